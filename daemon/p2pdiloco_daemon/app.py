"""The composition root: makes a node's parts, in the order in which they need each other.

    page -> network (p2pd, DHT, HTTP) -> spec -> replica and store -> core and shell -> learner

Leaving is the reverse of the reading order. The parts do not know this module.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Coroutine
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

from p2pdiloco.errors import P2PDilocoError
from p2pdiloco.optim.fragments import Fragment, fragments_of
from p2pdiloco.protocol.node import Node
from p2pdiloco.protocol.wire import PROTOCOL_VERSION
from p2pdiloco.signed_spec import SignedSpec
from p2pdiloco.spec import RunSpec
from p2pdiloco_bootstrap.addresses import split_peer
from p2pdiloco_bootstrap.discovery import Discovery
from p2pdiloco_bootstrap.host import Host, HostOptions
from p2pdiloco_bootstrap.identity import Identity
from p2pdiloco_bootstrap.serving import Traffic
from p2pdiloco_bootstrap.shelf import exchange_application
from p2pdiloco_daemon.children.forkserver import Forkserver
from p2pdiloco_daemon.chores import (
    SettleRequest,
    compare_with_partners,
    discover,
    keep_house,
    settle_when_asked,
    tell_of_sleep,
)
from p2pdiloco_daemon.exchange import Exchange, ExchangeError
from p2pdiloco_daemon.lag import LagMonitor
from p2pdiloco_daemon.learner import learner as learners
from p2pdiloco_daemon.learner.learner import Learner, LearnerOptions, running_learner
from p2pdiloco_daemon.log import configure_logging
from p2pdiloco_daemon.machine import ServedLog, measure_machine
from p2pdiloco_daemon.network import Network, running_network
from p2pdiloco_daemon.node import Expected, NodeShell
from p2pdiloco_daemon.report import LearnerReport, Reporter
from p2pdiloco_daemon.rl.part import RlPart
from p2pdiloco_daemon.rollouts.backends import TORCH
from p2pdiloco_daemon.rollouts.completions import Completions
from p2pdiloco_daemon.rollouts.report import RolloutReport
from p2pdiloco_daemon.rollouts.worker import (
    Policy,
    RolloutEvent,
    RolloutOptions,
    Rollouts,
    running_rollouts,
)
from p2pdiloco_daemon.signals import stop_signals
from p2pdiloco_daemon.status import view
from p2pdiloco_daemon.status.app import COMPLETIONS_PATH, build_app, serving_page
from p2pdiloco_daemon.storage.files import lock_directory
from p2pdiloco_daemon.storage.holdings import Holdings
from p2pdiloco_daemon.storage.place import Place, open_place
from p2pdiloco_daemon.storage.shelf import NodeShelf
from p2pdiloco_daemon.storage.store import Store
from p2pdiloco_daemon.waking import mixing_of, replica_of, require_memory, wake_up

SPEC_RETRY_S = 2.0
GOODBYE_S = 2.0

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
    rollouts: bool = False
    """Whether to answer completions, too; in an rl run a node generates in any case."""
    rollout_backend: str = TORCH
    supervisor_fd: int | None = None
    """See `stop_signals`."""
    forkserver: Forkserver | None = None
    """Makes learners and rollout workers at once."""


class StatusBoard:
    """What the page reads: a few words while the node starts, then the reporter's."""

    def __init__(self, place: Place, peer_id: str, started: float) -> None:
        self._place = place
        self.started = started
        self.sentence = "Starting."
        self.peer_id = peer_id
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


@dataclass(frozen=True, slots=True)
class Ground:
    """What a node stands on before it knows its run."""

    options: NodeOptions
    place: Place
    identity: Identity
    network: Network
    exchange: Exchange
    traffic: Traffic
    board: StatusBoard
    settle: SettleRequest
    served: ServedLog
    completions: Completions | None
    """None if this node does not answer any."""
    stop: asyncio.Event


@dataclass(frozen=True, slots=True)
class Part:
    """A node's part in its run."""

    signed: SignedSpec
    holdings: Holdings
    shell: NodeShell
    report: LearnerReport
    look_again: asyncio.Event
    """Set when members should be looked for at once."""
    rl: RlPart | None
    """Only in a run that learns from rollouts."""


async def run_node(options: NodeOptions) -> None:
    """Runs a node until one of `stop_signals`. UserError for what a person has to mend."""
    configure_logging()
    with stop_signals(options.supervisor_fd) as stop:
        async with _ground(options, stop) as ground:
            signed = await _until_stopped(_find_spec(ground), stop)
            if signed:
                await _take_part(ground, signed)


