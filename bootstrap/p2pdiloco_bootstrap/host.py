"""A node on the network: p2pd, the DHT, and HTTP in both directions over libp2p streams.

`open_host` is the one way in; leaving it takes everything down, p2pd and its sockets included. A
host opens whether or not a bootstrap peer answers: `host.bootstraps()` tells the reason for each
address, and the host goes on trying. hivemind has no types: what it gives is `Any`, and stays here
and in `discovery.py`.
"""

import asyncio
import errno
import logging
import socket
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, Protocol

import aiohttp
from aiohttp import web

from p2pdiloco.errors import UserError
from p2pdiloco_bootstrap import addresses as multiaddrs
from p2pdiloco_bootstrap.control import CONTROL_TIMEOUT_S, Control, Stream
from p2pdiloco_bootstrap.control_sockets import socket_prefix
from p2pdiloco_bootstrap.dht import dht_node, p2p_client, translated
from p2pdiloco_bootstrap.discovery import ANNOUNCE_RETRY_S
from p2pdiloco_bootstrap.identity import Identity
from p2pdiloco_bootstrap.links import close_dead_links, replace_relayed_links
from p2pdiloco_bootstrap.neighbours import BootstrapStatus, Neighbours
from p2pdiloco_bootstrap.p2pd import NetworkDaemon, running_p2pd
from p2pdiloco_bootstrap.reachability import Reachability
from p2pdiloco_bootstrap.relay import running_relay
from p2pdiloco_bootstrap.seeking import Seeker
from p2pdiloco_bootstrap.serving import MAX_REQUESTS, MAX_REQUESTS_PER_PEER, current_sender
from p2pdiloco_bootstrap.streams import attach, new_session

log = logging.getLogger(__name__)

HTTP_PROTOCOL = "/p2pdiloco/http/1"

PING_PROTOCOL = "/ipfs/ping/1.0.0"
PING = bytes(32)
PING_TIMEOUT_S = 3.0
"""Many times a round trip, relayed ones included."""

CONNECT_TIMEOUT_S = 8.0
"""For a dial of all of a peer's addresses at once, relayed ones included."""

CLOSE_TIMEOUT_S = 2.0
"""For each step of leaving."""

RELAY_BUFFER_BYTES = 256 * 1024
"""Two per relayed connection. p2pd's default of 16 MiB each is half a gigabyte for sixteen."""

ADDRESS_BOOK_PEERS = 4096
"""Peers whose addresses we remember; those not heard of for longest go first."""

CONNECTIONS_PER_PEER = 2 * MAX_REQUESTS_PER_PEER
CONNECTIONS = 2 * MAX_REQUESTS
"""Streams served at once, idle ones included; one more is closed unread."""

_SERVER_KEEP_ALIVE_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOptions:
    """How a host stands on the network."""

    identity_path: Path
    listen: tuple[str, int] = ("0.0.0.0", 0)
    """IP address and port; port 0 takes a free one."""
    bootstraps: tuple[str, ...] = ()
    """Multiaddrs with `/p2p/PEER`; also the first that a host behind NAT asks for a relay slot."""
    reachability: Literal["auto", "public", "private"] = "auto"
    """public: be a relay from the start; private: nobody can dial it; auto: let peers find out."""
    announced: tuple[str, ...] = ()
    """Multiaddrs to tell others instead of what p2pd finds out, as behind a forwarded port."""


class Directory(Protocol):
    """Where a host's addresses are written and those of others read: a `Discovery`."""

    async def announce_again(self) -> None:
        """As announced before, with the addresses of now; OSError where it cannot."""

    async def look_up(self, peer: str) -> None:
        """Has the host remember where `peer` is now; OSError where nobody tells."""


