"""What stands in for a host: its clock, its disk, its replica of the weights, without tensors.

A state is only its digest, made from the parent's digest and the payload's, so two replicas agree
when and only when they applied the same merges in the same order.
"""

import hashlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from p2pdiloco.protocol.lineage import Record
from p2pdiloco.protocol.naming import MixId, PeerId, RoundId
from p2pdiloco.protocol.node import Node
from p2pdiloco.simulation.disk import Disk, State, digest
from p2pdiloco.simulation.learner import LearnerModel

INBOX_MAX = 512
"""Messages of peers that wait at a machine that stands still; more are refused, as by the
daemon."""


class KeyedSigner:
    """Signatures that anybody could forge but nobody here does, unless a fault says so."""

    def __init__(self, me: PeerId):
        self.me = me

    def sign(self, data: bytes) -> bytes:
        return hashlib.blake2b(data, key=self.me.encode(), digest_size=16).digest()

    def verify(self, peer: PeerId, data: bytes, signature: bytes) -> bool:
        return hashlib.blake2b(data, key=peer.encode(), digest_size=16).digest() == signature


@dataclass
class Clock:
    """A monotonic clock: it goes too fast or too slow, jumps forward, and never goes back."""

    rate: float
    offset: float

    def shows(self, now: float) -> float:
        return now * self.rate + self.offset

    def when(self, shown: float) -> float:
        """The true time at which it will show that, if nothing happens to it before."""
        return (shown - self.offset) / self.rate

    def jump(self, seconds: float) -> None:
        assert seconds >= 0
        self.offset += seconds

    def go_at(self, rate: float, now: float) -> None:
        """Changes its pace; what it shows stays continuous."""
        assert rate > 0
        self.offset += now * (self.rate - rate)
        self.rate = rate


@dataclass(frozen=True, slots=True)
class Contribution:
    """An encoded outer gradient on the shelf; `base` is the state digest it was made from."""

    round: RoundId
    peer: PeerId
    base: str
    steps: int
    tokens: int

    @property
    def digest(self) -> str:
        return digest("contribution", self)


@dataclass(frozen=True, slots=True)
class Offer:
    """A vector that partners may fetch."""

    mix: MixId
    partners: tuple[PeerId, ...]
    value: float


@dataclass
class Machine:
    """One host. `node` is None while it is down; `life` counts its starts, so that what was begun
    in an earlier life ends with it.

    While it is `stalled` nothing happens in it: `backlog` is what will happen when it goes on.
    """

    name: PeerId
    disk: Disk
    learner: LearnerModel
    clock: Clock
    node: Node | None = None
    life: int = 0
    lying: int = 0
    forged: set[str] = field(default_factory=set)
    """Digests of payloads of merges that never took place."""
    stalled: int = 0
    slowdown: float = 1.0
    """Everything that it computes takes so many times as long."""
    backlog: deque[Callable[[], None]] = field(default_factory=deque)
    messages_waiting: int = 0
    messages_refused: int = 0
    wake_at: float | None = None
    replica: list[State | None] = field(default_factory=list)
    newest: list[Record | None] = field(default_factory=list)
    """The merges that are in memory, whether or not they are on the disk."""
    shelf: dict[int, Contribution] = field(default_factory=dict)
    pulled: dict[RoundId, dict[PeerId, Contribution]] = field(default_factory=dict)
    merged: dict[RoundId, State] = field(default_factory=dict)
    catching_up: dict[int, int] = field(default_factory=dict)
    """Fragment -> catch-ups under way."""
    rotten: set[int] = field(default_factory=set)
    """Fragments whose state in memory is no longer what it was."""
    tokens_this_life: int = 0
    processed_before: int = 0
    offers: dict[tuple[int, str], Offer] = field(default_factory=dict)
    """By fragment and part: what partners in gossip may fetch."""
    received: dict[tuple[MixId, PeerId], float] = field(default_factory=dict)
    """Their vectors."""

    def forget(self) -> None:
        """What a process loses when it ends."""
        self.shelf, self.pulled, self.merged, self.catching_up = {}, {}, {}, {}
        self.backlog.clear()
        self.offers, self.received = {}, {}
        self.rotten.clear()
        self.stalled = self.learner.stalled = self.messages_waiting = 0

    def local(self, now: float) -> float:
        return self.clock.shows(now)

    @property
    def answers(self) -> bool:
        """Whether somebody who asks it for something gets an answer."""
        return self.node is not None and not self.stalled

    def has_merge(self, record: Record) -> bool:
        """In memory or on disk."""
        newest = self.newest[record.fragment]
        in_memory = newest is not None and newest.payload_digest == record.payload_digest
        if in_memory or record.payload_digest in self.forged:
            return True
        return self.disk.fragments[record.fragment].has_merge(record)
