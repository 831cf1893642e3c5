"""What a rollout engine on one core brings: against `generate`, and with drafts against without.

    python -m benchmarks.rollout tiny 1 8             the 1.02M preset, 1 and 8 trajectories at once
    python -m benchmarks.rollout CHECKPOINT_DIR 1     a pretrained checkpoint in Hugging Face format

The workload is agentic: a scripted tool user is asked to look words up, calls a tool in JSON, gets
JSON back, answers. Trajectories come in groups with one task and differ in their noise; there are
two epochs over the same tasks, as in RL, and in the second the drafter knows the first one's
answers. Sampling is at temperature 1. The preset is first trained on such dialogues for some
seconds, so its text is as regular as they are: an upper bound for free prose. A checkpoint is taken
as it is, with one dialogue as an example in its prompt; its turns are of full length.

All variants of a load run in turns, some rounds; the figures are medians of generated tokens per
second of process time on one thread, so that other programs on the machine matter little. The
engine's variants must produce the same tokens, all at once or one trajectory at a time: that is
checked. `generate` draws its own tokens and computes each turn's history anew; "without reuse" is
the engine with that handicap.
"""

import copy
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from pathlib import Path
from statistics import median
from typing import Protocol

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from benchmarks.swarm import machine, table, write
from p2pdiloco.learn.models import build_model
from p2pdiloco.rollout.engine import Engine, Limits
from p2pdiloco.rollout.request import Request
from p2pdiloco.rollout.sampling import Sampling
from p2pdiloco.rollout.suffix import SuffixDrafter
from p2pdiloco.spec import ModelSpec
from p2pdiloco_daemon.status.view import JsonObject

RESULTS = Path(__file__).parent / "results" / "rollout"
SEQUENCE_LENGTH = 512
TRAINING_STEPS = 150
BASE = "engine without drafts"
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


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run of a variant."""

    num_tokens: int
    seconds: float
    digest: str = ""
    detail: dict[str, float] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """Generated tokens per second."""
        return self.num_tokens / self.seconds


Variant = Callable[[Policy, int], Outcome]


def main(source: str, loads: Sequence[int]) -> None:
    torch.set_num_threads(1)
    policy = trained() if source == "tiny" else pretrained(Path(source))
    variants: dict[str, Variant] = {
        "transformers generate": with_generate,
        "engine without drafts or reuse": lambda policy, load: with_engine(
            policy, load, drafts=False, reuse=False
        ),
        BASE: lambda policy, load: with_engine(policy, load, drafts=False),
        "engine, drafts that pay": with_engine,
    }
    for load in loads:
        alone: dict[str, Variant] = {"engine without drafts, one at a time": _one_at_a_time}
        keep(policy, load, measured(policy, load, variants | (alone if load > 1 else {})))


def _one_at_a_time(policy: Policy, load: int) -> Outcome:
    return with_engine(policy, load, drafts=False, at_once=1)


def measured(policy: Policy, load: int, variants: dict[str, Variant]) -> dict[str, list[Outcome]]:
    """The outcomes of each variant; the engine's must agree about the tokens."""
    outcomes: dict[str, list[Outcome]] = {name: [] for name in variants}
    for _ in range(policy.workload.rounds):
        for name, run in variants.items():
            outcomes[name].append(run(policy, load))
            print(policy.name, load, name, round(outcomes[name][-1].rate, 1), file=sys.stderr)
    digests = {o.digest for name, runs in outcomes.items() for o in runs if "engine" in name}
    assert len(digests) == 1, "the engine's variants disagree about tokens"
    return outcomes


def keep(policy: Policy, load: int, outcomes: dict[str, list[Outcome]]) -> None:
    """Adds the load to what earlier runs found, and writes the report anew."""
    kept = RESULTS.with_suffix(".json")
    result = json.loads(kept.read_text()) if kept.exists() else {}
    result.setdefault(policy.name, {})[str(load)] = {
        "machine": machine(),
        "workload": asdict(policy.workload),
        "variants": {
            name: [{"tokens_per_s": o.rate, "tokens": o.num_tokens, **o.detail} for o in runs]
            for name, runs in outcomes.items()
        },
    }
    write(RESULTS, result, report(result))


def report(result: JsonObject) -> str:
    rows: list[list[object]] = []
    for name, loads in result.items():
        for load, measured in loads.items():
            rates = {
                variant: median(run["tokens_per_s"] for run in runs)
                for variant, runs in measured["variants"].items()
            }
            work = measured["workload"]
            shape = f"{work['turns']} turns of {work['turn_tokens']}"
            for variant, rate in rates.items():
                runs = measured["variants"][variant]
                steps = runs[-1].get("tokens per step", "")
                ratio = f"{rate / rates[BASE]:.2f}"
                rows.append([name, load, shape, variant, len(runs), f"{rate:.1f}", ratio, steps])
    columns = ["model", "at once", "at most", "variant", "runs", "tokens/s", "ratio", "per step"]
    head = (
        "Rollout throughput on one thread: generated tokens per second of process time, medians of"
        " runs in turns, at temperature 1, two epochs over the same tasks. The ratio is to the"
        f" {BASE}, with the same tokens; the last column counts the tokens of a step."
    )
    return f"{head}\n\n{table(columns, rows)}"


