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

from benchmarks.placement_world import Finished, Job
from p2pdiloco.protocol.turns import Load
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


@dataclass(eq=False, slots=True)
class _Running:
    """A turn that has a row."""

    job: Job
    num_reused: int
    num_pending: int
    """Of the prompt, tokens still to be computed."""
    num_done: int = 0
    """Tokens generated."""


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
    chunks: Sequence[tuple[_Running, int]]
    decoding: Sequence[_Running]


class SimulatedEngine:
    """A `placement_world.Replica`: `next_s` is when a turn, or a chunk of a prompt, is done."""

    def __init__(self, machine: Machine) -> None:
        self.rtt_s = machine.rtt_s
        self._machine = machine
        self._clock = 0.0
        self._waiting: deque[Job] = deque()
        self._running: list[_Running] = []
        self._prefixes = Prefixes(machine.cache_tokens)
        self._seconds = cache(machine.costs().seconds)
        self._next: _Steps | None = None

    @property
    def next_s(self) -> float:
        return math.inf if self._next is None else self._end(self._next)

    def load(self) -> Load:
        machine = self._machine
        return Load(
            num_rows=machine.num_rows,
            cache_tokens=machine.cache_tokens,
            prefill_tokens_per_s=machine.prefill_tokens_per_s(),
            token_s=machine.decode_table(),
        )

    def submit(self, job: Job, now: float) -> None:
        if not self._running and not self._waiting:
            self._clock = now
        self._waiting.append(job)
        self._next = self._scheduled()

    def advance(self, now: float) -> list[Finished]:
        finished: list[Finished] = []
        while (steps := self._next) is not None:
            number = steps.number
            if self._end(steps) > now:
                number = int((now - self._clock) / steps.seconds)
            if number == 0:
                break
            self._clock += number * steps.seconds
            ended = self._work(steps, number)
            finished += [Finished(self._clock, turn.job, turn.num_reused) for turn in ended]
            self._next = self._scheduled()
        return finished

    def _end(self, steps: _Steps) -> float:
        return self._clock + steps.number * steps.seconds

    def _scheduled(self) -> _Steps | None:
        self._admit()
        if not self._running:
            return None
        chunks, decoding = self._chunks(), [turn for turn in self._running if not turn.num_pending]
        num_tokens = len(decoding) + sum(num for _turn, num in chunks)
        seconds = self._seconds(len(decoding) + len(chunks), num_tokens)
        number = 1 if chunks else min(turn.job.new_tokens - turn.num_done for turn in decoding)
        return _Steps(number, seconds, chunks, decoding)

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._machine.num_rows:
            job = self._waiting[0]
            coming = any(r.job.group == job.group and r.num_pending > 0 for r in self._running)
            if coming and not self._prefixes.has(job):
                break
            num_reused = self._prefixes.match(job)
            self._running.append(_Running(job, num_reused, job.prompt_tokens - num_reused))
            self._waiting.popleft()

    def _chunks(self) -> list[tuple[_Running, int]]:
        budget, chunks = CHUNK_TOKENS, []
        for turn in self._running:
            if turn.num_pending and budget:
                chunks.append((turn, min(budget, turn.num_pending)))
                budget -= chunks[-1][1]
        return chunks

    def _work(self, steps: _Steps, number: int) -> list[_Running]:
        """Takes so many of the steps; says what has ended."""
        for turn, num in steps.chunks:
            turn.num_pending -= num
            if not turn.num_pending:
                turn.num_done = 1
                self._prefixes.keep(turn.job, turn.job.prompt_tokens)
        for turn in steps.decoding:
            turn.num_done += number
        ended = [turn for turn in self._running if turn.num_done >= turn.job.new_tokens]
        for turn in ended:
            self._running.remove(turn)
            self._prefixes.keep(turn.job, turn.job.prompt_tokens + turn.job.new_tokens - 1)
        return ended