@asynccontextmanager
async def _ground(options: NodeOptions, stop: asyncio.Event) -> AsyncIterator[Ground]:
    started = asyncio.get_running_loop().time()
    async with AsyncExitStack() as stack:
        stack.enter_context(lock_directory(options.directory))
        place = open_place(options.directory, options.invite)
        identity = Identity.load_or_create(place.identity_path)
        board, settle = StatusBoard(place, identity.peer_id, started), SettleRequest()
        served = ServedLog()
        completions = Completions() if options.rollouts else None
        page = build_app(
            board.read,
            settle=settle,
            take_served=served.take,
            complete=completions.handle if completions else None,
        )
        board.page_url = await stack.enter_async_context(serving_page(page, options.status_port))
        logger.info("the status page is at %s", board.page_url)
        network = await stack.enter_async_context(
            running_network(partial(_host_options, options, place), on_end=stop.set)
        )
        traffic = Traffic()
        exchange = Exchange(network.session, traffic)
        yield Ground(
            options=options,
            place=place,
            identity=identity,
            network=network,
            exchange=exchange,
            traffic=traffic,
            board=board,
            settle=settle,
            served=served,
            completions=completions,
            stop=stop,
        )


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


async def _find_spec(ground: Ground) -> SignedSpec:
    """From the directory, else from whoever has it; asks for ever, and says what is wrong."""
    place, exchange, board = ground.place, ground.exchange, ground.board
    if kept := place.spec():
        return kept
    bootstraps = list(dict.fromkeys(split_peer(address)[1] for address in place.bootstraps))
    while True:
        peers = dict.fromkeys(bootstraps)
        if host := ground.network.host:
            with suppress(*Expected):
                members = await Discovery(host, place.run_id).members()
                peers |= dict.fromkeys(member.peer for member in members)
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


async def _take_part(ground: Ground, signed: SignedSpec) -> None:
    """From the spec to the goodbye."""
    fragments = fragments_of(signed.spec)
    require_memory(fragments, signed.spec)
    async with AsyncExitStack() as stack:
        worker = stack.enter_context(ThreadPoolExecutor(1, "worker"))
        disk = stack.enter_context(ThreadPoolExecutor(1, "disk"))
        store = stack.enter_context(Store(ground.place.directory, len(fragments), is_locked=True))
        holdings = Holdings(replica_of(signed.spec, fragments), store, worker, disk)
        node = await _wake(ground, signed, holdings)
        tasks = await stack.enter_async_context(_tasks())
        mixing = mixing_of(signed.spec, holdings, node.state.me)
        shell = NodeShell(node, holdings, ground.exchange, tasks, mixing)
        rl = RlPart(signed, shell, ground.traffic) if signed.spec.rl else None
        part = Part(signed, holdings, shell, LearnerReport(), asyncio.Event(), rl)
        on_the_network = partial(_on_the_network, ground, part)
        await stack.enter_async_context(ground.network.working(on_the_network))
        lag = LagMonitor(partial(tell_of_sleep, shell, part.look_again))
        ground.board.reporter = _reporter(ground, part, lag)
        owner = tasks.create_task(shell.run(), name="owner of the core")
        options = _learner_options(ground, signed.spec, fragments)
        on_learner = partial(_on_learner, part)
        learner = await stack.enter_async_context(running_learner(options, on_learner, worker))
        shell.learner = learner
        rollouts = None
        if ground.options.rollouts or rl:
            rollouts = await stack.enter_async_context(_generating(ground, part, worker))
        if rl:
            rl.learner, rl.rollouts = learner, rollouts
        chores = [
            tasks.create_task(work, name=name)
            for name, work in _chores(ground, part, learner, lag).items()
        ]
        await ground.stop.wait()
        ground.board.reporter.stopping = True
        for chore in chores:
            chore.cancel()
        await _leave(shell, learner, rollouts, owner)
        shell.save()


async def _wake(ground: Ground, signed: SignedSpec, holdings: Holdings) -> Node:
    """The core, as its last life left it."""
    ground.board.sentence = "Reading what is on disk."
    now = asyncio.get_running_loop().time()
    return await holdings.disk.run(wake_up, holdings, signed, ground.identity, ground.place, now)


