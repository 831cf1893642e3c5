"""A disk that knows states and merges only by their digests; it survives a crash, and can be full
or slow.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from p2pdiloco.protocol.events import SnapshotInfo
from p2pdiloco.protocol.lineage import RECORDS_KEPT, Chain, Record

SNAPSHOT_EVERY = 4
SNAPSHOTS_KEPT = 2
WRITES_MAX = 64
"""Writes that may wait for a slow disk; what comes on top is not written, as on a full one."""


def digest(*parts: object) -> str:
    """blake2b-256 of anything with a stable repr, in hex."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=32).hexdigest()


def genesis_digest(fragment: int) -> str:
    return digest("genesis", fragment)


@dataclass(frozen=True, slots=True)
class State:
    """The replica's state of a fragment."""

    version: int
    digest: str

    def apply(self, payload_digest: str) -> "State":
        return State(self.version + 1, digest("state", self.digest, payload_digest))


@dataclass(frozen=True, slots=True)
class Snapshot:
    state: State
    record: Record | None


@dataclass
class FragmentLog:
    """One fragment on disk: snapshots now and then, the merges since the oldest kept one, and the
    records of older ones.

    It has a `gap` after something could not be written: the next write begins anew. The records of
    merges that it `missed` are in memory until then.
    """

    snapshots: list[Snapshot] = field(default_factory=list)
    merges: dict[int, Record] = field(default_factory=dict)
    records: dict[int, Record] = field(default_factory=dict)
    gap: bool = False
    missed: dict[int, Record] = field(default_factory=dict)

    def miss(self, records: Sequence[Record]) -> None:
        """The disk did not take these."""
        self.gap = True
        self.missed |= {record.version: record for record in records}

    def put_snapshot(
        self, state: State, vouching: Sequence[Record], following: Sequence[Record] = ()
    ) -> None:
        """Begins anew from a snapshot: of what was here, what lies on its lineage stays."""
        first = vouching[0].version if vouching else 0
        self.records = {v: r for v, r in (self.records | self.missed).items() if v < first}
        self.records |= {record.version: record for record in vouching}
        wanted = {record.digest for record in following}
        self.merges = {v: r for v, r in self.merges.items() if r.digest in wanted}
        self.snapshots = [Snapshot(state, vouching[-1] if vouching else None)]
        self.forget_gap()

    def forget_gap(self) -> None:
        self.gap, self.missed = False, {}

    def put_merge(self, record: Record, state: State) -> None:
        if self.gap:
            self.put_snapshot(state, (record,))
            return
        self.merges[record.version] = self.records[record.version] = record
        self.records.pop(record.version - RECORDS_KEPT, None)
        newest = self.snapshots[-1].state.version
        if record.version % SNAPSHOT_EVERY == 0 or record.version - newest > SNAPSHOT_EVERY:
            self.snapshots = [*self.snapshots, Snapshot(state, record)][-SNAPSHOTS_KEPT:]
            oldest = self.snapshots[0].state.version
            self.merges = {v: r for v, r in self.merges.items() if v > oldest}

    def offered(self) -> tuple[SnapshotInfo, ...]:
        """What this machine offers as a donor, newest first."""
        return tuple(_info(snapshot) for snapshot in reversed(self.snapshots))

    def has_snapshot(self, snapshot: SnapshotInfo) -> bool:
        return snapshot in map(_info, self.snapshots)

    def has_merge(self, record: Record) -> bool:
        held = self.merges.get(record.version)
        return held is not None and held.payload_digest == record.payload_digest

    def load(self) -> tuple[Chain, State] | None:
        """What a restart begins with: all records that connect, and the newest state that they
        lead to.
        """
        if not self.snapshots:
            return None
        newest = self.snapshots[-1]
        state, chain = newest.state, self._chain_to(newest)
        while following := self.merges.get(chain.version + 1):
            chain.append(following)
            state = state.apply(following.payload_digest)
        return chain, state

    def _chain_to(self, snapshot: Snapshot) -> Chain:
        lineage: list[Record] = []
        record = snapshot.record
        while record:
            lineage.append(record)
            before = self.records.get(record.version - 1)
            record = before if before and before.digest == record.parent else None
        if not lineage:
            return Chain(snapshot.state.version, snapshot.state.digest)
        oldest = lineage[-1]
        return Chain(oldest.version - 1, oldest.parent, lineage[::-1][-RECORDS_KEPT:])


def _info(snapshot: Snapshot) -> SnapshotInfo:
    return SnapshotInfo(snapshot.state.version, snapshot.state.digest)


@dataclass
class Disk:
    """`saved` is the node's last save, made into JSON and back at a restart. Writes take `write_s`
    each, one after the other; `waiting` of them are not done, the last at `free_at`.
    """

    fragments: list[FragmentLog]
    saved: dict[str, Any] | None = None
    incarnation: int = 0
    full: bool = False
    write_s: float = 0.0
    waiting: int = 0
    free_at: float = 0.0

    @classmethod
    def empty(cls, num_fragments: int, incarnation: int = 0) -> "Disk":
        return cls([FragmentLog() for _ in range(num_fragments)], incarnation=incarnation)

    def power_lost(self) -> None:
        """What waited to be written is gone."""
        self.waiting, self.free_at = 0, 0.0
        for log in self.fragments:
            log.forget_gap()
