"""Data parallel under failures: when it runs, when it stands, and at what speed it runs.

*Rigid*: a failure stops everybody until the failed slice is replaced and all chips have started
anew. *Elastic*: a failure stops everybody for a short while, then training goes on with the slices
that are left; those that return are taken in later. Both keep the state in the memory of the slices
that are left, so a failure costs the step under way and the stop, no checkpoint is read. A failure
during a stop is taken in by that stop.

A learner of Decoupled DiLoCo is an elastic job with a share of the chips, so `elastic_runs` is what
its swarm is made of as well (`goodput_decoupled.py`).
"""

import heapq
import itertools
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from p2pdiloco.simulation.goodput_failures import Cluster, Failures, Standby, delay_s

RESOLUTION_S = 10.0
"""Pauses up to this long do not count against uptime."""


@dataclass(frozen=True, slots=True)
class Run:
    """Training from `start` to `end`, in seconds, with the share `speed` of the chips."""

    start: float
    end: float
    speed: float
    torn: bool
    """Whether a failure ended it, in the middle of a step."""

    def useful_s(self, step_s: float) -> float:
        """Time of the same steps with all chips, without the step that a failure tore."""
        full_s = (self.end - self.start) * self.speed
        return math.floor(full_s / step_s) * step_s if self.torn else full_s

    def within(self, start: float, end: float) -> "Run":
        """The part that lies in a window."""
        return Run(
            max(self.start, start), min(self.end, end), self.speed, self.torn and self.end <= end
        )


def elastic_runs(cluster: Cluster, num_chips: float, rng: random.Random) -> Iterator[Run]:
    """For ever, ascending; the gaps are the stops."""
    failures = Failures(cluster, num_chips, rng)
    num_slices = max(1.0, num_chips / cluster.slice_chips)
    start, num_out = 0.0, 0
    while True:
        num_back, torn, end = _until_stop(failures, cluster.standby_s)
        yield Run(start, end, max(0.0, 1 - num_out / num_slices), torn)
        start = end + delay_s(cluster.scale_down_s if torn else cluster.scale_up_s, rng)
        while failures.next_s <= start:
            failures.fail()
            num_out += 1
        num_out -= num_back + failures.returned_until(start)


def _until_stop(failures: Failures, standby_s: float) -> tuple[int, bool, float]:
    """(slices that returned meanwhile, whether a failure ends it, when)"""
    num_back, due = 0, math.inf
    while failures.next_return_s < min(failures.next_s, due):
        due = min(due, failures.take_return() + standby_s)
        num_back += 1
    return num_back, failures.next_s <= due, min(failures.next_s, due)


def rigid_runs(cluster: Cluster, num_chips: float, rng: random.Random) -> Iterator[Run]:
    """For ever, ascending; the gaps are the stops."""
    failures = Failures(cluster, num_chips, rng)
    standby = Standby(failures, cluster.standby_s)
    start = 0.0
    while True:
        end = failures.fail()
        yield Run(start, end, 1.0, torn=True)
        replace_s = 0.0 if standby.take(end) else delay_s(cluster.replace_s, rng)
        start = end + delay_s(cluster.restart_s, rng) + replace_s
        while failures.next_s <= start:
            failures.fail()


def window(runs: Iterable[Run], start: float, end: float) -> list[Run]:
    """What of the runs lies in a window."""
    reach = itertools.takewhile(lambda run: run.start < end, runs)
    return [run.within(start, end) for run in reach if run.end > start]


def goodput(jobs: Sequence[Sequence[Run]], span_s: float, step_s: float) -> float:
    """Share of the jobs' chip time spent on steps that were finished; the jobs are of one size."""
    useful_s = sum(run.useful_s(step_s) for runs in jobs for run in runs)
    return useful_s / (span_s * len(jobs))


def stepping_s(jobs: Sequence[Sequence[Run]]) -> float:
    """Time that the jobs had for steps, counted as with all chips."""
    return sum((run.end - run.start) * run.speed for runs in jobs for run in runs)


def uptime(jobs: Sequence[Sequence[Run]], span_s: float, resolution_s: float) -> float:
    """Share of the time without pauses in which no job trains; of each pause, `resolution_s` is
    forgiven.
    """
    merged = heapq.merge(*([run for run in runs if run.speed > 0] for runs in jobs), key=_start)
    down_s, up_to = 0.0, 0.0
    for run in merged:
        down_s += max(0.0, run.start - up_to - resolution_s)
        up_to = max(up_to, run.end)
    return 1 - (down_s + max(0.0, span_s - up_to - resolution_s)) / span_s


def _start(run: Run) -> float:
    return run.start
