"""What a node holds of the run, and the only way to it: replica, store, contributions, merges.

Everything heavy runs in threads of its own: arithmetic and codecs in `worker`, files in `disk`, one
thread each, so nothing here waits on the event loop and nothing needs a lock. What the replica
holds is replaced on the event loop only, in the order in which the protocol decided it.

Nobody is told of a merge before it is on this node's disk: whoever speaks to others waits for
`written` first. When the disk refuses, or takes too long, training goes on and the others are told:
the error is kept for the page, and the next snapshot that can be written makes the log whole again.

Who fetches a state over a slow link is *leased* the snapshot and the merges after it while it
reads, within bounds; and what has arrived here of somebody else's state is kept until it is whole.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ParamSpec, TypeAlias, TypeVar

from p2pdiloco.errors import P2PDilocoError, PeerError, StoreError
from p2pdiloco.optim.merge import token_weight
from p2pdiloco.protocol.events import SnapshotInfo
from p2pdiloco.protocol.lineage import (
    RECORDS_KEPT,
    Chain,
    Contributor,
    Record,
    Signer,
    check_record,
    describe,
    unpack_record,
)
from p2pdiloco.protocol.naming import PeerId, RoundId
from p2pdiloco_bootstrap.serving import Body
from p2pdiloco_daemon.arriving import PartInfo
from p2pdiloco_daemon.fetch import Gathering
from p2pdiloco_daemon.replica import (
    Buffer,
    FragmentState,
    Replica,
    StateDamagedError,
    Vector,
    pack_state,
    packed_state_bytes,
    payload_digest,
    require_sound,
)
from p2pdiloco_daemon.store import Store, StoredFragment, StoredMerge

Weight: TypeAlias = tuple[int, int]
"""Of a lineage at a version, as `Record.weight`."""

P = ParamSpec("P")
T = TypeVar("T")

PAYLOADS_IN_MEMORY = 2
"""Newest merge payloads of each fragment that are served without the disk."""
WRITES_WAITING_MAX = 64
"""Saves that may wait for the disk; more are skipped, and a later snapshot makes up for them."""
DISK_PATIENCE_S = 1.0
"""A merge that takes longer to write is told of before it is written: a node that says nothing for
three seconds counts as dead."""

SLOW = "slow disk"

LEASE_S = 120.0
"""After its last reader asked for a part of it, an old snapshot is kept for so long: eight chunks
of 1 MiB share a link of 1 Mbit/s for 67 s."""
FAR_BEHIND = 8
"""Merges behind the head that the log has anyhow; whoever reads older ones is leased them too."""
LEASE_MERGES_MAX = 128
"""And no older ones than this, since as many merges are kept with them (half a byte per parameter
each at 4 bits), and the 256 newest records must still lead from there to the head."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Prepared:
    """Our encoded outer gradient for one round."""

    round: RoundId
    payload: bytes
    steps: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Merge:
    """A merge made here and not committed yet."""

    payload: bytes
    digest: str
    state: FragmentState


@dataclass(slots=True)
class OurRound:
    """A round that this node runs: what was pulled for it, then the merge."""

    pulled: dict[PeerId, Vector] = field(default_factory=dict)
    merge: Merge | None = None


@dataclass(frozen=True, slots=True)
class Payload:
    version: int
    digest: str
    data: Buffer


@dataclass(frozen=True, slots=True)
class Adopting:
    """A lineage of which the newest state here does not outweigh yet what is on disk. Until it does
    the log stays as it is: a crash would leave neither.
    """

    before: Weight
    records: dict[int, Record]


@dataclass(frozen=True, slots=True)
class Arriving:
    """A state that is being fetched, or was when the donors failed or this node died."""

    part: PartInfo
    body: Gathering


