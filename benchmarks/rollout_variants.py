"""Who plays the rollout benchmarks' dialogues: the engine, and what transformers has.

The engine's tokens are a function of the seed; those of the others are their own. Only the engine
and continuous batching keep what they computed of a dialogue from turn to turn.
"""

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import torch
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

from benchmarks.rollout_workload import SEQUENCE_LENGTH, Dialogue, Policy, dialogues_of
from p2pdiloco.rollout.engine import Engine, Limits
from p2pdiloco.rollout.suffix import Draft, Drafter, SuffixDrafter

PAGE_TOKENS = 32
"""Of the paged cache of continuous batching; its default of 256 would share no prefix here."""
CHUNK_TOKENS = 256
RESULT_TIMEOUT_S = 300.0


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


class Capped(SuffixDrafter):
    """Drafts of at most so many tokens."""

    def __init__(self, num_tokens_max: int) -> None:
        super().__init__()
        self._num_tokens_max = num_tokens_max

    def draft(self, request: str, num_tokens_max: int) -> Draft:
        return super().draft(request, min(num_tokens_max, self._num_tokens_max))


def with_engine(
    policy: Policy,
    load: int,
    *,
    drafter: Callable[[], Drafter] | None = SuffixDrafter,
    calibrated: bool = True,
    reuse: bool = True,
    at_once: int | None = None,
) -> Outcome:
    """The dialogues of a load, so many `at_once`. Calibration is not part of the time, but told;
    without it every draft is tried whole."""
    limits = Limits(num_rows_max=at_once or load, cache_bytes=1 << 28)
    model = copy.deepcopy(policy.model)
    engine = Engine(model, limits, time.process_time, drafter=drafter and drafter(), reuse=reuse)
    started = time.process_time()
    if drafter and calibrated:
        engine.calibrate()
    calibrated_at = time.process_time()
    digest, num_tokens, num_steps = blake2b(digest_size=8), 0, 0
    for epoch in range(policy.workload.epochs):
        dialogues = dialogues_of(policy, load, epoch)
        tokens, steps = _play(engine, dialogues, at_once or load)
        num_tokens, num_steps = num_tokens + tokens, num_steps + steps
        digest.update(repr([dialogue.tokens for dialogue in dialogues]).encode())
    seconds = time.process_time() - calibrated_at
    detail = {
        "tokens per step": round(num_tokens / num_steps, 2),
        "verdicts": engine.referee.num_verdicts,
        "errors beyond the margin": engine.referee.num_exceeded,
        "calibration s": round(calibrated_at - started, 1),
    }
    if drafter and calibrated:
        cost = engine.costs.seconds
        detail["cost of 4 drafts each"] = round(cost(load, 5 * load) / cost(load, load), 2)
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
        dialogues = dialogues_of(policy, load, epoch)
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


def with_continuous_batching(policy: Policy, load: int) -> Outcome:
    """`load` dialogues at a time, each going on as soon as its turn is there."""
    torch.manual_seed(0)
    sampling = GenerationConfig(
        do_sample=True,
        top_k=0,
        max_new_tokens=policy.workload.turn_tokens,
        eos_token_id=sorted(policy.ends),
        pad_token_id=0,
    )
    pages_each = -(-SEQUENCE_LENGTH // PAGE_TOKENS)
    batching = ContinuousBatchingConfig(
        page_size=PAGE_TOKENS,
        num_blocks=2 * load * pages_each,
        max_batch_tokens=max(CHUNK_TOKENS, load),
        max_requests_per_batch=load,
    )
    model, num_tokens = copy.deepcopy(policy.model), 0
    with model.continuous_batching_context_manager(
        generation_config=sampling, continuous_batching_config=batching
    ) as manager:
        started = time.process_time()
        for epoch in range(policy.workload.epochs):
            num_tokens += _played_by(manager, dialogues_of(policy, load, epoch), load)
        seconds = time.process_time() - started
    return Outcome(num_tokens, seconds)


def _played_by(manager: ContinuousBatchingManager, dialogues: Sequence[Dialogue], load: int) -> int:
    """All dialogues to their ends, `load` at a time: tokens generated."""
    waiting = list(reversed(dialogues))
    active: dict[str, Dialogue] = {}
    num_tokens = 0

    def ask(dialogue: Dialogue) -> None:
        active[dialogue.request.id] = dialogue
        manager.add_request(dialogue.tokens, request_id=dialogue.request.id)

    while waiting or active:
        while waiting and len(active) < load:
            ask(waiting.pop())
        result = manager.get_result(timeout=RESULT_TIMEOUT_S)
        assert result is not None and result.error is None, "continuous batching has given up"
        if not result.is_finished():
            continue
        dialogue = active.pop(result.request_id)
        answer = _until_end(result.generated_tokens, dialogue.policy.ends)
        num_tokens += len(answer)
        if dialogue.answered(answer):
            ask(dialogue)
    return num_tokens
