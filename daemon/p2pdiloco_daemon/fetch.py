"""One body from several donors at once, chunk by chunk.

Each donor has two chunks under way, which hides its latency. A donor that fails passes its chunk
on to the others; a chunk that a slow donor still holds when nothing else is left to do is asked for
a second time by a faster one. Nothing here knows HTTP: a `FetchChunk` gets the bytes.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Sequence
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

PATIENCE_S = 1.0
"""A chunk younger than this is never asked for twice, however fast the waiting donor is."""

FetchChunk = Callable[[str, int, memoryview, Callable[[], None]], Coroutine[Any, Any, None]]
"""(donor, offset, where to put it, to be called as bytes arrive). Raises OSError where it is worth
another try, PeerError where this donor is of no use."""


@dataclass(frozen=True, slots=True)
class Gathered:
    """All bytes, unchecked, and who sent which chunk."""

    data: bytearray
    donor_of_chunk: tuple[str, ...]


class NotGathered(Exception):
    """No donor is left; `reasons` has the last failure of each."""

    def __init__(self, reasons: dict[str, str]) -> None:
        super().__init__("; ".join(f"{donor}: {why}" for donor, why in reasons.items()))
        self.reasons = reasons


async def gather_chunks(donors: Sequence[str], num_bytes: int, fetch_chunk: FetchChunk) -> Gathered:
    """Gets `num_bytes` from `donors`, the first ones first; NotGathered when all have failed."""
    download = _Download(donors, num_bytes, fetch_chunk)
    await download.run()
    return download.result()


@dataclass(slots=True)
class _UnderWay:
    """A chunk that some donors have been asked for."""

    started_at: float
    progress_at: float
    donors: list[str] = field(default_factory=list)


class _Download:
    def __init__(self, donors: Sequence[str], num_bytes: int, fetch_chunk: FetchChunk) -> None:
        assert num_bytes > 0
        self._fetch_chunk = fetch_chunk
        self._data = bytearray(num_bytes)
        self._num_chunks = -(-num_bytes // CHUNK_BYTES)
        self._pending = deque(range(self._num_chunks))
        self._under_way: dict[int, _UnderWay] = {}
        self._done: dict[int, str] = {}
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
        if len(self._done) < self._num_chunks:
            raise NotGathered(self._reasons)

    def result(self) -> Gathered:
        return Gathered(self._data, tuple(self._done[i] for i in range(self._num_chunks)))

    def _start_next_donor(self, group: asyncio.TaskGroup) -> None:
        if self._reserve:
            donor = self._reserve.popleft()
            for _ in range(WORKERS_PER_DONOR):
                self._workers.append(
                    group.create_task(self._work(donor, group), name=f"from {donor}")
                )

    async def _work(self, donor: str, group: asyncio.TaskGroup) -> None:
        while len(self._done) < self._num_chunks:
            if self._failures[donor] >= FAILURES_MAX:
                self._give_up(donor, group)
                return
            chunk = self._choose(donor)
            if chunk is None:
                await self._wait_for_change()
            elif not await self._fetch(donor, chunk):
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
        stalled = now - under_way.progress_at > STALLED_S
        typical_s = self._typical_s.get(donor)
        slow = typical_s is not None and now - under_way.started_at > max(PATIENCE_S, 2 * typical_s)
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

        start = chunk * CHUNK_BYTES
        stop = min(start + CHUNK_BYTES, len(self._data))
        received = bytearray(stop - start)  # its own: two donors may be at the same chunk
        try:
            await self._fetch_chunk(donor, start, memoryview(received), progress)
        except (OSError, PeerError) as error:
            self._note_failure(donor, error)
            self._give_back(donor, chunk)
            return False
        self._failures[donor] = 0
        self._typical_s[donor] = self._now() - started_at
        if chunk not in self._done:
            self._data[start:stop] = received
            self._done[chunk] = donor
            del self._under_way[chunk]
            self._changed.set()
        return True

    def _note_failure(self, donor: str, error: Exception) -> None:
        self._reasons[donor] = str(error)
        hopeless = isinstance(error, PeerError)
        self._failures[donor] = FAILURES_MAX if hopeless else self._failures[donor] + 1

    def _give_back(self, donor: str, chunk: int) -> None:
        under_way = self._under_way.get(chunk)
        if under_way is None or chunk in self._done:
            return
        under_way.donors.remove(donor)
        if not under_way.donors:
            del self._under_way[chunk]
            self._pending.appendleft(chunk)
            self._changed.set()
