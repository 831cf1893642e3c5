"""The status page's HTTP application, and serving it on loopback.

Only the person at this machine is meant to read it, so it is guarded against the two ways in which
a web page from elsewhere reaches a loopback port: every request must name a loopback host (DNS
rebinding), and the one that acts needs a header that a foreign page cannot send unasked (cross-site
requests). The page itself loads nothing from elsewhere and writes only text into its document.
"""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from importlib import resources

from aiohttp import web
from aiohttp.typedefs import Handler

from p2pdiloco.errors import UserError
from p2pdiloco_daemon.status import metrics
from p2pdiloco_daemon.status.view import JsonObject, Status

ReadStatus = Callable[[], Status]
"""Cheap and synchronous: called about once a second and for every request."""
Settle = Callable[[], Awaitable[None]]
"""Asks the node to settle; returns as soon as the node has taken the request."""
TakeServed = Callable[[bytes], None]
"""Takes what a program that serves here says of its answers; UserError if that is wrong."""

LOOPBACK = "127.0.0.1"
LOOPBACK_NAMES = frozenset({"127.0.0.1", "localhost", "[::1]"})
COMPLETIONS_PATH = "/v1/completions"
ACTION_HEADER = "X-P2PDiloco"
"""A custom header makes a browser ask first before it sends the request to another origin."""

BODY_BYTES_MAX = 64 * 1024
"""A report of a thousand answers."""
EVENT_INTERVAL_S = 1.0
EVENT_CLIENTS_MAX = 16
"""A person has a few tabs; each open stream costs one JSON document a second."""
EVENT_WRITE_TIMEOUT_S = 10.0
"""A client that takes no byte for this long has gone, and must not keep its place."""
CONNECTIONS_MAX = 32
"""Open at once, asking or not; a browser has six. One more closes the one that came first, so that
whoever opens connections and leaves them takes neither the page nor the node's open files."""
BACKLOG = 16
"""Connections that wait to be taken, which is done at one go."""
SHUTDOWN_TIMEOUT_S = 2.0

_STATIC = {
    "/": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
    "/favicon.svg": ("favicon.svg", "image/svg+xml"),
}
_SECURITY_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def build_app(
    read_status: ReadStatus,
    *,
    settle: Settle | None = None,
    take_served: TakeServed | None = None,
    complete: Handler | None = None,
    event_interval_s: float = EVENT_INTERVAL_S,
) -> web.Application:
    """The application; without `settle`, `take_served` and `complete` there is nothing in it that
    acts. `complete` answers the questions at `COMPLETIONS_PATH`.
    """
    app = web.Application(middlewares=[_guard], client_max_size=BODY_BYTES_MAX)
    streams = _EventStreams(read_status, event_interval_s)
    app.on_response_prepare.append(_add_security_headers)
    app.on_shutdown.append(streams.close)
    for path, (name, content_type) in _STATIC.items():
        app.router.add_get(path, _static_handler(name, content_type))

    async def get_status(_request: web.Request) -> web.Response:
        return web.json_response(read_status().to_json())

    async def get_metrics(_request: web.Request) -> web.Response:
        body = metrics.metrics_text(read_status()).encode(errors="replace")
        return web.Response(body=body, headers={"Content-Type": metrics.CONTENT_TYPE})

    app.router.add_get("/api/status", get_status)
    app.router.add_get("/api/events", streams.handle, allow_head=False)
    app.router.add_get("/metrics", get_metrics)
    if settle is not None:
        app.router.add_post("/api/settle", _settle_handler(settle))
    if take_served is not None:
        app.router.add_post("/api/served", _served_handler(take_served))
    if complete is not None:
        app.router.add_post(COMPLETIONS_PATH, complete)
    return app


@asynccontextmanager
async def serving_page(app: web.Application, port: int) -> AsyncIterator[str]:
    """Serve `app` on 127.0.0.1 and yield its URL; port 0 takes any free port."""
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=SHUTDOWN_TIMEOUT_S)
    await runner.setup()
    try:
        listener = await _listen(runner, port)
        bound_port = listener.sockets[0].getsockname()[1]
        try:
            yield f"http://{LOOPBACK}:{bound_port}/"
        finally:
            listener.close()
    finally:
        await runner.cleanup()


