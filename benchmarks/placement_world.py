"""One step of rollouts in virtual time: the real dispatcher, and replicas of either kind.

Agentic trajectories, links and tools are given beforehand, so each policy has the same work. What a
replica is, and how long it takes, is `Replica`: `placement_engine.py` simulates one,
`placement_replica.py` has a real engine.
"""

import heapq
import itertools
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from p2pdiloco.protocol.naming import PeerId
from p2pdiloco.protocol.placement import Placement, Rules
from p2pdiloco.protocol.turns import (
    Event,
    Load,
    LoadReported,
    Place,
    Step,
    TimePassed,
    TrajectoryEnded,
    TurnFinished,
    TurnId,
    TurnReady,
)

GROUP_SIZE = 8
NEVER = 1e9
"""Seconds: nothing is withdrawn here, so that every policy does the same work."""
REPORT_S = 1.0
"""Between reports of load: `SPEEDS_PERIOD_S` of the rollout process."""

BASELINE = "least request, sticky"
POLICIES: dict[str, Rules] = {
    BASELINE: Rules(form="war", threshold=NEVER, act_s_max=NEVER, step_s_max=NEVER),
    "WAR's score": Rules(form="war", threshold=0.0, act_s_max=NEVER, step_s_max=NEVER),
    "WAR, both": Rules(form="war", act_s_max=NEVER, step_s_max=NEVER),
    "swarm": Rules(act_s_max=NEVER, step_s_max=NEVER),
    "swarm, short first": Rules(order="short first", act_s_max=NEVER, step_s_max=NEVER),
    "swarm, long first": Rules(order="long first", act_s_max=NEVER, step_s_max=NEVER),
}


@dataclass(frozen=True, slots=True)
class Turn:
    new_tokens: int
    observed_tokens: int
    """Of the environment's answer."""
    act_s: float


@dataclass(frozen=True, slots=True)
class Workload:
    step: Step
    turns: Sequence[Sequence[Turn]]
    """Of each trajectory."""

    @property
    def num_new_tokens(self) -> int:
        return sum(turn.new_tokens for turns in self.turns for turn in turns)

    def group(self, trajectory: int) -> int:
        return trajectory // self.step.group_size

    def prompt_tokens(self, trajectory: int, turn: int) -> int:
        """The whole trajectory before that turn."""
        before = self.turns[trajectory][:turn]
        history = sum(t.new_tokens + t.observed_tokens for t in before)
        return self.step.prompt_tokens[self.group(trajectory)] + history


def agentic(num_groups: int, group_size: int, seed: int) -> Workload:
    """Tool-using trajectories: long prompts, short answers, turns with a long tail."""
    rng = random.Random(seed)
    prompts = [rng.randint(1000, 3000) for _ in range(num_groups)]
    turns = []
    for _ in range(num_groups):
        mean_turns = rng.uniform(4, 14)
        for _ in range(group_size):
            num = min(40, max(1, round(mean_turns * rng.lognormvariate(0, 0.4))))
            turns.append([_turn(rng) for _ in range(num)])
    return Workload(Step(number=0, prompt_tokens=tuple(prompts), group_size=group_size), turns)


def _turn(rng: random.Random) -> Turn:
    return Turn(
        max(4, round(80 * rng.lognormvariate(0, 0.6))),
        max(8, round(200 * rng.lognormvariate(0, 0.7))),
        1.5 * rng.lognormvariate(0, 0.8),
    )


@dataclass(frozen=True, slots=True)
class Job:
    """One turn at a replica."""

    key: tuple[int, int]
    """(trajectory, turn)"""
    group: int
    group_tokens: int
    prompt_tokens: int
    new_tokens: int


@dataclass(frozen=True, slots=True)
class Finished:
    """A turn is generated. `num_reused` of its prompt did not have to be computed."""

    at: float
    job: Job
    num_reused: int


