"""One body from several donors at once, chunk by chunk.

Each donor has two chunks under way, which hides its latency. A donor that fails passes its chunk
on to the others; a chunk that a slow donor still holds when nothing else is left to do is asked for
a second time by a faster one. What has arrived lies in a `Gathering`, which outlives the fetch:
when all donors have failed, the next fetch asks for the rest only. Nothing here knows HTTP: a
`FetchChunk` gets the bytes.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from p2pdiloco.errors import PeerError

CHUNK_BYTES = 1 << 20
"""0.8 s at 10 Mbit/s: what a donor that dies can cost at most, per connection."""

WORKERS_PER_DONOR = 2

ACTIVE_DONORS_MAX = 4
"""At once; more would only divide the same downlink. The rest are in reserve."""

FAILURES_MAX = 3
"""In a row, after which a donor is given up for this fetch."""

RETRY_PAUSE_S = 0.25

STALLED_S = 2.0
"""Without a byte: a donor that waits for work asks for that chunk too."""

SILENT_SHARE = 1 / 3
"""Of the time that a chunk is under way; a shorter silence is no stall. On a slow line full of
other bytes a connection may rest for some seconds, and to ask again costs the line a chunk.
"""

PATIENCE_S = 1.0
"""A chunk younger than this is never asked for twice, however fast the waiting donor is."""

FetchChunk = Callable[[str, int, memoryview, Callable[[], None]], Coroutine[Any, Any, None]]
"""(donor, offset, where to put it, to be called as bytes arrive). Raises OSError where it is worth
another try, PeerError where this donor is of no use."""


KEPT = ""
"""In place of a donor: the chunk was here before."""


class Gathering:
    """A body as it comes together, unchecked: its bytes, and who sent which chunk."""

    def __init__(self, num_bytes: int) -> None:
        assert num_bytes > 0
        self.data = bytearray(num_bytes)
        self.num_chunks = -(-num_bytes // CHUNK_BYTES)
        self.donors: dict[int, str] = {}
        self.on_chunk: Callable[[int], None] = lambda chunk: None
        """Told of each chunk that has arrived; its bytes do not change any more."""

    def span(self, chunk: int) -> slice:
        """Where a chunk lies in `data`."""
        return slice(chunk * CHUNK_BYTES, min((chunk + 1) * CHUNK_BYTES, len(self.data)))

    def add_kept(self, spans: Iterable[tuple[int, int]]) -> None:
        """Takes chunks at (offset, bytes) as arrived: they were put into `data`."""
        for offset, size in spans:
            span = self.span(offset // CHUNK_BYTES)
            if (span.start, span.stop) == (offset, offset + size):
                self.donors[offset // CHUNK_BYTES] = KEPT

    @property
    def is_whole(self) -> bool:
        return len(self.donors) == self.num_chunks

    @property
    def num_bytes_here(self) -> int:
        return sum(span.stop - span.start for span in map(self.span, self.donors))


class NotGathered(Exception):
    """No donor is left; `reasons` has the last failure of each."""

    def __init__(self, reasons: dict[str, str]) -> None:
        super().__init__("; ".join(f"{donor}: {why}" for donor, why in reasons.items()))
        self.reasons = reasons


async def gather_chunks(
    donors: Sequence[str],
    body: Gathering,
    fetch_chunk: FetchChunk,
    slots: asyncio.Semaphore | None = None,
) -> None:
    """Gets what `body` lacks from `donors`, the first ones first; NotGathered when all have failed.

    Each chunk under way takes one of `slots`, which several fetches share.
    """
    if not body.is_whole:
        slots = slots or asyncio.Semaphore(ACTIVE_DONORS_MAX * WORKERS_PER_DONOR)
        await _Download(donors, body, fetch_chunk, slots).run()


@dataclass(slots=True)
class _UnderWay:
    """A chunk that some donors have been asked for."""

    started_at: float
    progress_at: float
    donors: list[str] = field(default_factory=list)


class _Download:
    def __init__(
        self,
        donors: Sequence[str],
        body: Gathering,
        fetch_chunk: FetchChunk,
        slots: asyncio.Semaphore,
    ) -> None:
        self._fetch_chunk = fetch_chunk
        self._body = body
        self._slots = slots
        self._pending = deque(c for c in range(body.num_chunks) if c not in body.donors)
        self._under_way: dict[int, _UnderWay] = {}
        self._reserve = deque(dict.fromkeys(donors))
        self._failures: Counter[str] = Counter()
        self._reasons: dict[str, str] = {}
        self._typical_s: dict[str, float] = {}
        self._changed = asyncio.Event()
        self._workers: list[asyncio.Task[None]] = []
        self._given_up: set[str] = set()
        self._now = asyncio.get_running_loop().time

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(ACTIVE_DONORS_MAX):
                self._start_next_donor(group)
        if not self._body.is_whole:
            raise NotGathered(self._reasons)

    def _start_next_donor(self, group: asyncio.TaskGroup) -> None:
        if self._reserve:
            donor = self._reserve.popleft()
            for _ in range(WORKERS_PER_DONOR):
                self._workers.append(
                    group.create_task(self._work(donor, group), name=f"from {donor}")
                )

    async def _work(self, donor: str, group: asyncio.TaskGroup) -> None:
        while not self._body.is_whole:
            if self._failures[donor] >= FAILURES_MAX:
                self._give_up(donor, group)
                return
            async with self._slots:
                chunk = self._choose(donor)
                arrived = chunk is not None and await self._fetch(donor, chunk)
            if chunk is None:
                await self._wait_for_change()
            elif not arrived:
                await asyncio.sleep(RETRY_PAUSE_S)
        for worker in self._workers:  # what they still fetch is here already
            if worker is not asyncio.current_task():
                worker.cancel()

    def _give_up(self, donor: str, group: asyncio.TaskGroup) -> None:
        if donor not in self._given_up:
            self._given_up.add(donor)
            self._start_next_donor(group)

    def _choose(self, donor: str) -> int | None:
        if self._pending:
            return self._pending.popleft()
        now = self._now()
        late = [
            (under_way.started_at, chunk)
            for chunk, under_way in self._under_way.items()
            if donor not in under_way.donors and self._is_late(under_way, donor, now)
        ]
        return min(late)[1] if late else None

    def _is_late(self, under_way: _UnderWay, donor: str, now: float) -> bool:
        under_way_s = now - under_way.started_at
        stalled = now - under_way.progress_at > max(STALLED_S, SILENT_SHARE * under_way_s)
        typical_s = self._typical_s.get(donor)
        slow = typical_s is not None and under_way_s > max(PATIENCE_S, 2 * typical_s)
        return stalled or slow

    async def _wait_for_change(self) -> None:
        """Until a chunk was done or given back, or long enough to look for late ones again."""
        self._changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_S / 2):
                await self._changed.wait()

    async def _fetch(self, donor: str, chunk: int) -> bool:
        started_at = self._now()
        under_way = self._under_way.setdefault(chunk, _UnderWay(started_at, started_at))
        under_way.donors.append(donor)

        def progress() -> None:
            under_way.progress_at = self._now()

        span = self._body.span(chunk)
        received = bytearray(span.stop - span.start)  # its own: two donors may be at the same chunk
        try:
            await self._fetch_chunk(donor, span.start, memoryview(received), progress)
        except (OSError, PeerError) as error:
            self._note_failure(donor, error)
            self._give_back(donor, chunk)
            return False
        self._failures[donor] = 0
        self._typical_s[donor] = self._now() - started_at
        if chunk not in self._body.donors:
            self._body.data[span] = received
            self._body.donors[chunk] = donor
            del self._under_way[chunk]
            self._changed.set()
            self._body.on_chunk(chunk)
        return True

    def _note_failure(self, donor: str, error: Exception) -> None:
        self._reasons[donor] = str(error)
        hopeless = isinstance(error, PeerError)
        self._failures[donor] = FAILURES_MAX if hopeless else self._failures[donor] + 1

    def _give_back(self, donor: str, chunk: int) -> None:
        under_way = self._under_way.get(chunk)
        if under_way is None or chunk in self._body.donors:
            return
        under_way.donors.remove(donor)
        if not under_way.donors:
            del self._under_way[chunk]
            self._pending.appendleft(chunk)
            self._changed.set()
