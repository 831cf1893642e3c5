"""The log of the lineage that this node holds, as the disk thread writes it and a restart reads it.

All calls block.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

from p2pdiloco.errors import PeerError, StoreError
from p2pdiloco.protocol.lineage import (
    RECORDS_KEPT,
    Chain,
    Record,
    Signer,
    check_record,
    describe,
    unpack_record,
)
from p2pdiloco_daemon.storage.replica import Buffer, FragmentState, Replica
from p2pdiloco_daemon.storage.store import Store, StoredFragment, StoredMerge

Weight: TypeAlias = tuple[int, int]
"""Of a lineage at a version, as `Record.weight`."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Adopting:
    """A lineage of which the newest state here does not outweigh yet what is on disk. Until it does
    the log stays as it is: a crash would leave neither.
    """

    before: Weight
    records: dict[int, Record]


class LineageLog:
    """What is written of each fragment as it is merged, and when its lineage is another."""

    def __init__(self, store: Store, num_fragments: int) -> None:
        self._store = store
        self._adopting: dict[int, Adopting] = {}
        self._missed: list[dict[int, bytes]] = [{} for _ in range(num_fragments)]
        """Records of merges that the disk refused."""

    def begin(
        self,
        state: FragmentState,
        vouching: Sequence[Record],
        following: Sequence[Record],
        before: Weight | None,
    ) -> None:
        """As `Holdings.load`: at once if the new lineage outweighs the one that is on disk."""
        p, records = state.fragment, {record.version: record for record in vouching}
        weight = vouching[-1].weight if vouching else (0, 0)
        if before and (adopting := self._adopting.get(p)):
            before = max(before, adopting.before)
        if before is None or weight > before:
            self._restart(state, records, following)
        else:
            self._adopting[p] = Adopting(before, records)

    def extend(self, state: FragmentState, record: Record, payload: Buffer) -> None:
        """A merge that led to `state`."""
        adopting = self._adopting.get(state.fragment)
        if adopting is None:
            self._save_merge(record, payload)
            return
        adopting.records[record.version] = record
        if record.weight > adopting.before:
            self._restart(state, adopting.records, ())

    def _save_merge(self, record: Record, payload: Buffer) -> None:
        try:
            self._store.save_merge(record.fragment, record.version, payload, record.pack())
        except StoreError:
            missed = self._missed[record.fragment]
            missed[record.version] = record.pack()
            missed.pop(record.version - RECORDS_KEPT, None)
            raise

    def _restart(
        self, state: FragmentState, records: Mapping[int, Record], following: Sequence[Record]
    ) -> None:
        earlier = {version: record.pack() for version, record in records.items()}
        made = earlier.pop(state.version, None)
        wanted = {record.version: record.pack() for record in following}
        missed = self._missed[state.fragment]
        self._store.restart_log(state, made, earlier, wanted, missed)
        missed.clear()
        self._adopting.pop(state.fragment, None)

    def snapshot(self, state: FragmentState, record: bytes, leased: Sequence[int]) -> None:
        """Keeps the state if it is time to; of `leased` versions, see `Store.save_snapshot`."""
        if state.fragment in self._adopting:
            return
        if self._store.wants_snapshot(state.fragment, state.version):
            missed = self._missed[state.fragment]
            self._store.save_snapshot(state, record, leased, missed)
            missed.clear()


def replay(
    stored: StoredFragment,
    run_id: str,
    genesis_digest: str,
    signer: Signer,
    replica: Replica,
    on_merge: Callable[[Record, Buffer], None],
) -> Chain:
    """Brings the replica to where the log ends; returns the chain that leads there.

    PeerError if its snapshot is none of this run; what follows the snapshot and does not fit it is
    told in the log.
    """
    chain = _chain_at(stored, run_id, genesis_digest, signer)
    replica.put(stored.state)
    try:
        for merge in stored.merges:
            record = _record_after(chain, merge, run_id, signer)
            _replay_merge(replica, record, merge.payload)
            on_merge(record, merge.payload)
            chain.append(record)
    except PeerError as error:
        p = stored.state.fragment
        logger.warning("fragment %d: on disk nothing follows v%d: %s", p, chain.version, error)
    return chain


def _record_after(chain: Chain, merge: StoredMerge, run_id: str, signer: Signer) -> Record:
    """PeerError if the merge is not one that leads on from the head of the chain."""
    record = unpack_record(merge.record)
    check_record(record, run_id, signer)
    if record.version != chain.version + 1 or record.parent != chain.digest:
        raise PeerError(f"{describe(record)} is of another lineage")
    return record


def _replay_merge(replica: Replica, record: Record, payload: Buffer) -> None:
    """PeerError if the merge does not lead to the state that its record names."""
    state = replica.apply(record.fragment, record.version, payload, record.period_steps)
    if state.digest != record.state_digest:
        raise PeerError(f"{describe(record)} leads to another state than its record says")
    replica.put(state)


def _chain_at(stored: StoredFragment, run_id: str, genesis_digest: str, signer: Signer) -> Chain:
    """The chain that ends at a stored snapshot; PeerError if its record does not vouch for it."""
    if stored.record is None:
        if stored.state.digest != genesis_digest:
            raise PeerError("its version 0 is not this run's genesis")
        return Chain(0, genesis_digest)
    record = unpack_record(stored.record)
    check_record(record, run_id, signer)
    if record.state_digest != stored.state.digest:
        raise PeerError(f"its snapshot of v{record.version} is not what the record says")
    lineage = _connected_to(record, stored.earlier)
    return Chain(lineage[0].version - 1, lineage[0].parent, lineage)


def _connected_to(record: Record, earlier: Sequence[bytes]) -> list[Record]:
    """The newest of `earlier` that lead to `record` without a break, and `record`, oldest first.

    They tell what became of tokens that were merged after the ledger was last saved, and where
    another lineage leaves ours.
    """
    connected = [record]
    with suppress(PeerError):  # what does not read ends the chain as well
        for packed in reversed(earlier[-(RECORDS_KEPT - 1) :]):
            before = unpack_record(packed)
            if before.digest != connected[-1].parent:
                break
            connected.append(before)
    return connected[::-1]
