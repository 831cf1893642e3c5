"""What goes wrong, by name. Each fault begins at a moment and ends after a while; `schedule.py`
draws them from the seed, and `lies.py` says what liars do.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from p2pdiloco.protocol.naming import PeerId
from p2pdiloco.simulation.disk import Disk
from p2pdiloco.simulation.network import Quality
from p2pdiloco.simulation.world import World


class Fault(Protocol):
    @property
    def duration_s(self) -> float: ...
    def begin(self, world: World) -> None: ...
    def end(self, world: World) -> None: ...


# -------------------------------------------------------------------- processes


@dataclass(frozen=True, slots=True)
class Crash:
    """kill -9; starts again from its disk, or with an empty one if it was `wiped`."""

    name: PeerId
    duration_s: float
    wiped: bool = False

    def begin(self, world: World) -> None:
        machine = world.machines[self.name]
        world.crash(machine)
        if self.wiped and not machine.node:
            machine.disk = Disk.empty(world.swarm.num_fragments, machine.disk.incarnation)
            world.checkers.blind.add(self.name)

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


@dataclass(slots=True)
class Stall:
    """SIGSTOP, to the daemon alone or to all that runs on the machine, then SIGCONT."""

    name: PeerId
    duration_s: float
    with_learner: bool = False
    life: int = -1

    def begin(self, world: World) -> None:
        machine = world.machines[self.name]
        if machine.node:
            self.life = world.stall(machine, self.with_learner)

    def end(self, world: World) -> None:
        world.go_on(world.machines[self.name], self.with_learner, self.life)


@dataclass(frozen=True, slots=True)
class SlowMachine:
    """Its owner plays a game."""

    name: PeerId
    duration_s: float
    factor: float = 8.0

    def begin(self, world: World) -> None:
        machine = world.machines[self.name]
        machine.slowdown = machine.learner.slowdown = self.factor

    def end(self, world: World) -> None:
        machine = world.machines[self.name]
        machine.slowdown = machine.learner.slowdown = 1.0


# -------------------------------------------------------------------- clocks, disks, memory


@dataclass(frozen=True, slots=True)
class ClockJump:
    """The machine was suspended, and its clock counts that."""

    name: PeerId
    seconds: float
    duration_s: float = 0.0

    def begin(self, world: World) -> None:
        world.jump(world.machines[self.name], self.seconds)

    def end(self, world: World) -> None:
        """The clock stays where it is."""


@dataclass(frozen=True, slots=True)
class ClockDrift:
    name: PeerId
    rate: float
    duration_s: float

    def begin(self, world: World) -> None:
        world.drift(world.machines[self.name], self.rate)

    def end(self, world: World) -> None:
        world.drift(world.machines[self.name], 1.0)


@dataclass(frozen=True, slots=True)
class FullDisk:
    name: PeerId
    duration_s: float

    def begin(self, world: World) -> None:
        world.machines[self.name].disk.full = True

    def end(self, world: World) -> None:
        world.machines[self.name].disk.full = False


@dataclass(frozen=True, slots=True)
class SlowDisk:
    name: PeerId
    write_s: float
    duration_s: float

    def begin(self, world: World) -> None:
        world.machines[self.name].disk.write_s = self.write_s

    def end(self, world: World) -> None:
        world.machines[self.name].disk.write_s = 0.0


@dataclass(frozen=True, slots=True)
class Rot:
    """A bit of a fragment's anchor flips in memory."""

    name: PeerId
    fragment: int
    duration_s: float = 0.0

    def begin(self, world: World) -> None:
        machine = world.machines[self.name]
        if machine.node and machine.replica[self.fragment]:
            machine.rotten.add(self.fragment)

    def end(self, world: World) -> None:
        """The node itself finds and mends it."""


# -------------------------------------------------------------------- the network


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
class OneWay:
    """What `senders` send does not reach `receivers`; the other way all is well. Everybody as
    senders makes a receiver deaf, which still beats; everybody as receivers makes a sender mute.
    """

    senders: tuple[PeerId, ...]
    receivers: tuple[PeerId, ...]
    duration_s: float

    def begin(self, world: World) -> None:
        for sender, receiver in self._ways():
            world.network.block(sender, receiver)

    def end(self, world: World) -> None:
        for sender, receiver in self._ways():
            world.network.unblock(sender, receiver)

    def _ways(self) -> Iterator[tuple[PeerId, PeerId]]:
        return ((s, r) for s in self.senders for r in self.receivers if s != r)


def cut_link(one: PeerId, other: PeerId, duration_s: float) -> tuple[OneWay, OneWay]:
    """Two machines do not reach each other; all others reach both."""
    return OneWay((one,), (other,), duration_s), OneWay((other,), (one,), duration_s)


@dataclass(frozen=True, slots=True)
class RelayDeath:
    """Machines behind home routers no longer reach each other."""

    duration_s: float

    def begin(self, world: World) -> None:
        world.network.relay_is_up = False

    def end(self, world: World) -> None:
        world.network.relay_is_up = True


@dataclass(frozen=True, slots=True)
class BadNetwork:
    """A burst of loss, duplicates and delays that reorder."""

    quality: Quality
    duration_s: float

    def begin(self, world: World) -> None:
        world.network.quality = self.quality

    def end(self, world: World) -> None:
        world.network.quality = world.network.usual
