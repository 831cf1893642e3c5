"""What a node holds of the run, and the only way to it: replica, store, contributions, merges.

Everything heavy runs in threads of its own: arithmetic and codecs in `worker`, files in `disk`, one
thread each, so nothing here waits on the event loop and nothing needs a lock. What the replica
holds is replaced on the event loop only, in the order in which the protocol decided it.

When the disk refuses, training goes on: the error is kept for the page, and the next snapshot that
can be written makes the log whole again.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from p2pdiloco.errors import P2PDilocoError, PeerError, StoreError
from p2pdiloco.optim.merge import token_weight
from p2pdiloco.protocol.events import SnapshotInfo
from p2pdiloco.protocol.lineage import (
    Chain,
    Contributor,
    Record,
    Signer,
    check_record,
    unpack_record,
)
from p2pdiloco.protocol.naming import PeerId, RoundId
from p2pdiloco_bootstrap.serving import Body
from p2pdiloco_daemon.replica import (
    Buffer,
    FragmentState,
    Replica,
    Vector,
    pack_state,
    payload_digest,
    unpack_state,
)
from p2pdiloco_daemon.store import Store, StoredFragment

P = ParamSpec("P")
T = TypeVar("T")

PAYLOADS_IN_MEMORY = 2
"""Newest merge payloads of each fragment that are served without the disk."""
WRITES_WAITING_MAX = 64
"""Saves that may wait for the disk; more are skipped, and a later snapshot makes up for them."""

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
        self._writes_waiting = 0
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

    async def load(
        self, fragment: int, info: SnapshotInfo, packed: Buffer, record: Record | None
    ) -> None:
        """Holds a state that a donor sent; PayloadError unless it is the one announced."""
        size = self.replica.fragments[fragment].size
        state = await self.compute(unpack_state, packed, fragment, size, info.state_digest)
        self.replica.put(state)
        self._payloads[fragment].clear()
        packed_record = record.pack() if record else None
        self._save(_log_name(fragment), self._restart_log, state, packed_record)

    def _hold(self, state: FragmentState, record: Record, payload: Buffer) -> None:
        self.replica.put(state)
        kept = Payload(record.version, record.payload_digest, payload)
        self._payloads[record.fragment].append(kept)
        self._save(_log_name(record.fragment), self._extend_log, state, record.pack(), payload)

    # ---------------------------------------------------------------- what others may read

    def snapshots(self, fragment: int) -> tuple[SnapshotInfo, ...]:
        """States that can be served: that on disk, which stays a while, or else the newest.
        Blocks.
        """
        stored = self.store.snapshot_info(fragment)
        if stored:
            return (SnapshotInfo(stored.version, stored.state_digest),)
        held = self.replica.state(fragment)
        return (SnapshotInfo(held.version, held.digest),) if held else ()

    async def read_merge(self, fragment: int, version: int, digest: str) -> Buffer | None:
        """A merge payload, from memory or disk."""
        for kept in self._payloads[fragment]:
            if (kept.version, kept.digest) == (version, digest):
                return kept.data
        return await self.on_disk(self.store.read_merge, fragment, version, digest)

    async def state_body(self, fragment: int, version: int, digest: str) -> Body | None:
        """A packed state to be sent: from disk without a copy, else from memory."""
        part = await self.on_disk(self.store.state_part, fragment, version, digest)
        return part or await self.read_state(fragment, version, digest)

    async def read_state(self, fragment: int, version: int, digest: str) -> bytes | None:
        """A packed state, from memory or disk."""
        held = self.replica.state(fragment)
        if held and (held.version, held.digest) == (version, digest):
            return await self.compute(pack_state, held)
        return await self.on_disk(self.store.read_state, fragment, version, digest)

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
        for merge in stored.merges:
            record = unpack_record(merge.record)
            check_record(record, run_id, signer)
            if record.version != chain.version + 1 or record.parent != chain.digest:
                break
            state = self.replica.apply(record.fragment, record.version, merge.payload)
            if state.digest != record.state_digest:
                logger.warning("fragment %d v%d on disk diverges", record.fragment, record.version)
                break
            self.replica.put(state)
            self._payloads[record.fragment].append(
                Payload(record.version, record.payload_digest, merge.payload)
            )
            chain.append(record)
        return chain

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

    def _restart_log(self, state: FragmentState, record: bytes | None) -> None:
        self.store.rewind(state.fragment, -1)
        self.store.save_snapshot(state, record)

    def _extend_log(self, state: FragmentState, record: bytes, payload: Buffer) -> None:
        self.store.save_merge(state.fragment, state.version, payload, record)
        if self.store.wants_snapshot(state.fragment, state.version):
            self.store.save_snapshot(state, record)

    async def measure_disk(self, directory: Path) -> None:
        """Brings `bytes_on_disk` up to date."""
        self.bytes_on_disk = await self.on_disk(_bytes_below, directory)

    def _save(self, what: str, call: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Saves in the background, in order; a failure is kept for the page."""
        if self._writes_waiting >= WRITES_WAITING_MAX:
            waiting = f"the disk is too slow: {self._writes_waiting} writes are waiting"
            self._store_errors[what] = waiting
            return
        self._writes_waiting += 1
        loop = asyncio.get_running_loop()
        self._disk.submit(self._write, loop, what, lambda: call(*args, **kwargs))

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
        if error is None:
            self._store_errors.pop(what, None)
            self.saved_at = now
            return
        if error != self._store_errors.get(what):
            logger.warning("%s", error)
        self._store_errors[what] = error


def _log_name(fragment: int) -> str:
    return f"log of fragment {fragment}"


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
    lineage = [unpack_record(earlier) for earlier in stored.earlier]
    lineage = [*_connected_to(record, lineage), record]
    return Chain(lineage[0].version - 1, lineage[0].parent, lineage)


def _connected_to(record: Record, earlier: Sequence[Record]) -> list[Record]:
    """The newest of `earlier` that lead to `record` without a break, oldest first.

    They tell what became of tokens that were merged after the ledger was last saved.
    """
    connected = [record]
    for before in reversed(earlier):
        if before.digest != connected[0].parent:
            break
        connected.insert(0, before)
    return connected[:-1]
