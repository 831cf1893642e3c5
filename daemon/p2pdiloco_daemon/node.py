"""The thin shell around `p2pdiloco.protocol.node`: one task owns the core, errands carry out its
actions.

The owner takes an event from the inbox, or wakes at the core's deadline, and starts one task for
each action that takes time. An errand catches only what can be expected of a network, a peer or a
learner, and posts the event that answers its action; anything else ends the daemon with a
traceback.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol, assert_never

from p2pdiloco.errors import P2PDilocoError, PayloadError, PeerError
from p2pdiloco.protocol import actions, events, wire
from p2pdiloco.protocol.lineage import Record, unpack_record
from p2pdiloco.protocol.naming import PeerId, RoundId
from p2pdiloco.protocol.node import Node
from p2pdiloco_bootstrap.shelf import Contribution, RecordsPage, merge_path, state_path
from p2pdiloco_daemon.exchange import Check, Exchange, FetchFailed, check_payload
from p2pdiloco_daemon.fetch import Gathering
from p2pdiloco_daemon.gossip import GossipErrands
from p2pdiloco_daemon.learner import learner as learners
from p2pdiloco_daemon.mixing import Mixing
from p2pdiloco_daemon.storage.holdings import Holdings
from p2pdiloco_daemon.storage.part_files import PartInfo
from p2pdiloco_daemon.storage.replica import (
    Buffer,
    FragmentState,
    StateDamagedError,
    Vector,
    packed_state_bytes,
    unpack_state,
)

INBOX_MAX = 512
"""Messages of peers that may wait; more are answered with 503. Our own events always find room:
there is at most one for each action, and the learner's steps come one at a time."""
SENDS_PER_PEER_MAX = 16
"""Messages on their way to one peer; a peer that takes none misses news that the next heartbeat
repeats, and holds nobody up."""
NOTES_KEPT = 200
SNAPSHOTS_MAX = 8
"""Offered for one fragment by one donor; ours offer four at most."""

Expected = (OSError, TimeoutError, P2PDilocoError)
"""What a network, a peer or a disk may do to an errand."""

logger = logging.getLogger(__name__)


class LearnerCommands(Protocol):
    """What the shell asks of a learner; see `p2pdiloco_daemon.learner.learner.Learner`."""

    def install(self, fragment: int, version: int, values: Vector) -> bool: ...
    def snapshot(self, fragment: int, base_version: int, *, hold: bool = False) -> int: ...
    def end_round(self, fragment: int, version: int, base: Vector, share: float) -> bool: ...
    def blend(self, fragment: int, version: int, change: Vector) -> bool: ...


SAVED_NODE = "node"
"""Name under which the node's own state is kept in its directory."""


