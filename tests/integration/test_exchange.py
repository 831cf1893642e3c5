"""Real hosts on loopback: messages, fetches, and what happens when peers die, hang or lie."""

import asyncio
import os
import random
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import pytest
from yarl import URL

from p2pdiloco.errors import PeerError, UserError
from p2pdiloco.learn.predictions import PREDICTIONS_BYTES
from p2pdiloco.protocol.uplink import Uplink
from p2pdiloco.signed_spec import SignedSpec, bytes_to_sign, canonical_bytes
from p2pdiloco.spec import GenesisSpec, RunSpec, TensorLayout
from p2pdiloco_bootstrap import dht as dht_module
from p2pdiloco_bootstrap import discovery as discovery_module
from p2pdiloco_bootstrap.app import BootstrapOptions, running_bootstrap
from p2pdiloco_bootstrap.control_sockets import socket_prefix
from p2pdiloco_bootstrap.discovery import Discovery
from p2pdiloco_bootstrap.host import Host, HostOptions, open_host
from p2pdiloco_bootstrap.identity import Identity, verify_with_key
from p2pdiloco_bootstrap.invite import parse_invite
from p2pdiloco_bootstrap.p2pd import DaemonEnded
from p2pdiloco_bootstrap.serving import (
    MAX_REQUESTS_PER_PEER,
    Body,
    FilePart,
    Traffic,
    serving_on_tcp,
)
from p2pdiloco_bootstrap.shelf import (
    MESSAGE_BYTES_MAX,
    Contribution,
    MixVector,
    RecordsPage,
    exchange_application,
    merge_path,
    state_path,
)
from p2pdiloco_bootstrap.streams import peer_url
from p2pdiloco_daemon import fetch
from p2pdiloco_daemon.exchange import Busy, Exchange, FetchFailed, Refused, Unreachable

pytestmark = [pytest.mark.loopback, pytest.mark.timeout(600)]

T = TypeVar("T")

LOOPBACK = ("127.0.0.1", 0)
DATA = random.Random(1).randbytes(8 << 20)
DIGEST = blake2b(DATA, digest_size=32).hexdigest()
MERGE = merge_path(0, 1, DIGEST)
IDLE_S = 3.0
"""Longer than a living donor on this machine ever keeps a byte back."""


class FakeShelf:
    """Serves `data` under any digest; `on_read` may do what a test needs at the n-th request."""

    def __init__(self, data: bytes = DATA) -> None:
        self.data: Body | None = data
        self.num_reads = 0
        self.on_read: Callable[[int], None] = lambda number: None
        self.gate: asyncio.Event | None = None
        """Before it opens, nobody gets the spec or a merge."""

    async def spec(self) -> bytes:
        if self.gate is not None:
            await self.gate.wait()
        return b"the spec"

    async def records(self, fragment: int, since: int) -> RecordsPage | None:
        records = tuple(b"record %d" % version for version in range(since + 1, 4))
        return RecordsPage(records, ((2, "ab" * 32),)) if fragment == 0 else None

    async def merge(self, fragment: int, version: int, digest: str) -> Body | None:
        if self.gate is not None:
            await self.gate.wait()
        self.num_reads += 1
        self.on_read(self.num_reads)
        return self.data

    async def state(self, fragment: int, version: int, digest: str) -> Body | None:
        return self.data

    async def contribution(
        self, peer: str, fragment: int, version: int, term: int, attempt: int
    ) -> Contribution | None:
        payload = f"{peer} {fragment} {version} {term} {attempt}".encode()
        return Contribution(7, 3584, payload) if fragment == 0 else None


class CountingUplink(Uplink):
    """Knows how much it ever let through."""

    num_bytes = 0

    def wait_s(self, num_bytes: int, now: float) -> float:
        self.num_bytes += num_bytes
        return super().wait_s(num_bytes, now)


class FakeGossip:
    """Tells who asked for what; of fragment 1 nothing is kept."""

    async def vector_for(
        self, peer: str, part: str, fragment: int, round_: int, held: int | None
    ) -> MixVector | None:
        return MixVector(held, f"{peer} {part} {round_}".encode()) if fragment == 0 else None

    def predictions(self) -> bytes | None:
        return bytes(PREDICTIONS_BYTES)


