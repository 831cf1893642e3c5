"""The network between the machines: links of finite width, messages that are delayed, lost, doubled
and reordered; cuts in one direction or both; home routers behind which nobody can be dialled.

Bodies (outer gradients, merges, states) queue for the sender's uplink and the receiver's downlink,
each serial, so that n askers of one machine wait n times as long. Control messages are a few
kilobytes: they are delayed, and take no width.
"""

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from p2pdiloco.protocol.naming import PeerId

MBIT = 1e6 / 8
"""Bytes per second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """`delay_s` is the mean of what comes on top of the latency of both links, exponential, so that
    messages overtake each other; `loss` and `duplicate` are probabilities per message.
    """

    delay_s: float = 0.02
    loss: float = 0.0
    duplicate: float = 0.0


HOME = Quality(loss=0.002, duplicate=0.001)
"""An ordinary day between homes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What a machine hangs on; `latency_s` is its part of the way of a message. Behind a `nat` it
    can dial others and cannot be dialled.
    """

    up_mbit_s: float = 1000.0
    down_mbit_s: float = 1000.0
    latency_s: float = 0.005
    nat: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkKind:
    """(least, most) from which the links of a swarm are drawn; `nat` is the share of machines
    behind one.
    """

    up_mbit_s: tuple[float, float] = (1000.0, 1000.0)
    down_mbit_s: tuple[float, float] = (1000.0, 1000.0)
    latency_s: tuple[float, float] = (0.005, 0.005)
    nat: float = 0.0

    def draw(self, rng: random.Random) -> Link:
        return Link(
            up_mbit_s=rng.uniform(*self.up_mbit_s),
            down_mbit_s=rng.uniform(*self.down_mbit_s),
            latency_s=rng.uniform(*self.latency_s),
            nat=rng.random() < self.nat,
        )


HALL_LINKS = LinkKind()
"""Machines of one hall: what is being tested is not the network."""
HOME_LINKS = LinkKind(
    up_mbit_s=(10.0, 40.0), down_mbit_s=(50.0, 100.0), latency_s=(0.01, 0.06), nat=0.5
)
"""Volunteers: cable and DSL, every other one behind a router that nobody can dial."""
RELAY_LINK = Link(latency_s=0.01)
"""The first peer is in a data centre."""


@dataclass(slots=True)
class _Pipes:
    """When the uplink and the downlink of a machine are through with what they have to carry."""

    link: Link
    up_free: float = 0.0
    down_free: float = 0.0


class Network:
    """Knows which machines reach each other, when a message sent now arrives, and when a body
    does.
    """

    def __init__(self, rng: random.Random, quality: Quality):
        self.rng = rng
        self.quality = quality
        self.usual = quality
        self.relay_is_up = True
        self.served_bytes: Counter[PeerId] = Counter()
        """By each machine, in bodies."""
        self._relay = _Pipes(RELAY_LINK)
        self._pipes: dict[PeerId, _Pipes] = {}
        self._side: dict[PeerId, int] = {}
        self._blocked: Counter[tuple[PeerId, PeerId]] = Counter()

    def attach(self, name: PeerId, link: Link) -> None:
        self._pipes[name] = _Pipes(link)

    def link(self, name: PeerId) -> Link:
        return self._pipes[name].link

    # ---------------------------------------------------------------- who reaches whom

    def carries(self, sender: PeerId, receiver: PeerId) -> bool:
        """Whether what one sends comes through to the other."""
        if sender == receiver:
            return True
        same_side = self._side.get(sender, 0) == self._side.get(receiver, 0)
        if not same_side or self._blocked[sender, receiver]:
            return False
        return self.relay_is_up or not self._relayed(sender, receiver)

    def connected(self, one: PeerId, other: PeerId) -> bool:
        """Whether a request comes through and its answer comes back."""
        return self.carries(one, other) and self.carries(other, one)

    def _relayed(self, one: PeerId, other: PeerId) -> bool:
        """Nobody can dial either of them: they meet at the relay."""
        return self._pipes[one].link.nat and self._pipes[other].link.nat

    # ---------------------------------------------------------------- how long it takes

    def arrivals(self, sender: PeerId, receiver: PeerId) -> list[float]:
        """Seconds until each copy of a message arrives: none when it is lost."""
        rng, quality = self.rng, self.quality
        if not self.carries(sender, receiver) or rng.random() < quality.loss:
            return []
        copies = 2 if rng.random() < quality.duplicate else 1
        return [self._delay_s(sender, receiver) for _ in range(copies)]

    def round_trip_s(self, one: PeerId, other: PeerId) -> float:
        """Of a request over a reliable stream; what is lost there is sent again below us."""
        return 2 * self._delay_s(one, other)

    def _delay_s(self, one: PeerId, other: PeerId) -> float:
        way_s = self._pipes[one].link.latency_s + self._pipes[other].link.latency_s
        if self._relayed(one, other):
            way_s += 2 * RELAY_LINK.latency_s
        return way_s + self.rng.expovariate(1 / self.quality.delay_s)

    def carry(self, sender: PeerId, receiver: PeerId, num_bytes: int, now: float) -> float:
        """When the last byte of a body arrives that is asked for now."""
        if sender == receiver:
            return now
        self.served_bytes[sender] += num_bytes
        source, sink = self._pipes[sender], self._pipes[receiver]
        source.up_free = sent = self.sent_at(sender, num_bytes, now)
        if self._relayed(sender, receiver):
            relay = self._relay
            relay.up_free = _through(relay.up_free, now, num_bytes, relay.link.up_mbit_s)
            sent = max(sent, relay.up_free)
        taken = _through(sink.down_free, now, num_bytes, sink.link.down_mbit_s)
        sink.down_free = arrived = max(sent, taken)
        return arrived + self.round_trip_s(sender, receiver)

    def sent_at(self, sender: PeerId, num_bytes: int, now: float) -> float:
        """When the sender's uplink would be through with a body that is asked for now."""
        pipes = self._pipes[sender]
        return _through(pipes.up_free, now, num_bytes, pipes.link.up_mbit_s)

    # ---------------------------------------------------------------- faults

    def split(self, sides: Sequence[Iterable[PeerId]]) -> None:
        """Partitions the network; who is on no side stays on the first."""
        self._side = {name: index for index, side in enumerate(sides) for name in side}

    def heal(self) -> None:
        self._side = {}

    def block(self, sender: PeerId, receiver: PeerId) -> None:
        """In this direction nothing comes through, until as many `unblock`."""
        self._blocked[sender, receiver] += 1

    def unblock(self, sender: PeerId, receiver: PeerId) -> None:
        self._blocked[sender, receiver] -= 1


def _through(free_at: float, now: float, num_bytes: int, mbit_s: float) -> float:
    """When a serial queue that is free at `free_at` has passed on so many bytes."""
    return max(free_at, now) + num_bytes / (mbit_s * MBIT)
