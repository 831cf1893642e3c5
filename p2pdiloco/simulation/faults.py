"""What goes wrong, by name. Each fault begins at a moment and ends after a while; a schedule of
them is drawn from the seed.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from p2pdiloco.protocol.lineage import Contributor, Record
from p2pdiloco.protocol.naming import PeerId, RoundId
from p2pdiloco.protocol.wire import (
    Committed,
    ContributionReady,
    Head,
    Heartbeat,
    Message,
    RoundOpened,
)
from p2pdiloco.simulation.machine import Machine, digest
from p2pdiloco.simulation.network import Quality
from p2pdiloco.simulation.world import World


class Fault(Protocol):
    @property
    def duration_s(self) -> float: ...
    def begin(self, world: World) -> None: ...
    def end(self, world: World) -> None: ...


@dataclass(frozen=True, slots=True)
class Crash:
    """kill -9; starts again from its disk."""

    name: PeerId
    duration_s: float

    def begin(self, world: World) -> None:
        world.crash(world.machines[self.name])

    def end(self, world: World) -> None:
        world.start(world.machines[self.name])


@dataclass(frozen=True, slots=True)
class Leave:
    """The owner stops the daemon and comes back later."""

    name: PeerId
    duration_s: float

    def begin(self, world: World) -> None:
        world.leave(world.machines[self.name])

    def end(self, world: World) -> None:
        world.start(world.machines[self.name])


@dataclass(frozen=True, slots=True)
class LearnerDeath:
    name: PeerId
    duration_s: float = 0.0

    def begin(self, world: World) -> None:
        world.kill_learner(world.machines[self.name])

    def end(self, world: World) -> None:
        """The daemon itself starts it again."""


@dataclass(frozen=True, slots=True)
class SlowMachine:
    """Its owner plays a game."""

    name: PeerId
    duration_s: float
    factor: float = 8.0

    def begin(self, world: World) -> None:
        world.machines[self.name].learner.slowdown = self.factor

    def end(self, world: World) -> None:
        world.machines[self.name].learner.slowdown = 1.0


@dataclass(frozen=True, slots=True)
class Partition:
    """Two sides that do not reach each other, then heal."""

    side: tuple[PeerId, ...]
    duration_s: float

    def begin(self, world: World) -> None:
        rest = [name for name in world.machines if name not in self.side]
        world.network.split([rest, self.side])

    def end(self, world: World) -> None:
        world.network.heal()


@dataclass(frozen=True, slots=True)
class CutLink:
    """Two machines do not reach each other; all others reach both."""

    one: PeerId
    other: PeerId
    duration_s: float

    def begin(self, world: World) -> None:
        world.network.cut(self.one, self.other)

    def end(self, world: World) -> None:
        world.network.mend(self.one, self.other)


@dataclass(frozen=True, slots=True)
class BadNetwork:
    """A burst of loss, duplicates and delays that reorder."""

    quality: Quality
    duration_s: float

    def begin(self, world: World) -> None:
        world.network.quality = self.quality

    def end(self, world: World) -> None:
        world.network.quality = world.network.usual


@dataclass(frozen=True, slots=True)
class Liar:
    """Serves wrong bytes, and sends what breaks the protocol."""

    name: PeerId
    duration_s: float

    def begin(self, world: World) -> None:
        machine = world.machines[self.name]
        machine.lying += 1
        for index in range(4):
            world.at(world.now + index * self.duration_s / 4, lambda: _tell_lies(world, machine))

    def end(self, world: World) -> None:
        world.machines[self.name].lying -= 1


def _tell_lies(world: World, machine: Machine) -> None:
    if not machine.node:
        return
    for peer in world.machines:
        if peer != machine.name:
            world.send(machine, peer, _lie(world, machine))


def _lie(world: World, machine: Machine) -> Message:
    """Well-formed messages, as the decoder lets no others in, that are wrong in every other way."""
    assert machine.node
    rng, num = world.rng, world.swarm.num_fragments
    fragment = rng.randrange(2 * num)
    register = machine.node.state.registers[fragment % num]
    version = register.version + rng.choice((1, 2, 50))
    round_id = RoundId(fragment, max(1, version), rng.randrange(2), rng.randrange(5))
    record = Record(
        run_id=rng.choice(("simulation", "another")),
        fragment=fragment,
        version=max(1, version),
        parent=register.chain.digest if register.chain else digest("?"),
        payload_digest=digest("payload", rng.random()),
        payload_bytes=1000,
        state_digest=digest("state", rng.random()),
        contributors=(Contributor(machine.name, 2**49, 10),),
        refused=(),
        term=round_id.term,
        attempt=round_id.attempt,
        tokens_total=2**50,
        reason="a lie",
        synchronizer=rng.choice(sorted(world.machines)),
        signature=b"forged",
    )
    heartbeat = Heartbeat(
        run_id=f"another {rng.random()}",
        protocol_version=1,
        incarnation=10**6,
        sequence=1,
        name=machine.name,
        ready=True,
        uplink_mb_s=1e6,
        step_s=0.0,
        tokens_per_s=1e9,
        local_steps=(10**6,) * num,
        heads=(Head(10**6, digest("head"), 2**60),) * num,
        sightings=(),
    )
    report = ContributionReady(round_id, 10**6, 2**49, 1, 0.0)
    short = replace(heartbeat, run_id="simulation", heads=())
    return rng.choice(
        (Committed(record), heartbeat, short, report, RoundOpened(round_id, record.parent))
    )


# -------------------------------------------------------------------- schedules

KINDS = (
    "crash",
    "crash",
    "leave",
    "learner",
    "learner",
    "slow",
    "partition",
    "partition",
    "link",
    "network",
    "network",
    "liar",
    "blackout",
)
DURATION_MIN_S = 2.0
DURATION_MAX_S = 20.0
DOWN_MAX_S = 25.0


def draw_schedule(
    rng: random.Random, names: Sequence[PeerId], start: float, end: float, num_faults: int
) -> list[tuple[float, Fault]]:
    """Faults that all end before `end`, ascending by the moment when they begin."""
    schedule: list[tuple[float, Fault]] = []
    for _ in range(num_faults):
        at = rng.uniform(start, end - DURATION_MIN_S)
        duration_s = min(rng.uniform(DURATION_MIN_S, DURATION_MAX_S), end - at)
        schedule.extend((at, fault) for fault in _draw(rng, names, duration_s))
    return sorted(schedule, key=lambda entry: entry[0])


def _draw(rng: random.Random, names: Sequence[PeerId], duration_s: float) -> list[Fault]:
    one, other, *_ = rng.sample(names, len(names))
    match rng.choice(KINDS):
        case "crash":
            return [Crash(one, duration_s)]
        case "leave":
            return [Leave(one, duration_s)]
        case "learner":
            return [LearnerDeath(one)]
        case "slow":
            return [SlowMachine(one, duration_s, rng.choice((3.0, 8.0, 20.0)))]
        case "partition":
            return [Partition(tuple(rng.sample(names, rng.randint(1, len(names) - 1))), duration_s)]
        case "link":
            return [CutLink(one, other, duration_s)]
        case "liar":
            return [Liar(one, duration_s)]
        case "blackout":
            back = [duration_s * rng.uniform(0.3, 1.0) for _ in names]
            return [Crash(name, after_s) for name, after_s in zip(names, back, strict=True)]
        case _:
            return [BadNetwork(_bad_quality(rng), duration_s)]


def _bad_quality(rng: random.Random) -> Quality:
    return Quality(
        delay_s=rng.choice((0.02, 0.2, 1.0)),
        loss=rng.choice((0.05, 0.2, 0.5)),
        duplicate=rng.choice((0.0, 0.1, 0.3)),
    )


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
