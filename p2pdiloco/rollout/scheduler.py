"""Who runs: a bounded queue, admission in order, chunks of prompts beside the others' decoding."""

from collections import deque
from collections.abc import Collection, Iterable
from itertools import chain

from p2pdiloco.rollout.cache import Cache
from p2pdiloco.rollout.prefixes import BLOCK_TOKENS
from p2pdiloco.rollout.request import QueueFull, Request, Running


class Scheduler:
    """First come, first served. Running sequence i owns row i of the cache."""

    def __init__(self, cache: Cache, *, num_rows_max: int, num_waiting_max: int) -> None:
        self._cache = cache
        self._num_rows_max = num_rows_max
        self._num_waiting_max = num_waiting_max
        self.waiting: deque[Running] = deque()
        self.running: list[Running] = []

    def add(self, request: Request) -> None:
        """Raises `QueueFull` when as many wait as may, `ValueError` for what can never run."""
        if not self._cache.could_admit(request.length_max):
            raise too_long(request, self._cache.num_slots_max)
        require_place(request, self.waiting, self.running, self._num_waiting_max)
        self.waiting.append(Running.of(request))

    def admit(self) -> list[Running]:
        """Gives rows to those that wait, in order, while there is memory; says who got one."""
        admitted: list[Running] = []
        while self.waiting and len(self.running) < self._num_rows_max:
            candidate = self.waiting[0]
            if self._prefix_is_coming(candidate):
                break
            num_held = self._cache.admit(candidate.tokens, candidate.request.length_max)
            if num_held is None:
                break
            candidate.num_held = candidate.num_reused = num_held
            self.running.append(self.waiting.popleft())
            admitted.append(candidate)
        return admitted

    def finish(self, request_id: str) -> Running:
        """Ends a running request; its prefix stays for reuse, its row is free."""
        row = self._row(request_id)
        assert row is not None
        ended = self.running[row]
        self._cache.keep(row, ended.tokens[: ended.num_held])
        self._release(row)
        return ended

    def remove(self, request_id: str) -> bool:
        """Drops a request, waiting or running, and frees its row. False if it is unknown."""
        row = self._row(request_id)
        if row is not None:
            self._release(row)
            return True
        known = len(self.waiting)
        self.waiting = deque(w for w in self.waiting if w.request.id != request_id)
        return len(self.waiting) < known

    def recompute(self) -> None:
        """What the rows hold is void; running sequences start over from their tokens."""
        for running in self.running:
            running.num_held = 0

    def _prefix_is_coming(self, candidate: Running) -> bool:
        """A running sequence is about to compute more of this prompt than is stored.

        So the first of a group computes the shared prompt and the others copy it.
        """
        stored = self._cache.prefixes.num_matched(candidate.tokens[:-1])
        next_block = candidate.tokens[: stored + BLOCK_TOKENS]
        return len(next_block) < len(candidate.tokens) and any(
            running.num_pending > 1 and running.tokens[: len(next_block)] == next_block
            for running in self.running
        )

    def _row(self, request_id: str) -> int | None:
        return next((i for i, r in enumerate(self.running) if r.request.id == request_id), None)

    def _release(self, row: int) -> None:
        last = self.running.pop()
        self._cache.release(row, last.num_held)
        if row < len(self.running):
            self.running[row] = last


def require_place(
    request: Request,
    waiting: Collection[Running],
    running: Iterable[Running],
    num_waiting_max: int,
) -> None:
    """`QueueFull` when as many wait as may, `ValueError` for an id that is in use."""
    if any(known.request.id == request.id for known in chain(waiting, running)):
        raise ValueError(f"request {request.id!r} is here already; give each its own id")
    if len(waiting) >= num_waiting_max:
        raise QueueFull(
            f"{len(waiting)} requests wait, at most {num_waiting_max} may; ask again later"
        )


def too_long(request: Request, cache_tokens: int) -> ValueError:
    """For a request that the cache does not hold, even alone."""
    return ValueError(
        f"request {request.id!r} may need {request.length_max} tokens of cache, which holds"
        f" {cache_tokens}; shorten it or give the cache more memory"
    )
