"""A replica without a model: what `p2pdiloco.rollout` would do with its time and its cache.

The rows of running sequences have memory of their own; the rest of the cache keeps prefixes, whole
blocks, and gives up the least recently used, as the engine's does. A step decodes one token of each
sequence whose prompt is computed, and computes a chunk of prompts; it takes what the cost table
says.
Not modelled: attention that grows with the context, and speculation.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

from p2pdiloco.rollout.costs import CostTable

CHUNK_TOKENS = 256
"""Of prompts, per step: the default of `rollout.engine.Limits`."""
BLOCK_TOKENS = 16
"""That of `rollout/prefixes.py`."""
_BATCHES = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, slots=True)
class Machine:
    """A replica's size. A step over n tokens takes `step_s + n * token_s` seconds."""

    name: str
    step_s: float
    token_s: float
    num_rows: int
    cache_tokens: int
    """For prefixes."""
    rtt_s: float

    def costs(self) -> CostTable:
        table = CostTable()
        table.measure(_BATCHES, lambda batch, width: self.step_s + self.token_s * batch * width)
        return table

    def prefill_tokens_per_s(self) -> float:
        """Alone."""
        return CHUNK_TOKENS / (self.step_s + self.token_s * CHUNK_TOKENS)

    def decode_table(self) -> tuple[tuple[int, float], ...]:
        return tuple((batch, self.step_s + self.token_s * batch) for batch in _BATCHES)


@dataclass(slots=True)
class Job:
    """One turn at the engine."""

    key: tuple[int, int]
    """(trajectory, turn)"""
    group: int
    group_tokens: int
    prompt_tokens: int
    new_tokens: int
    num_pending: int = 0
    """Of the prompt, tokens still to be computed."""
    num_reused: int = 0
    num_done: int = 0


@dataclass(slots=True)
class Prefixes:
    """Least recently used first: a group's prompt, and what each trajectory has after it."""

    capacity: int
    tokens: OrderedDict[tuple[str, int], int] = field(default_factory=OrderedDict)
    total: int = 0

    def match(self, job: Job) -> int:
        """Tokens of the prompt that are stored; counts as use. The last token never is."""
        shared = self._touched(("group", job.group))
        own = 0
        if shared == job.group_tokens:
            own = self._touched(("own", job.key[0]))
            self._touched(("group", job.group))
        return min(shared + own, (job.prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS)

    def has(self, job: Job) -> bool:
        return self.tokens.get(("group", job.group), 0) >= job.group_tokens

    def keep(self, job: Job, num_tokens: int) -> None:
        """The sequence is computed up to here. Younger prefixes push out older ones."""
        self._put(("own", job.key[0]), max(0, num_tokens - job.group_tokens))
        self._put(("group", job.group), min(num_tokens, job.group_tokens))
        while self.total > self.capacity:
            oldest, tokens = next(iter(self.tokens.items()))
            left = tokens - min(
                tokens, -(-(self.total - self.capacity) // BLOCK_TOKENS) * BLOCK_TOKENS
            )
            self.total -= tokens - left
            if left:
                self.tokens[oldest] = left
            else:
                del self.tokens[oldest]

    def _touched(self, key: tuple[str, int]) -> int:
        if key not in self.tokens:
            return 0
        self.tokens.move_to_end(key)
        return self.tokens[key]

    def _put(self, key: tuple[str, int], num_tokens: int) -> None:
        whole = num_tokens // BLOCK_TOKENS * BLOCK_TOKENS if key[0] == "own" else num_tokens
        self.total += whole - self.tokens.pop(key, 0)
        self.tokens[key] = whole


@dataclass(frozen=True, slots=True)
class _Steps:
    """Steps that are alike."""

    number: int
    seconds: float
    """Of each."""
    chunks: Sequence[tuple[Job, int]]
    decoding: Sequence[Job]


class SimulatedEngine:
    """`advance` brings it to a time and says which turns have finished, and when."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.clock = 0.0
        self.num_prefilled = self.num_decoded = 0
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []
        self._prefixes = Prefixes(machine.cache_tokens)
        self._seconds = cache(machine.costs().seconds)
        self._next: _Steps | None = None

    def submit(self, job: Job, now: float) -> None:
        """Call it at the time to which the engine was advanced."""
        if not self._running and not self._waiting:
            self.clock = now
        self._waiting.append(job)
        self._next = self._scheduled()

    @property
    def next_s(self) -> float:
        """When something may have finished, if nothing new comes."""
        return math.inf if self._next is None else self._end(self._next)

    def advance(self, now: float) -> list[tuple[float, Job]]:
        finished: list[tuple[float, Job]] = []
        while (steps := self._next) is not None:
            number = steps.number
            if self._end(steps) > now:
                number = int((now - self.clock) / steps.seconds)
            if number == 0:
                break
            self.clock += number * steps.seconds
            finished += [(self.clock, job) for job in self._work(steps, number)]
            self._next = self._scheduled()
        return finished

    def _end(self, steps: _Steps) -> float:
        return self.clock + steps.number * steps.seconds

    def _scheduled(self) -> _Steps | None:
        self._admit()
        if not self._running:
            return None
        chunks, decoding = self._chunks(), [job for job in self._running if not job.num_pending]
        num_tokens = len(decoding) + sum(num for _job, num in chunks)
        seconds = self._seconds(len(decoding) + len(chunks), num_tokens)
        number = 1 if chunks else min(job.new_tokens - job.num_done for job in decoding)
        return _Steps(number, seconds, chunks, decoding)

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self.machine.num_rows:
            job = self._waiting[0]
            coming = any(r.group == job.group and r.num_pending > 0 for r in self._running)
            if coming and not self._prefixes.has(job):
                break
            job.num_pending = job.prompt_tokens - self._prefixes.match(job)
            job.num_reused = job.prompt_tokens - job.num_pending
            self._running.append(self._waiting.popleft())

    def _chunks(self) -> list[tuple[Job, int]]:
        budget, chunks = CHUNK_TOKENS, []
        for job in self._running:
            if job.num_pending and budget:
                chunks.append((job, min(budget, job.num_pending)))
                budget -= chunks[-1][1]
        return chunks

    def _work(self, steps: _Steps, number: int) -> list[Job]:
        """Takes so many of the steps; says what has ended."""
        for job, num in steps.chunks:
            job.num_pending -= num
            self.num_prefilled += num
            if not job.num_pending:
                job.num_done = 1
                self._prefixes.keep(job, job.prompt_tokens)
        for job in steps.decoding:
            job.num_done += number
        ended = [job for job in self._running if job.num_done >= job.new_tokens]
        for job in ended:
            self.num_decoded += job.new_tokens
            self._running.remove(job)
            self._prefixes.keep(job, job.prompt_tokens + job.new_tokens - 1)
        return ended