class Holdings:
    """`worker` and `disk` have one thread each and are closed by whoever made them."""

    def __init__(
        self, replica: Replica, store: Store, worker: ThreadPoolExecutor, disk: ThreadPoolExecutor
    ) -> None:
        num = len(replica.fragments)
        self.replica = replica
        self.saved_at: float | None = None
        self.bytes_on_disk = 0
        self.store = store
        self._worker = worker
        self._disk = disk
        self._contributions: dict[int, Prepared] = {}
        self._rounds: dict[RoundId, OurRound] = {}
        self._payloads: list[deque[Payload]] = [
            deque(maxlen=PAYLOADS_IN_MEMORY) for _ in range(num)
        ]
        self._arriving: dict[int, Arriving] = {}
        self._adopting: dict[int, Adopting] = {}
        self._missed: list[dict[int, bytes]] = [{} for _ in range(num)]
        """Records of merges that the disk refused; this and the former are the disk thread's."""
        self._read_at: list[dict[int, float]] = [{} for _ in range(num)]
        """Version -> when a reader that is behind last asked for it."""
        self._writes_waiting = 0
        self._newest_write: Future[None] | None = None
        self._is_slow = False
        self._store_errors: dict[str, str] = {}

    @property
    def store_error(self) -> str | None:
        """Why something could not be saved, until it could."""
        return next(iter(self._store_errors.values()), None)

    async def compute(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs arithmetic in the worker thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._worker, lambda: call(*args, **kwargs))

    async def on_disk(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs file access in the disk thread, after all that was asked for before."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._disk, lambda: call(*args, **kwargs))

    # ---------------------------------------------------------------- our contributions

    async def prepare(self, round_id: RoundId, local: Vector, steps: int, tokens: int) -> int:
        """Encodes anchor - local; returns the number of bytes. Replaces an older contribution."""
        payload = await self.compute(
            self.replica.encode_outer_gradient, round_id.fragment, round_id.version - 1, local
        )
        self._contributions[round_id.fragment] = Prepared(round_id, payload, steps, tokens)
        return len(payload)

    def contribution(self, round_id: RoundId) -> Prepared | None:
        kept = self._contributions.get(round_id.fragment)
        return kept if kept and kept.round == round_id else None

    def drop_contribution(self, fragment: int) -> None:
        self._contributions.pop(fragment, None)

    # ---------------------------------------------------------------- rounds that we run

    @property
    def num_rounds(self) -> int:
        """Rounds that something is kept for."""
        return len(self._rounds)

    def open_round(self, round_id: RoundId) -> None:
        """Keeps what is taken in for this round from now on, until it is committed or dropped."""
        self._rounds.setdefault(round_id, OurRound())

    async def take_in(self, round_id: RoundId, peer: PeerId, payload: Buffer) -> None:
        """Decodes and checks a pulled contribution; PayloadError if it is not what it should be."""
        delta = await self.compute(self.replica.decode_contribution, round_id.fragment, payload)
        if round_ := self._rounds.get(round_id):  # else it ended meanwhile
            round_.pulled[peer] = delta

    async def merge(self, round_id: RoundId, parts: Sequence[Contributor]) -> Merge:
        """Merges what was taken in from `parts`, weighted by their counters, and applies it."""
        round_ = self._rounds[round_id]
        weighted = [(round_.pulled[p.peer], token_weight(p.tokens, p.steps)) for p in parts]
        round_.merge = await self.compute(self._merge, round_id, weighted)
        return round_.merge

    def _merge(self, round_id: RoundId, parts: Sequence[tuple[Vector, float]]) -> Merge:
        payload = self.replica.merge(round_id.fragment, parts)
        state = self.replica.apply(round_id.fragment, round_id.version, payload)
        return Merge(payload, payload_digest(payload), state)

    def drop_round(self, round_id: RoundId) -> None:
        self._rounds.pop(round_id, None)

    def commit(self, record: Record) -> None:
        """Holds the state of our own merge from now on."""
        round_id = RoundId(record.fragment, record.version, record.term, record.attempt)
        merge = self._rounds.pop(round_id).merge
        assert merge, f"{round_id} is committed before it was merged"
        self._hold(merge.state, record, merge.payload)

    # ---------------------------------------------------------------- merges and states of others

    async def apply(self, record: Record, payload: Buffer) -> FragmentState:
        """Applies and holds a merge; the caller has checked the payload's digest.

        The state is held even if its digest is not the record's: the caller compares, and says so.
        """
        state = await self.compute(self.replica.apply, record.fragment, record.version, payload)
        if state.digest == record.state_digest:
            self._hold(state, record, payload)
        return state

    def load(
        self,
        state: FragmentState,
        vouching: Sequence[Record],
        following: Sequence[Record],
        before: Weight | None,
    ) -> None:
        """Holds a state that was fetched, or read from disk to replace a damaged one.

        `vouching` are the records that lead to it, `following` those that will be applied to it,
        `before` the weight of the lineage that was held, if any.
        """
        self.replica.put(state)
        begin, name = self._begin_log, _log_name(state.fragment)
        self._newest_write = self._save(name, begin, state, vouching, following, before)
        self.drop_arriving(state.fragment)

    def _hold(self, state: FragmentState, record: Record, payload: Buffer) -> None:
        p = record.fragment
        self.replica.put(state)
        self._payloads[p].append(Payload(record.version, record.payload_digest, payload))
        packed = record.pack()
        self._newest_write = self._save(_log_name(p), self._extend_log, state, record, payload)
        leased = self._leased(p, record.version)
        self._save(_snapshots_name(p), self._snapshot_log, state, packed, leased)
        arriving = self._arriving.get(p)
        if arriving and arriving.part.version <= record.version:
            self.drop_arriving(p)

    async def written(self) -> None:
        """Returns when the merges that are held are on disk, or the disk has refused them."""
        if self._newest_write is None or self._newest_write.done() or self._is_slow:
            return
        try:
            async with asyncio.timeout(DISK_PATIENCE_S):
                await asyncio.shield(asyncio.wrap_future(self._newest_write))
        except TimeoutError:
            self._is_slow = True
            self._store_errors[SLOW] = (
                f"the disk is too slow: a merge is not written after {DISK_PATIENCE_S:.0f} s"
            )

    # ---------------------------------------------------------------- states that are arriving

    async def arriving(self, fragment: int, info: SnapshotInfo) -> Gathering:
        """What is here of a state that is about to be fetched, perhaps nothing; it is kept as it
        grows.
        """
        size = packed_state_bytes(self.replica.fragments[fragment].size)
        part = PartInfo(info.version, info.state_digest, size)
        known = self._arriving.get(fragment)
        if known and known.part == part:
            return known.body
        body = Gathering(size)
        if body.num_chunks > 1:  # else there is nothing to go on with
            body.on_chunk = lambda chunk: self._keep_chunk(fragment, part, body, chunk)
            found = await self.on_disk(self._open_part, fragment, part, memoryview(body.data))
            body.add_kept(found)
        self._arriving[fragment] = Arriving(part, body)
        return body

    def drop_arriving(self, fragment: int) -> None:
        """It is whole, or what has arrived is wrong."""
        self._arriving.pop(fragment, None)
        self._save(_part_name(fragment), self.store.parts.drop, fragment)

    def begun(self, fragment: int) -> SnapshotInfo | None:
        """The state of which something is here already. Blocks."""
        arriving = self._arriving.get(fragment)
        part = arriving.part if arriving else self.store.parts.info(fragment)
        return SnapshotInfo(part.version, part.state_digest) if part else None

    def _open_part(self, fragment: int, part: PartInfo, place: memoryview) -> list[tuple[int, int]]:
        try:
            if self.store.parts.info(fragment) == part:
                return self.store.parts.read(fragment, part, place)
            self.store.parts.begin(fragment, part)
        except StoreError as error:
            logger.warning("%s", error)
        return []

    def _keep_chunk(self, fragment: int, part: PartInfo, body: Gathering, chunk: int) -> None:
        if self._writes_waiting < WRITES_WAITING_MAX // 2:  # a chunk may be fetched again
            span = body.span(chunk)
            data = memoryview(body.data)[span]
            keep = self.store.parts.save_chunk
            self._save(_part_name(fragment), keep, fragment, part.version, span.start, data)

    # ---------------------------------------------------------------- what others may read

    def snapshots(self, fragment: int) -> tuple[SnapshotInfo, ...]:
        """States that can be served: those on disk, newest first, which stay a while, or else the
        one that is held. Blocks.
        """
        stored = self.store.snapshots(fragment)
        if stored:
            return tuple(SnapshotInfo(s.version, s.state_digest) for s in stored)
        held = self.replica.state(fragment)
        return (SnapshotInfo(held.version, held.digest),) if held else ()

    async def read_merge(self, fragment: int, version: int, digest: str) -> Buffer | None:
        """A merge payload, from memory or disk."""
        for kept in self._payloads[fragment]:
            if (kept.version, kept.digest) == (version, digest):
                return kept.data
        held = self.replica.state(fragment)
        if held and version < held.version - FAR_BEHIND:
            self._note_reader(fragment, version - 1)
        return await self.on_disk(self.store.read_merge, fragment, version, digest)

    async def state_body(self, fragment: int, version: int, digest: str) -> Body | None:
        """A packed state to be sent: from disk without a copy, else from memory."""
        self._note_reader(fragment, version)
        part = await self.on_disk(self.store.state_part, fragment, version, digest)
        if part:
            return part
        held = await self._held_state(fragment, version, digest)
        return await self.compute(pack_state, held) if held else None

    async def read_state(self, fragment: int, version: int, digest: str) -> FragmentState | None:
        """A state that this node has, from memory or disk, checked."""
        held = await self._held_state(fragment, version, digest)
        return held or await self.on_disk(self.store.read_state, fragment, version, digest)

    async def _held_state(self, fragment: int, version: int, digest: str) -> FragmentState | None:
        held = self.replica.state(fragment)
        if held is None or (held.version, held.digest) != (version, digest):
            return None
        try:
            await self.compute(require_sound, held)
        except StateDamagedError as error:  # told when it is next built upon
            logger.warning("%s", error)
            return None
        return held

    def _note_reader(self, fragment: int, version: int) -> None:
        """Somebody wants the state of this version, and then the merges after it."""
        self._read_at[fragment][version] = asyncio.get_running_loop().time()

    def _leased(self, fragment: int, newest: int) -> tuple[int, ...]:
        """Versions whose states, and the merges after them, are being read; the latest read
        first.
        """
        now, read_at = asyncio.get_running_loop().time(), self._read_at[fragment]
        for version in list(read_at):
            if now > read_at[version] + LEASE_S or version < newest - LEASE_MERGES_MAX:
                del read_at[version]
        return tuple(sorted(read_at, key=lambda v: (read_at[v], v), reverse=True))

    # ---------------------------------------------------------------- disk

    def resume(
        self, run_id: str, genesis_digests: Sequence[str], signer: Signer
    ) -> list[Chain | None]:
        """Loads what an earlier life left: states into the replica, and their chains. Blocks."""
        return [self._resume(p, run_id, digest, signer) for p, digest in enumerate(genesis_digests)]

    def _resume(
        self, fragment: int, run_id: str, genesis_digest: str, signer: Signer
    ) -> Chain | None:
        stored = self.store.load(fragment)
        try:
            return self._replay(stored, run_id, genesis_digest, signer) if stored else None
        except P2PDilocoError as error:
            logger.warning("fragment %d: what is on disk is of no use: %s", fragment, error)
            return None

    def _replay(
        self, stored: StoredFragment, run_id: str, genesis_digest: str, signer: Signer
    ) -> Chain:
        chain = _chain_at(stored, run_id, genesis_digest, signer)
        self.replica.put(stored.state)
        try:
            for merge in stored.merges:
                self._replay_merge(chain, merge, run_id, signer)
        except PeerError as error:
            p = stored.state.fragment
            logger.warning("fragment %d: on disk nothing follows v%d: %s", p, chain.version, error)
        return chain

    def _replay_merge(self, chain: Chain, merge: StoredMerge, run_id: str, signer: Signer) -> None:
        """PeerError if the merge is not one that leads on from the head of the chain."""
        record = unpack_record(merge.record)
        check_record(record, run_id, signer)
        if record.version != chain.version + 1 or record.parent != chain.digest:
            raise PeerError(f"{describe(record)} is of another lineage")
        state = self.replica.apply(record.fragment, record.version, merge.payload)
        if state.digest != record.state_digest:
            raise PeerError(f"{describe(record)} leads to another state than its record says")
        self.replica.put(state)
        self._payloads[record.fragment].append(
            Payload(record.version, record.payload_digest, merge.payload)
        )
        chain.append(record)

    def save_json(self, name: str, value: Mapping[str, Any]) -> None:
        self._save(name, self.store.save_json, name, dict(value))

    def load_json(self, name: str) -> Any:
        """Blocks."""
        return self.store.load_json(name)

    def save_peers(self, addresses: Mapping[PeerId, Sequence[str]]) -> None:
        self.save_json("peers", {peer: list(each) for peer, each in addresses.items()})

    def load_peers(self) -> dict[PeerId, tuple[str, ...]]:
        """The addresses of other nodes that an earlier life knew. Blocks."""
        match self.store.load_json("peers"):
            case dict(kept):
                lists = {p: each for p, each in kept.items() if isinstance(each, list)}
                return {PeerId(p): tuple(map(str, each)) for p, each in lists.items()}
        return {}

    def _begin_log(
        self,
        state: FragmentState,
        vouching: Sequence[Record],
        following: Sequence[Record],
        before: Weight | None,
    ) -> None:
        p, records = state.fragment, {record.version: record for record in vouching}
        weight = vouching[-1].weight if vouching else (0, 0)
        if before and (adopting := self._adopting.get(p)):
            before = max(before, adopting.before)
        if before is None or weight > before:
            self._restart_log(state, records, following)
        else:
            self._adopting[p] = Adopting(before, records)

    def _extend_log(self, state: FragmentState, record: Record, payload: Buffer) -> None:
        adopting = self._adopting.get(state.fragment)
        if adopting is None:
            self._save_merge(record, payload)
            return
        adopting.records[record.version] = record
        if record.weight > adopting.before:
            self._restart_log(state, adopting.records, ())

    def _save_merge(self, record: Record, payload: Buffer) -> None:
        try:
            self.store.save_merge(record.fragment, record.version, payload, record.pack())
        except StoreError:
            missed = self._missed[record.fragment]
            missed[record.version] = record.pack()
            missed.pop(record.version - RECORDS_KEPT, None)
            raise

    def _restart_log(
        self, state: FragmentState, records: Mapping[int, Record], following: Sequence[Record]
    ) -> None:
        earlier = {version: record.pack() for version, record in records.items()}
        made = earlier.pop(state.version, None)
        wanted = {record.version: record.pack() for record in following}
        missed = self._missed[state.fragment]
        self.store.restart_log(state, made, earlier, wanted, missed)
        missed.clear()
        self._adopting.pop(state.fragment, None)

    def _snapshot_log(self, state: FragmentState, record: bytes, leased: Sequence[int]) -> None:
        if state.fragment in self._adopting:
            return
        if self.store.wants_snapshot(state.fragment, state.version):
            missed = self._missed[state.fragment]
            self.store.save_snapshot(state, record, leased, missed)
            missed.clear()

    async def measure_disk(self, directory: Path) -> None:
        """Brings `bytes_on_disk` up to date."""
        self.bytes_on_disk = await self.on_disk(_bytes_below, directory)

    def _save(
        self, what: str, call: Callable[P, None], *args: P.args, **kwargs: P.kwargs
    ) -> Future[None] | None:
        """Saves in the background, in order; a failure is kept for the page, not raised. None if
        too much is waiting already.
        """
        if self._writes_waiting >= WRITES_WAITING_MAX:
            waiting = f"the disk is too slow: {self._writes_waiting} writes are waiting"
            self._store_errors[what] = waiting
            return None
        self._writes_waiting += 1
        loop = asyncio.get_running_loop()
        return self._disk.submit(self._write, loop, what, lambda: call(*args, **kwargs))

    def _write(self, loop: asyncio.AbstractEventLoop, what: str, call: Callable[[], None]) -> None:
        error = None
        try:
            call()
        except StoreError as refused:
            error = str(refused)
        except Exception as bug:  # nobody awaits a save, so it must be told here
            logger.exception("the %s could not be saved", what)
            error = f"{type(bug).__name__}: {bug}"
        loop.call_soon_threadsafe(self._written, loop.time(), what, error)

    def _written(self, now: float, what: str, error: str | None) -> None:
        self._writes_waiting -= 1
        if not self._writes_waiting:
            self._is_slow = False
            self._store_errors.pop(SLOW, None)
        if error is None:
            self._store_errors.pop(what, None)
            self.saved_at = now
            return
        if error != self._store_errors.get(what):
            logger.warning("%s", error)
        self._store_errors[what] = error


def _log_name(fragment: int) -> str:
    return f"log of fragment {fragment}"


def _snapshots_name(fragment: int) -> str:
    return f"snapshots of fragment {fragment}"


def _part_name(fragment: int) -> str:
    return f"arriving state of fragment {fragment}"


def _bytes_below(directory: Path) -> int:
    sizes = []
    for path in directory.rglob("*"):
        with suppress(FileNotFoundError):  # being replaced just now
            sizes.append(path.stat().st_size if path.is_file() else 0)
    return sum(sizes)


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
