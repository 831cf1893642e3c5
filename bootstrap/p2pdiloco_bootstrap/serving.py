"""What every HTTP application here shares: who asks, how much at once, and how big bodies leave.

The applications are plain aiohttp ones. `host.py` serves them over libp2p streams, where the sender
is authenticated; `serving_on_tcp` serves the same on a socket, for tests and benchmarks.
"""

import asyncio
import logging
import os
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from p2pdiloco.protocol.uplink import Uplink


@dataclass(frozen=True, slots=True)
class FilePart:
    """A body that lies inside a file."""

    path: Path
    offset: int
    num_bytes: int


Body = bytes | bytearray | memoryview | Path | FilePart
"""What can be sent: a buffer that nobody changes meanwhile, a file, or a part of one."""

log = logging.getLogger(__name__)

PLAIN_TCP = "plain-tcp"
"""`sender()` of a request that did not come over an authenticated stream."""

CHUNK_BYTES = 1 << 18
"""Per write. Larger ones stall the loop (40 MB: 66 ms), smaller ones gain nothing."""

WRITE_TIMEOUT_S = 30.0
"""For one chunk to leave: 70 kbit/s, an eighth of 0.6 Mbit/s, since a joiner asks for eight things
at a time. A receiver slower than that holds a place of others."""

MAX_REQUESTS_PER_PEER = 8
"""A fetch uses 2 connections per donor, messages and records a few more."""

MAX_REQUESTS = 128
"""Of all peers together; each holds a stream and at most a few chunks of memory."""

_SHUTDOWN_TIMEOUT_S = 2.0

current_sender: ContextVar[str] = ContextVar("current_sender", default=PLAIN_TCP)
"""Set by the transport before it hands a connection to aiohttp, which handles all requests of a
connection in a task that copies this context."""


@dataclass(slots=True)
class Traffic:
    """Bytes of bodies by kind ("state", "message", ...); headers and encryption come on top. And
    how fast bodies may leave.
    """

    uplink: Uplink = field(default_factory=Uplink)
    up: Counter[str] = field(default_factory=Counter)
    down: Counter[str] = field(default_factory=Counter)
    refused_messages: int = 0
    """Messages from peers that were wrong, and answered so."""


def sender() -> str:
    """The peer id of who sent the request being handled, authenticated by libp2p's handshake."""
    return current_sender.get()


def new_application(client_max_bytes: int) -> web.Application:
    """An application whose requests are limited in number per peer, and in size."""
    return web.Application(middlewares=[_limited()], client_max_size=client_max_bytes)


def _limited() -> Middleware:
    active: Counter[str] = Counter()

    @web.middleware
    async def limit(request: web.Request, handler: Handler) -> web.StreamResponse:
        peer = sender()
        if active[peer] >= MAX_REQUESTS_PER_PEER or active.total() >= MAX_REQUESTS:
            raise web.HTTPServiceUnavailable(
                text="too many requests at once; try again in a second",
                headers={"Retry-After": "1"},
            )
        active[peer] += 1
        try:
            return await handler(request)
        finally:
            active[peer] -= 1
            if not active[peer]:
                del active[peer]

    return limit


async def send_body(
    request: web.Request,
    body: Body,
    kind: str,
    traffic: Traffic,
    headers: dict[str, str] | None = None,
) -> web.StreamResponse:
    """Answers with `body`, or the part that a Range header asks for, in chunks."""
    loop, source = asyncio.get_running_loop(), await _open(body)
    try:
        start, stop = _asked_range(request, source.num_bytes)
        response = web.StreamResponse(status=206 if "Range" in request.headers else 200)
        response.headers.update(headers or {})
        response.content_type = "application/octet-stream"
        response.content_length = stop - start
        if response.status == 206:
            response.headers["Content-Range"] = f"bytes {start}-{stop - 1}/{source.num_bytes}"
        await response.prepare(request)
        while start < stop:
            size = traffic.uplink.write_bytes(CHUNK_BYTES)
            chunk = await source.read(start, min(start + size, stop))
            await asyncio.sleep(traffic.uplink.wait_s(len(chunk), loop.time()))
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                await response.write(chunk)
            traffic.up[kind] += len(chunk)
            start += len(chunk)
        await response.write_eof()
    except (ConnectionError, TimeoutError) as error:  # the receiver went away, or takes no data
        log.debug("%s does not take %s to the end: %s", sender(), request.path, error)
        if request.transport is not None:
            request.transport.abort()
    finally:
        await source.close()
    return response


@asynccontextmanager
async def serving_on_tcp(app: web.Application, address: str = "127.0.0.1") -> AsyncIterator[str]:
    """Serves `app` on a free port of `address`; gives its URL, without a slash at the end."""
    runner = web.AppRunner(app, shutdown_timeout=_SHUTDOWN_TIMEOUT_S, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, address, 0).start()
        yield f"http://{address}:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def _asked_range(request: web.Request, num_bytes: int) -> tuple[int, int]:
    """-> (start, stop) within the body; 416 where the request asks for something outside."""
    try:
        asked = request.http_range
    except ValueError:
        asked = slice(num_bytes, None)
    start, stop, _ = asked.indices(num_bytes)
    if "Range" in request.headers and start >= stop:
        raise web.HTTPRequestRangeNotSatisfiable(headers={"Content-Range": f"bytes */{num_bytes}"})
    return start, stop


class _Buffer:
    def __init__(self, buffer: bytes | bytearray | memoryview) -> None:
        self._view = memoryview(buffer).cast("B")
        self.num_bytes = len(self._view)

    async def read(self, start: int, stop: int) -> memoryview:
        return self._view[start:stop]

    async def close(self) -> None:
        self._view.release()


class _File:
    """Read in threads, one chunk at a time, so that a slow disk does not stop the loop."""

    def __init__(self, descriptor: int, offset: int, num_bytes: int) -> None:
        self._descriptor = descriptor
        self._offset = offset
        self.num_bytes = num_bytes

    async def read(self, start: int, stop: int) -> bytes:
        """At least one byte; ConnectionError where the file has become shorter than it was."""
        place = self._offset + start
        chunk = await asyncio.to_thread(os.pread, self._descriptor, stop - start, place)
        if not chunk:
            raise ConnectionError("the file that it was sent from has been cut short")
        return chunk

    async def close(self) -> None:
        os.close(self._descriptor)


async def _open(body: Body) -> _Buffer | _File:
    if not isinstance(body, Path | FilePart):
        return _Buffer(body)
    path = body if isinstance(body, Path) else body.path
    try:
        descriptor = await asyncio.to_thread(os.open, path, os.O_RDONLY)
    except FileNotFoundError:  # pruned between the answer of the store and now
        raise web.HTTPNotFound(text="no longer kept here") from None
    if isinstance(body, Path):
        return _File(descriptor, 0, os.fstat(descriptor).st_size)
    return _File(descriptor, body.offset, body.num_bytes)
