"""What a sync costs whatever answers requests on this machine, learnt on the machine itself.

From served answers (latency, load when the request came, whether a transfer or merge was in flight)
the model gives, for a load, the latency that an answer will not exceed, with a sync and without
one, and how many answers a sync would make late. The bound is the quantile of the newest answers of
like load at a level that follows its own errors: adaptive conformal inference (Gibbs and Candes,
2021), level <- level + rate * (wanted misses - was missed), so that the share of misses comes right
in the long run whatever the latencies do. That share is kept, for the page.
"""

from bisect import bisect_left, bisect_right, insort
from collections import deque
from dataclasses import dataclass, field
from math import ceil, fsum, inf, log2
from operator import mul

MISSES_WANTED = 0.05
"""The bound should hold for 95 % of the answers."""
ADAPTATION_RATE = 0.01
"""Some hundred answers move the level by its own size: spells of a few seconds do not."""
ANSWERS_KEPT = 256
"""Of each load level with and without a sync: a quantile of 95 % rests on 13 of them."""
ANSWERS_MIN = 20
"""Below so many a level borrows from its neighbours."""
LEVELS = 16
LEVELS_PER_DOUBLING = 2
"""Load and one, that is: the first levels end at 0.4, 1, 1.8, 3, 4.7, 7, the last begins at 180."""
EXTRA_GUESSED = 0.1
GUESS_ANSWERS = 100
"""Before anything is known a sync is taken to make a tenth of the answers late, as firmly as if so
many had been seen, which is some ten syncs: then it is best where few are answered.
"""
EXTRA_MIN = 0.01
"""No sync counts as harmless: of moments that seem so the quietest is best."""
OUTCOMES_KEPT = 500
CHANGE_ANSWERS = 100
"""The newest answers without a sync: about half should be above the median of their level."""
CHANGE_SHARE = 0.85
"""If more than this share is above, or below, the machine is another one than it was."""
_ALL_LEVELS = frozenset(range(LEVELS))


