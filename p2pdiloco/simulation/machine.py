"""What stands in for a host: its disk, its replica of the weights and its learner, without tensors.

A state is only its digest, made from the parent's digest and the payload's, so two replicas agree
when and only when they applied the same merges in the same order.
"""

import hashlib
from dataclasses import dataclass, field

from p2pdiloco.protocol.events import SnapshotInfo
from p2pdiloco.protocol.lineage import Chain, Record
from p2pdiloco.protocol.naming import PeerId, RoundId
from p2pdiloco.protocol.node import Node

SNAPSHOT_EVERY = 4
SNAPSHOTS_KEPT = 2


def digest(*parts: object) -> str:
    """blake2b-256 of anything with a stable repr, in hex."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=32).hexdigest()


def genesis_digest(fragment: int) -> str:
    return digest("genesis", fragment)


class KeyedSigner:
    """Signatures that anybody could forge but nobody here does, unless a fault says so."""

    def __init__(self, me: PeerId):
        self.me = me

    def sign(self, data: bytes) -> bytes:
        return hashlib.blake2b(data, key=self.me.encode(), digest_size=16).digest()

    def verify(self, peer: PeerId, data: bytes, signature: bytes) -> bool:
        return hashlib.blake2b(data, key=peer.encode(), digest_size=16).digest() == signature


@dataclass(frozen=True, slots=True)
class State:
    """The replica's state of a fragment."""

    version: int
    digest: str

    def apply(self, payload_digest: str) -> "State":
        return State(self.version + 1, digest("state", self.digest, payload_digest))


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
class Snapshot:
    state: State
    record: Record | None


@dataclass
class FragmentLog:
    """One fragment on disk: snapshots now and then, and the merges since the oldest kept one."""

    snapshots: list[Snapshot] = field(default_factory=list)
    merges: dict[int, Record] = field(default_factory=dict)

    def put_snapshot(self, state: State, record: Record | None) -> None:
        """Begins anew from a snapshot that was fetched: what was there was of another lineage, or
        too old to connect.
        """
        self.snapshots, self.merges = [Snapshot(state, record)], {}

    def put_merge(self, record: Record, state: State) -> None:
        self.merges[record.version] = record
        if record.version - self.snapshots[-1].state.version >= SNAPSHOT_EVERY:
            self.snapshots = [*self.snapshots, Snapshot(state, record)][-SNAPSHOTS_KEPT:]
            oldest = self.snapshots[0].state.version
            self.merges = {v: r for v, r in self.merges.items() if v > oldest}

    def newest_snapshot(self) -> tuple[SnapshotInfo, ...]:
        """What this machine offers as a donor."""
        return tuple(_info(snapshot) for snapshot in self.snapshots[-1:])

    def has_snapshot(self, snapshot: SnapshotInfo) -> bool:
        return snapshot in map(_info, self.snapshots)

    def has_merge(self, record: Record) -> bool:
        held = self.merges.get(record.version)
        return held is not None and held.payload_digest == record.payload_digest

    def load(self) -> tuple[Chain, State] | None:
        """What a restart begins with: the records from the oldest kept snapshot on, and the newest
        state that they lead to.
        """
        if not self.snapshots:
            return None
        oldest, newest = self.snapshots[0], self.snapshots[-1]
        first, state = oldest.record, newest.state
        chain = Chain(first.version - 1, first.parent) if first else Chain(0, oldest.state.digest)
        if first:
            chain.append(first)
        while following := self.merges.get(chain.version + 1):
            chain.append(following)
            if following.version > state.version:
                state = state.apply(following.payload_digest)
        return chain, state


def _info(snapshot: Snapshot) -> SnapshotInfo:
    return SnapshotInfo(snapshot.state.version, snapshot.state.digest)


@dataclass
class Disk:
    """Survives a crash. `saved` is the JSON text of the node's last save."""

    fragments: list[FragmentLog]
    saved: str | None = None
    incarnation: int = 0


@dataclass
class LearnerModel:
    """Takes inner steps at its own pace for ever, once it received every fragment.

    `waiting` are states handed over for its next step boundary, `asked` the snapshots wanted from
    it; `held` what it trains on.
    """

    num_fragments: int
    step_s: float
    tokens_per_step: int
    alive: bool = False
    life: int = 0
    slowdown: float = 1.0
    stepping: bool = False
    held: list[State | None] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    waiting: dict[int, State] = field(default_factory=dict)
    asked: dict[int, RoundId] = field(default_factory=dict)
    steps_total: int = 0
    next_boundary: float = 0.0

    def start(self) -> None:
        self.alive, self.stepping, self.life = True, False, self.life + 1
        self.held = [None] * self.num_fragments
        self.steps = [0] * self.num_fragments
        self.waiting, self.asked = {}, {}

    def stop(self) -> None:
        self.alive, self.stepping = False, False

    def step(self) -> None:
        self.steps = [steps + 1 for steps in self.steps]
        self.steps_total += 1

    def receive(self, fragment: int) -> int:
        """Overwrites a fragment; returns the tokens counted on the version before."""
        tokens = self.steps[fragment] * self.tokens_per_step
        self.held[fragment], self.steps[fragment] = self.waiting.pop(fragment), 0
        return tokens

    @property
    def complete(self) -> bool:
        return all(self.held)


@dataclass
class Machine:
    """One host. `node` is None while it is down; `life` counts its starts, so that what was begun
    in an earlier life ends with it.

    Its clock shows `now * clock_rate + clock_offset`.
    """

    name: PeerId
    disk: Disk
    learner: LearnerModel
    clock_rate: float
    clock_offset: float
    node: Node | None = None
    life: int = 0
    lying: int = 0
    wake_at: float | None = None
    replica: list[State | None] = field(default_factory=list)
    shelf: dict[int, Contribution] = field(default_factory=dict)
    pulled: dict[RoundId, dict[PeerId, Contribution]] = field(default_factory=dict)
    merged: dict[RoundId, State] = field(default_factory=dict)
    catching_up: dict[int, int] = field(default_factory=dict)
    """Fragment -> catch-ups under way."""
    tokens_this_life: int = 0
    processed_before: int = 0

    def local(self, now: float) -> float:
        return now * self.clock_rate + self.clock_offset

    def from_local(self, local: float) -> float:
        return (local - self.clock_offset) / self.clock_rate
