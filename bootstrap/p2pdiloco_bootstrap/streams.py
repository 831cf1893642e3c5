"""HTTP over libp2p streams: both ends of aiohttp, put onto connections that p2pd opened.

A stream reaches us as a unix socket, with asyncio's reader and writer on top. Here the protocol of
that socket is exchanged for aiohttp's; nothing is copied twice and back-pressure stays asyncio's.
"""

import asyncio
import base64
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
from aiohttp.client_proto import ResponseHandler
from yarl import URL

from p2pdiloco_bootstrap.control import Stream
from p2pdiloco_bootstrap.identity import base58_decode, base58_encode

OPEN_TIMEOUT_S = 10.0
"""For a stream to a peer to open where the request sets no `sock_connect`: a direct dial takes two
round trips, one through a relay up to some seconds; a hung peer never answers."""

MAX_CONNECTIONS_PER_PEER = 6
"""Kept by the client to one peer: two for a fetch, the rest for messages beside it."""

_KEEP_ALIVE_S = 15.0
"""Shorter than the server keeps idle connections, so that it is not the one to hang up."""


def peer_url(peer: str, path: str) -> URL:
    """The URL of `path` at a peer. Host names know no upper case, so the id goes in base32."""
    decoded = base58_decode(peer)
    if not decoded:
        raise ValueError(f"not a peer id: {peer!r}")
    host = base64.b32encode(decoded).decode().rstrip("=").lower()
    return URL.build(scheme="http", host=host, path=path)


def peer_of(url: URL) -> str:
    """The peer id in a URL that `peer_url` made."""
    host = (url.raw_host or "").upper()
    return base58_encode(base64.b32decode(host + "=" * (-len(host) % 8)))


class AttachedStream(asyncio.Protocol):
    """The protocol of a stream's socket: passes everything on to `inner`, tells when it has ended.

    It keeps the StreamWriter, whose end would close the transport under us.
    """

    def __init__(self, inner: asyncio.Protocol, writer: asyncio.StreamWriter) -> None:
        self._inner = inner
        self._writer = writer
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.heard = False
        """Whether a single byte has come."""

    def data_received(self, data: bytes) -> None:
        self.heard = True
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)
            self._inner.connection_lost(exc)


def attach(inner: asyncio.Protocol, stream: Stream) -> AttachedStream:
    """Hands an open stream over to `inner`, with what asyncio had already read from it."""
    reader, writer = stream
    transport: Any = writer.transport
    attached = AttachedStream(inner, writer)
    transport.set_protocol(attached)
    inner.connection_made(transport)
    if already_read := bytes(reader._buffer):  # type: ignore[attr-defined]
        attached.data_received(already_read)
    if transport.is_closing() or reader.at_eof():
        transport.abort()
        attached.connection_lost(None)
    elif not transport.is_reading():  # the reader had paused it, being full
        transport.resume_reading()
    return attached


class StreamConnector(aiohttp.BaseConnector):
    """Opens libp2p streams where aiohttp would open sockets; one pool of connections per peer.

    p2pd gives a stream at once where it believes to be connected, so that a connection which has
    died without a word shows only in silence; `on_silence` is told of the peer then.
    """

    def __init__(
        self, open_stream: Callable[[str], Awaitable[Stream]], on_silence: Callable[[str], object]
    ) -> None:
        super().__init__(
            keepalive_timeout=_KEEP_ALIVE_S, limit=0, limit_per_host=MAX_CONNECTIONS_PER_PEER
        )
        self._open_stream = open_stream
        self._on_silence = on_silence

    async def _create_connection(
        self,
        req: aiohttp.ClientRequest,
        traces: list[Any],
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109  # aiohttp's name
    ) -> ResponseHandler:
        peer = peer_of(req.url)
        try:
            async with asyncio.timeout(timeout.sock_connect or OPEN_TIMEOUT_S):
                stream = await self._open_stream(peer)
        except TimeoutError as error:
            raise aiohttp.ConnectionTimeoutError(f"{peer} does not answer") from error
        except OSError as error:
            raise aiohttp.ClientConnectionError(str(error)) from error
        handler = ResponseHandler(self._loop)
        attached = attach(handler, stream)
        attached.ended.add_done_callback(lambda _: attached.heard or self._on_silence(peer))
        return handler


def new_session(
    open_stream: Callable[[str], Awaitable[Stream]],
    on_silence: Callable[[str], object] = lambda peer: None,
) -> aiohttp.ClientSession:
    """A client of peers, reached at `peer_url(peer, path)`; whoever made it closes it."""
    return aiohttp.ClientSession(
        connector=StreamConnector(open_stream, on_silence),
        cookie_jar=aiohttp.DummyCookieJar(),  # peers leave nothing with us
        auto_decompress=False,  # nor do they choose how big an answer grows
    )