class Node:
    """A host that serves a fake shelf and keeps its messages."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.shelf = FakeShelf()
        self.traffic = Traffic()
        self.exchange = Exchange(host.session(), self.traffic)
        self.inbox: list[tuple[str, bytes]] = []
        self.inbox_size = 8

    @property
    def peer(self) -> str:
        return self.host.peer_id

    def application(self) -> aiohttp.web.Application:
        return exchange_application(self.shelf, self.traffic, self.on_message, FakeGossip())

    def on_message(self, peer: str, body: bytes) -> bool:
        if body == b"garbage":
            raise PeerError("not a message")
        if len(self.inbox) >= self.inbox_size:
            return False
        self.inbox.append((peer, body))
        return True


@asynccontextmanager
async def open_node(directory: Path, name: str, *bootstraps: str) -> AsyncIterator[Node]:
    options = HostOptions(
        identity_path=directory / f"{name}.key", listen=LOOPBACK, bootstraps=bootstraps
    )
    async with open_host(options) as host:
        node = Node(host)
        async with host.serving(node.application()):
            yield node


class Swarm:
    """Three nodes and the bootstrap host, and the loop that they all live in."""

    def __init__(self, directory: Path, runner: asyncio.Runner) -> None:
        self.directory = directory
        self._runner = runner
        self.stack = AsyncExitStack()
        self.addresses: tuple[str, ...] = ()
        self.nodes: list[Node] = []

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(main)

    async def open(self) -> None:
        first = await self.stack.enter_async_context(open_node(self.directory, "bootstrap"))
        self.addresses = tuple(await first.host.addresses())
        for name in ("a", "b", "c"):
            opened = open_node(self.directory, name, *self.addresses)
            self.nodes.append(await self.stack.enter_async_context(opened))
        self.nodes.append(first)

    def open_node(self, name: str, *bootstraps: str) -> Any:
        return open_node(self.directory, name, *(bootstraps or self.addresses))


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    with asyncio.Runner() as runner, pytest.MonkeyPatch.context() as patch:
        patch.setattr(dht_module, "DHT_WAIT_S", 20.0)  # nobody hangs, and all may be slow
        patch.setattr(discovery_module, "DHT_TIMEOUT_S", 120.0)
        swarm = Swarm(tmp_path_factory.mktemp("swarm"), runner)
        try:
            runner.run(swarm.open())
            yield swarm
        finally:
            runner.run(swarm.stack.aclose())


@pytest.fixture
def short_path() -> Iterator[Path]:
    """Short enough for sockets, whatever pytest's own directories are called."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


