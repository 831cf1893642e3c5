"""The client half of what peers say and hand to each other; `p2pdiloco_bootstrap.shelf` serves.

Every call ends: it has a limit for connecting, for silence and for size. What fails because a peer
is dead, slow, busy or has not got it raises an `ExchangeError` (an OSError: try again or another);
what a peer does against the protocol raises PeerError.

ExchangeError
├── Unreachable   no connection, or it broke, or nobody spoke in time
├── Refused       answered no: `status` and the peer's words
│   └── Busy      503: the same again in a second
└── FetchFailed   none of several donors; `reasons` of each, and the `liars` among them
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from hashlib import blake2b

import aiohttp
from yarl import URL

from p2pdiloco.errors import PayloadError, PeerError
from p2pdiloco.learn.predictions import PREDICTIONS_BYTES
from p2pdiloco_bootstrap.serving import CHUNK_BYTES, Traffic
from p2pdiloco_bootstrap.shelf import (
    HELD_HEADER,
    MESSAGE_BYTES_MAX,
    RECORDS_BYTES_MAX,
    STEPS_HEADER,
    TOKENS_HEADER,
    Contribution,
    MixVector,
    RecordsPage,
    contribution_path,
    mix_path,
)
from p2pdiloco_bootstrap.streams import peer_url
from p2pdiloco_daemon.fetch import KEPT, Gathering, NotGathered, gather_chunks

CONNECT_TIMEOUT_S = 8.0
"""A relayed connection takes seconds; a hung peer never answers."""

MESSAGE_TIMEOUT_S = 8.0
"""In all, connecting included. The protocol repeats what matters."""

HANDED_TIMEOUT_S = 90.0
"""Until a peer that was handed something has looked through it."""

IDLE_TIMEOUT_S = 10.0
"""Without one byte."""

BYTES_PER_S_MIN = 8 * 1024
"""A whole answer may take a minute and its size at this rate; who drips slower is given up."""

SPEC_BYTES_MAX = 1 << 20

CHUNKS_IN_FLIGHT_MAX = 8
"""Of all fetches together: four donors with two each. More would only share the downlink, until no
chunk arrives in time on a slow one."""

_ANSWER_BYTES_MAX = 200
"""Of a peer's words that we repeat."""

_COUNTER_MAX = 2**50

Check = Callable[[bytearray, str], object]
"""(all bytes, expected digest); PeerError where they do not belong together. Runs in a thread."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of the body at `path`."""

    path: str
    start: int
    total_bytes: int
    """Of the whole body."""
    place: memoryview
    """Where it goes; as long as the piece."""
    idle_timeout_s: float
    progress: Callable[[], None]
    """To be called as bytes arrive."""


class ExchangeError(ConnectionError):
    """Got nothing from a peer; see the module's tree."""


class Unreachable(ExchangeError):
    """A connection that cannot be made, broke, or is silent."""


class Refused(ExchangeError):
    """The peer answered, with a refusal."""

    def __init__(self, peer: str, status: int, words: str) -> None:
        super().__init__(f"{peer} refused: {status} {words}")
        self.status = status


class Busy(Refused):
    """The peer has too much to do just now."""


class FetchFailed(ExchangeError):
    """No donor gave the bytes wanted."""

    def __init__(self, path: str, reasons: Mapping[str, str], liars: Sequence[str]) -> None:
        told = "; ".join(
            why.replace(donor, donor[-8:]) if donor in why else f"{donor[-8:]}: {why}"
            for donor, why in reasons.items()
        )
        super().__init__(f"none of {len(reasons)} donors gave {path}: {told}")
        self.reasons = dict(reasons)
        self.liars = tuple(liars)


@dataclass(frozen=True, slots=True)
class Fetched:
    """Checked bytes, and how they came."""

    data: bytearray
    bytes_by_donor: Mapping[str, int]
    liars: tuple[str, ...]
    """Donors that sent other bytes than these under this digest."""


def check_payload(data: bytearray, digest: str) -> None:
    """PayloadError unless `digest` is the blake2b-256 of the bytes, in hex."""
    got = blake2b(data, digest_size=32).hexdigest()
    if got != digest:
        raise PayloadError(f"expected bytes with digest {digest}, got {got}")


