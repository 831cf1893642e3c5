"""M learners under failures, merging by the production protocol.

Each learner is an elastic job with a share of the chips (`goodput_parallel.elastic_runs`) and one
machine of the `World`: when its job stops, its node is killed; when the job can go on, its node has
started from its disk, and catches up from its peers, while the others go on merging whoever is
there.
The World's checkers look at every event: a learner that waited for anything would end the run with
`PromiseBroken`.

The protocol code is not fast enough for the thousands of failures that a narrow interval needs, so
a cell has two factors: the share of time that failures leave to M independent learners, from a long
run of the failure process alone, and the *efficiency*: what the protocol made of that time in a
window of the World, where catching up and torn steps are the loss. Goodput is their
product.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from p2pdiloco.simulation.goodput_failures import Cluster
from p2pdiloco.simulation.goodput_parallel import (
    RESOLUTION_S,
    Run,
    elastic_runs,
    stepping_s,
    uptime,
    window,
)
from p2pdiloco.simulation.learner import LEARNER_START_S
from p2pdiloco.simulation.machine import Machine
from p2pdiloco.simulation.world import Swarm, World

LEAD_S = 20.0
"""Everybody starts and has the genesis weights, before the first failure."""
WINDOW_LEARNER_STEPS = 1200
"""The window of a World in steps of all its learners together, but `WINDOW_STEPS_MIN` of each."""
WINDOW_STEPS_MIN = 100
INNER_STEPS = 24
"""H of the paper."""
NUM_FRAGMENTS = 6
"""P of our run spec; the paper has 24. Fewer merges, each of more, cost the simulator less."""
OVERLAP_STEPS = 2
LOOK_EVERY_S = 0.5


@dataclass(frozen=True, slots=True)
class Merging:
    """What the protocol did in one window of the World."""

    window_s: float
    efficiency: float
    """Steps taken, of those that fitted into the time that failures left."""
    num_merges: int
    num_contributions: int
    num_forks: int
    merged_tokens: int
    processed_tokens: int
    """Both as the ledgers of the nodes that were up at the end say."""
    longest_pause_s: float
    """In which nobody finished a step."""


@dataclass(frozen=True, slots=True)
class Decoupled:
    """One seed of one cell."""

    goodput: float
    uptime: float
    uptime_instant: float
    """Of all learners at every instant, however short the pause."""
    merging: Merging


def run_decoupled(
    cluster: Cluster, num_chips: int, num_learners: int, span_s: float, seed: int
) -> Decoupled:
    """`span_s` is how long the failure process is followed."""
    rng = random.Random(f"failures {seed}")
    share = num_chips / num_learners
    jobs = [window(elastic_runs(cluster, share, rng), 0.0, span_s) for _ in range(num_learners)]
    merging = merge_under_failures(cluster, num_chips, num_learners, seed)
    available = stepping_s(jobs) / (span_s * num_learners)
    return Decoupled(
        goodput=available * merging.efficiency,
        uptime=uptime(jobs, span_s, RESOLUTION_S),
        uptime_instant=uptime(jobs, span_s, 0.0),
        merging=merging,
    )


def merge_under_failures(cluster: Cluster, num_chips: int, num_learners: int, seed: int) -> Merging:
    """Raises PromiseBroken if the protocol breaks a promise."""
    window_s = cluster.step_s * max(WINDOW_STEPS_MIN, WINDOW_LEARNER_STEPS / num_learners)
    rng = random.Random(f"window {seed}")
    settled_s = 2 * (cluster.return_s + cluster.standby_s)
    jobs = [
        window(
            elastic_runs(cluster, num_chips / num_learners, rng), settled_s, settled_s + window_s
        )
        for _ in range(num_learners)
    ]
    swarm = Swarm(
        num_machines=num_learners,
        num_fragments=NUM_FRAGMENTS,
        inner_steps=INNER_STEPS,
        overlap_steps=OVERLAP_STEPS,
        step_s=cluster.step_s,
        step_spread=cluster.step_spread,
    )
    world = World(seed, swarm)
    world.start_all()
    world.run(until=LEAD_S)
    watch = _Watch(world)
    for machine, runs in zip(world.machines.values(), jobs, strict=True):
        _schedule(world, machine, runs, LEAD_S - settled_s, LEAD_S + window_s)
    world.run(until=LEAD_S + window_s)
    return watch.result(window_s, stepping_s(jobs))


def _schedule(
    world: World, machine: Machine, runs: Sequence[Run], shift_s: float, end: float
) -> None:
    """Kills and starts the node as its chips dictate; its learner's process starts within the
    stop.
    """

    def begin(speed: float) -> None:
        machine.learner.slowdown = 1 / speed
        world.start(machine)

    if not runs or runs[0].start + shift_s > world.now:
        world.crash(machine)
    stopped_s = world.now
    for run in runs:
        if run.speed > 0:
            ready_s = max(stopped_s, run.start + shift_s - LEARNER_START_S)
            world.at(ready_s, lambda speed=run.speed: begin(speed))  # type: ignore[misc]
        stopped_s = run.end + shift_s
        if stopped_s < end:
            world.at(stopped_s, lambda: world.crash(machine))


class _Watch:
    """Counts from now on."""

    def __init__(self, world: World):
        self.world = world
        self._begun_s = self._seen_s = self._worked_s()
        self._records = set(world.records)
        self._forks = world.checkers.forks
        self._since = world.now
        self._longest_s = 0.0
        self._look()

    def _worked_s(self) -> float:
        """Time of the finished steps of all learners, with all their chips."""
        learners = [machine.learner for machine in self.world.machines.values()]
        return sum(learner.steps_total * learner.step_s for learner in learners)

    def _look(self) -> None:
        world, worked_s = self.world, self._worked_s()
        if worked_s > self._seen_s:
            self._seen_s, self._since = worked_s, world.now
        self._longest_s = max(self._longest_s, world.now - self._since)
        world.at(world.now + LOOK_EVERY_S, self._look)

    def result(self, window_s: float, possible_s: float) -> Merging:
        world = self.world
        merges = [r for digest, r in world.records.items() if digest not in self._records]
        totals = [world.checkers.totals(machine) for machine in world.up]
        worked_s = self._worked_s() - self._begun_s
        return Merging(
            window_s=window_s,
            efficiency=worked_s / possible_s if possible_s else 1.0,
            num_merges=len(merges),
            num_contributions=sum(len(record.contributors) for record in merges),
            num_forks=world.checkers.forks - self._forks,
            merged_tokens=sum(t.merged for t in totals),
            processed_tokens=sum(t.processed for t in totals),
            longest_pause_s=self._longest_s,
        )
