"""The composition root: makes a node's parts, in the order in which they need each other.

    page -> host (p2pd, DHT, HTTP) -> spec -> replica and store -> core and shell -> learner

Leaving is the reverse of the reading order. The parts do not know this module.
"""

import asyncio
import logging
import random
import signal
from collections.abc import AsyncIterator, Awaitable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from itertools import islice
from pathlib import Path

import psutil

from p2pdiloco.errors import P2PDilocoError, UserError
from p2pdiloco.optim.fragments import Fragment, fragments_of
from p2pdiloco.protocol import events
from p2pdiloco.protocol.naming import PeerId
from p2pdiloco.protocol.node import Node
from p2pdiloco.protocol.pacing import SyncTimes
from p2pdiloco.protocol.state import NodeConfig
from p2pdiloco.protocol.wire import PROTOCOL_VERSION
from p2pdiloco.spec import RunSpec, SignedSpec
from p2pdiloco_bootstrap import identity as identities
from p2pdiloco_bootstrap.addresses import split_peer
from p2pdiloco_bootstrap.discovery import Discovery
from p2pdiloco_bootstrap.host import Host, HostOptions, open_host
from p2pdiloco_bootstrap.identity import Identity
from p2pdiloco_bootstrap.serving import Traffic
from p2pdiloco_bootstrap.shelf import exchange_application
from p2pdiloco_daemon import learner as learners
from p2pdiloco_daemon.exchange import Exchange, ExchangeError
from p2pdiloco_daemon.holdings import Holdings
from p2pdiloco_daemon.lag import LagMonitor
from p2pdiloco_daemon.learner import Learner, LearnerOptions, running_learner
from p2pdiloco_daemon.log import configure_logging
from p2pdiloco_daemon.node import SAVED_NODE, Expected, NodeShell, saved
from p2pdiloco_daemon.place import Place, open_place
from p2pdiloco_daemon.replica import Replica
from p2pdiloco_daemon.report import LearnerReport, Reporter
from p2pdiloco_daemon.shelf import NodeShelf
from p2pdiloco_daemon.status import view
from p2pdiloco_daemon.status.app import build_app, serving_page
from p2pdiloco_daemon.store import Store, lock_directory

REPLICA_BYTES_PER_PARAMETER = 8
"""Anchor and momentum in float32, in the daemon."""
LEARNER_BYTES_PER_PARAMETER = 24
"""Weights, gradients, Adam's moments in float32, and both areas of the shared memory."""
SPEC_RETRY_S = 2.0
HOUSEKEEPING_S = 2.0
DISCOVERY_S = (1.0, 60.0)
"""First and longest pause between looks into the DHT; it doubles."""
GOODBYE_S = 2.0
LEARNER_ROLE = "learner"
PEERS_REMEMBERED = 16
"""Members whose addresses are kept: a restart finds the swarm when no first peer is left."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """What a person decides about a node."""

    directory: Path
    invite: str | None
    status_port: int
    listen: tuple[str, int]
    device: str
    threads: int


class StatusBoard:
    """What the page reads: a few words while the node starts, then the reporter's."""

    def __init__(self, place: Place, started: float) -> None:
        self._place = place
        self.started = started
        self.sentence = "Starting."
        self.peer_id = ""
        self.page_url: str | None = None
        self.reporter: Reporter | None = None

    def read(self) -> view.Status:
        if self.reporter:
            return self.reporter.status()
        return view.Status(
            protocol_version=PROTOCOL_VERSION,
            app_version=version("p2pdiloco"),
            peer_id=self.peer_id,
            node_name=self.peer_id[-8:],
            run=view.Run(id=self._place.run_id, name=""),
            state=view.NodeState.STARTING,
            sentence=self.sentence,
            uptime_s=asyncio.get_running_loop().time() - self.started,
            page_url=self.page_url,
        )


