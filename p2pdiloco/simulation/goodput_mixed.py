"""Two kinds of accelerator in one swarm: who is waited for, and what that costs.

The paper's experiment: 4 learners of one kind, 4 of another whose steps take 18 % longer, and 10 %
of variance on top (1.8 in our notes). *K = M* is the synchronous baseline, where every learner
waits at every step for the slowest. *K = 1* merges with whoever reports first, *K = 1 with grace*
after the adaptive window of Eq. 3: both run the production protocol, in which nobody ever waits.
"""

import random
from dataclasses import dataclass
from statistics import fmean

from p2pdiloco.simulation.goodput_decoupled import (
    INNER_STEPS,
    LEAD_S,
    LOOK_EVERY_S,
    NUM_FRAGMENTS,
    OVERLAP_STEPS,
)
from p2pdiloco.simulation.machine import Machine
from p2pdiloco.simulation.world import Swarm, World

STEP_TIMES_S = (1.0,) * 4 + (1.18,) * 4
NOISE = 0.1
"""Standard deviation of a step's time, relative."""
WORLD_NOISE = 0.1 / 3**0.5
"""What the World varies each step by on its own: uniform, at most a tenth either way."""
WINDOW_S = 60.0
BARRIERS = 10_000
GRACE_FACTOR = 0.8


@dataclass(frozen=True, slots=True)
class Mixed:
    """`contributors` is their mean number per merge."""

    policy: str
    published: float
    goodput: float
    contributors: float


def run_mixed(seed: int) -> tuple[Mixed, ...]:
    """Goodput is the share of the learners' time in which they compute."""
    num_learners = float(len(STEP_TIMES_S))
    return (
        Mixed("K = M, everybody waits", 0.84, synchronous_goodput(seed), num_learners),
        Mixed("K = 1", 1.0, *_merge(seed, grace_factor=0.0)),
        Mixed("K = 1 with grace", 1.0, *_merge(seed, GRACE_FACTOR)),
    )


def synchronous_goodput(seed: int) -> float:
    """A barrier after every step, and a network that costs nothing."""
    rng = random.Random(f"barriers {seed}")
    worked_s = passed_s = 0.0
    for _ in range(BARRIERS):
        steps_s = [step_s * _noise(rng, NOISE) for step_s in STEP_TIMES_S]
        worked_s += sum(steps_s)
        passed_s += max(steps_s) * len(steps_s)
    return worked_s / passed_s


def _noise(rng: random.Random, deviation: float) -> float:
    return max(0.5, rng.gauss(1.0, deviation))


def _merge(seed: int, grace_factor: float) -> tuple[float, float]:
    """(goodput, contributors per merge) of the production protocol."""
    swarm = Swarm(
        num_machines=len(STEP_TIMES_S),
        num_fragments=NUM_FRAGMENTS,
        inner_steps=INNER_STEPS,
        overlap_steps=OVERLAP_STEPS,
        quorum=1,
        grace_factor=grace_factor,
        step_s=fmean(STEP_TIMES_S),
        step_spread=0.0,
    )
    world = World(seed, swarm)
    rng = random.Random(f"noise {seed}")
    for machine, step_s in zip(world.machines.values(), STEP_TIMES_S, strict=True):
        machine.learner.step_s = step_s
        _vary(world, machine, rng)
    world.start_all()
    world.run(until=LEAD_S)
    before, computing = set(world.records), []
    for look in range(int(WINDOW_S / LOOK_EVERY_S)):
        world.run(until=LEAD_S + look * LOOK_EVERY_S)
        computing += [machine.learner.stepping for machine in world.machines.values()]
    merges = [record for digest, record in world.records.items() if digest not in before]
    return fmean(computing), fmean(len(record.contributors) for record in merges)


def _vary(world: World, machine: Machine, rng: random.Random) -> None:
    """Draws a pace anew about once a step, so that the World's own variation and this one make
    `NOISE`.
    """
    machine.learner.slowdown = _noise(rng, (NOISE**2 - WORLD_NOISE**2) ** 0.5)
    world.at(world.now + machine.learner.step_s, lambda: _vary(world, machine, rng))