class NodeShell:
    """Owns the core; made by the composition root, which runs `run` and `carry_out` in one task
    group.
    """

    def __init__(
        self,
        node: Node,
        holdings: Holdings,
        exchange: Exchange,
        tasks: asyncio.TaskGroup,
        mixing: Mixing | None = None,
    ) -> None:
        self.node = node
        self.notes: deque[tuple[float, str]] = deque(maxlen=NOTES_KEPT)
        self.dropped_sends: Counter[str] = Counter()
        self.first_merge_at: float | None = None
        self.learner: LearnerCommands | None = None
        self.gossip = GossipErrands(self, mixing, holdings, exchange, Expected) if mixing else None
        self._holdings = holdings
        self._exchange = exchange
        self._tasks = tasks
        self._inbox: asyncio.Queue[events.Event] = asyncio.Queue()
        self._sending: Counter[PeerId] = Counter()
        self._snapshots: dict[int, RoundId] = {}
        self._errands: set[asyncio.Task[None]] = set()
        self._gone = asyncio.Event()
        self._all_sent = asyncio.Event()
        self._all_sent.set()

    # ---------------------------------------------------------------- the owner

    async def run(self) -> None:
        """Until the node has left."""
        loop = asyncio.get_running_loop()
        while (deadline := self.node.deadline) is not None:
            event: events.Event = events.Woke()
            try:
                async with asyncio.timeout_at(deadline):
                    event = await self._inbox.get()
            except TimeoutError:
                pass
            for action in self.node.handle(event, loop.time()):
                self._carry_out(action)
            if isinstance(event, events.StateReached) and event.record is None:
                self.save()  # a lineage was adopted: an older ledger would not fit it
            await asyncio.sleep(0)  # a full inbox must not keep the loop from its transfers
        self._gone.set()

    async def leave(self, timeout_s: float) -> None:
        """Says goodbye and waits until the messages are out, at most so long; then no errand is
        left.
        """
        self.post(events.LeaveAsked())
        try:
            async with asyncio.timeout(timeout_s):
                await self._gone.wait()
                await self._all_sent.wait()
        except TimeoutError:
            logger.info("left without telling everybody")
        finally:
            for errand in self._errands:
                errand.cancel()

    def save(self) -> None:
        """Keeps, in the background, what a later life of this node needs."""
        self._holdings.save_json(SAVED_NODE, saved(self.node))

    def post(self, event: events.Event) -> None:
        self._inbox.put_nowait(event)

    def take_message(self, peer: str, body: bytes) -> bool:
        """For the server: False when the inbox is full. Raises PeerError for a malformed
        message.
        """
        if self._inbox.qsize() >= INBOX_MAX:
            return False
        self.post(events.MessageArrived(PeerId(peer), wire.unpack(body)))
        return True

    # ---------------------------------------------------------------- the learner

    def on_learner(self, event: learners.LearnerEvent) -> None:
        """Translates the learner's events; counters reach the core in their order."""
        self._translate(event)
        if self.gossip:
            self.gossip.on_learner(event)

    def _translate(self, event: learners.LearnerEvent) -> None:
        match event:
            case learners.Ready():
                self.post(events.LearnerStarted())
            case learners.StepsDone():
                step_s = event.step_s / event.steps
                self.post(events.StepsDone(event.steps, event.tokens, step_s, event.loss))
            case learners.Installed():
                self.post(events.FragmentInstalled(event.fragment, event.version, event.tokens))
            case learners.Snapshot():
                if round_id := self._snapshots.pop(event.request_id, None):
                    self.start(self._encode(round_id, event), f"encode {round_id}")
            case learners.SnapshotRefused():
                if round_id := self._snapshots.pop(event.request_id, None):
                    self.post(events.ContributionFailed(round_id, event.reason))
            case learners.Died():
                for round_id in self._snapshots.values():
                    self.post(events.ContributionFailed(round_id, "the learner died"))
                self._snapshots.clear()
                self.post(events.LearnerStopped(event.reason))
            case _:
                pass

    async def _encode(self, round_id: RoundId, taken: learners.Snapshot) -> None:
        try:
            num_bytes = await self._holdings.prepare(
                round_id, taken.values, taken.steps, taken.tokens
            )
        except P2PDilocoError as error:
            self.tell_damage(error)
            self.post(events.ContributionFailed(round_id, str(error)))
        else:
            self.post(events.ContributionPrepared(round_id, taken.steps, taken.tokens, num_bytes))

    # ---------------------------------------------------------------- actions

    def _carry_out(self, action: actions.Action) -> None:  # noqa: C901 (one case for each action)
        match action:
            case actions.Send(peer, message):
                self._send(peer, message)
            case actions.Note(text):
                self.tell(text)
            case actions.PrepareContribution(round_id, hold):
                self._ask_for_snapshot(round_id, hold)
            case actions.DropContribution(fragment):
                self._holdings.drop_contribution(fragment)
            case actions.PullContribution(round_id, peer):
                self._holdings.open_round(round_id)
                self.start(self._pull(round_id, peer), f"pull {round_id} of {peer}")
            case actions.MergeRound():
                self.start(self._merge(action), f"merge {action.round}")
            case actions.DropRound(round_id):
                self._holdings.drop_round(round_id)
            case actions.CommitRecord(record):
                self._holdings.commit(record)
                self.merged()
            case actions.FetchRecords(peer, fragment, after_version):
                self.start(self._fetch_records(peer, fragment, after_version), "fetch records")
            case actions.CatchUp():
                self.start(self._catch_up(action), f"catch up fragment {action.fragment}")
            case actions.InstallFragment(fragment, _):
                self._install(fragment)
            case (
                actions.OpenMix()
                | actions.FetchMix()
                | actions.CutRound()
                | actions.FinishRound()
                | actions.TakeValues()
                | actions.BlendValues()
            ):
                assert self.gossip, action
                self.gossip.carry_out(action)
            case _:
                assert_never(action)

    def start(self, errand: Coroutine[Any, Any, None], name: str) -> None:
        task = self._tasks.create_task(errand, name=name)
        self._errands.add(task)
        task.add_done_callback(self._errands.discard)

    def _send(self, peer: PeerId, message: wire.Message) -> None:
        if self._sending[peer] >= SENDS_PER_PEER_MAX:
            self.dropped_sends[message.kind] += 1
            return
        self._sending[peer] += 1
        self._all_sent.clear()
        self.start(self._deliver(peer, wire.pack(message)), f"{message.kind} to {peer}")

    async def _deliver(self, peer: PeerId, body: bytes) -> None:
        try:
            await self._holdings.written()  # what it says of merges must outlive this process
            await self._exchange.send(peer, body)
        except Expected as error:
            logger.debug("a message to %s did not arrive: %s", peer, error)
        finally:
            self._sending[peer] -= 1
            if not self._sending[peer]:
                del self._sending[peer]
            if not self._sending:
                self._all_sent.set()

    def _ask_for_snapshot(self, round_id: RoundId, hold: bool) -> None:
        if self.learner is None:
            self.post(events.ContributionFailed(round_id, "the learner is not running"))
            return
        request_id = self.learner.snapshot(round_id.fragment, round_id.version - 1, hold=hold)
        self._snapshots[request_id] = round_id

    def _install(self, fragment: int) -> None:
        state = self._holdings.replica.state(fragment)
        assert state, f"fragment {fragment} is not held"
        if self.learner:
            self.learner.install(fragment, state.version, state.anchor)

    def tell(self, text: str) -> None:
        """For log and page."""
        self.notes.append((asyncio.get_running_loop().time(), text))
        logger.info("%s", text)

    def merged(self) -> None:
        if self.first_merge_at is None:
            self.first_merge_at = asyncio.get_running_loop().time()

    # ---------------------------------------------------------------- errands of a synchronizer

    async def _pull(self, round_id: RoundId, peer: PeerId) -> None:
        try:
            got = await self._contribution(round_id, peer)
            await self._holdings.take_in(round_id, peer, got.payload)
        except PeerError as error:
            self.post(events.PullFailed(round_id, peer, str(error), hostile=True))
        except Expected as error:
            self.tell_damage(error)
            self.post(events.PullFailed(round_id, peer, _why(error)))
        else:
            self.post(events.ContributionPulled(round_id, peer, got.steps, got.tokens))

    async def _contribution(self, round_id: RoundId, peer: PeerId) -> Contribution:
        """Our own does not go over the network."""
        if peer == self.node.state.me:
            own = self._holdings.contribution(round_id)
            if own is None:
                raise GoneError("our own contribution is gone")
            return Contribution(own.steps, own.tokens, own.payload)
        return await self._exchange.pull_contribution(
            peer,
            round_id.fragment,
            round_id.version,
            round_id.term,
            round_id.attempt,
            self._holdings.replica.payload_bytes_max(round_id.fragment),
        )

    async def _merge(self, action: actions.MergeRound) -> None:
        try:
            merge = await self._holdings.merge(action.round, action.parts)
        except P2PDilocoError as error:
            self.tell_damage(error)
            self.post(events.MergeFailed(action.round, str(error)))
        else:
            self.post(
                events.RoundMerged(
                    action.round, merge.digest, len(merge.payload), merge.state.digest
                )
            )

    # ---------------------------------------------------------------- errands of a replica

    async def _fetch_records(self, peer: PeerId, fragment: int, after_version: int) -> None:
        try:
            records, snapshots = await self._records_of(peer, fragment, after_version)
            begun = await self._holdings.disk.run(self._holdings.arrivals.begun, fragment)
        except Expected as error:
            self.post(events.RecordsFailed(peer, fragment, _why(error)))
        else:
            self.post(events.RecordsFetched(peer, fragment, records, snapshots, begun))

    async def _records_of(
        self, peer: PeerId, fragment: int, after_version: int
    ) -> tuple[tuple[Record, ...], tuple[events.SnapshotInfo, ...]]:
        """Of a donor, or of ourselves."""
        if peer == self.node.state.me:
            snapshots = await self._holdings.disk.run(self._holdings.snapshots, fragment)
            return self.node.records_after(fragment, after_version), snapshots
        return unpack_page(await self._exchange.records(peer, fragment, after_version))

    async def _catch_up(self, action: actions.CatchUp) -> None:
        try:
            await self._load_snapshot(action)
            for record in action.records:
                await self._apply(action, record)
        except Expected as error:
            self.tell_damage(error)
            self.post(
                events.CatchUpFailed(
                    action.fragment, _why(error), diverged=isinstance(error, DivergedError)
                )
            )

    async def _load_snapshot(self, action: actions.CatchUp) -> None:
        info, p = action.snapshot, action.fragment
        if info is None:
            return
        state = await self._holdings.read_state(p, info.version, info.state_digest)
        if state is None:
            state = await self._fetch_state(p, info, action.donors)
        chain = self.node.state.registers[p].chain
        before = chain.weight if chain else None
        self._holdings.load(state, action.vouching, action.records, before)
        self.post(events.StateReached(p, info.version, info.state_digest, None))

    async def _fetch_state(
        self, fragment: int, info: events.SnapshotInfo, donors: Sequence[str]
    ) -> FragmentState:
        """What an earlier try got of it is not fetched again."""
        size = self._holdings.replica.fragments[fragment].size
        part = PartInfo(info.version, info.state_digest, packed_state_bytes(size))
        body = await self._holdings.arrivals.gathering(fragment, part)
        checked: list[FragmentState] = []

        def check(data: bytearray, digest: str) -> None:
            state = unpack_state(data, fragment, size, digest)
            if state.version != info.version:  # its digest was named for another one
                raise PayloadError(f"a state of v{state.version}; expected v{info.version}")
            checked.append(state)

        try:
            await self._fetch(
                donors,
                state_path(fragment, info.version, info.state_digest),
                part.num_bytes,
                info.state_digest,
                check,
                body,
            )
        except FetchFailed:
            if body.is_whole:  # and wrong
                self._holdings.arrivals.drop(fragment)
            raise
        return checked[-1]

    async def _fetch(
        self,
        donors: Sequence[str],
        path: str,
        num_bytes: int,
        digest: str,
        check: Check,
        body: Gathering | None = None,
    ) -> bytearray:
        """From several donors; who sent wrong bytes is held to account."""
        try:
            fetched = await self._exchange.fetch(
                donors, path, num_bytes, digest, check=check, body=body
            )
        except FetchFailed as error:
            self._accuse(error.liars)
            raise
        self._accuse(fetched.liars)
        return fetched.data

    def tell_damage(self, error: BaseException) -> None:
        """Only of a state that we hold still: what was replaced meanwhile harms nobody."""
        if isinstance(error, StateDamagedError):
            damaged = error.state
            logger.warning("%s", error)
            if self._holdings.replica.state(damaged.fragment) is damaged:
                self.post(events.StateDamaged(damaged.fragment, damaged.version))

    def _accuse(self, liars: Sequence[str]) -> None:
        for liar in liars:
            self.post(events.WrongBytes(PeerId(liar), "it sent bytes of another digest"))

    async def _apply(self, action: actions.CatchUp, record: Record) -> None:
        p, version, digest = record.fragment, record.version, record.payload_digest
        if record.payload_bytes > self._holdings.replica.payload_bytes_max(p):
            raise PeerError(f"a merge payload of {record.payload_bytes} bytes is too large")
        payload: Buffer | None = await self._holdings.read_merge(p, version, digest)
        if payload is None:
            payload = await self._fetch(
                action.donors,
                merge_path(p, version, digest),
                record.payload_bytes,
                digest,
                check_payload,
            )
        state = await self._holdings.apply(record, payload)
        if state.digest != record.state_digest:
            raise DivergedError(
                f"v{version} gives state {state.digest[:8]} here, {record.state_digest[:8]} at "
                f"{record.synchronizer[-8:]}"
            )
        self.merged()
        self.post(events.StateReached(p, version, state.digest, record))


class GoneError(P2PDilocoError):
    """Something of our own was replaced before it was wanted."""


def saved(node: Node) -> dict[str, Any]:
    """What is kept of a node, as plain data."""
    return {"incarnation": node.state.config.incarnation, "core": node.save()}


class DivergedError(P2PDilocoError):
    """The same merge led to another state here than at its synchronizer."""


def unpack_page(
    page: RecordsPage,
) -> tuple[tuple[Record, ...], tuple[events.SnapshotInfo, ...]]:
    """Raises PeerError unless the records are well-formed and the snapshots few."""
    if (num_snapshots := len(page.snapshots)) > SNAPSHOTS_MAX:
        raise PeerError(f"{num_snapshots} snapshots are too many; at most {SNAPSHOTS_MAX} are kept")
    snapshots = tuple(events.SnapshotInfo(*snapshot) for snapshot in page.snapshots)
    return tuple(unpack_record(record) for record in page.records), snapshots


def _why(error: BaseException) -> str:
    text = str(error) or type(error).__name__
    return text if len(text) <= 180 else text[:177] + "..."