async def run_node(options: NodeOptions) -> None:
    """Runs a node until Ctrl-C or SIGTERM. UserError for what a person has to mend."""
    configure_logging()
    started = asyncio.get_running_loop().time()
    with stop_signals() as stop:
        async with AsyncExitStack() as stack:
            stack.enter_context(lock_directory(options.directory))
            place = open_place(options.directory, options.invite)
            identity = Identity.load_or_create(place.identity_path)
            board = StatusBoard(place, started)
            board.peer_id = identity.peer_id
            settle = SettleRequest()
            page = build_app(board.read, settle=settle)
            url = await stack.enter_async_context(serving_page(page, options.status_port))
            board.page_url = url
            logger.info("the status page is at %s", url)
            host = await stack.enter_async_context(open_host(_host_options(options, place)))
            traffic = Traffic()
            exchange = Exchange(host.session(), traffic)
            signed = await _until_stopped(_find_spec(place, host, exchange, board), stop)
            if signed:
                await _take_part(
                    options, place, host, exchange, traffic, signed, identity, board, stop, settle
                )


class SettleRequest:
    """The page's request to settle, passed on to the node once there is one."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def __call__(self) -> None:
        self.asked.set()


@contextmanager
def stop_signals() -> Iterator[asyncio.Event]:
    """Set by the first Ctrl-C or SIGTERM; the second one cancels the running task at once."""
    stop, loop, task = asyncio.Event(), asyncio.get_running_loop(), asyncio.current_task()
    assert task

    def on_signal() -> None:
        if stop.is_set():
            task.cancel()
        stop.set()

    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, on_signal)
    try:
        yield stop
    except asyncio.CancelledError:
        if not stop.is_set():
            raise
        logger.warning("stopped at once")
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def _host_options(options: NodeOptions, place: Place) -> HostOptions:
    """Any free port becomes the one of the last life, where the others still look for this node."""
    host, port = options.listen
    if port == 0:
        port = place.listen_port(host)
    return HostOptions(
        identity_path=place.identity_path, listen=(host, port), bootstraps=place.bootstraps
    )


async def _until_stopped(wanted: Awaitable[SignedSpec], stop: asyncio.Event) -> SignedSpec | None:
    """The spec, or None if the person stops first."""
    finding = asyncio.ensure_future(wanted)
    stopping = asyncio.create_task(stop.wait(), name="stop")
    try:
        await asyncio.wait((finding, stopping), return_when=asyncio.FIRST_COMPLETED)
        return finding.result() if finding.done() else None
    finally:
        for task in (finding, stopping):
            task.cancel()
            with suppress(asyncio.CancelledError, P2PDilocoError):
                await task


async def _find_spec(
    place: Place, host: Host, exchange: Exchange, board: StatusBoard
) -> SignedSpec:
    """From the directory, else from whoever has it; asks for ever, and says what is wrong."""
    if kept := place.spec():
        return kept
    bootstraps = list(dict.fromkeys(split_peer(address)[1] for address in place.bootstraps))
    discovery = Discovery(host, place.run_id)
    while True:
        peers = dict.fromkeys(bootstraps)
        with suppress(*Expected):
            peers |= dict.fromkeys(member.peer for member in await discovery.members())
        for peer in peers:
            try:
                signed = place.checked(await exchange.spec(peer))
            except (ExchangeError, P2PDilocoError) as error:
                board.sentence = f"Looking for the run: {error}."
                logger.warning("no spec from %s: %s", peer[-8:], error)
            else:
                place.keep_spec(signed)
                return signed
        await asyncio.sleep(SPEC_RETRY_S)


async def _take_part(
    options: NodeOptions,
    place: Place,
    host: Host,
    exchange: Exchange,
    traffic: Traffic,
    signed: SignedSpec,
    identity: Identity,
    board: StatusBoard,
    stop: asyncio.Event,
    settle: SettleRequest,
) -> None:
    """From the spec to the goodbye."""
    spec, fragments = signed.spec, fragments_of(signed.spec)
    require_memory(fragments)
    async with AsyncExitStack() as stack:
        worker = stack.enter_context(ThreadPoolExecutor(1, "worker"))
        disk = stack.enter_context(ThreadPoolExecutor(1, "disk"))
        store = stack.enter_context(Store(place.directory, len(fragments), is_locked=True))
        holdings = Holdings(_replica(spec, fragments), store, worker, disk)
        board.sentence = "Reading what is on disk."
        node = await holdings.on_disk(
            partial(_wake_up, holdings, signed, identity, place, asyncio.get_running_loop().time())
        )
        shelf = NodeShelf(signed.pack(), node, holdings)
        tasks = await stack.enter_async_context(_tasks())
        shell = NodeShell(node, holdings, exchange, tasks)
        server = exchange_application(shelf, traffic, shell.take_message)
        await stack.enter_async_context(host.serving(server))
        report, lag = LearnerReport(), LagMonitor()
        board.reporter = Reporter(
            spec=spec,
            run_id=signed.run_id,
            started=board.started,
            now=asyncio.get_running_loop().time,
            node=node,
            shell=shell,
            holdings=holdings,
            traffic=traffic,
            lag=lag,
            learner=report,
            network_sentence=partial(_network_sentence, host),
            page_url=board.page_url,
        )
        background = [
            tasks.create_task(work, name=name)
            for work, name in (
                (lag.run(), "lag monitor"),
                (host.watch(), "p2pd"),
                (_discover(host, place.run_id, shell, holdings), "discovery"),
                (_keep_house(holdings, shell, traffic, place.directory), "housekeeping"),
            )
        ]
        owner = tasks.create_task(shell.run(), name="owner of the core")
        learner = await stack.enter_async_context(
            running_learner(
                _learner_options(options, spec, fragments, place, identity),
                partial(_on_learner, shell, report),
                worker,
            )
        )
        shell.learner = learner
        background.append(
            tasks.create_task(_settle(settle, learner, shell, report), name="settling")
        )
        await stop.wait()
        board.reporter.stopping = True
        logger.info("leaving")
        await learner.stop()
        await shell.leave(GOODBYE_S)
        await owner
        for task in background:
            task.cancel()
        shell.save()


@asynccontextmanager
async def _tasks() -> AsyncIterator[asyncio.TaskGroup]:
    async with asyncio.TaskGroup() as tasks:
        yield tasks


def require_memory(fragments: tuple[Fragment, ...]) -> None:
    """UserError if the model does not fit beside what else runs; says what it takes."""
    num = sum(fragment.size for fragment in fragments)
    needed = num * (REPLICA_BYTES_PER_PARAMETER + LEARNER_BYTES_PER_PARAMETER)
    available = psutil.virtual_memory().available
    logger.info(
        "%.2f million parameters: about %.0f MB of memory, beside activations",
        num / 1e6,
        needed / 1e6,
    )
    if needed > available:
        raise UserError(
            f"this run's model needs about {needed / 1e9:.1f} GB of memory, "
            f"{available / 1e9:.1f} GB are free; close other programs or join from a larger machine"
        )


def _replica(spec: RunSpec, fragments: tuple[Fragment, ...]) -> Replica:
    return Replica(
        fragments,
        outer_learning_rate=spec.outer.learning_rate,
        outer_momentum=spec.outer.momentum,
        wire=spec.sync.wire,
        merge_rule=spec.sync.merge,
    )


class _Signer:
    """The core's view of the node's key and of the keys in peer ids."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity

    def sign(self, data: bytes) -> bytes:
        return self._identity.sign(data)

    def verify(self, peer: PeerId, data: bytes, signature: bytes) -> bool:
        return identities.verify(peer, data, signature)