@pytest.fixture(autouse=True)
def nobody_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a loaded machine a donor that only waits for it would be passed over."""
    monkeypatch.setattr(fetch, "STALLED_S", 1e9)
    monkeypatch.setattr(fetch, "PATIENCE_S", 1e9)


@pytest.fixture
def nodes(swarm: Swarm) -> list[Node]:
    for node in swarm.nodes:
        node.shelf.__init__()  # type: ignore[misc]
        node.inbox.clear()
        node.inbox_size = 8
    return swarm.nodes


def test_a_message_arrives_with_its_authenticated_sender(swarm: Swarm, nodes: list[Node]) -> None:
    a, b, *_ = nodes
    before = a.traffic.up["message"], b.traffic.down["message"]
    swarm.run(a.exchange.send(b.peer, b"hello"))
    assert b.inbox == [(a.peer, b"hello")]
    assert (a.traffic.up["message"], b.traffic.down["message"]) == (before[0] + 5, before[1] + 5)


def test_bodies_leave_through_the_bucket_and_messages_do_not(
    swarm: Swarm, nodes: list[Node]
) -> None:
    a, b, *_ = nodes
    uplink = b.traffic.uplink = CountingUplink(rate=1e9)
    assert swarm.run(a.exchange.get(b.peer, MERGE, len(DATA))) == DATA
    assert uplink.num_bytes == len(DATA)
    swarm.run(b.exchange.send(a.peer, b"hello"))
    assert uplink.num_bytes == len(DATA)
    assert list(uplink._best) == [a.peer]


def test_a_full_inbox_says_busy(swarm: Swarm, nodes: list[Node]) -> None:
    a, b, *_ = nodes
    b.inbox_size = 0
    with pytest.raises(Busy, match="503 inbox full"):
        swarm.run(a.exchange.send(b.peer, b"hello"))


def test_garbage_is_refused_with_a_reason_and_counted(swarm: Swarm, nodes: list[Node]) -> None:
    a, b, *_ = nodes
    with pytest.raises(Refused, match="400 not a message"):
        swarm.run(a.exchange.send(b.peer, b"garbage"))
    assert b.traffic.refused_messages == 1


def test_a_message_too_long_is_refused_on_both_sides(swarm: Swarm, nodes: list[Node]) -> None:
    a, b, *_ = nodes
    giant = bytes(MESSAGE_BYTES_MAX + 1)

    async def post_anyway() -> int:
        async with a.host.session().post(peer_url(b.peer, "/v1/message"), data=giant) as response:
            return response.status

    with pytest.raises(ValueError, match="at most 65536 bytes"):
        swarm.run(a.exchange.send(b.peer, giant))
    assert swarm.run(post_anyway()) == 413
    assert b.inbox == []


def test_records_and_contributions_come_with_their_numbers(swarm: Swarm, nodes: list[Node]) -> None:
    a, b, *_ = nodes
    page = swarm.run(a.exchange.records(b.peer, 0, 1))
    assert page == RecordsPage((b"record 2", b"record 3"), ((2, "ab" * 32),))
    pulled = swarm.run(a.exchange.pull_contribution(b.peer, 0, 3, 1, 2, 1000))
    assert pulled == Contribution(7, 3584, f"{a.peer} 0 3 1 2".encode())
    with pytest.raises(Refused, match="404 not kept here"):
        swarm.run(a.exchange.records(b.peer, 1, 0))
    with pytest.raises(Refused, match="404 not kept here"):
        swarm.run(a.exchange.pull_contribution(b.peer, 1, 3, 1, 2, 1000))
    with pytest.raises(PeerError, match=r"announces \d+ bytes .* at most 10 fit"):
        swarm.run(a.exchange.pull_contribution(b.peer, 0, 3, 1, 2, 10))


def test_partners_in_gossip_get_vectors_and_predictions(swarm: Swarm, nodes: list[Node]) -> None:
    a, b, *_ = nodes
    whole = swarm.run(a.exchange.pull_vector(b.peer, "start", 0, 7, None, 1000))
    assert whole == MixVector(None, f"{a.peer} start 7".encode())
    difference = swarm.run(a.exchange.pull_vector(b.peer, "outer", 0, 7, 6, 1000))
    assert difference == MixVector(6, f"{a.peer} outer 7".encode())
    with pytest.raises(Refused, match="404 not kept here"):
        swarm.run(a.exchange.pull_vector(b.peer, "start", 1, 7, None, 1000))
    with pytest.raises(PeerError, match=r"announces \d+ bytes .* at most 10 fit"):
        swarm.run(a.exchange.pull_vector(b.peer, "start", 0, 7, None, 10))
    assert swarm.run(a.exchange.predictions(b.peer)) == bytes(PREDICTIONS_BYTES)


def test_a_fetch_takes_from_all_donors(swarm: Swarm, nodes: list[Node]) -> None:
    a, *donors = nodes
    fetched = swarm.run(a.exchange.fetch([d.peer for d in donors], MERGE, len(DATA), DIGEST))
    assert fetched.data == DATA
    assert fetched.liars == ()
    assert set(fetched.bytes_by_donor) == {d.peer for d in donors}
    assert sum(fetched.bytes_by_donor.values()) == len(DATA)


def test_a_file_is_served_like_a_buffer(swarm: Swarm, nodes: list[Node], tmp_path: Path) -> None:
    a, b, *_ = nodes
    path = tmp_path / "payload"
    path.write_bytes(DATA[: 3 << 20])
    for body, content in (
        (path, DATA[: 3 << 20]),
        (FilePart(path, 1000, 2 << 20), DATA[1000 : 1000 + (2 << 20)]),
    ):
        b.shelf.data = body
        digest = blake2b(content, digest_size=32).hexdigest()
        asked = merge_path(0, 1, digest)
        fetched = swarm.run(a.exchange.fetch([b.peer], asked, len(content), digest))
        assert fetched.data == content
    path.unlink()
    with pytest.raises(Refused, match="404 no longer kept here"):
        swarm.run(a.exchange.get(b.peer, MERGE, 1 << 30))


def test_a_donor_killed_half_way_is_replaced(swarm: Swarm, nodes: list[Node]) -> None:
    a, b, c, _ = nodes
    data = DATA * 4
    digest = blake2b(data, digest_size=32).hexdigest()

    async def main() -> None:
        async with swarm.open_node("victim") as victim:
            killed = asyncio.Event()
            for donor in (victim, b, c):
                donor.shelf.data = data
            b.shelf.gate = c.shelf.gate = killed

            def kill_at_the_fifth(number: int) -> None:
                if number == 5:
                    os.kill(victim.host.daemon_pid, signal.SIGKILL)
                    killed.set()

            victim.shelf.on_read = kill_at_the_fifth
            donors = [victim.peer, b.peer, c.peer]
            fetched = await a.exchange.fetch(donors, merge_path(0, 1, digest), len(data), digest)
            assert fetched.data == data
            assert 0 < fetched.bytes_by_donor[victim.peer] <= 4 << 20
            with pytest.raises(DaemonEnded, match="ended with code -9"):
                await victim.host.watch()

    swarm.run(main())


def test_a_stopped_donor_costs_the_idle_timeout(swarm: Swarm, nodes: list[Node]) -> None:
    a, b, *_ = nodes

    async def main() -> None:
        async with swarm.open_node("stopped") as stopped:
            pid = stopped.host.daemon_pid
            stopped.shelf.on_read = lambda n: os.kill(pid, signal.SIGSTOP) if n == 3 else None
            with pytest.raises(Unreachable, match="silent"):
                stopped.shelf.num_reads = 2
                await a.exchange.get(stopped.peer, MERGE, 1 << 30, idle_timeout_s=IDLE_S)
            donors = [stopped.peer, b.peer]
            fetched = await a.exchange.fetch(
                donors, MERGE, len(DATA), DIGEST, idle_timeout_s=IDLE_S
            )
            assert fetched.data == DATA
            assert set(fetched.bytes_by_donor) == {b.peer}
            os.kill(pid, signal.SIGCONT)

    swarm.run(main())


def test_a_lying_donor_is_named(swarm: Swarm, nodes: list[Node]) -> None:
    a, b, liar, d = nodes
    liar.shelf.data = DATA[::-1]
    donors = [b.peer, liar.peer, d.peer]
    fetched = swarm.run(a.exchange.fetch(donors, MERGE, len(DATA), DIGEST))
    assert fetched.data == DATA
    assert fetched.liars == (liar.peer,)


def test_a_single_lying_donor_fails_the_fetch(swarm: Swarm, nodes: list[Node]) -> None:
    a, liar, *_ = nodes
    liar.shelf.data = bytes(100)
    with pytest.raises(FetchFailed, match="expected bytes with digest") as caught:
        swarm.run(a.exchange.fetch([liar.peer], MERGE, 100, DIGEST))
    assert caught.value.liars == (liar.peer,)


def test_a_donor_with_another_size_is_of_no_use(swarm: Swarm, nodes: list[Node]) -> None:
    a, b, *_ = nodes
    b.shelf.data = bytes(50)
    with pytest.raises(FetchFailed, match=r"416|was asked for bytes"):
        swarm.run(a.exchange.fetch([b.peer], MERGE, 100, DIGEST))


def test_nobody_at_home_is_unreachable(swarm: Swarm, nodes: list[Node]) -> None:
    a, *_ = nodes
    with pytest.raises(Unreachable):
        swarm.run(a.exchange.send(Identity.generate().peer_id, b"hello"))


def test_one_peer_cannot_ask_for_everything_at_once(swarm: Swarm, nodes: list[Node]) -> None:
    _, b, *_ = nodes
    b.shelf.gate = gate = asyncio.Event()

    async def main() -> None:
        async with serving_on_tcp(b.application()) as url, aiohttp.ClientSession() as session:
            over_tcp = Exchange(session, Traffic(), lambda peer, path: URL(url + path))
            one_too_many = MAX_REQUESTS_PER_PEER + 1
            asking = [asyncio.create_task(over_tcp.spec("b")) for _ in range(one_too_many)]
            [refused], _ = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
            assert isinstance(refused.exception(), Busy)
            gate.set()
            asking.remove(refused)
            assert [await task for task in asking] == [b"the spec"] * MAX_REQUESTS_PER_PEER

    swarm.run(main())


def test_the_same_application_works_on_plain_tcp(swarm: Swarm, nodes: list[Node]) -> None:
    b = nodes[1]

    async def main() -> None:
        async with serving_on_tcp(b.application()) as url, aiohttp.ClientSession() as session:
            exchange = Exchange(session, Traffic(), lambda peer, path: URL(url + path))
            await exchange.send("b", b"hello")
            assert (await exchange.fetch(["b"], MERGE, len(DATA), DIGEST)).data == DATA

    swarm.run(main())
    assert b.inbox == [("plain-tcp", b"hello")]


def test_members_are_found_and_expire_by_their_own_word(swarm: Swarm, nodes: list[Node]) -> None:
    a, b, *_ = nodes

    async def main() -> None:
        here, there = Discovery(a.host, "run 1"), Discovery(b.host, "run 1")
        before = time.time()
        assert await here.announce(("learner",))
        after = time.time()
        assert await there.announce()
        members = await there.members()
        assert [m.peer for m in members] == sorted([a.peer, b.peer])
        by_peer = {m.peer: m for m in members}
        assert by_peer[a.peer].roles == ("learner",)
        assert by_peer[a.peer].addresses == tuple(await a.host.addresses())
        assert before + 600 <= by_peer[a.peer].expires_at <= after + 600
        assert await Discovery(b.host, "another run").members() == ()
        offset = await here.clock_offset()
        assert offset is not None and offset.num_peers >= 2
        assert offset.problem() is None

    swarm.run(main())


def test_a_record_in_the_name_of_another_is_not_stored(swarm: Swarm, nodes: list[Node]) -> None:
    a, b, *_ = nodes

    async def main() -> None:
        discovery = Discovery(a.host, "run 2")
        await discovery.announce()
        expires_at = time.time() + 700
        for shard in range(16):
            key = f"p2pdiloco/run 2/members/{shard}"
            assert not await b.host.dht.store(key, b"forged", expires_at, subkey=a.peer)
        assert [m.peer for m in await Discovery(b.host, "run 2").members()] == [a.peer]

    swarm.run(main())


def test_one_dead_bootstrap_of_two_does_not_matter(swarm: Swarm, nodes: list[Node]) -> None:
    dead = f"/ip4/127.0.0.1/tcp/9/p2p/{Identity.generate().peer_id}"

    async def main() -> None:
        async with swarm.open_node("joiner", dead, *swarm.addresses) as joiner:
            unreached, reached = joiner.host.bootstraps()
            assert "/ip4/127.0.0.1/tcp/9: connection refused" in unreached.sentence()
            assert reached.connected
            await joiner.exchange.send(nodes[0].peer, b"hello")

    swarm.run(main())


def test_without_any_bootstrap_a_host_opens_and_says_why(swarm: Swarm) -> None:
    dead = f"/ip4/127.0.0.1/tcp/9/p2p/{Identity.generate().peer_id}"

    async def main() -> None:
        async with swarm.open_node("alone", dead) as alone:
            [status] = alone.host.bootstraps()
            assert not status.connected
            assert "connection refused" in status.sentence()
            assert await Discovery(alone.host, "run 3").announce()

    swarm.run(main())


def test_a_swarm_lives_on_when_its_bootstrap_is_killed(swarm: Swarm) -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            first = await stack.enter_async_context(open_node(swarm.directory, "first"))
            addresses = await first.host.addresses()
            x, y = [
                await stack.enter_async_context(swarm.open_node(name, *addresses))
                for name in ("x", "y")
            ]
            of_x, of_y = Discovery(x.host, "run 4"), Discovery(y.host, "run 4")
            assert await of_x.announce() and await of_y.announce()
            os.kill(first.host.daemon_pid, signal.SIGKILL)
            assert {m.peer for m in await of_x.members()} >= {x.peer, y.peer}
            await x.exchange.send(y.peer, b"still here")
            assert y.inbox == [(x.peer, b"still here")]
            assert await of_y.announce()
            late = await stack.enter_async_context(
                swarm.open_node("late", *addresses, *await x.host.addresses())
            )
            assert {m.peer for m in await Discovery(late.host, "run 4").members()} == {
                x.peer,
                y.peer,
            }
            await late.exchange.send(y.peer, b"joined through x")

    swarm.run(main())


def test_a_peer_that_comes_back_elsewhere_is_found_by_its_record(swarm: Swarm) -> None:
    async def main() -> None:
        async with swarm.open_node("anchor") as anchor:
            async with swarm.open_node("mover") as mover:
                await anchor.exchange.send(mover.peer, b"before")
            with pytest.raises(Unreachable):
                await anchor.exchange.send(mover.peer, b"meanwhile")
            async with swarm.open_node("mover") as moved:
                await Discovery(moved.host, "run 5").announce()
                await Discovery(anchor.host, "run 5").members()
                await anchor.exchange.send(moved.peer, b"after")
                assert moved.inbox == [(anchor.peer, b"after")]

    swarm.run(main())


def test_a_closed_host_leaves_nothing_behind(swarm: Swarm, short_path: Path) -> None:
    async def main() -> int:
        async with open_node(short_path, "guest", *swarm.addresses) as guest:
            assert len([name for name in os.listdir(short_path) if name.endswith(".sock")]) == 2
            return guest.host.daemon_pid

    pid = swarm.run(main())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert [path.name for path in short_path.iterdir()] == ["guest.key"]


def test_sockets_of_a_killed_host_are_taken_away_by_the_next(tmp_path: Path) -> None:
    for directory in (tmp_path, tmp_path / ("long-" * 15)):
        directory.mkdir(exist_ok=True)
        with socket_prefix(directory / "me.key") as prefix:
            leftover = Path(f"{prefix}p2pclient-12345678901.sock")
        leftover.parent.mkdir(mode=0o700, exist_ok=True)
        leftover.touch()
        with socket_prefix(directory / "me.key") as again:
            assert again == prefix
            assert not leftover.exists()
            assert len(f"{again}p2pclient-12345678901.sock".encode()) < 104
    assert not leftover.parent.exists()


def test_a_port_in_use_is_named(swarm: Swarm, tmp_path: Path) -> None:
    port = int(swarm.addresses[0].split("/")[4])

    async def main() -> None:
        options = HostOptions(identity_path=tmp_path / "key", listen=("127.0.0.1", port))
        async with open_host(options):
            pass

    with pytest.raises(UserError, match=rf"port {port} of 127.0.0.1 is in use by another program"):
        swarm.run(main())


def test_the_first_peer_gives_spec_and_genesis_to_whoever_has_its_invite(
    swarm: Swarm, tmp_path: Path
) -> None:
    owner = Identity.generate()
    packed = DATA[: 2 << 20]
    digest = "cd" * 32
    spec = RunSpec(name="a-run").with_genesis(
        GenesisSpec(
            num_parameters=10,
            tensors=(TensorLayout(name="w", shape=(10,)),),
            state_digests=(digest,) * RunSpec(name="a-run").sync.num_fragments,
        )
    )
    spec_bytes = canonical_bytes(spec)
    signed = SignedSpec(spec_bytes, owner.public_key, owner.sign(bytes_to_sign(spec_bytes)))
    options = BootstrapOptions(
        directory=tmp_path,
        listen="127.0.0.1",
        signed_spec=signed.pack(),
        genesis={0: packed},
    )

    async def main() -> None:
        async with running_bootstrap(options) as first:
            text = await first.invite(owner, time.time() + 3600)
            invite = parse_invite(text, time.time())
            assert invite.owner == owner.public_key
            async with swarm.open_node("newcomer", *invite.bootstraps) as newcomer:
                peer = first.host.peer_id
                got = await newcomer.exchange.spec(peer)
                assert SignedSpec.unpack(got, verify_with_key, invite.run_id).spec == spec
                page = await newcomer.exchange.records(peer, 0, 0)
                assert page == RecordsPage((), ((0, digest),))
                state = await newcomer.exchange.fetch(
                    [peer], state_path(0, 0, digest), len(packed), digest, check=lambda *_: None
                )
                assert state.data == packed
                with pytest.raises(Refused, match="404"):
                    await newcomer.exchange.get(peer, state_path(0, 1, digest), 1 << 30)
                with pytest.raises(Refused, match="404"):
                    await newcomer.exchange.send(peer, b"hello")
                assert first.traffic.up["state"] == len(packed)
                members = await Discovery(newcomer.host, first.run_id).members()
                assert [(m.peer, m.roles) for m in members] == [(peer, ("bootstrap",))]

    swarm.run(main())