class Exchange:
    """Asks peers, over the session of a host; `url` says where a peer's paths are."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        traffic: Traffic,
        url: Callable[[str, str], URL] = peer_url,
    ) -> None:
        self._session = session
        self._traffic = traffic
        self._url = url
        self._slots = asyncio.Semaphore(CHUNKS_IN_FLIGHT_MAX)

    async def send(self, peer: str, message: bytes) -> None:
        """Delivers a message into the peer's inbox; returns when it lies there."""
        if len(message) > MESSAGE_BYTES_MAX:
            raise ValueError(f"a message has at most {MESSAGE_BYTES_MAX} bytes, got {len(message)}")
        timeout = aiohttp.ClientTimeout(total=MESSAGE_TIMEOUT_S, sock_connect=CONNECT_TIMEOUT_S)
        url, now = self._url(peer, "/v1/message"), asyncio.get_running_loop().time
        started, uplink = now(), self._traffic.uplink
        try:
            async with (
                asking(peer),
                self._session.post(
                    url, data=message, timeout=timeout, allow_redirects=False
                ) as response,
            ):
                await require_success(peer, response)
        except Unreachable:
            if now() >= started + MESSAGE_TIMEOUT_S:
                uplink.round_trip(peer, MESSAGE_TIMEOUT_S, now())
            raise
        uplink.round_trip(peer, now() - started, now())
        self._traffic.up["message"] += len(message)

    async def hand(self, peer: str, path: str, body: bytes) -> None:
        """Gives the peer a body, piece by piece; returns when it has taken it."""
        headers = {"Content-Length": str(len(body))}
        url, timeout = self._url(peer, path), _timeout(len(body), HANDED_TIMEOUT_S)
        async with (
            asking(peer),
            self._session.post(
                url,
                data=self._pieces(_kind(path), body),
                headers=headers,
                timeout=timeout,
                allow_redirects=False,
            ) as response,
        ):
            await require_success(peer, response)

    async def spec(self, peer: str) -> bytes:
        """The signed run spec, unverified."""
        return bytes(await self.get(peer, "/v1/spec", SPEC_BYTES_MAX))

    async def records(self, peer: str, fragment: int, since: int) -> RecordsPage:
        """The peer's merge records of the fragment after version `since`, unverified."""
        path = f"/v1/records/{fragment}"
        query = {"since": str(since)}
        data, _ = await self._get(peer, path, RECORDS_BYTES_MAX, IDLE_TIMEOUT_S, query)
        return RecordsPage.unpack(data)

    async def pull_contribution(
        self, peer: str, fragment: int, version: int, term: int, attempt: int, max_bytes: int
    ) -> Contribution:
        """The peer's outer gradient for that round, of at most `max_bytes`."""
        path = contribution_path(fragment, version, term, attempt)
        data, headers = await self._get(peer, path, max_bytes, IDLE_TIMEOUT_S)
        steps, tokens = (_counter(headers, name) for name in (STEPS_HEADER, TOKENS_HEADER))
        return Contribution(steps, tokens, data)

    async def pull_vector(
        self, peer: str, part: str, fragment: int, round_: int, held: int | None, max_bytes: int
    ) -> MixVector:
        """The peer's vector of that round of gossip, of at most `max_bytes`, perhaps as a
        difference to what we hold of it.
        """
        query = {} if held is None else {"held": str(held)}
        path = mix_path(part, fragment, round_)
        data, headers = await self._get(peer, path, max_bytes, IDLE_TIMEOUT_S, query)
        named = headers.get(HELD_HEADER, "")
        if named not in ("", str(held)):
            raise PeerError(f"{peer} sends a difference to {named[:20]!r}, we hold {held}")
        return MixVector(held if named else None, bytes(data))

    async def predictions(self, peer: str) -> bytes:
        """What the peer's learner predicts on the probe, unchecked."""
        return bytes(await self.get(peer, "/v1/predictions", PREDICTIONS_BYTES))

    async def get(
        self, peer: str, path: str, max_bytes: int, idle_timeout_s: float = IDLE_TIMEOUT_S
    ) -> bytearray:
        """The body at `path`, whose size the peer announces; PeerError above `max_bytes`."""
        data, _ = await self._get(peer, path, max_bytes, idle_timeout_s)
        return data

    async def fetch(
        self,
        donors: Sequence[str],
        path: str,
        num_bytes: int,
        digest: str,
        *,
        check: Check = check_payload,
        idle_timeout_s: float = IDLE_TIMEOUT_S,
        body: Gathering | None = None,
    ) -> Fetched:
        """The `num_bytes` at `path` from several donors at once, checked; else FetchFailed.

        What `body` has already is not asked for again, and what arrives stays in it. If what came
        together is wrong, each donor is asked for all of it, one after the other, and `body` is of
        no more use.
        """
        if not donors and not (body and body.is_whole):
            raise FetchFailed(path, {}, ())
        attempt = _Attempt(self, path, num_bytes, digest, check, idle_timeout_s)
        return await attempt.run(donors, body or Gathering(num_bytes))

    async def gather(
        self,
        donors: Sequence[str],
        path: str,
        body: Gathering,
        idle_timeout_s: float = IDLE_TIMEOUT_S,
    ) -> None:
        """Fills `body`, unchecked; NotGathered when all donors have failed."""

        async def fetch(
            donor: str, start: int, place: memoryview, progress: Callable[[], None]
        ) -> None:
            whole = len(body.data)
            chunk = Chunk(path, start, whole, place, idle_timeout_s, progress)
            await self.fetch_chunk(donor, chunk)

        await gather_chunks(donors, body, fetch, self._slots)

    async def fetch_chunk(self, donor: str, chunk: Chunk) -> None:
        """Puts the chunk into its place."""
        start, stop = chunk.start, chunk.start + len(chunk.place)
        asked = {"Range": f"bytes={start}-{stop - 1}"}
        timeout = _timeout(len(chunk.place), chunk.idle_timeout_s)
        url = self._url(donor, chunk.path)
        try:
            async with (
                asking(donor),
                self._session.get(
                    url, headers=asked, timeout=timeout, allow_redirects=False
                ) as response,
            ):
                await require_success(donor, response)
                got = response.headers.get("Content-Range")
                if got != f"bytes {start}-{stop - 1}/{chunk.total_bytes}":
                    raise PeerError(
                        f"{donor} was asked for bytes {start}-{stop - 1} of {chunk.total_bytes}, "
                        f"sent {str(got)[:60]}"
                    )
                await self._receive(donor, response, chunk.place, _kind(chunk.path), chunk.progress)
        except Busy:
            raise
        except Refused as error:  # it has not got it: asking this donor again is of no use
            raise PeerError(str(error)) from error

    async def _get(
        self,
        peer: str,
        path: str,
        max_bytes: int,
        idle_timeout_s: float,
        query: Mapping[str, str] | None = None,
    ) -> tuple[bytearray, Mapping[str, str]]:
        timeout = _timeout(max_bytes, idle_timeout_s)
        url = self._url(peer, path)
        async with (
            asking(peer),
            self._session.get(
                url, params=query, timeout=timeout, allow_redirects=False
            ) as response,
        ):
            await require_success(peer, response)
            size = response.content_length
            if size is None or size > max_bytes:
                raise PeerError(
                    f"{peer} announces {size} bytes for {path}, at most {max_bytes} fit"
                )
            data = bytearray(size)
            await self._receive(peer, response, memoryview(data), _kind(path))
            return data, response.headers

    async def _pieces(self, kind: str, body: bytes) -> AsyncIterator[memoryview]:
        for start in range(0, len(body), CHUNK_BYTES):
            piece = memoryview(body)[start : start + CHUNK_BYTES]
            yield piece
            self._traffic.up[kind] += len(piece)

    async def _receive(
        self,
        peer: str,
        response: aiohttp.ClientResponse,
        place: memoryview,
        kind: str,
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        """Fills `place` exactly, without ever holding more than one piece beside it."""
        offset = 0
        async for piece in response.content.iter_any():
            if offset + len(piece) > len(place):
                raise PeerError(f"{peer} sends more than the {len(place)} bytes it announced")
            place[offset : offset + len(piece)] = piece
            offset += len(piece)
            self._traffic.down[kind] += len(piece)
            progress()
        if offset != len(place):
            raise Unreachable(f"{peer} broke off after {offset} of {len(place)} bytes")


class _Attempt:
    """One `fetch`."""

    def __init__(
        self,
        exchange: Exchange,
        path: str,
        num_bytes: int,
        digest: str,
        check: Check,
        idle_timeout_s: float,
    ) -> None:
        self._exchange = exchange
        self._path = path
        self._num_bytes = num_bytes
        self._digest = digest
        self._check = check
        self._idle_timeout_s = idle_timeout_s
        self._reasons: dict[str, str] = {}
        self._liars: list[str] = []

    async def run(self, donors: Sequence[str], together: Gathering) -> Fetched:
        if not await self._gather(donors, together):
            raise self._failed()
        if await self._is_good(together):
            return self._fetched(together)
        for donor in dict.fromkeys(donors):
            if donor in self._liars:
                continue
            alone = Gathering(self._num_bytes)
            if await self._gather([donor], alone) and await self._is_good(alone):
                for liar in await asyncio.to_thread(_differing_donors, together, alone):
                    self._accuse(liar)
                return self._fetched(alone)
        raise self._failed()

    async def _gather(self, donors: Sequence[str], body: Gathering) -> bool:
        try:
            await self._exchange.gather(donors, self._path, body, self._idle_timeout_s)
        except NotGathered as error:
            self._reasons |= error.reasons
            return False
        return True

    async def _is_good(self, body: Gathering) -> bool:
        try:
            await asyncio.to_thread(self._check, body.data, self._digest)
        except PeerError as error:
            givers = set(body.donors.values())
            if len(givers) == 1 and KEPT not in givers:
                self._accuse(*givers)
                self._reasons[body.donors[0]] = str(error)
            return False
        return True

    def _accuse(self, donor: str) -> None:
        if donor not in self._liars:
            self._liars.append(donor)
            self._reasons.setdefault(donor, "sent wrong bytes")

    def _failed(self) -> FetchFailed:
        return FetchFailed(self._path, self._reasons, self._liars)

    def _fetched(self, body: Gathering) -> Fetched:
        by_donor: dict[str, int] = {}
        for chunk, donor in body.donors.items():
            span = body.span(chunk)
            by_donor[donor] = by_donor.get(donor, 0) + span.stop - span.start
        by_donor.pop(KEPT, None)
        return Fetched(body.data, by_donor, tuple(self._liars))


def _differing_donors(suspect: Gathering, good: Gathering) -> list[str]:
    """Who sent a chunk that is not the good one."""
    return [
        donor
        for chunk, donor in sorted(suspect.donors.items())
        if donor != KEPT and suspect.data[(part := suspect.span(chunk))] != good.data[part]
    ]


@asynccontextmanager
async def asking(peer: str) -> AsyncIterator[None]:
    """What aiohttp raises about a connection, as Unreachable."""
    try:
        yield
    except ExchangeError:
        raise
    except TimeoutError as error:
        raise Unreachable(f"{peer} is silent") from error
    except (aiohttp.ClientError, OSError) as error:
        raise Unreachable(f"{peer}: {str(error) or type(error).__name__}") from error


async def require_success(peer: str, response: aiohttp.ClientResponse) -> None:
    if response.status < 300:
        return
    words = (await response.content.read(_ANSWER_BYTES_MAX)).decode(errors="replace")
    kind = Busy if response.status == 503 else Refused
    raise kind(peer, response.status, words)


def _timeout(num_bytes: int, idle_timeout_s: float) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(
        total=60.0 + num_bytes / BYTES_PER_S_MIN,
        sock_connect=CONNECT_TIMEOUT_S,
        sock_read=idle_timeout_s,
    )


def _kind(path: str) -> str:
    """ "/v1/merge/3/..." -> "merge"."""
    return path.split("/")[2]


def _counter(headers: Mapping[str, str], name: str) -> int:
    text = headers.get(name, "")
    if text.isascii() and text.isdigit() and len(text) <= 16 and int(text) <= _COUNTER_MAX:
        return int(text)
    raise PeerError(f"expected a counter in the header {name}, got {text[:40]!r}")