def _wake_up(
    holdings: Holdings, signed: SignedSpec, identity: Identity, place: Place, now: float
) -> Node:
    """The core with what an earlier life left on disk. Blocks."""
    spec, signer = signed.spec, _Signer(identity)
    assert spec.genesis
    chains = holdings.resume(signed.run_id, spec.genesis.state_digests, signer)
    kept = holdings.load_json(SAVED_NODE) or {}
    incarnation = int(kept.get("incarnation", 0)) + 1
    config = NodeConfig(
        run_id=signed.run_id,
        me=PeerId(identity.peer_id),
        name=identity.peer_id[-8:],
        incarnation=incarnation,
        genesis_digests=spec.genesis.state_digests,
        genesis_donors=tuple(
            dict.fromkeys(PeerId(split_peer(address)[1]) for address in place.bootstraps)
        ),
        times=SyncTimes(
            inner_steps=spec.sync.inner_steps,
            num_fragments=spec.sync.num_fragments,
            overlap_steps=spec.sync.overlap_steps,
            quorum=spec.sync.quorum,
            grace_factor=spec.sync.grace_factor,
        ),
        term_merges=spec.sync.term_merges,
        contributors_max=spec.limits.max_contributors,
    )
    node = Node(config, signer, random.Random(), now, chains, kept.get("core"))
    holdings.store.save_json(SAVED_NODE, saved(node))
    return node