async def _listen(runner: web.AppRunner, port: int) -> asyncio.Server:
    assert runner.server
    server = runner.server

    def next_connection() -> asyncio.BaseProtocol:
        surplus = max(0, len(server.connections) + 1 - CONNECTIONS_MAX)
        for oldest in server.connections[:surplus]:
            oldest.force_close()
        return server()

    loop = asyncio.get_running_loop()
    try:
        return await loop.create_server(next_connection, LOOPBACK, port, backlog=BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UserError(
                f"port {port} on {LOOPBACK} is already in use, perhaps by another node: "
                "choose another with --port, or --port 0 for any free one"
            ) from error
        if error.errno == errno.EACCES:
            raise UserError(
                f"port {port} on {LOOPBACK} may not be opened by this user: "
                "choose one from 1024 to 65535 with --port"
            ) from error
        raise


class _EventStreams:
    """The open `/api/events` streams: the status about once a second until the node stops."""

    def __init__(self, read_status: ReadStatus, interval_s: float) -> None:
        self._read_status = read_status
        self._interval_s = interval_s
        self._closing = asyncio.Event()
        self._num_clients = 0
        self._frame = b""
        self._frame_time = -1.0

    async def close(self, _app: web.Application) -> None:
        self._closing.set()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if self._num_clients >= EVENT_CLIENTS_MAX:
            message = (
                f"{EVENT_CLIENTS_MAX} streams are open already: close a tab, or use /api/status"
            )
            response = _error(503, message)
            response.headers["Retry-After"] = "5"
            return response
        self._num_clients += 1
        try:
            return await self._stream(request)
        finally:
            self._num_clients -= 1

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            while not self._closing.is_set():
                async with asyncio.timeout(EVENT_WRITE_TIMEOUT_S):
                    await response.write(self._current_frame())
                await self._pause()
            await response.write(b"event: bye\ndata: {}\n\n")
        except (ConnectionError, TimeoutError):
            pass  # the client has gone; nothing is owed to it
        return response

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(self._interval_s):
                await self._closing.wait()
        except TimeoutError:
            pass

    def _current_frame(self) -> bytes:
        """One encoding serves all clients that ask within half an interval."""
        now = asyncio.get_running_loop().time()
        if not self._frame or now - self._frame_time > self._interval_s / 2:
            self._frame = b"data: " + _encode(self._read_status().to_json()) + b"\n\n"
            self._frame_time = now
        return self._frame


@web.middleware
async def _guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Loopback names only; errors of the router as JSON."""
    if not _is_loopback(request.headers.get("Host", "")):
        return _error(403, "this page answers only to 127.0.0.1, localhost and [::1]")
    if request.transport is None:
        raise ConnectionResetError("who asked has gone")
    try:
        return await handler(request)
    except web.RequestPayloadError:
        return _error(400, "the body is not encoded as its headers say")
    except web.HTTPNotFound:
        return _error(404, f"there is nothing at {request.path}")
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        response = _error(405, f"{request.path} takes {allowed}, not {request.method}")
        response.headers["Allow"] = allowed
        return response


def _is_loopback(host: str) -> bool:
    """Whether a Host header names this machine, with any port."""
    name, colon, port = host.lower().rpartition(":")
    if not colon or not port.isdecimal():
        name = host.lower()
    return name in LOOPBACK_NAMES


async def _add_security_headers(_request: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(_SECURITY_HEADERS)


def _static_handler(name: str, content_type: str) -> Handler:
    body = resources.files(__package__).joinpath("static", name).read_bytes()

    async def get_static(_request: web.Request) -> web.Response:
        return web.Response(body=body, content_type=content_type, charset="utf-8")

    return get_static


def _settle_handler(settle: Settle) -> Handler:
    async def post_settle(request: web.Request) -> web.Response:
        if request.headers.get(ACTION_HEADER) != "1":
            return _error(403, f"send the header {ACTION_HEADER}: 1 with this request")
        await settle()
        return web.json_response({"accepted": True}, status=202)

    return post_settle


def _served_handler(take_served: TakeServed) -> Handler:
    async def post_served(request: web.Request) -> web.Response:
        if request.headers.get(ACTION_HEADER) != "1":
            return _error(403, f"send the header {ACTION_HEADER}: 1 with this request")
        try:
            take_served(await request.read())
        except UserError as error:
            return _error(400, str(error))
        return web.json_response({"accepted": True}, status=202)

    return post_served


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": message}, status=status)


def _encode(document: JsonObject) -> bytes:
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode()
