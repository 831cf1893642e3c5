"""What the rollout benchmarks play: an agentic dialogue, and the policies that play it.

A scripted tool user is asked to look words up, calls a tool in JSON, gets JSON back, answers.
Trajectories come in groups with one task and differ in their noise. The preset is first trained on
such dialogues for some seconds, so its text is as regular as they are: an upper bound for free
prose. A checkpoint is taken as it is, with one dialogue as an example in its prompt.
"""

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from p2pdiloco.learn.models import build_model
from p2pdiloco.rollout.request import Request
from p2pdiloco.rollout.sampling import Sampling
from p2pdiloco.spec import ModelSpec

SEQUENCE_LENGTH = 512
TRAINING_STEPS = 150
_WORDS = ("amber", "basil", "cedar", "delta", "ember", "fjord", "grove", "hazel", "ivory", "jolly")


class Codec(Protocol):
    """Text as tokens, of the tokenizers of transformers or of bytes."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...


class ByteCodec:
    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode(errors="replace")


@dataclass(frozen=True, slots=True)
class Workload:
    """What is played, and how often it is measured."""

    rounds: int
    group: int
    """Trajectories with one task."""
    turn_tokens: int
    """An answer's tokens, at most."""
    turns: int = 3
    epochs: int = 2


BRISK = Workload(rounds=3, group=4, turn_tokens=40)
SLOW = Workload(rounds=1, group=2, turn_tokens=24)
"""For a model that takes a tenth of a second per token."""


@dataclass(frozen=True, slots=True)
class Policy:
    """The model, its tokens, and what all its prompts begin with."""

    name: str
    model: PreTrainedModel
    codec: Codec
    ends: frozenset[int]
    """Tokens that end a turn: line feeds, or a pretrained model's end of text."""
    preamble: str
    workload: Workload


@dataclass(slots=True)
class Dialogue:
    """One trajectory: the script answers whatever the policy says."""

    policy: Policy
    name: str
    task: int
    tokens: list[int] = field(default_factory=list)
    turn: int = 0
    _rng: random.Random = field(default_factory=random.Random)

    def __post_init__(self) -> None:
        self._rng.seed(self.task)
        self.tokens = self.policy.codec.encode(self.policy.preamble + _task(self._rng))

    @property
    def request(self) -> Request:
        """The next turn."""
        return Request(
            id=f"{self.name}/{self.turn}",
            trajectory=self.name,
            prompt=tuple(self.tokens),
            num_tokens_max=self.policy.workload.turn_tokens,
            sampling=Sampling(seed=1),
            stop_tokens=self.policy.ends,
        )

    def answered(self, answer: Sequence[int]) -> bool:
        """Takes the policy's words and the script's reply; whether the dialogue goes on."""
        codec = self.policy.codec
        text = codec.decode(answer)
        word = next((word for word in _WORDS if word in text), "none")
        self.tokens += answer
        if not text.endswith("\n"):
            self.tokens += codec.encode("\n")
        self.tokens += codec.encode(_result(word, self._rng.randint(10, 99)))
        self.turn += 1
        return self.turn < self.policy.workload.turns


def trained() -> Policy:
    """The tiny preset, trained on the beginnings of dialogues."""
    model = trained_on_dialogues("tiny", SEQUENCE_LENGTH, windows=8, window_tokens=256)
    return Policy("tiny, trained", model, ByteCodec(), frozenset(b"\n"), "", BRISK)


def trained_on_dialogues(
    preset: str, sequence_length: int, *, windows: int, window_tokens: int
) -> PreTrainedModel:
    """The preset after `TRAINING_STEPS` steps of AdamW on so many windows of dialogues each."""
    spec = ModelSpec.model_validate({"preset": preset})
    model: PreTrainedModel = build_model(spec, 0, sequence_length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    rng = random.Random(0)
    for _ in range(TRAINING_STEPS):
        texts = [dialogues(rng, window_tokens + 1) for _ in range(windows)]
        batch = torch.tensor([list(text.encode()[: window_tokens + 1]) for text in texts])
        logits = model(input_ids=batch[:, :-1]).logits
        loss = cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    print(f"trained to {loss.item():.3f} nats per byte", file=sys.stderr)
    return model.eval()


def pretrained(directory: Path) -> Policy:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    example = f"Look words up with the tool, one after the other.\n{_dialogue(random.Random(1))}\n"
    ends = frozenset({int(tokenizer.eos_token_id)})
    return Policy(directory.name, model.eval(), tokenizer, ends, example, SLOW)


def dialogues_of(policy: Policy, load: int, epoch: int) -> list[Dialogue]:
    """Of one epoch. The tasks of all epochs are the same, the noise is not."""
    group = policy.workload.group
    number = max(group, load)
    return [Dialogue(policy, f"e{epoch}d{index}", index // group) for index in range(number)]


def dialogues(rng: random.Random, num_bytes: int) -> str:
    """At least so many bytes of them, one after the other."""
    text = ""
    while len(text) < num_bytes:
        text += _dialogue(rng)
    return text


def observations(rng: random.Random, num_bytes: int) -> str:
    """At least so many bytes of what the tool says."""
    text = ""
    while len(text) < num_bytes:
        text += _result(rng.choice(_WORDS), rng.randint(10, 99))
    return text


def _dialogue(rng: random.Random) -> str:
    """As a perfect policy would play it."""
    text = _task(rng)
    values = []
    for word in text.removeprefix("task: add ").strip().split(" and "):
        values.append(rng.randint(10, 99))
        text += f'{{"tool": "lookup", "key": "{word}"}}\n{_result(word, values[-1])}'
    return text + f'{{"tool": "answer", "value": {sum(values)}}}\n'


def _task(rng: random.Random) -> str:
    return f"task: add {' and '.join(rng.sample(_WORDS, 3))}\n"


def _result(word: str, value: int) -> str:
    return f'{{"key": "{word}", "value": {value}, "status": "ok"}}\n'