class Replica(Protocol):
    """It has its own clock, which may run ahead of the world's by the step that it is in."""

    @property
    def rtt_s(self) -> float: ...

    @property
    def next_s(self) -> float:
        """When to call `advance`, if nothing new comes: before that nothing ends."""

    def load(self) -> Load: ...

    def submit(self, job: Job, now: float) -> None:
        """Call it at the time to which the replica was advanced."""

    def advance(self, now: float) -> Sequence[Finished]: ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one step."""

    seconds: float
    """Virtual, to the end of the last trajectory."""
    num_new_tokens: int
    num_prefilled: int
    """Prompt tokens that were computed."""
    hit_rate: float
    """Share of all turns' prompt tokens that were not."""
    dispatcher_ms: float
    """Real time that the dispatcher took per event."""

    @property
    def throughput(self) -> float:
        """Generated tokens per second."""
        return self.num_new_tokens / self.seconds


class World:
    """One step; `run` plays it to its end."""

    def __init__(
        self,
        workload: Workload,
        replicas: Mapping[PeerId, Replica],
        rules: Rules,
        *,
        report_s: float = math.inf,
    ) -> None:
        """Replicas report their load at the start, and every `report_s`."""
        self.workload = workload
        self.now = 0.0
        self._replicas = replicas
        self._report_s = report_s
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = itertools.count()
        self._placement = Placement(workload.step, rules, 0.0, ask=list(replicas))
        self._generated = self._reused = self._prompts = self._events = 0
        self._decided_s = 0.0
        self._deadline = math.inf

    def run(self) -> Outcome:
        for name in self._replicas:
            self._report(name)
        while not self._placement.is_done:
            at, name = min((replica.next_s, name) for name, replica in self._replicas.items())
            heard = self._heap[0][0] if self._heap else math.inf
            if self._deadline < min(at, heard):
                self._pass_to(max(self.now, self._deadline))
                self._tell(TimePassed())
            elif heard <= at:
                when, _serial, call = heapq.heappop(self._heap)
                self._pass_to(when)
                call()
            else:
                self._pass_to(at)
                self._advance(name)
        assert self._generated >= self.workload.num_new_tokens
        return Outcome(
            self.now,
            self.workload.num_new_tokens,
            self._prompts - self._reused,
            self._reused / self._prompts,
            1000 * self._decided_s / self._events,
        )

    def _pass_to(self, when: float) -> None:
        assert when >= self.now, "time goes forward only"
        self.now = when

    def _at(self, when: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (when, next(self._serial), call))

    def _report(self, name: PeerId) -> None:
        replica = self._replicas[name]
        self._tell(LoadReported(name, replica.load(), replica.rtt_s))
        if self._report_s < math.inf:
            self._at(self.now + self._report_s, partial(self._report, name))

    def _tell(self, event: Event) -> None:
        started = time.perf_counter()
        actions = self._placement.handle(event, self.now)
        self._deadline = self._placement.deadline or math.inf
        self._decided_s += time.perf_counter() - started
        self._events += 1
        for action in actions:
            assert isinstance(action, Place), action
            link_s = self._replicas[action.worker].rtt_s / 2
            self._at(self.now + link_s, partial(self._submit, action))

    def _submit(self, place: Place) -> None:
        self._advance(place.worker)
        trajectory, turn = place.turn.trajectory, place.turn.turn
        group = self.workload.group(trajectory)
        job = Job(
            (trajectory, turn),
            group,
            self.workload.step.prompt_tokens[group],
            self.workload.prompt_tokens(trajectory, turn),
            self.workload.turns[trajectory][turn].new_tokens,
        )
        self._replicas[place.worker].submit(job, self.now)

    def _advance(self, name: PeerId) -> None:
        for finished in self._replicas[name].advance(self.now):
            self._finished(name, finished)

    def _finished(self, name: PeerId, finished: Finished) -> None:
        job, num_reused = finished.job, finished.num_reused
        self._generated += job.new_tokens
        self._reused += num_reused
        self._prompts += job.prompt_tokens
        trajectory, number = job.key
        turn = self.workload.turns[trajectory][number]
        heard = max(self.now, finished.at + self._replicas[name].rtt_s / 2)
        id_ = TurnId(0, trajectory, number)
        total = job.prompt_tokens + job.new_tokens
        self._at(heard, lambda: self._tell(TurnFinished(name, id_, total, num_reused)))
        last = number + 1 == len(self.workload.turns[trajectory])
        following: Event = TrajectoryEnded(id_)
        if not last:
            following = TurnReady(TurnId(0, trajectory, number + 1), total + turn.observed_tokens)
        self._at(heard + turn.act_s, lambda: self._tell(following))
