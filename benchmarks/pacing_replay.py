"""Policies on many seeds, in a replay of what live runs measured.

Service times, what the link adds to an answer, the duration of a sync and the pace of the learner
are drawn from a live trace (with and without a sync in flight apart); arrivals come at the rate of
a schedule, and the server's queue is simulated: first come, first served. The policies are the
product's, and the model learns online from what the replay serves, from nothing.
"""

import heapq
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any

from benchmarks.pacing_parts import SLACK_STEPS, STEPS_PER_PERIOD, Oracle, Schedule
from p2pdiloco.protocol.calibration import Answer
from p2pdiloco.protocol.pacer import Pacer, Served
from p2pdiloco.protocol.pacing import SyncTimes, next_offset, window
from p2pdiloco.protocol.policies import (
    Calibrated,
    Fixed,
    Load,
    Moment,
    Policy,
    Pressure,
    PressureGate,
    RandomMoment,
    WorkloadAware,
)

TICK_S = 0.25
TELL_TICKS = 2
RATE_S = 3.0
TOKENS_PER_STEP = 512

TIMES = SyncTimes(
    inner_steps=STEPS_PER_PERIOD,
    num_fragments=1,
    overlap_steps=2,
    quorum=1,
    grace_factor=0.8,
    slack_steps=SLACK_STEPS,
)


@dataclass(frozen=True, slots=True)
class Trace:
    """Measured live. Of answers: (service_s, what link and client add to the latency)."""

    quiet: Sequence[tuple[float, float]]
    syncing: Sequence[tuple[float, float]]
    sync_s: Sequence[float]
    step_s: float

    @classmethod
    def of(cls, runs: Sequence[tuple[Any, Any, Any]]) -> "Trace":
        """`runs` are (node, load, setting) of live runs, as `pacing_parts` wrote them."""
        quiet: list[tuple[float, float]] = []
        syncing: list[tuple[float, float]] = []
        sync_s, steps, seconds = [], 0, 0.0
        for node, answers, setting in runs:
            spans = [(sync["start"], sync["end"]) for sync in node["syncs"]]
            sync_s += [end - start for start, end in spans]
            steps, seconds = steps + node["steps"], seconds + setting["seconds"]
            for sent, latency_s, service_s, server_s, _ in answers:
                done = sent + latency_s
                during = any(start < done and sent < end for start, end in spans)
                (syncing if during else quiet).append((service_s, max(0.0, latency_s - server_s)))
        return cls(quiet, syncing, sync_s, seconds / steps)


@dataclass(slots=True)
class _Request:
    arrived: float
    quiet: tuple[float, float]
    syncing: tuple[float, float]
    load: float = 0.0


@dataclass
class Outcome:
    late: int = 0
    answers: int = 0
    late_syncing: int = 0
    answers_syncing: int = 0
    syncs: int = 0
    periods: list[int] = field(default_factory=list)
    staleness_s: list[float] = field(default_factory=list)
    coverage: dict[bool, float | None] = field(default_factory=dict)
    relearned: int = 0

    @property
    def percent(self) -> float:
        return 100 * self.late / max(1, self.answers)


