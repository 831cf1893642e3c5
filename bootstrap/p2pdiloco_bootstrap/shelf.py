"""What a peer hands out, and the HTTP application that does it.

    POST /v1/message                                  204, or 400 what is wrong, 413, 503 inbox full
    GET  /v1/spec                                     the signed run spec
    GET  /v1/records/{p}?since=V                      merge records after V, and snapshots on offer
    GET  /v1/merge/{p}/{v}/{digest}                   a merge payload
    GET  /v1/state/{p}/{v}/{digest}                   a packed fragment state
    GET  /v1/contribution/{p}/{v}/{term}/{attempt}    an outer gradient; counters in headers
    GET  /v1/mix/{part}/{p}/{round}?held=R            a vector, for a partner in gossip; a header
                                                      says if it is the difference to round R's
    GET  /v1/predictions                              of the learner of a node that gossips

All answers may also be 404 (not kept here) or 503 (too much at once); bodies honour a Range. Who
reads what lies on the shelf is of no concern: digests protect it.
"""

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgpack
from aiohttp import web

from p2pdiloco.errors import PeerError
from p2pdiloco.protocol.lineage import RECORDS_KEPT
from p2pdiloco_bootstrap.serving import Body, Traffic, new_application, send_body, sender

MESSAGE_BYTES_MAX = 64 * 1024
"""Of a control message, as `p2pdiloco.protocol.wire` has it."""

MESSAGE_TIMEOUT_S = 10.0
"""For a message to arrive whole."""

RECORDS_BYTES_MAX = 8 << 20
"""Of a page of records. A donor keeps some tens of records of a few KB each per fragment."""

HELD_HEADER = "X-Held"
STEPS_HEADER = "X-Steps"
TOKENS_HEADER = "X-Tokens"

VERSION_MAX = 10**16 - 1
"""What fits into the paths below; no run comes near."""

_HEX_DIGEST = "[0-9a-f]{64}"
_DIGEST = f"{{digest:{_HEX_DIGEST}}}"
_FRAGMENT = r"{fragment:\d{1,4}}"
_VERSION = r"{version:\d{1,16}}"

OnMessage = Callable[[str, bytes], bool]
"""(authenticated sender, message) -> False when the inbox is full; PeerError when it is wrong."""


@dataclass(frozen=True, slots=True)
class RecordsPage:
    """Merge records of a fragment, in order, and the (version, state digest) of its snapshots."""

    records: tuple[bytes, ...]
    snapshots: tuple[tuple[int, str], ...]

    def pack(self) -> bytes:
        packed: bytes = msgpack.packb({"records": self.records, "snapshots": self.snapshots})
        return packed

    @classmethod
    def unpack(cls, buffer: bytes | bytearray) -> "RecordsPage":
        """PeerError where it is no such page; the records themselves stay unchecked bytes."""
        try:
            match msgpack.unpackb(buffer, use_list=False, max_array_len=RECORDS_KEPT):
                case {"records": tuple(records), "snapshots": tuple(snapshots)}:
                    return cls(
                        tuple(_checked_record(record) for record in records),
                        tuple(_checked_snapshot(snapshot) for snapshot in snapshots),
                    )
        except (ValueError, msgpack.UnpackException):
            pass
        raise PeerError(
            f"expected a page of merge records, got {len(buffer)} bytes of something else"
        )


@dataclass(frozen=True, slots=True)
class Contribution:
    """An encoded outer gradient, with what was trained for it."""

    steps: int
    tokens: int
    payload: bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class MixVector:
    """An encoded vector, or its difference to what the receiver holds of round `held`."""

    held: int | None
    payload: bytes


class GossipShelf(Protocol):
    """What a node that gossips hands out. None is answered as "not kept here"."""

    async def vector_for(
        self, peer: str, part: str, fragment: int, round_: int, held: int | None
    ) -> MixVector | None:
        """`held` is the round whose vector the peer says it has."""

    def predictions(self) -> bytes | None:
        """As `p2pdiloco.learn.predictions` packs them."""


class Shelf(Protocol):
    """Where the application reads from. None is answered as "not kept here"."""

    async def spec(self) -> bytes: ...
    async def records(self, fragment: int, since: int) -> RecordsPage | None: ...
    async def merge(self, fragment: int, version: int, digest: str) -> Body | None: ...
    async def state(self, fragment: int, version: int, digest: str) -> Body | None: ...
    async def contribution(
        self, peer: str, fragment: int, version: int, term: int, attempt: int
    ) -> Contribution | None: ...


def exchange_application(
    shelf: Shelf,
    traffic: Traffic,
    on_message: OnMessage | None = None,
    gossip: GossipShelf | None = None,
) -> web.Application:
    """The application above; without `on_message` it takes no messages, without `gossip` it has
    nothing for partners (404).
    """
    server = _Server(shelf, traffic, on_message, gossip)
    app = new_application(MESSAGE_BYTES_MAX)
    if on_message is not None:
        app.router.add_post("/v1/message", server.message)
    app.router.add_get("/v1/spec", server.spec)
    app.router.add_get(f"/v1/records/{_FRAGMENT}", server.records)
    app.router.add_get(f"/v1/merge/{_FRAGMENT}/{_VERSION}/{_DIGEST}", server.merge)
    app.router.add_get(f"/v1/state/{_FRAGMENT}/{_VERSION}/{_DIGEST}", server.state)
    app.router.add_get(
        rf"/v1/contribution/{_FRAGMENT}/{_VERSION}/{{term:\d{{1,16}}}}/{{attempt:\d{{1,16}}}}",
        server.contribution,
    )
    if gossip is not None:
        app.router.add_get("/v1/predictions", server.predictions)
        app.router.add_get(
            rf"/v1/mix/{{part:start|outer|local}}/{_FRAGMENT}/{_VERSION}", server.mix
        )
    return app


