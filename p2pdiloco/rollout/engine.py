"""The rollout engine: continuous batching with drafts that pay for themselves.

One step: `schedule` decides which tokens the model sees, `run` computes their logits, `postprocess`
commits what the sampling rule gives. A sequence's new tokens are what it has pending (a chunk of
its prompt, or its newest token) and, when that is all, a draft.

Tokens are a function of weights, prompt, sampling, trajectory and position (verify.py): whatever
else the engine does, it may not and does not change them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from p2pdiloco.rollout.cache import Cache
from p2pdiloco.rollout.costs import WIDTHS, CostTable, Reliability, Searching, paying_lengths
from p2pdiloco.rollout.lean import lean_pass
from p2pdiloco.rollout.pace import Pace
from p2pdiloco.rollout.packed import Segment, forward, in_pass_order, num_positions, prepare
from p2pdiloco.rollout.policy import overwrite, require_answerable
from p2pdiloco.rollout.request import Finish, Progress, Request, Running, Token
from p2pdiloco.rollout.rows import Rows
from p2pdiloco.rollout.sampling import Choice, Sampling, decide
from p2pdiloco.rollout.scheduler import Scheduler
from p2pdiloco.rollout.suffix import Draft, Drafter
from p2pdiloco.rollout.verify import Position, Referee, settle

DRAFT_TOKENS_MAX = 32
"""Longer drafts hardly ever hold to the end, and drafting takes time too."""

CALIBRATION_TOKENS = 256
"""Context of the steps that are timed, at most. Work at other lengths corrects the table."""
_NEWEST = 0.05
"""Weight of a step in what rows take. What is left is for prefixes, which must outlast the steps
until their next turn; and a lull may let no flood in."""
_TRIALS = 3
"""The fastest counts: other programs only ever slow a step down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the engine may take."""

    cache_bytes: int = 1 << 28
    """For keys and values."""
    num_rows_max: int = 64
    """Sequences that run at once."""
    num_waiting_max: int = 256
    chunk_tokens: int = 256
    """Prompt tokens per step: what decoding sequences may have to wait for."""


@dataclass(frozen=True, slots=True)
class _Work:
    """One sequence's part of a step. `draft` is the tail of the segment's tokens."""

    running: Running
    segment: Segment
    num_wanted: int
    """Of the last tokens of the segment, how many need logits: none if more of a prompt follows."""
    draft: list[int] = field(default_factory=list)
    guess: Draft = field(default_factory=Draft)
    """What the draft was cut from."""


class Engine:
    """Generates with one model, which it takes over. One call at a time; all state is in here."""

    def __init__(
        self,
        model: PreTrainedModel,
        limits: Limits,
        clock: Callable[[], float],
        *,
        drafter: Drafter | None = None,
        reuse: bool = True,
        version: int = 0,
    ) -> None:
        """`clock` gives seconds; what a step takes decides how much is drafted, nothing else.

        Without a drafter nothing is drafted, without `reuse` each prompt is computed whole.
        """
        prepare(model)
        self._forward = lean_pass(model) or partial(forward, model)
        self.model = model
        """The one whose weights `swap` overwrites."""
        self.costs = CostTable()
        self.pace = Pace(self.costs)
        self.reliability = Reliability()
        self._searching = Searching()
        self.referee = Referee(model, self._logits_alone)
        self.cache = Cache(model, limits.cache_bytes, reuse=reuse)
        self.scheduler = Scheduler(
            self.cache, num_rows_max=limits.num_rows_max, num_waiting_max=limits.num_waiting_max
        )
        self.version = version
        self._limits = limits
        self._clock = clock
        self._drafter = drafter
        self._cancelled: list[Progress] = []
        self._row_slots = 0.0
        """What rows take of the cache; older steps fade."""
        self.busy_s = 0.0
        """Spent in steps, by the clock."""
        self.num_drafted = 0
        """Draft tokens tried."""
        self.num_held = 0
        """Of those, the ones that the rule confirmed."""

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do or to tell."""
        return bool(self.scheduler.waiting or self.scheduler.running or self._cancelled)

    @property
    def num_running(self) -> int:
        return len(self.scheduler.running)

    @property
    def num_waiting(self) -> int:
        return len(self.scheduler.waiting)

    @property
    def cache_tokens(self) -> int:
        """Tokens whose keys and values there is room for."""
        return self.cache.num_slots_max

    @property
    def cache_share(self) -> float:
        """Of these, what is in use, by rows and prefixes."""
        return self.cache.num_slots / max(1, self.cache_tokens)

    @property
    def prefix_tokens(self) -> int:
        """Of these, room for prefixes beside the rows, which hold copies; at least 1."""
        return max(1, self.cache_tokens - round(self._row_slots))

    def num_rows_of(self, length_max: int) -> int:
        """Sequences of this length that run at once."""
        return min(self._limits.num_rows_max, self.cache.num_rows_of(length_max))

    def submit(self, request: Request) -> None:
        """Queues a request. `QueueFull` if too many wait, `ValueError` if it can never run."""
        require_answerable(self.model, request)
        self.scheduler.add(request)

    @torch.inference_mode()
    def cancel(self, request_id: str) -> None:
        """Ends a request and frees its memory now; the next step reports it. Unknown ids are
        ignored: the request may have ended meanwhile."""
        if self.scheduler.remove(request_id):
            if self._drafter is not None:
                self._drafter.stop(request_id)
            self._cancelled.append(Progress(request_id, (), Finish.CANCELLED))

    @torch.inference_mode()
    def swap(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Overwrites the weights in place, between two steps.

        Running requests go on: their keys and values are computed anew, and their next tokens carry
        the new version.
        """
        overwrite(self.model, weights)
        self.version = version
        self.cache.prefixes.clear()
        self.scheduler.recompute()
        self.referee.probe()

    def learn(self, tokens: Sequence[int]) -> None:
        """Drafts may come from this finished response of another node."""
        if self._drafter is not None:
            self._drafter.learn(tokens)

    @torch.inference_mode()
    def step(self) -> list[Progress]:
        """One pass of the model; what it added to each request."""
        started = self._clock()
        works = self.schedule()
        self._row_slots += _NEWEST * (self.cache.rows.num_slots - self._row_slots)
        progress = self.postprocess(works, self.run(works)) if works else []
        if works:
            num_committed = sum(len(added.tokens) for added in progress)
            self._observe(works, num_committed, self._clock() - started)
        progress += self._cancelled
        self._cancelled = []
        return progress

    def schedule(self) -> list[_Work]:
        """Every decoding sequence, with drafts as far as they pay, and a chunk of prompts."""
        for admitted in self.scheduler.admit():
            if self._drafter is not None:
                self._drafter.start(admitted.request.id, admitted.tokens)
        rows = list(enumerate(self.scheduler.running))
        decoding = [(row, running) for row, running in rows if running.num_pending == 1]
        works = self._decoding(decoding)
        budget = self._limits.chunk_tokens
        for row, running in rows:
            if running.num_pending > 1 and budget > 0:
                end = running.num_held + min(budget, running.num_pending)
                chunk = Segment(row, running.num_held, running.tokens[running.num_held : end])
                works.append(_Work(running, chunk, int(end == len(running.tokens))))
                budget -= len(chunk.tokens)
        order = {id(s): i for i, s in enumerate(in_pass_order([w.segment for w in works]))}
        return sorted(works, key=lambda work: order[id(work.segment)])

    def run(self, works: Sequence[_Work]) -> Tensor:
        """Logits [N, V] of all wanted places, in the order of the works."""
        wanted: list[int] = []
        end = 0
        for work in works:
            end += len(work.segment.tokens)
            wanted += range(end - work.num_wanted, end)
        return self._forward([w.segment for w in works], self.cache.rows, wanted)

    def postprocess(self, works: Sequence[_Work], logits_NV: Tensor) -> list[Progress]:
        """Commits tokens, keeps finished prefixes, frees finished rows."""
        positions = [p for work in works for p in self._positions(work)]
        choices = decide(
            logits_NV,
            [position.sampling for position in positions],
            [position.key for position in positions],
            self.referee.margin,
        )
        progress: list[Progress] = []
        start = 0
        for work in works:
            work.running.num_held = work.segment.end - len(work.draft)
            if work.num_wanted:
                span = slice(start, start + work.num_wanted)
                start = span.stop
                settled = self._settled(work, positions[span], choices[span], logits_NV[span])
                progress.append(self._commit(work, settled))
        for ended in progress:
            if ended.finish is not None:
                self._end(ended.id)
        return progress

    @torch.inference_mode()
    def calibrate(self) -> None:
        """Times steps of many sizes, so that drafts are tried only where they pay. Until then every
        draft is tried whole. The engine must be idle."""
        assert not self.has_work, "calibrate an idle engine"
        length = CALIBRATION_TOKENS + WIDTHS[-1]
        num_rows_max = min(self._limits.num_rows_max, max(1, self.cache.num_slots_max // length))
        batches = [1 << power for power in range(num_rows_max.bit_length())]
        self.cache.prefixes.clear()
        self.cache.rows.resize(batches[-1], length)
        self.costs.measure(batches, self._trial_seconds)
        num_prompt_tokens = min(
            self._limits.chunk_tokens, CALIBRATION_TOKENS, num_positions(self.model)
        )
        self.pace.prefilled(num_prompt_tokens, self._prompt_seconds(num_prompt_tokens))
        self.cache.rows.resize(0, 0)

    def _observe(self, works: Sequence[_Work], num_committed: int, seconds: float) -> None:
        self.busy_s += seconds
        num_tokens = sum(len(work.segment.tokens) for work in works)
        if all(work.num_wanted == len(work.segment.tokens) for work in works):
            self.pace.decoded(len(works), num_committed, seconds)
            self.costs.observe(len(works), num_tokens, seconds)
        elif all(work.num_wanted < len(work.segment.tokens) for work in works):
            self.pace.prefilled(num_tokens, seconds)

    def _trial_seconds(self, batch: int, width: int) -> float:
        """As far as the model has positions: with less context, and at last with fewer tokens."""
        positions = num_positions(self.model)
        width = min(width, positions)
        start = min(CALIBRATION_TOKENS, positions - width)
        segments = [Segment(row, start, [0] * width) for row in range(batch)]
        samplings, keys = [Sampling()] * (batch * width), [0] * (batch * width)
        seconds = []
        for _ in range(_TRIALS):
            started = self._clock()
            logits_NV = self._forward(segments, self.cache.rows, range(batch * width))
            decide(logits_NV, samplings, keys, self.referee.margin)
            seconds.append(self._clock() - started)
        return min(seconds)

    def _prompt_seconds(self, num_tokens: int) -> float:
        started = self._clock()
        self._forward([Segment(0, 0, [0] * num_tokens)], self.cache.rows, [num_tokens - 1])
        return self._clock() - started

    def _logits_alone(self, tokens: Sequence[int]) -> Tensor:
        rows = Rows(self.model)
        rows.resize(1, len(tokens))
        return self._forward([Segment(0, 0, tokens)], rows, range(len(tokens)))

    def _decoding(self, decoding: Sequence[tuple[int, Running]]) -> list[_Work]:
        """Newest token and paying draft of each of these (row, sequence)."""
        guesses, lengths = self._drafts([running for _row, running in decoding])
        works = []
        for (row, running), guess, length in zip(decoding, guesses, lengths, strict=True):
            draft = guess.tokens[:length]
            segment = Segment(row, running.num_held, [running.tokens[-1], *draft])
            works.append(_Work(running, segment, len(draft) + 1, draft, guess))
        return works

    def _drafts(self, decoding: Sequence[Running]) -> tuple[list[Draft], list[int]]:
        """What follows each of these sequences, perhaps, and how much of it to try."""
        batch, seconds = len(decoding), self.costs.seconds
        is_measured = batch > 0 and bool(self.costs.batches)
        num_due = self._searching.num_due(batch) if is_measured else batch
        if self._drafter is not None:
            for running in decoding[:num_due]:
                self._drafter.read(running.request.id)  # serves all later steps, not this one alone
        started = self._clock()
        guesses = [self._guess(running) for running in decoding[:num_due]]
        guesses += [Draft()] * (batch - num_due)
        if not is_measured or not num_due:
            return guesses, [len(guess.tokens) for guess in guesses]
        chances = [self.reliability.path_chances(guess.chances) for guess in guesses]
        lengths = paying_lengths(chances, batch, seconds)
        pairs = zip(chances, lengths, strict=True)
        expected = batch + sum(sum(path[:length]) for path, length in pairs)
        plain_s = seconds(batch, batch) * expected / batch
        saved_s = plain_s - seconds(batch, batch + sum(lengths))
        self._searching.took(num_due, self._clock() - started, saved_s)
        return guesses, lengths

    def _guess(self, running: Running) -> Draft:
        """Never longer than what may be committed and what the row has room for."""
        num_tokens_max = min(DRAFT_TOKENS_MAX, running.num_left - 1)
        if self._drafter is None or num_tokens_max == 0:
            return Draft()
        return self._drafter.draft(running.request.id, num_tokens_max)

    def _positions(self, work: _Work) -> list[Position]:
        """The places whose logits the work wants: after the last token, and after each drafted."""
        return [
            Position.after(work.running, work.draft[:index]) for index in range(work.num_wanted)
        ]

    def _settled(
        self,
        work: _Work,
        positions: Sequence[Position],
        choices: Sequence[Choice],
        logits_NV: Tensor,
    ) -> list[Choice]:
        settled = settle(
            work.draft, choices, lambda i: self.referee.verdict(positions[i], logits_NV[i])
        )
        self.num_drafted += len(work.draft)
        self.num_held += len(settled) - 1
        for token, chance, choice in zip(
            work.guess.tokens, work.guess.chances, settled, strict=False
        ):
            self.reliability.observe(chance, token == choice.token)
        return settled

    def _commit(self, work: _Work, settled: Sequence[Choice]) -> Progress:
        running = work.running
        num_before = len(running.tokens)
        finish = running.commit([choice.token for choice in settled])
        new = running.tokens[num_before:]
        running.num_held += len(new) - 1
        if num_before == len(running.request.prompt):
            self.cache.keep(work.segment.row, running.tokens[: running.num_held])
        if self._drafter is not None:
            self._drafter.extend(running.request.id, new)
        tokens = (Token(c.token, c.logprob, self.version) for c in settled[: len(new)])
        return Progress(running.request.id, tuple(tokens), finish, running.num_reused)

    def _end(self, request_id: str) -> None:
        """A finished request leaves its prefix to later turns, and its answer to drafts."""
        ended = self.scheduler.finish(request_id)
        if self._drafter is not None:
            self._drafter.stop(request_id)
            self._drafter.learn(ended.tokens[len(ended.request.prompt) :])