class Host:
    """A running host; made by `open_host`."""

    def __init__(
        self,
        identity: Identity,
        options: HostOptions,
        daemon: NetworkDaemon,
        control: Control,
        p2p: Any,
        dht: Any,
    ) -> None:
        self.identity = identity
        self.dht = dht
        """hivemind's DHTNode."""
        self._options = options
        self._daemon = daemon
        self._control = control
        self._p2p = p2p
        self._session = new_session(self.open_stream, self.seek)
        self._address_book: OrderedDict[str, tuple[str, ...]] = OrderedDict()
        bootstraps = _by_peer(options.bootstraps)
        self._neighbours = Neighbours(bootstraps, control, self.connect, dht)
        self._addresses_changed = asyncio.Event()
        self._directory: Directory | None = None
        self._seeker = Seeker(self._find)
        self._tending: asyncio.Task[None] | None = None
        self._reachability = (
            Reachability(
                control,
                identity.peer_id,
                bootstraps,
                asks=options.reachability == "auto",
                on_change=self._addresses_changed.set,
            )
            if _may_need_relays(options)
            else None
        )

    @property
    def peer_id(self) -> str:
        return self.identity.peer_id

    @property
    def daemon_pid(self) -> int:
        return self._daemon.pid

    def session(self) -> aiohttp.ClientSession:
        """For requests to `peer_url(peer, path)`; the host closes it."""
        return self._session

    async def addresses(self) -> list[str]:
        """Our multiaddrs with `/p2p/PEER`, as they are now; relayed ones last."""
        if self._options.announced:
            found = list(self._options.announced)
        else:
            found = await self._control.addresses()
        elsewhere = [address for address in found if not multiaddrs.is_loopback(address)]
        relayed = self._reachability.relayed_addresses() if self._reachability else []
        return [f"{address}/p2p/{self.peer_id}" for address in (*(elsewhere or found), *relayed)]

    def reach(self) -> str | None:
        """How others reach this host, in a sentence; None where that was said from the start."""
        return self._reachability.sentence() if self._reachability else None

    def consult(self, directory: Directory) -> None:
        """From now on it hears of new addresses of ours, and is asked for those of lost peers."""
        self._directory = directory

    async def connections(self) -> dict[str, tuple[str, ...]]:
        """Peers we are connected to now, with the addresses in use."""
        return await self._control.connections()

    def bootstraps(self) -> tuple[BootstrapStatus, ...]:
        """Which bootstrap peers we are connected to, and why not the others."""
        return self._neighbours.statuses()

    def remember(self, peer: str, addresses: Sequence[str]) -> None:
        """Keeps addresses (with or without `/p2p/PEER`) to dial `peer` when a request needs it."""
        if peer == self.peer_id or not addresses:
            return
        self._address_book[peer] = tuple(a.removesuffix(f"/p2p/{peer}") for a in addresses)
        self._address_book.move_to_end(peer)
        if len(self._address_book) > ADDRESS_BOOK_PEERS:
            self._address_book.popitem(last=False)

    def _remembered(self, peer: str) -> tuple[str, ...]:
        return self._address_book.get(peer, ())

    async def connect(self, peer: str, addresses: Sequence[str] = ()) -> None:
        """Dials `peer` at all addresses known; ConnectionError names the reason for each."""
        self.remember(peer, addresses)
        encoded = []
        for address in self._address_book.get(peer, ()):
            with suppress(UserError):  # written by another peer: a strange one is just not used
                encoded.append(multiaddrs.encode(address))
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await self._control.connect(peer, encoded)
        except TimeoutError:
            raise ConnectionError(f"no answer within {CONNECT_TIMEOUT_S:.0f} s") from None

    @asynccontextmanager
    async def serving(self, app: web.Application) -> AsyncIterator[None]:
        """Serves `app` (from `serving.new_application`) to every peer that opens a stream to us."""
        runner = web.AppRunner(
            app, shutdown_timeout=CLOSE_TIMEOUT_S, keepalive_timeout=_SERVER_KEEP_ALIVE_S,
            access_log=None,
        )  # fmt: skip
        await runner.setup()
        assert runner.server is not None
        server, open_streams = runner.server, Counter[str]()

        async def on_stream(info: Any, *stream: Any) -> None:
            peer = info.peer_id.to_base58()
            if open_streams[peer] >= CONNECTIONS_PER_PEER or open_streams.total() >= CONNECTIONS:
                stream[1].transport.abort()
                return
            current_sender.set(peer)
            open_streams[peer] += 1
            try:
                await attach(server(), stream).ended
            finally:
                open_streams[peer] -= 1
                if not open_streams[peer]:
                    del open_streams[peer]

        try:
            async with asyncio.timeout(CONTROL_TIMEOUT_S):
                await translated(self._p2p.add_binary_stream_handler(HTTP_PROTOCOL, on_stream))
            yield
        finally:
            with suppress(OSError):  # p2pd may be gone
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await translated(self._p2p.remove_binary_stream_handler(HTTP_PROTOCOL))
            await runner.cleanup()

    async def watch(self) -> NoReturn:
        """Never returns; raises `DaemonEnded` when p2pd ends by itself, and what the tending of the
        host has died of, which is a bug.
        """
        ended = asyncio.create_task(self._daemon.wait_ended(), name="p2pd ends")
        try:
            tending = (self._tending,) if self._tending else ()
            await asyncio.wait((ended, *tending), return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
        if ended.done():
            raise ended.result()
        for task in tending:
            task.result()
        raise AssertionError("the tending of a host never returns")

    async def open_stream(self, peer: str) -> Stream:
        """A stream to the peer's application; ConnectionError tells why there is none."""
        try:
            return await self._open_stream(peer)
        except (ConnectionError, asyncio.CancelledError):  # whoever asked may not wait so long
            self.seek(peer)
            raise

    def seek(self, peer: str) -> None:
        """Looks for a peer that has not answered, soon, unless that was tried just now."""
        self._seeker.seek(peer)

    async def _open_stream(self, peer: str) -> Stream:
        try:
            return await self._control.open_stream(peer, HTTP_PROTOCOL)
        except ConnectionError:
            if peer not in self._address_book:
                raise
        await self.connect(peer)
        return await self._control.open_stream(peer, HTTP_PROTOCOL)

    async def _tend(self) -> None:
        """What a host does by itself, for ever."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._neighbours.tend(), name="neighbours")
            tasks.create_task(self._seeker.run(), name="seeking")
            tasks.create_task(close_dead_links(self._control), name="dead links")
            replacing = replace_relayed_links(self._control, self._remembered, self.connect)
            tasks.create_task(replacing, name="relayed links")
            if self._reachability:
                tasks.create_task(self._reachability.tend(), name="reachability")
                tasks.create_task(self._keep_known(), name="new addresses")

    async def _find(self, peer: str) -> None:
        """Dials a peer that a request did not reach; ConnectionError where it is not to be found.

        A connection that has died without a word is closed: p2pd would keep it for 40 seconds, and
        prefer it to a relayed one that works.
        """
        if peer in await self._control.connections() and not await self._answers(peer):
            await self._control.disconnect(peer)
        if self._directory:
            await self._directory.look_up(peer)
        await self.connect(peer)

    async def _answers(self, peer: str) -> bool:
        """Whether the peer's p2pd sends a ping back."""
        try:
            async with asyncio.timeout(PING_TIMEOUT_S):
                reader, writer = await self._control.open_stream(peer, PING_PROTOCOL)
                try:
                    writer.write(PING)
                    return await reader.readexactly(len(PING)) == PING
                finally:
                    writer.transport.abort()
        except (OSError, EOFError):
            return False

    async def _keep_known(self) -> None:
        """Writes our record anew when our addresses have changed."""
        while True:
            await self._addresses_changed.wait()
            self._addresses_changed.clear()
            if self._directory:
                try:
                    await self._directory.announce_again()
                except OSError as error:
                    log.debug("cannot renew our record in the DHT: %s", error)
                    self._addresses_changed.set()
                    await asyncio.sleep(ANNOUNCE_RETRY_S)

    async def _close(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._session.close()


@asynccontextmanager
async def open_host(options: HostOptions) -> AsyncIterator[Host]:
    """A host on the network; UserError when this machine or the options do not allow one."""
    identity = Identity.load_or_create(options.identity_path)
    listen = multiaddrs.listen_address(*options.listen)
    _check_port_is_free(*options.listen)
    _by_peer(options.bootstraps)
    async with AsyncExitStack() as stack:
        sockets = stack.enter_context(socket_prefix(options.identity_path))
        arguments = _p2pd_arguments(options, listen, f"/unix{sockets}p2pd.sock")
        starting = (
            running_relay(arguments, identity.peer_id, sockets)
            if options.reachability == "public"
            else running_p2pd(arguments)
        )
        daemon = await stack.enter_async_context(starting)
        p2p = await stack.enter_async_context(p2p_client(sockets))
        dht = await stack.enter_async_context(dht_node(p2p, identity))
        control = Control(f"{sockets}p2pd.sock")
        host = Host(identity, options, daemon, control, p2p, dht)
        stack.push_async_callback(host._close)
        await host._neighbours.go_round()
        host._tending = asyncio.create_task(host._tend(), name="host")
        stack.push_async_callback(_cancelled, host._tending)
        yield host


def _may_need_relays(options: HostOptions) -> bool:
    """Not where it is known that we can be dialed, or that all others are on this machine."""
    if options.reachability == "auto":
        local = multiaddrs.is_loopback(multiaddrs.listen_address(*options.listen))
        return not local and not options.announced
    return options.reachability == "private"


def _p2pd_arguments(options: HostOptions, listen: str, control: str) -> list[str]:
    local = multiaddrs.is_loopback(listen)
    relays = options.reachability == "public" or (options.reachability == "auto" and not local)
    flags: dict[str, object] = {
        "listen": control,
        "id": options.identity_path,
        "hostAddrs": listen,
        "dhtServer": 1,
        "idleTimeout": "30s",
        "persistentConnMaxMsgSize": 4 << 20,
        "connManager": 1,
        "autonat": int(not local),
        "natPortMap": int(not local),
        "relay": 1,
        "relayService": int(relays),
        "relayBufferSize": RELAY_BUFFER_BYTES,
        "tls": 1,
    }
    if options.announced:
        flags["announceAddrs"] = ",".join(options.announced)
    if options.reachability != "auto":
        flags[f"forceReachability{options.reachability.title()}"] = 1
    return [f"-{name}={value}" for name, value in flags.items()]


async def _cancelled(task: asyncio.Task[None]) -> None:
    """Ends `task`; what it died of before, it raises now."""
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


def _by_peer(bootstraps: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Addresses without `/p2p/PEER`, by peer; UserError for a malformed one."""
    grouped: dict[str, tuple[str, ...]] = {}
    for address in bootstraps:
        transport, peer = multiaddrs.split_peer(address)
        grouped[peer] = (*grouped.get(peer, ()), transport)
    return grouped


def _check_port_is_free(host: str, port: int) -> None:
    """p2pd sets SO_REUSEPORT: a second one on a port would start, and each get half the calls."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            what = (
                "is in use by another program (perhaps another node): stop that one or"
                if error.errno == errno.EADDRINUSE
                else f"cannot be listened on ({error.strerror}):"
            )
            raise UserError(f"port {port} of {host} {what} choose another") from error
