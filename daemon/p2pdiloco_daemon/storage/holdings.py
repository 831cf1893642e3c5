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
from typing import Any, ParamSpec, TypeVar

from p2pdiloco.errors import P2PDilocoError
from p2pdiloco.optim.merge import token_weight
from p2pdiloco.protocol.events import SnapshotInfo
from p2pdiloco.protocol.lineage import (
    Chain,
    Contributor,
    Record,
    Signer,
    period_of,
)
from p2pdiloco.protocol.naming import PeerId, RoundId
from p2pdiloco_bootstrap.serving import Body
from p2pdiloco_daemon.storage.arriving import Arrivals
from p2pdiloco_daemon.storage.disk_queue import DiskQueue
from p2pdiloco_daemon.storage.lineage_log import LineageLog, Weight, replay
from p2pdiloco_daemon.storage.replica import (
    Buffer,
    FragmentState,
    Replica,
    StateDamagedError,
    Vector,
    pack_state,
    payload_digest,
    require_sound,
)
from p2pdiloco_daemon.storage.store import Store

P = ParamSpec("P")
T = TypeVar("T")

PAYLOADS_IN_MEMORY = 2
"""Newest merge payloads of each fragment that are served without the disk."""
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


class Holdings:
    """`worker` and `disk` have one thread each and are closed by whoever made them."""

    def __init__(
        self, replica: Replica, store: Store, worker: ThreadPoolExecutor, disk: ThreadPoolExecutor
    ) -> None:
        num = len(replica.fragments)
        self.replica = replica
        self.bytes_on_disk = 0
        self.store = store
        self._worker = worker
        self._num_computing = 0
        self.num_computed = 0
        self.disk = DiskQueue(disk)
        self.arrivals = Arrivals(store.parts, self.disk)
        self._log = LineageLog(store, num)
        self._contributions: dict[int, Prepared] = {}
        self._rounds: dict[RoundId, OurRound] = {}
        self._payloads: list[deque[Payload]] = [
            deque(maxlen=PAYLOADS_IN_MEMORY) for _ in range(num)
        ]
        self._read_at: list[dict[int, float]] = [{} for _ in range(num)]
        """Version -> when a reader that is behind last asked for it."""
        self._newest_write: Future[None] | None = None

    @property
    def is_computing(self) -> bool:
        return self._num_computing > 0

    async def compute(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs arithmetic in the worker thread."""
        loop = asyncio.get_running_loop()
        self._num_computing += 1
        try:
            return await loop.run_in_executor(self._worker, lambda: call(*args, **kwargs))
        finally:
            self._num_computing -= 1
            self.num_computed += 1

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
        round_.merge = await self.compute(self._merge, round_id, weighted, period_of(parts))
        return round_.merge

    def _merge(
        self, round_id: RoundId, parts: Sequence[tuple[Vector, float]], period_steps: int
    ) -> Merge:
        payload = self.replica.merge(round_id.fragment, parts)
        p, version = round_id.fragment, round_id.version
        state = self.replica.apply(p, version, payload, period_steps)
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
        state = await self.compute(
            self.replica.apply, record.fragment, record.version, payload, record.period_steps
        )
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
        begin, name = self._log.begin, _log_name(state.fragment)
        self._newest_write = self.disk.save(name, begin, state, vouching, following, before)
        self.arrivals.drop(state.fragment)

    def _hold(self, state: FragmentState, record: Record, payload: Buffer) -> None:
        p = record.fragment
        self.replica.put(state)
        self._keep_payload(record, payload)
        extend, snapshot, packed = self._log.extend, self._log.snapshot, record.pack()
        self._newest_write = self.disk.save(_log_name(p), extend, state, record, payload)
        leased = self._leased(p, record.version)
        self.disk.save(_snapshots_name(p), snapshot, state, packed, leased)
        self.arrivals.reached(p, record.version)

    def _keep_payload(self, record: Record, payload: Buffer) -> None:
        kept = Payload(record.version, record.payload_digest, payload)
        self._payloads[record.fragment].append(kept)

    def hold_own(self, state: FragmentState) -> None:
        """Holds a state that this node made by itself, which no record vouches for: the log has no
        merges then.
        """
        p = state.fragment
        self.replica.put(state)
        leased, name = self._leased(p, state.version), _snapshots_name(p)
        self._newest_write = self.disk.save(name, self.store.save_snapshot, state, None, leased)

    async def written(self) -> None:
        """Returns when the merges that are held are on disk, or the disk has refused them."""
        if self._newest_write:
            await self.disk.written(self._newest_write)

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
        return await self.disk.run(self.store.read_merge, fragment, version, digest)

    async def state_body(self, fragment: int, version: int, digest: str) -> Body | None:
        """A packed state to be sent: from disk without a copy, else from memory, which only what is
        on offer is worth: each such answer holds a copy until its reader has it.
        """
        self._note_reader(fragment, version)
        part = await self.disk.run(self.store.state_part, fragment, version, digest)
        if part:
            return part
        if SnapshotInfo(version, digest) not in await self.disk.run(self.snapshots, fragment):
            return None
        held = await self._held_state(fragment, version, digest)
        return await self.compute(pack_state, held) if held else None

    async def read_state(self, fragment: int, version: int, digest: str) -> FragmentState | None:
        """A state that this node has, from memory or disk, checked."""
        held = await self._held_state(fragment, version, digest)
        return held or await self.disk.run(self.store.read_state, fragment, version, digest)

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
        """Somebody wants the state of this version, and then the merges after it; strangers may
        name any.
        """
        held = self.replica.state(fragment)
        if held and held.version - LEASE_MERGES_MAX <= version <= held.version:
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
        self,
        run_id: str,
        genesis_digests: Sequence[str],
        signer: Signer,
        *,
        unvouched: bool = False,
    ) -> list[Chain | None]:
        """Loads what an earlier life left: states into the replica, and their chains. Blocks.

        An `unvouched` state at another version than 0 is of use where each node makes its own.
        """
        return [
            self._resume(p, run_id, digest, signer, unvouched)
            for p, digest in enumerate(genesis_digests)
        ]

    def _resume(
        self, fragment: int, run_id: str, genesis_digest: str, signer: Signer, unvouched: bool
    ) -> Chain | None:
        stored, keep = self.store.load(fragment), self._keep_payload
        if stored is None:
            return None
        if unvouched and stored.record is None and stored.state.version:
            self.replica.put(stored.state)
            return Chain(stored.state.version, stored.state.digest)
        try:
            return replay(stored, run_id, genesis_digest, signer, self.replica, keep)
        except P2PDilocoError as error:
            logger.warning("fragment %d: what is on disk is of no use: %s", fragment, error)
            return None

    def save_json(self, name: str, value: Mapping[str, Any]) -> None:
        self.disk.save(name, self.store.save_json, name, dict(value))

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

    async def measure_disk(self, directory: Path) -> None:
        """Brings `bytes_on_disk` up to date, unless the disk refuses to be looked at."""
        with suppress(OSError):
            self.bytes_on_disk = await self.disk.run(_bytes_below, directory)


def _log_name(fragment: int) -> str:
    return f"log of fragment {fragment}"


def _snapshots_name(fragment: int) -> str:
    return f"snapshots of fragment {fragment}"


def _bytes_below(directory: Path) -> int:
    sizes = []
    for path in directory.rglob("*"):
        with suppress(FileNotFoundError):  # being replaced just now
            sizes.append(path.stat().st_size if path.is_file() else 0)
    return sum(sizes)