@dataclass(frozen=True, slots=True)
class Answer:
    """A request that was answered: in `latency_s`, under the `load` when it came, and whether a
    sync was in flight meanwhile.

    Load is what is asked of whoever answers, best as requests per second over some seconds: what
    happens to be queued says less of the next seconds, and is itself longer during a sync.
    """

    latency_s: float
    load: float
    syncing: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Of a sync that would begin now. `bound_s` is exceeded by 5 % of the answers during it,
    `quiet_bound_s` by as many without it; infinite if nothing is known. Of the answers `quiet_late`
    is the share that is late anyhow, `extra_late` the share that a sync would make late; `rate` is
    answers per second.
    """

    target_s: float
    bound_s: float
    quiet_bound_s: float
    quiet_late: float
    extra_late: float
    rate: float

    @property
    def cost(self) -> float:
        """Answers per second that a sync would make late."""
        return self.extra_late * self.rate


@dataclass
class Coverage:
    """How often a bound held, and the level that follows from it."""

    level: float = MISSES_WANTED
    outcomes: deque[bool] = field(default_factory=lambda: deque(maxlen=OUTCOMES_KEPT))

    def add(self, held: bool) -> None:
        self.outcomes.append(held)
        self.level += ADAPTATION_RATE * (MISSES_WANTED - (not held))

    @property
    def share(self) -> float | None:
        """Of the newest answers, those that kept the bound; wanted are 95 %."""
        return sum(self.outcomes) / len(self.outcomes) if self.outcomes else None


class _Cell:
    """The newest latencies of a level, in order of size as well."""

    def __init__(self) -> None:
        self._newest: deque[float] = deque()
        self.ordered: list[float] = []

    def __len__(self) -> int:
        return len(self.ordered)

    def add(self, latency_s: float) -> None:
        if len(self._newest) == ANSWERS_KEPT:
            del self.ordered[bisect_left(self.ordered, self._newest.popleft())]
        self._newest.append(latency_s)
        insort(self.ordered, latency_s)

    def late(self, target_s: float) -> float:
        """Share of answers beyond the target; there must be some."""
        return 1.0 - bisect_right(self.ordered, target_s) / len(self.ordered)

    def side_of_median(self, latency_s: float) -> float:
        """1 above it, 0 below. What equals it counts for both sides: where a clock is coarse, most
        answers may.
        """
        median_s = self.ordered[len(self.ordered) // 2]
        return 0.5 if latency_s == median_s else float(latency_s > median_s)


class LatencyModel:
    """Learns from answers; forgets what it knew when the machine has changed (`relearned`)."""

    def __init__(self) -> None:
        self.relearned = 0
        self.num_answers = 0
        self._forget()

    def _forget(self) -> None:
        self.coverage = {syncing: Coverage() for syncing in (False, True)}
        self._cells = {
            (level, syncing): _Cell() for level in range(LEVELS) for syncing in (False, True)
        }
        self._newest: deque[tuple[Answer, float]] = deque(maxlen=CHANGE_ANSWERS)
        """Answers without a sync, and on which side of the median of its level each was."""

    def add(self, answer: Answer) -> None:
        """First judges the bound by the answer, then learns from it."""
        self.num_answers += 1
        bound_s = self.bound_s(answer.load, answer.syncing)
        if bound_s is not None:
            self.coverage[answer.syncing].add(answer.latency_s <= bound_s)
        cell = self._cells[level_of(answer.load), answer.syncing]
        if not answer.syncing and len(cell) >= ANSWERS_MIN:
            self._newest.append((answer, cell.side_of_median(answer.latency_s)))
            if self._has_changed():
                self._relearn()
                return
        cell.add(answer.latency_s)

    def bound_s(self, load: float, syncing: bool) -> float | None:
        """The latency that the next answer exceeds with probability 5 %; None before the first."""
        latencies = self._near(load, syncing)
        if not latencies:
            return None
        level = self.coverage[syncing].level
        if level <= 0.0:
            return inf
        rank = ceil((1.0 - level) * (len(latencies) + 1))
        return latencies[min(max(rank, 1), len(latencies)) - 1]

    def late(self, load: float, syncing: bool, target_s: float) -> float | None:
        """The share of answers beyond the target; None before the first."""
        latencies = self._near(load, syncing)
        if not latencies:
            return None
        return 1.0 - bisect_right(latencies, target_s) / len(latencies)

    def forecast(self, load: float, rate: float, target_s: float) -> Forecast | None:
        """None until there was an answer without a sync."""
        quiet_bound_s = self.bound_s(load, False)
        quiet_late = self.late(load, False, target_s)
        if quiet_bound_s is None or quiet_late is None:
            return None
        bound_s = self.bound_s(load, True)
        return Forecast(
            target_s=target_s,
            bound_s=inf if bound_s is None else bound_s,
            quiet_bound_s=quiet_bound_s,
            extra_late=self.extra_late(load, target_s),
            quiet_late=quiet_late,
            rate=rate,
        )

    def extra_late(self, load: float, target_s: float) -> float:
        """The share of answers that a sync makes late at this load.

        Few answers come during syncs: what they say at one level is drawn towards what they say at
        all, and that towards a guess.
        """
        nums, extras = [], []
        for level in range(LEVELS):
            quiet, syncing = self._cells[level, False], self._cells[level, True]
            nums.append(len(syncing) if len(quiet) else 0)
            extras.append(syncing.late(target_s) - quiet.late(target_s) if nums[-1] else 0.0)
        overall = _drawn(fsum(map(mul, nums, extras)), sum(nums), EXTRA_GUESSED)
        level = level_of(load)
        return max(EXTRA_MIN, _drawn(nums[level] * extras[level], nums[level], overall))

    def _near(self, load: float, syncing: bool) -> list[float]:
        """Latencies at this level of load in order of size; while those are too few, with those of
        the nearest levels that make them enough.
        """
        level, found = level_of(load), list[float]()
        for distance in range(LEVELS):
            for near in sorted({level - distance, level + distance} & _ALL_LEVELS):
                found += self._cells[near, syncing].ordered
            if len(found) >= ANSWERS_MIN:
                break
        return sorted(found)

    def _has_changed(self) -> bool:
        if len(self._newest) < CHANGE_ANSWERS:
            return False
        above = sum(side for _, side in self._newest) / CHANGE_ANSWERS
        return above > CHANGE_SHARE or above < 1 - CHANGE_SHARE

    def _relearn(self) -> None:
        """Begins again with the newest answers alone."""
        newest = [answer for answer, _ in self._newest]
        self._forget()
        self.relearned += 1
        for answer in newest:
            self._cells[level_of(answer.load), False].add(answer.latency_s)


def _drawn(total: float, num: int, towards: float) -> float:
    """The mean of `num` values, as if there had been `GUESS_ANSWERS` more at `towards`."""
    return (total + GUESS_ANSWERS * towards) / (num + GUESS_ANSWERS)


def level_of(load: float) -> int:
    return min(LEVELS - 1, int(LEVELS_PER_DOUBLING * log2(1.0 + max(0.0, load))))
