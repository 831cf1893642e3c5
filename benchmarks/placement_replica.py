"""A replica with a real engine, on a clock of its own: what its steps took of this process's time.

While one replica's step runs nothing else does, so each has the core to itself in its turn, however
many there are. It reports what the rollout process reports of an engine, measured in the same way.
"""

import copy
import math
import random
import time
from collections.abc import Callable
from dataclasses import replace
from hashlib import blake2b

from transformers import PreTrainedModel

from benchmarks.placement_world import Finished, Job, Turn, Workload
from benchmarks.rollout_workload import dialogues, observations
from p2pdiloco.protocol.turns import Load
from p2pdiloco.rollout.engine import Engine, Limits
from p2pdiloco.rollout.request import Request
from p2pdiloco.rollout.sampling import Sampling
from p2pdiloco.rollout.suffix import SuffixDrafter
from p2pdiloco_daemon.rollouts.trajectories import ROWS_MAX, TURNS_MAX


def scaled(workload: Workload, divisor: int, length_max: int) -> Workload:
    """All lengths and tool times so many times smaller; no trajectory longer than `length_max`: it
    ends with the last turn before."""
    step = workload.step
    prompts = tuple(tokens // divisor for tokens in step.prompt_tokens)
    turns = []
    for index, of_one in enumerate(workload.turns):
        length, kept = prompts[index // step.group_size], []
        for turn in of_one:
            small = Turn(
                max(1, round(turn.new_tokens / divisor)),
                max(1, round(turn.observed_tokens / divisor)),
                turn.act_s / divisor,
            )
            length += small.new_tokens + small.observed_tokens
            if length > length_max:
                break
            kept.append(small)
        turns.append(kept)
    return Workload(replace(step, prompt_tokens=prompts), turns)


class Texts:
    """What is written so far, of all trajectories: prompts of dialogues (a group has one), answers
    as they come, tool results. A turn that is generated again must come out the same."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._answers: dict[tuple[int, int], list[int]] = {}

    def prompt(self, trajectory: int, turn: int) -> tuple[int, ...]:
        """The whole trajectory before that turn."""
        group = self._workload.group(trajectory)
        num_tokens = self._workload.step.prompt_tokens[group]
        tokens = _last_bytes(dialogues(random.Random(f"group {group}"), num_tokens), num_tokens)
        for number, before in enumerate(self._workload.turns[trajectory][:turn]):
            tokens += self._answers[trajectory, number]
            rng, observed = random.Random(f"{trajectory}/{number}"), before.observed_tokens
            tokens += _last_bytes(observations(rng, observed), observed)
        return tuple(tokens)

    def answered(self, trajectory: int, turn: int, tokens: list[int]) -> None:
        known = self._answers.setdefault((trajectory, turn), tokens)
        assert known == tokens, f"trajectory {trajectory} turn {turn} came out otherwise"

    @property
    def digest(self) -> str:
        """Of all answers."""
        return blake2b(repr(sorted(self._answers.items())).encode(), digest_size=8).hexdigest()


def _last_bytes(text: str, number: int) -> list[int]:
    return list(text.encode()[-number:])


def calibrated_engine(
    model: PreTrainedModel,
    cache_tokens: int,
    *,
    drafts: bool,
    clock: Callable[[], float] = time.process_time,
) -> Engine:
    """As the rollout process makes it, but for the size of the cache."""
    probe = Engine(copy.deepcopy(model), Limits(), clock)
    limits = Limits(
        cache_bytes=cache_tokens * probe.cache.rows.slot_bytes,
        num_rows_max=ROWS_MAX,
        num_waiting_max=TURNS_MAX,
    )
    drafter = SuffixDrafter() if drafts else None
    engine = Engine(copy.deepcopy(model), limits, clock, drafter=drafter)
    engine.calibrate()
    return engine


class RealReplica:
    """A `placement_world.Replica`. `next_s` is when the engine's next step begins."""

    def __init__(
        self,
        engine: Engine,
        texts: Texts,
        rtt_s: float,
        length_max: int,
        clock: Callable[[], float] = time.process_time,
    ) -> None:
        """Takes over the engine. `clock` is the one by which its steps take time."""
        self.rtt_s = rtt_s
        self.engine = engine
        self._texts = texts
        self._length_max = length_max
        self._process_s = clock
        self._clock = 0.0
        self._jobs: dict[str, Job] = {}
        self._answers: dict[str, list[int]] = {}

    @property
    def next_s(self) -> float:
        return self._clock if self.engine.has_work else math.inf

    def load(self) -> Load:
        """See `RolloutProcess._tell_speeds`."""
        engine = self.engine
        return Load(
            num_rows=engine.num_rows_of(self._length_max),
            cache_tokens=engine.prefix_tokens,
            prefill_tokens_per_s=engine.pace.prefill_tokens_per_s,
            token_s=engine.pace.token_s,
        )

    def submit(self, job: Job, now: float) -> None:
        self._clock = max(self._clock, now)
        trajectory, turn = job.key
        request = Request(
            id=f"{trajectory}/{turn}",
            trajectory=str(trajectory),
            prompt=self._texts.prompt(trajectory, turn),
            num_tokens_max=job.new_tokens,
            sampling=Sampling(seed=1),
        )
        assert len(request.prompt) == job.prompt_tokens
        self._jobs[request.id], self._answers[request.id] = job, []
        self.engine.submit(request)

    def advance(self, now: float) -> list[Finished]:
        finished: list[Finished] = []
        while self.engine.has_work and self._clock <= now:
            finished += self._step()
        return finished

    def _step(self) -> list[Finished]:
        started = self._process_s()
        added = self.engine.step()
        self._clock += self._process_s() - started
        finished = []
        for progress in added:
            self._answers[progress.id] += [token.token for token in progress.tokens]
            if progress.finish is not None:
                job = self._jobs.pop(progress.id)
                self._texts.answered(*job.key, self._answers.pop(progress.id))
                finished.append(Finished(self._clock, job, progress.num_reused))
        return finished