def mix_path(part: str, fragment: int, round_: int) -> str:
    return f"/v1/mix/{part}/{fragment}/{round_}"


def merge_path(fragment: int, version: int, digest: str) -> str:
    return f"/v1/merge/{fragment}/{version}/{digest}"


def state_path(fragment: int, version: int, digest: str) -> str:
    return f"/v1/state/{fragment}/{version}/{digest}"


def contribution_path(fragment: int, version: int, term: int, attempt: int) -> str:
    return f"/v1/contribution/{fragment}/{version}/{term}/{attempt}"


class _Server:
    def __init__(
        self,
        shelf: Shelf,
        traffic: Traffic,
        on_message: OnMessage | None,
        gossip: GossipShelf | None,
    ) -> None:
        self._shelf = shelf
        self._gossip = gossip
        self._traffic = traffic
        self._on_message = on_message

    async def message(self, request: web.Request) -> web.StreamResponse:
        assert self._on_message is not None
        try:
            async with asyncio.timeout(MESSAGE_TIMEOUT_S):
                body = await request.read()
        except TimeoutError:
            raise web.HTTPRequestTimeout from None
        self._traffic.down["message"] += len(body)
        try:
            taken = self._on_message(sender(), body)
        except PeerError as error:
            self._traffic.refused_messages += 1
            raise web.HTTPBadRequest(text=str(error)) from error
        if not taken:
            raise web.HTTPServiceUnavailable(text="inbox full", headers={"Retry-After": "1"})
        return web.Response(status=204)

    async def spec(self, request: web.Request) -> web.StreamResponse:
        return await self._send(request, "spec", await self._shelf.spec())

    async def records(self, request: web.Request) -> web.StreamResponse:
        since = request.query.get("since", "0")
        if not (since.isascii() and since.isdigit() and len(since) <= 16):
            raise web.HTTPBadRequest(text=f"since is a version, got {since[:40]!r}")
        page = await self._shelf.records(int(request.match_info["fragment"]), int(since))
        return await self._send(request, "records", page.pack() if page else None)

    async def merge(self, request: web.Request) -> web.StreamResponse:
        return await self._send(request, "merge", await self._shelf.merge(*_named(request)))

    async def state(self, request: web.Request) -> web.StreamResponse:
        return await self._send(request, "state", await self._shelf.state(*_named(request)))

    async def contribution(self, request: web.Request) -> web.StreamResponse:
        numbers = [
            int(request.match_info[name]) for name in ("fragment", "version", "term", "attempt")
        ]
        found = await self._shelf.contribution(sender(), *numbers)
        if found is None:
            return await self._send(request, "contribution", None)
        headers = {STEPS_HEADER: str(found.steps), TOKENS_HEADER: str(found.tokens)}
        return await self._send(request, "contribution", found.payload, headers)

    async def mix(self, request: web.Request) -> web.StreamResponse:
        assert self._gossip is not None
        place = request.match_info
        fragment, number = int(place["fragment"]), int(place["version"])
        held = _round_number(request.query.get("held", ""))
        found = await self._gossip.vector_for(sender(), place["part"], fragment, number, held)
        if found is None:
            return await self._send(request, "mix", None)
        headers = {HELD_HEADER: "" if found.held is None else str(found.held)}
        return await self._send(request, "mix", found.payload, headers)

    async def predictions(self, request: web.Request) -> web.StreamResponse:
        assert self._gossip is not None
        return await self._send(request, "predictions", self._gossip.predictions())

    async def _send(
        self,
        request: web.Request,
        kind: str,
        body: Body | None,
        headers: dict[str, str] | None = None,
    ) -> web.StreamResponse:
        if body is None:
            raise web.HTTPNotFound(text="not kept here")
        return await send_body(request, body, kind, self._traffic, headers)


def _round_number(text: str) -> int | None:
    if not text:
        return None
    if text.isascii() and text.isdigit() and len(text) <= 16:
        return int(text)
    raise web.HTTPBadRequest(text=f"held is a round, got {text[:40]!r}")


def _named(request: web.Request) -> tuple[int, int, str]:
    place = request.match_info
    return int(place["fragment"]), int(place["version"]), place["digest"]


def _checked_record(record: object) -> bytes:
    if isinstance(record, bytes):
        return record
    raise ValueError("a record is bytes")


def _checked_snapshot(snapshot: object) -> tuple[int, str]:
    match snapshot:
        case (int(version), str(digest)) if 0 <= version <= VERSION_MAX and re.fullmatch(
            _HEX_DIGEST, digest
        ):
            return version, digest
    raise ValueError("a snapshot is a version and a digest")
