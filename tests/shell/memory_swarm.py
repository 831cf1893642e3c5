"""Nodes without processes: real shell, core, holdings and store, over an exchange in memory.

The learner is a fake whose numbers drift towards `TARGET`, at a pace in virtual time.
"""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from virtual_clock import CountedExecutor, run_virtual

from p2pdiloco.errors import PeerError
from p2pdiloco.optim.fragments import plan_fragments
from p2pdiloco.optim.mixing import Continuation, part_of
from p2pdiloco.protocol import events
from p2pdiloco.protocol.naming import PeerId
from p2pdiloco.protocol.node import Node
from p2pdiloco.protocol.pacing import SyncTimes
from p2pdiloco.protocol.state import NodeConfig
from p2pdiloco.simulation.machine import KeyedSigner
from p2pdiloco_bootstrap.serving import Body, FilePart
from p2pdiloco_bootstrap.shelf import Contribution, GossipShelf, MixVector, RecordsPage
from p2pdiloco_daemon.exchange import (
    CHUNKS_IN_FLIGHT_MAX,
    MESSAGE_TIMEOUT_S,
    Busy,
    Chunk,
    Exchange,
    Refused,
    Unreachable,
)
from p2pdiloco_daemon.learner import learner as learners
from p2pdiloco_daemon.mixing import Mixing, MixSettings
from p2pdiloco_daemon.node import NodeShell
from p2pdiloco_daemon.storage.holdings import Holdings
from p2pdiloco_daemon.storage.replica import FragmentState, Replica, Vector, genesis, pack_state
from p2pdiloco_daemon.storage.shelf import NodeShelf
from p2pdiloco_daemon.storage.store import Store

A, B, C, BOOT = (PeerId(name) for name in ("anna", "bert", "cleo", "boot"))
RUN = "run"
SHAPES = {"embedding": (6, 4), "layer": (5, 4), "norm": (7,)}
FRAGMENTS = plan_fragments(SHAPES, 3, {"embedding"})
GENESIS = tuple(genesis(f.index, np.full(f.size, 1.0, np.float32)) for f in FRAGMENTS)
OUTER_TENSORS = ("embedding", "layer")
"""What a blocking mix is for; the norm is left as it is."""
TARGET = 3.0
NOISE = 0.01
"""Deviation of a step; a learner that has arrived would have nothing more to contribute."""
TOKENS_PER_STEP = 10
TIMES = SyncTimes(inner_steps=6, num_fragments=3, overlap_steps=2, quorum=1, grace_factor=0.8)
PACING = "fixed"


def rot(state: FragmentState | None) -> None:
    """Flips a bit of the anchor, which nobody may write to."""
    assert state
    state.anchor.setflags(write=True)
    state.anchor.view(np.uint32)[3] ^= 1 << 20
    state.anchor.setflags(write=False)


def new_replica() -> Replica:
    return Replica(
        FRAGMENTS, outer_learning_rate=0.7, outer_momentum=0.3, wire="float32", merge_rule="rda"
    )


class GenesisShelf:
    """The first peer: version 0 of everything."""

    async def records(self, fragment: int, since: int) -> RecordsPage:
        return RecordsPage((), ((0, GENESIS[fragment].digest),))

    async def state(self, fragment: int, version: int, digest: str) -> bytes:
        return pack_state(GENESIS[fragment])

    async def merge(self, fragment: int, version: int, digest: str) -> None:
        return None

    async def contribution(
        self, peer: str, fragment: int, version: int, term: int, attempt: int
    ) -> Contribution | None:
        return None


class Donates(Protocol):
    """Of a `p2pdiloco_bootstrap.shelf.Shelf`, what is asked for here."""

    async def records(self, fragment: int, since: int) -> RecordsPage | None: ...
    async def merge(self, fragment: int, version: int, digest: str) -> Body | None: ...
    async def state(self, fragment: int, version: int, digest: str) -> Body | None: ...
    async def contribution(
        self, peer: str, fragment: int, version: int, term: int, attempt: int
    ) -> Contribution | None: ...


TakeMessage = Callable[[str, bytes], bool]


@dataclass(repr=False)
class Network:
    """Who serves what, and what is wrong with whom. To and from a `hung` peer nothing arrives."""

    shelves: dict[str, Donates] = field(default_factory=dict)
    inboxes: dict[str, TakeMessage] = field(default_factory=dict)
    gossip: dict[str, GossipShelf] = field(default_factory=dict)
    mixed: Counter[str] = field(default_factory=Counter)
    """Vectors that each peer has received of partners."""
    hung: set[str] = field(default_factory=set)
    latency_s: float = 0.02
    state_chunk_s: dict[str, float] = field(default_factory=dict)
    """What a chunk of a state takes to a peer with a slow link."""
    state_chunks: Counter[str] = field(default_factory=Counter)
    """Chunks of states that each peer has received."""

    def __post_init__(self) -> None:
        self.shelves[BOOT] = GenesisShelf()

    async def reach(self, me: str, peer: str) -> None:
        await asyncio.sleep(self.latency_s)
        if self.hung & {me, peer}:
            await asyncio.sleep(MESSAGE_TIMEOUT_S)
            raise Unreachable(f"{peer} is silent")
        if peer not in self.shelves:
            raise Unreachable(f"{peer}: connection refused")


