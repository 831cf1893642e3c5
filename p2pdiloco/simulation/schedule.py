"""Faults drawn from a seed, and when they begin."""

import random
from collections.abc import Callable, Sequence

from p2pdiloco.protocol.naming import PeerId
from p2pdiloco.simulation.faults import (
    BadNetwork,
    ClockDrift,
    ClockJump,
    Crash,
    Fault,
    FullDisk,
    LearnerDeath,
    Leave,
    OneWay,
    Partition,
    RelayDeath,
    Rot,
    SlowDisk,
    SlowMachine,
    Stall,
    cut_link,
)
from p2pdiloco.simulation.lies import Forger, Liar
from p2pdiloco.simulation.network import Quality
from p2pdiloco.simulation.world import World

DURATION_MIN_S = 2.0
DURATION_MAX_S = 20.0

Draw = Callable[[random.Random, Sequence[PeerId], float], Sequence[Fault]]
"""Of (rng, names of all machines in random order, duration in seconds)."""


def _partition(rng: random.Random, names: Sequence[PeerId], duration_s: float) -> Sequence[Fault]:
    return [Partition(tuple(names[: rng.randint(1, len(names) - 1)]), duration_s)]


def _one_way(rng: random.Random, names: Sequence[PeerId], duration_s: float) -> Sequence[Fault]:
    one, everybody = (names[0],), tuple(names)
    deaf, mute = OneWay(everybody, one, duration_s), OneWay(one, everybody, duration_s)
    half = OneWay(everybody[: len(names) // 2], everybody[len(names) // 2 :], duration_s)
    return [rng.choice((deaf, mute, half))]


def _blackout(rng: random.Random, names: Sequence[PeerId], duration_s: float) -> Sequence[Fault]:
    return [Crash(name, duration_s * rng.uniform(0.3, 1.0)) for name in names]


def _bad_network(rng: random.Random, names: Sequence[PeerId], duration_s: float) -> Sequence[Fault]:
    quality = Quality(
        delay_s=rng.choice((0.02, 0.2, 1.0)),
        loss=rng.choice((0.05, 0.2, 0.5)),
        duplicate=rng.choice((0.0, 0.1, 0.3)),
    )
    return [BadNetwork(quality, duration_s)]


KINDS: tuple[tuple[int, Draw], ...] = (
    (3, lambda rng, names, s: [Crash(names[0], s)]),
    (1, lambda rng, names, s: [Crash(names[0], s, wiped=True)]),
    (1, lambda rng, names, s: [Leave(names[0], s)]),
    (2, lambda rng, names, s: [LearnerDeath(names[0])]),
    (2, lambda rng, names, s: [Stall(names[0], s, with_learner=rng.random() < 0.5)]),
    (1, lambda rng, names, s: [SlowMachine(names[0], s, rng.choice((3.0, 8.0, 20.0)))]),
    (1, lambda rng, names, s: [ClockJump(names[0], rng.choice((2.0, 30.0, 1000.0)))]),
    (1, lambda rng, names, s: [ClockDrift(names[0], rng.choice((0.95, 1.05)), s)]),
    (1, lambda rng, names, s: [FullDisk(names[0], s)]),
    (1, lambda rng, names, s: [SlowDisk(names[0], rng.choice((0.3, 3.0)), s)]),
    (1, lambda rng, names, s: [Rot(names[0], rng.randrange(2))]),
    (2, _partition),
    (2, _one_way),
    (1, lambda rng, names, s: cut_link(names[0], names[1], s)),
    (1, lambda rng, names, s: [RelayDeath(s)]),
    (2, _bad_network),
    (1, lambda rng, names, s: [Liar(names[0], s)]),
    (1, lambda rng, names, s: [Forger(names[0], s)]),
    (1, _blackout),
)
"""How often each is drawn, and what it is; a swarm has at least two fragments."""


def draw_schedule(
    rng: random.Random, names: Sequence[PeerId], start: float, end: float, num_faults: int
) -> list[tuple[float, Fault]]:
    """Faults that all end before `end`, ascending by the moment when they begin."""
    schedule: list[tuple[float, Fault]] = []
    for _ in range(num_faults):
        at = rng.uniform(start, end - DURATION_MIN_S)
        duration_s = min(rng.uniform(DURATION_MIN_S, DURATION_MAX_S), end - at)
        draw = rng.choices([draw for _, draw in KINDS], [weight for weight, _ in KINDS])[0]
        shuffled = rng.sample(names, len(names))
        schedule.extend((at, fault) for fault in draw(rng, shuffled, duration_s))
    return sorted(schedule, key=lambda entry: entry[0])


def inflict(world: World, schedule: Sequence[tuple[float, Fault]]) -> float:
    """Puts the faults on the world's heap; returns when the last one ends."""
    last = 0.0
    for at, fault in schedule:
        world.at(at, lambda fault=fault: _begin(world, fault))  # type: ignore[misc]
        world.at(at + fault.duration_s, lambda fault=fault: _end(world, fault))  # type: ignore[misc]
        last = max(last, at + fault.duration_s)
    return last


def _begin(world: World, fault: Fault) -> None:
    world.tell("fault", f"begins: {fault}")
    fault.begin(world)


def _end(world: World, fault: Fault) -> None:
    world.tell("fault", f"ends: {fault}")
    fault.end(world)