class Replay:
    """One run of one policy; the same seed gives all policies the same requests."""

    def __init__(
        self, trace: Trace, schedule: Schedule, target_s: float, burst_rate: float, seed: int
    ) -> None:
        self.trace, self.schedule, self.target_s = trace, schedule, target_s
        self.burst_rate = burst_rate
        self.now = 0.0
        self.sync_until = float("-inf")
        self.sync_began = float("-inf")
        self.outcome = Outcome()
        self.pacer = Pacer(Fixed())
        rng = random.Random(seed)
        self.sync_rng = random.Random(seed + 1)
        self._requests = deque(_requests(trace, schedule, rng))
        self._waiting: deque[_Request] = deque()
        self._leaving: list[tuple[float, float, float, bool]] = []
        self._free_at = 0.0
        self._told: list[Answer] = []
        self._came: deque[float] = deque()

    def run(self, make: Callable[["Replay"], Policy]) -> Outcome:
        policy = self.pacer.policy = make(self)
        began_s, offset, version, ticks, then = 0.0, 0, 1, 0, 0.0
        while self.now < self.schedule.length_s:
            self.now += TICK_S
            ticks += 1
            self._serve()
            if ticks % TELL_TICKS == 0:
                self._tell()
            steps = int((self.now - began_s) / self.trace.step_s)
            opens, closes = window(TIMES, 0, version, offset)
            if self.now < self.sync_until or steps < opens or isinstance(policy, Never):
                continue
            moment = self._moment(version, steps, opens, closes, self.now - then)
            if self.pacer.decide(moment).sync:
                offset = next_offset(TIMES, 0, version + 1, offset, steps)
                began_s += steps * self.trace.step_s
                self.outcome.staleness_s.append(self.now - then)
                self.sync_began, then = self.now, self.now
                self.sync_until = self.now + self.sync_rng.choice(self.trace.sync_s)
                self.outcome.syncs += 1
                self.outcome.periods.append(steps)
                version += 1
        assert policy is self.pacer.policy
        model = self.pacer.model
        self.outcome.coverage = {key: kept.share for key, kept in model.coverage.items()}
        self.outcome.relearned = model.relearned
        return self.outcome

    def _moment(
        self, version: int, steps: int, opens: int, closes: int, staleness_s: float
    ) -> Moment:
        return Moment(
            fragment=0,
            version=version,
            steps=steps,
            tokens=steps * TOKENS_PER_STEP,
            opens=opens,
            closes=closes,
            step_s=self.trace.step_s,
            staleness_s=staleness_s,
            loss_fall=0.0002 * steps,
            pressure=self.pacer.pressure,
            forecast=self.pacer.forecast,
        )

    def _is_syncing(self, at: float) -> bool:
        return self.sync_began <= at < self.sync_until

    def _serve(self) -> None:
        while self._requests and self._requests[0].arrived <= self.now:
            request = self._requests.popleft()
            self._work(request.arrived)
            self._came.append(request.arrived)
            request.load = self._rate(request.arrived)
            self._waiting.append(request)
        self._work(self.now)
        while self._leaving and self._leaving[0][0] <= self.now:
            _, latency_s, load, syncing = heapq.heappop(self._leaving)
            self._told.append(Answer(latency_s, load, syncing))

    def _rate(self, now: float) -> float:
        """Requests per second, lately."""
        while self._came and self._came[0] < now - RATE_S:
            self._came.popleft()
        return len(self._came) / RATE_S

    def _work(self, until: float) -> None:
        while self._waiting:
            start = max(self._free_at, self._waiting[0].arrived)
            if start > until:
                return
            request = self._waiting.popleft()
            service_s, _ = request.syncing if self._is_syncing(start) else request.quiet
            self._free_at = start + service_s
            _, added_s = request.syncing if self._is_syncing(self._free_at) else request.quiet
            done = self._free_at + added_s
            touched = self.sync_began < done and request.arrived < self.sync_until
            self._answered(request, done, touched)

    def _answered(self, request: _Request, done: float, syncing: bool) -> None:
        latency_s = done - request.arrived
        late = latency_s > self.target_s
        self.outcome.answers += 1
        self.outcome.late += late
        self.outcome.answers_syncing += syncing
        self.outcome.late_syncing += late and syncing
        heapq.heappush(self._leaving, (done, latency_s, request.load, syncing))

    def _tell(self) -> None:
        rate = self._rate(self.now)
        pressure = Pressure(
            link=float(self._is_syncing(self.now)), serving=min(1.0, rate / self.burst_rate)
        )
        served = Served(self.target_s, rate, rate, tuple(self._told))
        self._told = []
        self.pacer.measured(pressure, served)


def _requests(trace: Trace, schedule: Schedule, rng: random.Random) -> list[_Request]:
    """A Poisson process at the schedule's rate, by thinning."""
    at, found, most = 0.0, [], max(schedule.rate(0.1 * n) for n in range(600))
    while at < schedule.length_s:
        at += rng.expovariate(most)
        quiet, syncing = rng.choice(trace.quiet), rng.choice(trace.syncing)
        if rng.random() < schedule.rate(at) / most:
            found.append(_Request(at, quiet, syncing))
    return found


class Never:
    """What is late anyway. Keeps no window: for comparison alone."""

    def judge(self, moment: Moment) -> tuple[bool, str]:
        return False, "never"


POLICIES: dict[str, Callable[[Replay], Policy]] = {
    "no sync": lambda replay: Never(),
    "fixed H": lambda replay: Fixed(),
    "load": lambda replay: Load(),
    "pressure gate": lambda replay: PressureGate(),
    "workload-aware": lambda replay: WorkloadAware(),
    "workload-aware, staleness as published": lambda replay: WorkloadAware(staleness=-0.25),
    "workload-aware, with cost": lambda replay: WorkloadAware(cost=1.0),
    "random": lambda replay: RandomMoment(replay.sync_rng),
    "calibrated": lambda replay: Calibrated(),
    "oracle": lambda replay: Oracle(
        replay.schedule, lambda: replay.now, lambda: fmean(replay.trace.sync_s)
    ),
}


def mean_and_half_width(values: Sequence[float]) -> tuple[float, float]:
    """With 95 % confidence; normal, for some tens of values."""
    half = 1.96 * stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return fmean(values), half