class MemoryExchange(Exchange):
    """The calls of an `Exchange`, without HTTP; `fetch` is the real one."""

    def __init__(self, me: str, network: Network) -> None:
        self._me = me
        self._network = network
        self._slots = asyncio.Semaphore(CHUNKS_IN_FLIGHT_MAX)

    async def send(self, peer: str, message: bytes) -> None:
        await self._network.reach(self._me, peer)
        if peer not in self._network.inboxes:
            raise Refused(peer, 404, "takes no messages")
        try:
            taken = self._network.inboxes[peer](self._me, message)
        except PeerError as error:
            raise Refused(peer, 400, str(error)) from error
        if not taken:
            raise Busy(peer, 503, "inbox full")

    async def records(self, peer: str, fragment: int, since: int) -> RecordsPage:
        await self._network.reach(self._me, peer)
        page = await self._network.shelves[peer].records(fragment, since)
        if page is None:
            raise Refused(peer, 404, "not kept here")
        return RecordsPage.unpack(page.pack())

    async def pull_contribution(
        self, peer: str, fragment: int, version: int, term: int, attempt: int, max_bytes: int
    ) -> Contribution:
        await self._network.reach(self._me, peer)
        shelf = self._network.shelves[peer]
        found = await shelf.contribution(self._me, fragment, version, term, attempt)
        if found is None:
            raise Refused(peer, 404, "not kept here")
        if len(found.payload) > max_bytes:
            raise PeerError(f"{peer} announces {len(found.payload)} bytes")
        return found

    async def pull_vector(
        self, peer: str, part: str, fragment: int, round_: int, held: int | None, max_bytes: int
    ) -> MixVector:
        await self._network.reach(self._me, peer)
        found = await self._network.gossip[peer].vector_for(self._me, part, fragment, round_, held)
        if found is None:
            raise Refused(peer, 404, "not kept here")
        if len(found.payload) > max_bytes:
            raise PeerError(f"{peer} announces {len(found.payload)} bytes")
        self._network.mixed[self._me] += 1
        return found

    async def fetch_chunk(self, donor: str, chunk: Chunk) -> None:
        await self._network.reach(self._me, donor)
        _, _, kind, fragment, version, digest = chunk.path.split("/")
        shelf = self._network.shelves[donor]
        read = shelf.merge if kind == "merge" else shelf.state
        body = await read(int(fragment), int(version), digest)
        if isinstance(body, FilePart):
            body = body.path.read_bytes()[body.offset :][: body.num_bytes]
        if not isinstance(body, bytes | bytearray) or len(body) != chunk.total_bytes:
            raise PeerError(f"{donor} has not got {chunk.path}")
        if kind == "state":
            await asyncio.sleep(self._network.state_chunk_s.get(self._me, 0.0))
        chunk.place[:] = body[chunk.start : chunk.start + len(chunk.place)]
        self._network.state_chunks[self._me] += kind == "state"
        chunk.progress()