def trained() -> Policy:
    """The tiny preset after `TRAINING_STEPS` steps of AdamW on dialogues."""
    model: PreTrainedModel = build_model(ModelSpec(preset="tiny"), 0, SEQUENCE_LENGTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    rng = random.Random(0)
    for _ in range(TRAINING_STEPS):
        batch = torch.tensor([list(_dialogue(rng).encode()[:257].ljust(257)) for _ in range(8)])
        logits = model(input_ids=batch[:, :-1]).logits
        loss = cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    print(f"trained to {loss.item():.3f} nats per byte", file=sys.stderr)
    return Policy("tiny, trained", model.eval(), ByteCodec(), frozenset(b"\n"), "", BRISK)


def pretrained(directory: Path) -> Policy:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    example = f"Look words up with the tool, one after the other.\n{_dialogue(random.Random(1))}\n"
    ends = frozenset({int(tokenizer.eos_token_id)})
    return Policy(directory.name, model.eval(), tokenizer, ends, example, SLOW)


def with_engine(
    policy: Policy,
    load: int,
    *,
    drafts: bool = True,
    reuse: bool = True,
    at_once: int | None = None,
) -> Outcome:
    """The dialogues of a load, so many `at_once`. Calibration is not part of the time, but told."""
    limits = Limits(num_rows_max=at_once or load, cache_bytes=1 << 28)
    drafter = SuffixDrafter() if drafts else None
    model = copy.deepcopy(policy.model)
    engine = Engine(model, limits, time.process_time, drafter=drafter, reuse=reuse)
    started = time.process_time()
    if drafts:
        engine.calibrate()
    calibrated = time.process_time()
    digest, num_tokens, num_steps = blake2b(digest_size=8), 0, 0
    for epoch in range(policy.workload.epochs):
        dialogues = _dialogues(policy, load, epoch)
        tokens, steps = _play(engine, dialogues, at_once or load)
        num_tokens, num_steps = num_tokens + tokens, num_steps + steps
        digest.update(repr([dialogue.tokens for dialogue in dialogues]).encode())
    seconds = time.process_time() - calibrated
    detail = {
        "tokens per step": round(num_tokens / num_steps, 2),
        "verdicts": engine.referee.num_verdicts,
        "errors beyond the margin": engine.referee.num_exceeded,
        "calibration s": round(calibrated - started, 1),
    }
    return Outcome(num_tokens, seconds, digest.hexdigest(), detail)


def _play(engine: Engine, dialogues: Sequence[Dialogue], load: int) -> tuple[int, int]:
    """All dialogues to their ends, `load` at a time: tokens generated and steps taken."""
    waiting = list(reversed(dialogues))
    active: dict[str, Dialogue] = {}
    answers: dict[str, list[int]] = {}
    num_tokens = num_steps = 0

    def submit(dialogue: Dialogue) -> None:
        active[dialogue.request.id] = dialogue
        engine.submit(dialogue.request)

    while waiting or active:
        while waiting and len(active) < load:
            submit(waiting.pop())
        num_steps += 1
        for progress in engine.step():
            answers.setdefault(progress.id, []).extend(t.token for t in progress.tokens)
            num_tokens += len(progress.tokens)
            if progress.finish is not None:
                dialogue = active.pop(progress.id)
                if dialogue.answered(answers.pop(progress.id)):
                    submit(dialogue)
    return num_tokens, num_steps


def with_generate(policy: Policy, load: int) -> Outcome:
    """`load` dialogues in step with each other, left-padded."""
    torch.manual_seed(0)
    num_tokens = 0
    started = time.process_time()
    for epoch in range(policy.workload.epochs):
        dialogues = _dialogues(policy, load, epoch)
        for first in range(0, len(dialogues), load):
            batch = dialogues[first : first + load]
            for _turn in range(policy.workload.turns):
                for dialogue, answer in zip(batch, _generated(policy, batch), strict=True):
                    num_tokens += len(answer)
                    dialogue.answered(answer)
    return Outcome(num_tokens, time.process_time() - started)


def _generated(policy: Policy, batch: Sequence[Dialogue]) -> list[list[int]]:
    length = max(len(dialogue.tokens) for dialogue in batch)
    ids = torch.tensor([[0] * (length - len(d.tokens)) + d.tokens for d in batch])
    mask = torch.tensor([[i >= length - len(d.tokens) for i in range(length)] for d in batch])
    out = policy.model.generate(
        ids,
        attention_mask=mask.long(),
        do_sample=True,
        top_k=0,
        max_new_tokens=policy.workload.turn_tokens,
        eos_token_id=sorted(policy.ends),
        pad_token_id=0,
    )[:, length:].tolist()
    return [_until_end(row, policy.ends) for row in out]


def _until_end(tokens: list[int], ends: frozenset[int]) -> list[int]:
    last = next((index for index, token in enumerate(tokens) if token in ends), len(tokens) - 1)
    return tokens[: last + 1]


def _dialogues(policy: Policy, load: int, epoch: int) -> list[Dialogue]:
    """The tasks of all epochs are the same, the noise is not."""
    group = policy.workload.group
    number = max(group, load)
    return [Dialogue(policy, f"e{epoch}d{index}", index // group) for index in range(number)]


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


if __name__ == "__main__":
    main(sys.argv[1], [int(load) for load in sys.argv[2:]])
