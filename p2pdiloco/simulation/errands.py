"""What a node asks of others, carried out over the network: outer gradients are pulled and merged,
records fetched, states and merges caught up with, chunk by chunk, from whoever has them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from p2pdiloco.protocol import actions, events
from p2pdiloco.protocol.lineage import Contributor, Record
from p2pdiloco.protocol.naming import PeerId, RoundId
from p2pdiloco.simulation.disk import State, digest, genesis_digest
from p2pdiloco.simulation.machine import Contribution, Machine

if TYPE_CHECKING:
    from p2pdiloco.simulation.world import World

GENESIS_DONOR = PeerId("genesis-donor")
MERGE_S = 0.05
APPLY_S = 0.02
STALL_S = 1.0
"""A stream to a peer that does not answer is given up after this."""
CHUNK_BYTES = 1 << 20
CHUNKS_MAX = 10
"""Pieces in which a body travels; each can come from another donor. Large bodies have larger
pieces here, so that a simulated one costs no more."""
DONORS_AT_ONCE = 4
"""A body of several chunks comes from so many donors, those who are quick giving more of it."""


@dataclass(slots=True)
class Transfer:
    """A CatchUp under way: items are fetched in chunks, each from one of the first `donors`: those
    that have not failed with the current item. `liars` gave chunks of it.
    """

    catch_up: actions.CatchUp
    item: int = -1
    chunk: int = 0
    donors: list[PeerId] = field(default_factory=list)
    liars: set[PeerId] = field(default_factory=set)

    def next_item(self) -> bool:
        """Whether there is one."""
        self.item, self.donors = self.item + 1, list(self.catch_up.donors)
        return self.item < self.num_items

    @property
    def num_items(self) -> int:
        return len(self.catch_up.records) + (self.catch_up.snapshot is not None)

    def record(self) -> Record | None:
        """What the current item is: a merge, or None for the snapshot."""
        index = self.item - (self.catch_up.snapshot is not None)
        return self.catch_up.records[index] if index >= 0 else None


def num_chunks(num_bytes: int) -> int:
    return min(-(-num_bytes // CHUNK_BYTES), CHUNKS_MAX)


def _has(machine: Machine, transfer: Transfer) -> bool:
    """Whether the machine has the current item, in memory or on disk."""
    if record := transfer.record():
        return machine.has_merge(record)
    assert transfer.catch_up.snapshot
    log = machine.disk.fragments[transfer.catch_up.fragment]
    return log.has_snapshot(transfer.catch_up.snapshot)


class Errands:
    def __init__(self, world: World):
        self.world = world
        self.refused_bytes: Counter[str] = Counter()
        self.copies: dict[str, float] = {}
        """Payload digest -> copies of it that the machine which made it has served."""

    def reaches(self, machine: Machine, peer: PeerId) -> Machine | None:
        other = self.world.machines.get(peer)
        usable = other and other.answers and self.world.network.connected(machine.name, peer)
        return other if usable else None

    # ---------------------------------------------------------------- rounds

    def shelve(
        self, machine: Machine, round_id: RoundId, base: str, steps: int, tokens: int
    ) -> None:
        """A snapshot of the learner was encoded against the anchor: it lies ready to be pulled."""
        if self._is_rotten(machine, round_id.fragment):
            failed = events.ContributionFailed(round_id, "the anchor is damaged")
            self.world.handle(machine, failed)
            return
        made = Contribution(round_id, machine.name, base, steps, tokens)
        machine.shelf[round_id.fragment] = made
        num_bytes = self.world.swarm.payload_bytes
        answer = events.ContributionPrepared(round_id, steps, tokens, num_bytes)
        self.world.handle(machine, answer)

    def pull(self, machine: Machine, round_id: RoundId, peer: PeerId) -> None:
        world = self.world
        machine.pulled.setdefault(round_id, {})
        delay_s = STALL_S
        if self.reaches(machine, peer):
            arrives = world.network.carry(peer, machine.name, world.swarm.payload_bytes, world.now)
            delay_s = arrives - world.now
        world.soon(machine, delay_s, lambda: self._pull_ends(machine, round_id, peer))

    def _pull_ends(self, machine: Machine, round_id: RoundId, peer: PeerId) -> None:
        other = self.reaches(machine, peer)
        found = other.shelf.get(round_id.fragment) if other else None
        answer: events.Event
        wanted = other and other.node and other.node.state.registers[round_id.fragment].offer
        if not other or not found or found.round != round_id:
            reason = "no such contribution" if other else "unreachable"
            answer = events.PullFailed(round_id, peer, reason)
        elif other is not machine and (not wanted or wanted.synchronizer != machine.name):
            reason = "it is not for this synchronizer"
            answer = events.PullFailed(round_id, peer, reason)
        elif other.lying and other is not machine:
            self.refused_bytes[peer] += 1
            answer = events.PullFailed(round_id, peer, "values that are not finite", hostile=True)
        else:
            if round_id in machine.pulled:
                machine.pulled[round_id][peer] = found
            answer = events.ContributionPulled(round_id, peer, found.steps, found.tokens)
        self.world.handle(machine, answer)

    def merge(self, machine: Machine, round_id: RoundId, parts: tuple[Contributor, ...]) -> None:
        merge_s = MERGE_S * machine.slowdown
        self.world.soon(machine, merge_s, lambda: self._merged(machine, round_id, parts))

    def _merged(self, machine: Machine, round_id: RoundId, parts: tuple[Contributor, ...]) -> None:
        world = self.world
        pulled, state = machine.pulled.get(round_id), machine.replica[round_id.fragment]
        if pulled is None:
            return
        if state is None or state.version != round_id.version - 1:
            world.handle(machine, events.MergeFailed(round_id, "the replica has moved on"))
            return
        if self._is_rotten(machine, round_id.fragment):
            world.handle(machine, events.MergeFailed(round_id, "the anchor is damaged"))
            return
        merged = [pulled[part.peer] for part in parts]
        world.checkers.merging(machine, state, merged, parts)
        payload = digest("payload", [contribution.digest for contribution in merged])
        machine.merged[round_id] = after = state.apply(payload)
        num_bytes = world.swarm.payload_bytes
        world.handle(machine, events.RoundMerged(round_id, payload, num_bytes, after.digest))

    def _is_rotten(self, machine: Machine, fragment: int) -> bool:
        """Before anything is built upon a state, it is looked at; the node is told."""
        state = machine.replica[fragment]
        if fragment in machine.rotten and state:
            self.world.handle(machine, events.StateDamaged(fragment, state.version))
        return fragment in machine.rotten

    def commit(self, machine: Machine, record: Record) -> None:
        round_id = RoundId(record.fragment, record.version, record.term, record.attempt)
        self.world.checkers.committing(machine, record)
        self.world.records[record.digest] = record
        self._put(machine, record, machine.merged.pop(round_id))
        machine.pulled.pop(round_id, None)

    def _put(self, machine: Machine, record: Record, state: State) -> None:
        p = record.fragment
        machine.replica[p], machine.newest[p] = state, record
        log = machine.disk.fragments[p]
        if not self.world.write(machine, lambda: log.put_merge(record, state)):
            log.miss((record,))

    # ---------------------------------------------------------------- records

    def fetch_records(self, machine: Machine, action: actions.FetchRecords) -> None:
        peer = action.peer
        known = peer == GENESIS_DONOR or self.reaches(machine, peer)
        network = self.world.network
        delay_s = network.round_trip_s(machine.name, peer) if known else STALL_S
        self.world.soon(machine, delay_s, lambda: self._records_arrive(machine, action))

    def _records_arrive(self, machine: Machine, action: actions.FetchRecords) -> None:
        peer, fragment = action.peer, action.fragment
        other = self.reaches(machine, peer)
        answer: events.Event
        if peer == GENESIS_DONOR:
            snapshot = events.SnapshotInfo(0, genesis_digest(fragment))
            answer = events.RecordsFetched(peer, fragment, (), (snapshot,))
        elif not other or not other.node:
            answer = events.RecordsFailed(peer, fragment, "unreachable")
        else:
            offered = other.disk.fragments[fragment].offered()
            after = min([action.after_version, *(s.version - 1 for s in offered[:1])])
            records = other.node.records_after(fragment, max(0, after))
            answer = events.RecordsFetched(peer, fragment, records, offered)
        self.world.handle(machine, answer)

    # ---------------------------------------------------------------- catching up

    def catch_up(self, machine: Machine, action: actions.CatchUp) -> None:
        fragment = action.fragment
        machine.catching_up[fragment] = machine.catching_up.get(fragment, 0) + 1
        transfer = Transfer(action)
        transfer.next_item()
        self._next_chunk(machine, transfer)

    def _next_chunk(self, machine: Machine, transfer: Transfer) -> None:
        world = self.world
        if _has(machine, transfer):
            apply_s = APPLY_S * machine.slowdown
            world.soon(machine, apply_s, lambda: self._item_arrives(machine, transfer))
            return
        if not transfer.donors:
            self._fails(machine, transfer, "no donor has what is needed")
            return
        donor = self._quickest(transfer)
        has = self._holds(machine, donor, transfer)
        if has is None:
            world.soon(machine, STALL_S, lambda: self._donor_fails(machine, transfer, donor))
        elif not has:
            refused_s = world.network.round_trip_s(machine.name, donor)
            world.soon(machine, refused_s, lambda: self._donor_fails(machine, transfer, donor))
        else:
            chunk_s = self._carry_chunk(machine, donor, transfer)
            world.soon(machine, chunk_s, lambda: self._chunk_ends(machine, transfer, donor))

    def _quickest(self, transfer: Transfer) -> PeerId:
        """Of the donors that are asked at once, the one that is through with the next chunk first;
        the first of them all if there is but one chunk.
        """
        world, at_once = self.world, transfer.donors[:DONORS_AT_ONCE]
        if num_chunks(self._num_bytes(transfer)) == 1:
            return at_once[0]
        chunk_bytes = self._chunk_bytes(transfer)
        return min(at_once, key=lambda d: world.network.sent_at(d, chunk_bytes, world.now))

    def _carry_chunk(self, machine: Machine, donor: PeerId, transfer: Transfer) -> float:
        world, record = self.world, transfer.record()
        chunk_bytes = self._chunk_bytes(transfer)
        if record and record.synchronizer == donor:
            served = self.copies.get(record.payload_digest, 0.0)
            share = chunk_bytes / self._num_bytes(transfer)
            self.copies[record.payload_digest] = served + share
        return world.network.carry(donor, machine.name, chunk_bytes, world.now) - world.now

    def _chunk_bytes(self, transfer: Transfer) -> int:
        num_bytes = self._num_bytes(transfer)
        return num_bytes // num_chunks(num_bytes)

    def _num_bytes(self, transfer: Transfer) -> int:
        swarm = self.world.swarm
        return swarm.payload_bytes if transfer.record() else swarm.state_bytes

    def _donor_fails(self, machine: Machine, transfer: Transfer, donor: PeerId) -> None:
        transfer.donors.remove(donor)
        self._next_chunk(machine, transfer)

    def _holds(self, machine: Machine, donor: PeerId, transfer: Transfer) -> bool | None:
        """Whether the donor has the current item; None when it cannot be reached."""
        if donor == GENESIS_DONOR:
            snapshot = transfer.catch_up.snapshot
            return transfer.record() is None and snapshot is not None and snapshot.version == 0
        other = self.reaches(machine, donor)
        return _has(other, transfer) if other else None

    def _chunk_ends(self, machine: Machine, transfer: Transfer, donor: PeerId) -> None:
        """A chunk that arrived stays, whoever gave it; wrong bytes show when the item is whole."""
        if donor != GENESIS_DONOR and not self.reaches(machine, donor):
            self._donor_fails(machine, transfer, donor)
            return
        if donor != GENESIS_DONOR and self.world.machines[donor].lying:
            transfer.liars.add(donor)
        transfer.chunk += 1
        if transfer.chunk < num_chunks(self._num_bytes(transfer)):
            self._next_chunk(machine, transfer)
            return
        transfer.chunk = 0
        if transfer.liars:
            self._refuse_liars(machine, transfer)
            self._next_chunk(machine, transfer)
            return
        apply_s = APPLY_S * machine.slowdown
        self.world.soon(machine, apply_s, lambda: self._item_arrives(machine, transfer))

    def _refuse_liars(self, machine: Machine, transfer: Transfer) -> None:
        """The whole was not what it should be: everything is fetched again, from others."""
        for donor in sorted(transfer.liars):
            self.refused_bytes[donor] += 1
            self.world.handle(machine, events.WrongBytes(donor, "bytes of another digest"))
            if donor in transfer.donors:
                transfer.donors.remove(donor)
        transfer.liars.clear()

    def _item_arrives(self, machine: Machine, transfer: Transfer) -> None:
        record = transfer.record()
        if record and self._is_rotten(machine, record.fragment):
            self._fails(machine, transfer, "the anchor is damaged")
            return
        state = self._apply(machine, record) if record else self._load(machine, transfer.catch_up)
        if record and state.digest != record.state_digest:
            self._fails(machine, transfer, "our state had diverged", diverged=True)
            return
        if record:
            self._put(machine, record, state)
        fragment, goes_on = transfer.catch_up.fragment, transfer.next_item()
        if not goes_on:
            machine.catching_up[fragment] -= 1
        event = events.StateReached(fragment, state.version, state.digest, record)
        self.world.handle(machine, event)
        if record is None:
            self.world.save(machine)  # the lineage on disk is another, on which others are lost
        if goes_on:
            self._next_chunk(machine, transfer)

    @staticmethod
    def _apply(machine: Machine, record: Record) -> State:
        before = machine.replica[record.fragment]
        assert before and before.version == record.version - 1, (machine.name, before, record)
        return before.apply(record.payload_digest)

    def _load(self, machine: Machine, catch_up: actions.CatchUp) -> State:
        p, snapshot = catch_up.fragment, catch_up.snapshot
        assert snapshot
        state = State(snapshot.version, snapshot.state_digest)
        machine.replica[p], machine.newest[p] = state, None
        machine.rotten.discard(p)
        log = machine.disk.fragments[p]
        vouching, following = catch_up.vouching, catch_up.records
        if not self.world.write(machine, lambda: log.put_snapshot(state, vouching, following)):
            log.miss(vouching)
        return state

    def _fails(
        self, machine: Machine, transfer: Transfer, reason: str, diverged: bool = False
    ) -> None:
        fragment = transfer.catch_up.fragment
        machine.catching_up[fragment] -= 1
        self.world.handle(machine, events.CatchUpFailed(fragment, reason, diverged))