@dataclass(repr=False)
class FakeLearner:
    """Steps for ever once it received every fragment; takes installs, then answers snapshots, at
    its step boundaries, as the real one.
    """

    on_event: Callable[[learners.LearnerEvent], None]
    step_s: float = 0.5
    pull: float = 0.05
    """The share of the way to `TARGET` that a step makes."""
    values: dict[int, Vector] = field(default_factory=dict)
    versions: dict[int, int] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)
    steps_total: int = 0
    arrivals: dict[int, tuple[int, Vector]] = field(default_factory=dict)
    asked: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Fragment -> (request id, base version)."""
    held: set[int] = field(default_factory=set)
    """Fragments for which it stands still once their snapshot was taken."""
    endings: dict[int, tuple[int, Vector, float]] = field(default_factory=dict)
    """Fragment -> (version, base, share) to go on from."""
    blends: dict[int, tuple[int, Vector]] = field(default_factory=dict)
    """Fragment -> (version, what to add)."""
    num_requests: int = 0
    paused: bool = False
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(1))

    def install(self, fragment: int, version: int, values: Vector) -> bool:
        self.arrivals[fragment] = (version, values)
        return True

    def snapshot(self, fragment: int, base_version: int, *, hold: bool = False) -> int:
        self.num_requests += 1
        self.asked[fragment] = (self.num_requests, base_version)
        if hold:
            self.held.add(fragment)
        return self.num_requests

    def end_round(self, fragment: int, version: int, base: Vector, share: float) -> bool:
        self.endings[fragment] = (version, base, share)
        return True

    def blend(self, fragment: int, version: int, change: Vector) -> bool:
        self.blends[fragment] = (version, change)
        return True

    async def run(self) -> None:
        self.on_event(learners.Ready(1, "cpu", 0))
        while True:
            await asyncio.sleep(self.step_s)
            self._boundary()
            stands = any(p in self.held and p not in self.asked for p in self.values)
            if len(self.values) == len(FRAGMENTS) and not (self.paused or stands):
                self._step()

    def _boundary(self) -> None:
        for p, (version, values) in self.arrivals.items():
            steps = self.steps.get(p, 0)
            self.values[p], self.versions[p], self.steps[p] = values.copy(), version, 0
            self.held.discard(p)
            self.on_event(learners.Installed(p, version, steps, steps * TOKENS_PER_STEP))
        self.arrivals = {}
        for p, ending in list(self.endings.items()):
            if self.steps[p]:
                self._go_on(p, *ending)
        for p, (version, change) in self.blends.items():
            done = self.versions[p] == version
            if done:
                self.values[p] += change
            self.on_event(learners.Blended(p, done))
        self.blends = {}
        for p, (request_id, base) in list(self.asked.items()):
            if self.versions.get(p, -1) > base:
                del self.asked[p]
                self.on_event(learners.SnapshotRefused(request_id, p, "a newer version is here"))
            elif self.versions.get(p) == base and self.steps[p]:
                del self.asked[p]
                taken = self.steps[p], self.steps[p] * TOKENS_PER_STEP
                values = self.values[p].copy()
                self.on_event(learners.Snapshot(request_id, p, base, *taken, values))

    def _go_on(self, p: int, version: int, base: Vector, share: float) -> None:
        del self.endings[p]
        local, steps = self.values[p], self.steps[p]
        self.values[p] = Continuation(base, share).start(local)
        self.versions[p], self.steps[p] = version, 0
        tokens = steps * TOKENS_PER_STEP
        self.on_event(learners.RoundLeft(p, version, steps, tokens, local))

    def _step(self) -> None:
        for p, values in self.values.items():
            noise = self.rng.normal(0, NOISE, len(values)).astype(np.float32)
            values += np.float32(self.pull) * (np.float32(TARGET) - values) + noise
            self.steps[p] += 1
        self.steps_total += 1
        self.on_event(
            learners.StepsDone(
                step=self.steps_total,
                steps=1,
                tokens=TOKENS_PER_STEP,
                step_s=self.step_s,
                stall_s=0.0,
                loss=1.0,
            )
        )


@dataclass(frozen=True, repr=False)
class Living:
    """A node while it lives. No repr: a failed assertion would print all of it."""

    node: Node
    shell: NodeShell
    holdings: Holdings
    tasks: asyncio.TaskGroup
    learner: FakeLearner

    def start_learner(self) -> None:
        self.shell.learner = self.learner
        self.tasks.create_task(self.learner.run(), name="learner")

    @property
    def versions(self) -> list[int]:
        return [register.version for register in self.node.state.registers]

    @property
    def digests(self) -> list[str | None]:
        held = [self.holdings.replica.state(f.index) for f in FRAGMENTS]
        return [state.digest if state else None for state in held]

    @property
    def distance(self) -> float:
        """Of the anchors from `TARGET`; 2 at genesis."""
        held = [self.holdings.replica.state(f.index) for f in FRAGMENTS]
        return max(float(np.abs(state.anchor - TARGET).max()) for state in held if state)


def new_node(
    holdings: Holdings,
    now: float,
    me: PeerId = A,
    kind: type[Node] = Node,
    term_merges: int = 2,
    **changes: Any,
) -> Node:
    """The core, with what is on disk; `changes` are fields of its config."""
    signer = KeyedSigner(me)
    digests = [state.digest for state in GENESIS]
    chains = holdings.resume(RUN, digests, signer, unvouched="gossip" in changes)
    saved = holdings.load_json("node") or {}
    config = NodeConfig(
        run_id=RUN,
        me=me,
        name=me,
        incarnation=int(saved.get("incarnation", 0)) + 1,
        genesis_digests=tuple(digests),
        genesis_donors=(BOOT,),
        times=TIMES,
        term_merges=term_merges,
        pacing=PACING,
    )
    node = kind(
        replace(config, **changes), signer, random.Random(me), now, chains, saved.get("core")
    )
    holdings.store.save_json("node", saved_state(node))
    return node


def saved_state(node: Node) -> dict[str, Any]:
    return {"incarnation": node.state.config.incarnation, "core": node.save()}


@asynccontextmanager
async def open_holdings(directory: Path) -> AsyncIterator[Holdings]:
    loop = asyncio.get_running_loop()
    with (
        Store(directory, len(FRAGMENTS)) as store,
        CountedExecutor(loop) as worker,
        CountedExecutor(loop) as disk,
    ):
        yield Holdings(new_replica(), store, worker, disk)


@asynccontextmanager
async def open_node(
    network: Network,
    directory: Path,
    me: PeerId = A,
    kind: type[Node] = Node,
    **changes: Any,
) -> AsyncIterator[Living]:
    """A node whose owner runs; its learner is not started yet."""
    async with AsyncExitStack() as stack:
        holdings = await stack.enter_async_context(open_holdings(directory))
        now = asyncio.get_running_loop().time()
        node = await holdings.disk.run(lambda: new_node(holdings, now, me, kind, **changes))
        async with asyncio.TaskGroup() as tasks:
            mixing = mixing_of(holdings, me) if changes else None
            shell = NodeShell(node, holdings, MemoryExchange(me, network), tasks, mixing)
            if shell.gossip:
                network.gossip[me] = shell.gossip
            network.shelves[me] = NodeShelf(b"", node, holdings)
            network.inboxes[me] = shell.take_message
            owner = tasks.create_task(shell.run(), name="owner")
            try:
                yield Living(node, shell, holdings, tasks, FakeLearner(shell.on_learner))
            finally:
                del network.shelves[me], network.inboxes[me]
                owner.cancel()


def mixing_of(holdings: Holdings, me: PeerId) -> Mixing:
    settings = MixSettings(
        me=me,
        learning_rate=0.7,
        momentum=0.3,
        start_wire="int8",
        outer_wire="float32",
        merge_rule="mean",
        outer_parts=tuple(part_of(f, OUTER_TENSORS) for f in FRAGMENTS),
        partners_return=True,
    )
    return Mixing(holdings, settings)


async def live(
    network: Network,
    directory: Path,
    me: PeerId,
    nodes: dict[PeerId, Living],
    **changes: Any,
) -> None:
    """A whole node, until it is cancelled, which is its `kill -9`."""
    async with open_node(network, directory, me, **changes) as living:
        nodes[me] = living
        living.start_learner()
        living.tasks.create_task(_keep_house(living), name="housekeeping")
        living.shell.post(events.PeersFound(tuple(PeerId(p) for p in network.shelves)))
        await asyncio.Event().wait()


async def _keep_house(living: Living) -> None:
    while True:
        await asyncio.sleep(2.0)
        living.holdings.save_json("node", saved_state(living.node))


class Swarm:
    """Nodes by name; each has a directory, which survives it."""

    def __init__(self, directory: Path, **changes: Any) -> None:
        self.network = Network()
        self._changes = changes
        self.nodes: dict[PeerId, Living] = {}
        self._directory = directory
        self._lives: dict[PeerId, asyncio.Task[None]] = {}

    def start(self, *peers: PeerId) -> None:
        for me in peers:
            life = live(self.network, self._directory / me, me, self.nodes, **self._changes)
            self._lives[me] = asyncio.create_task(life, name=me)

    async def kill(self, *peers: PeerId) -> None:
        for me in peers:
            life = self._lives.pop(me)
            del self.nodes[me]
            life.cancel()
            await asyncio.wait([life])

    async def train(self, seconds: float) -> None:
        """A life that ends by itself ends the test."""
        done, _ = await asyncio.wait(self._lives.values(), timeout=seconds)
        for life in done:
            life.result()

    async def settle(self) -> None:
        """As the demo at its end: all reach the newest heads and stay there."""
        for living in self.nodes.values():
            living.learner.paused = True
            living.shell.post(events.SettleAsked())
        await self.train(20)
        assert all(living.node.is_settled for living in self.nodes.values())

    def versions(self) -> list[int]:
        """The newest of each fragment."""
        return [max(each) for each in zip(*(n.versions for n in self.nodes.values()), strict=True)]


SwarmScenario = Callable[[Swarm], Coroutine[None, None, None]]


def play_swarm(directory: Path, scenario: SwarmScenario, **changes: Any) -> None:
    """`changes` are fields of the nodes' configs: nodes that gossip, or a quorum."""

    async def main() -> None:
        swarm = Swarm(directory, **changes)
        try:
            await scenario(swarm)
        finally:
            await swarm.kill(*list(swarm.nodes))

    run_virtual(main())