async def _on_the_network(ground: Ground, part: Part, host: Host) -> None:
    """As long as this host lives: serves what is held, and looks for members."""
    shelf = NodeShelf(part.signed.pack(), part.shell.node, part.holdings)
    server = exchange_application(
        shelf, ground.traffic, part.shell.take_message, gossip=part.shell.gossip
    )
    if ground.completions:
        server.router.add_post(COMPLETIONS_PATH, ground.completions.handle)
    if part.rl:
        part.rl.add_to(server)
    async with host.serving(server):
        await discover(host, ground.place.run_id, part.shell, part.holdings, part.look_again)


@asynccontextmanager
async def _generating(ground: Ground, part: Part, worker: Executor) -> AsyncIterator[Rollouts]:
    """A rollout worker, which answers completions too where that is wanted, as long as the block
    lasts."""
    if part.signed.spec.rl:
        part.shell.tell("this run learns from rollouts: this node generates, too")
    now, report = asyncio.get_running_loop().time, RolloutReport()

    def on_event(event: RolloutEvent) -> None:
        report.take(event, now())

    options = RolloutOptions(
        spec=part.signed.spec,
        run_id=part.signed.run_id,
        fragments=part.holdings.replica.fragments,
        newest=partial(_newest_policy, part.holdings),
        device=ground.options.device,
        threads=ground.options.threads,
        backend=ground.options.rollout_backend,
        forkserver=ground.options.forkserver,
    )
    async with running_rollouts(options, on_event, worker) as rollouts:
        assert ground.board.reporter
        ground.board.reporter.rollouts = report
        if ground.completions:
            ground.completions.model = part.signed.spec.name
            ground.completions.rollouts = rollouts
        try:
            yield rollouts
        finally:
            if ground.completions:
                ground.completions.rollouts = None


def _newest_policy(holdings: Holdings) -> Policy | None:
    """The anchors, once all are held."""
    held = [holdings.replica.state(p) for p in range(len(holdings.replica.fragments))]
    states = [state for state in held if state]
    if len(states) < len(held):
        return None
    return Policy(sum(state.version for state in states), [state.anchor for state in states])


def _reporter(ground: Ground, part: Part, lag: LagMonitor) -> Reporter:
    return Reporter(
        spec=part.signed.spec,
        run_id=part.signed.run_id,
        started=ground.board.started,
        now=asyncio.get_running_loop().time,
        node=part.shell.node,
        shell=part.shell,
        holdings=part.holdings,
        traffic=ground.traffic,
        lag=lag,
        learner=part.report,
        network=ground.network,
        dispatched=part.rl.status if part.rl else None,
        page_url=ground.board.page_url,
    )


def _chores(
    ground: Ground, part: Part, learner: Learner, lag: LagMonitor
) -> dict[str, Coroutine[None, None, None]]:
    """What runs beside the core until the node leaves."""
    chores = {
        "lag monitor": lag.run(),
        "housekeeping": keep_house(
            part.holdings, part.shell, ground.traffic, ground.place.directory
        ),
        "settling": settle_when_asked(ground.settle, learner, part.shell, part.report),
        "comparing": compare_with_partners(part.shell),
    }
    if part.rl:
        chores["dispatching"] = part.rl.dispatch(ground.exchange, ground.network.session)
    if part.signed.spec.sync.slack_steps:
        chores["measuring"] = measure_machine(
            ground.served, part.holdings, part.shell, ground.traffic, part.report
        )
    return chores


async def _leave(
    shell: NodeShell, learner: Learner, rollouts: Rollouts | None, owner: asyncio.Task[None]
) -> None:
    logger.info("leaving")
    async with asyncio.TaskGroup() as stops:
        stops.create_task(learner.stop())
        if rollouts:
            stops.create_task(rollouts.stop())
    await shell.leave(GOODBYE_S)
    await owner


@asynccontextmanager
async def _tasks() -> AsyncIterator[asyncio.TaskGroup]:
    async with asyncio.TaskGroup() as tasks:
        yield tasks


def _learner_options(
    ground: Ground, spec: RunSpec, fragments: tuple[Fragment, ...]
) -> LearnerOptions:
    return LearnerOptions(
        spec=spec,
        fragments=fragments,
        directory=ground.place.directory,
        node_key=ground.identity.peer_id,
        device=ground.options.device,
        threads=ground.options.threads,
        forkserver=ground.options.forkserver,
    )


def _on_learner(part: Part, event: learners.LearnerEvent) -> None:
    part.report.take(event, asyncio.get_running_loop().time())
    part.shell.on_learner(event)
    if part.rl:
        part.rl.on_learner(event)