def _learner_options(
    options: NodeOptions,
    spec: RunSpec,
    fragments: tuple[Fragment, ...],
    place: Place,
    identity: Identity,
) -> LearnerOptions:
    return LearnerOptions(
        spec=spec,
        fragments=fragments,
        directory=place.directory,
        node_key=identity.peer_id,
        device=options.device,
        threads=options.threads,
    )


def _on_learner(shell: NodeShell, report: LearnerReport, event: learners.LearnerEvent) -> None:
    report.take(event)
    shell.on_learner(event)


# ---------------------------------------------------------------- background work


async def _settle(
    request: SettleRequest, learner: Learner, shell: NodeShell, report: LearnerReport
) -> None:
    await request.asked.wait()
    learner.pause()
    report.paused = True
    shell.post(events.SettleAsked())


async def _discover(host: Host, run_id: str, shell: NodeShell, holdings: Holdings) -> None:
    """Announces this node and finds the others, for ever, with growing pauses."""
    discovery = Discovery(host, run_id)
    remembered = await holdings.on_disk(holdings.load_peers)
    for peer, addresses in remembered.items():
        host.remember(peer, addresses)
    if remembered:
        shell.post(events.PeersFound(tuple(remembered)))
    pause_s, longest_s = DISCOVERY_S
    while True:
        members: tuple[PeerId, ...] = ()
        try:
            await discovery.announce((LEARNER_ROLE,))
            found = {
                PeerId(m.peer): m.addresses
                for m in await discovery.members()
                if LEARNER_ROLE in m.roles and m.peer != host.peer_id
            }
            members = tuple(found)
            known = dict(islice((found | remembered | found).items(), PEERS_REMEMBERED))
            if known != remembered:
                remembered = known
                holdings.save_peers(known)
            offset = await discovery.clock_offset()
            if offset and (problem := offset.problem()):
                logger.warning("%s", problem)
        except Expected as error:
            logger.warning("discovery: %s", error or "no answer from the DHT")
        shell.post(events.PeersFound(members))
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, longest_s)


async def _keep_house(
    holdings: Holdings, shell: NodeShell, traffic: Traffic, directory: Path
) -> None:
    """Saves the ledger, measures disk and uplink, every few seconds."""
    state, sent_before = shell.node.state, traffic.up.total()
    while True:
        await asyncio.sleep(HOUSEKEEPING_S)
        shell.save()
        await holdings.measure_disk(directory)
        sent = traffic.up.total()
        rate_mb_s = (sent - sent_before) / HOUSEKEEPING_S / 1e6
        state.uplink_mb_s = max(rate_mb_s, 0.98 * state.uplink_mb_s)
        sent_before = sent


def _network_sentence(host: Host) -> str | None:
    """Why no bootstrap peer is connected; None when one is, or others are."""
    bootstraps = host.bootstraps()
    if not bootstraps or any(status.connected for status in bootstraps):
        return None
    return "; ".join(status.sentence() for status in bootstraps)
