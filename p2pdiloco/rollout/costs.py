"""How many draft tokens pay for themselves, from what steps have cost on this machine.

A step over the sequences of a batch commits one token each, and those of their drafts that hold. It
takes T(batch, tokens) seconds, measured. With the draft tokens of the batch ranked by the chance
that they hold, the best number n of them maximizes

    (batch + sum of the n largest chances) / T(batch, batch + n)

the expected tokens per second; a token of a draft never ranks before the one it follows. (Seer,
arXiv 2511.14617, and EfficientRollout, 2606.18967, compare the same two sides, for one number of
drafts per sequence and an acceptance rate in place of each token's own chance.)
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import mul

WIDTHS = (1, 2, 3, 5, 9, 17)
"""Tokens per sequence at which T is measured; between them it is interpolated."""
_TRIAL_S_MAX = 0.25
"""Keeps calibration to some seconds; by then a step is long enough for costs to be proportional."""
_NEWEST = 0.1
"""Weight of a new measurement of a cell."""
_OUTLIER = 2.0
"""A measurement counts as at most so many times what was expected: machines have hiccups."""
_PAUSE_MAX = 16
"""Steps without a look for drafts: texts may begin to repeat themselves at any time."""
_PROBED = 4
"""Sequences that are looked at after a pause."""
_NUM_BINS = 10
_PRIOR_TRIALS = 4.0
"""A bin of chances believes the drafter's word as if it had held in so many trials."""
_TRIALS_MAX = 500.0
"""Older trials fade, as the policy and the texts change."""


class CostTable:
    """T(batch, tokens) in seconds, on a grid of batch sizes by tokens per sequence."""

    def __init__(self, widths: Sequence[int] = WIDTHS) -> None:
        """An engine without drafts has no widths but 1."""
        self._widths = widths
        self._seconds: dict[int, list[float]] = {}
        """By batch size, one entry for each of the widths."""
        self._rows: dict[int, list[float]] = {}
        """What follows from them, for the batch sizes that were asked for since they changed."""

    @property
    def batches(self) -> list[int]:
        """The batch sizes measured so far."""
        return sorted(self._seconds)

    def measure(self, batches: Sequence[int], timed: Callable[[int, int], float]) -> None:
        """Fills the table; `timed(batch, width)` carries out such a step and says what it took.

        What would take long is not tried: beyond `_TRIAL_S_MAX` costs grow with the tokens.
        """
        self._seconds, self._rows = {}, {}
        for batch in batches:
            row: list[float] = []
            for width, before in zip(self._widths, (1, *self._widths), strict=False):
                long = row and row[-1] > _TRIAL_S_MAX
                row.append(row[-1] * width / before if long else timed(batch, width))
            self._seconds[batch] = row
            if row[0] > _TRIAL_S_MAX:
                return

    def observe(self, batch: int, num_tokens: int, seconds: float) -> None:
        """A step of real work took so long; the nearest cell moves towards it."""
        if not self._seconds:
            return
        expected = self.seconds(batch, num_tokens)
        ratio = min(seconds / expected, _OUTLIER)
        row = self._seconds[min(self._seconds, key=lambda known: abs(known - batch))]
        width = num_tokens / batch
        nearest = min(range(len(row)), key=lambda index: abs(self._widths[index] - width))
        row[nearest] *= 1 + _NEWEST * (ratio - 1)
        self._rows = {}

    def seconds(self, batch: int, num_tokens: int) -> float:
        """T, linear between cells and proportional beyond them. Needs a measured table."""
        row = self._rows.get(batch)
        if row is None:
            row = self._rows[batch] = self._row(batch)
        width, widths = num_tokens / batch, self._widths
        if width >= widths[-1]:
            return row[-1] * width / widths[-1]
        index = bisect_right(widths, width) - 1
        share = (width - widths[index]) / (widths[index + 1] - widths[index])
        return row[index] + share * (row[index + 1] - row[index])

    def _row(self, batch: int) -> list[float]:
        """T of this many sequences, one entry for each of the widths."""
        batches = self.batches
        below = max((b for b in batches if b <= batch), default=batches[0])
        above = min((b for b in batches if b >= batch), default=batches[-1])
        low, high = self._rising(below), self._rising(above)
        if below == above:
            return [seconds * max(1.0, batch / below) for seconds in low]
        share = (batch - below) / (above - below)
        return [some + share * (more - some) for some, more in zip(low, high, strict=True)]

    def _rising(self, batch: int) -> list[float]:
        """A measured row. More tokens never cost less: what looks so is noise."""
        return list(accumulate(self._seconds[batch], max))


class Searching:
    """For how many sequences to look for drafts in a step: that takes time, too. While drafts have
    not saved what looking for them took, more and more steps go by without, and then only some
    sequences are looked at."""

    def __init__(self) -> None:
        self._saved_s = self._took_s = 0.0
        """Per sequence that was looked at; older ones fade."""
        self._pause = self._num_left = 0

    def num_due(self, batch: int) -> int:
        """Of so many sequences. Asked once for each step."""
        if self._num_left == 0:
            return min(batch, _PROBED) if self._pause else batch
        self._num_left -= 1
        return 0

    def took(self, num_sequences: int, seconds: float, saved_s: float) -> None:
        """To look at these took so long, and what was found is expected to save so much."""
        self._took_s += _NEWEST * (seconds / num_sequences - self._took_s)
        self._saved_s += _NEWEST * (saved_s / num_sequences - self._saved_s)
        pays = self._saved_s >= self._took_s
        self._pause = 0 if pays else min(max(1, 2 * self._pause), _PAUSE_MAX)
        self._num_left = self._pause


class Reliability:
    """What a drafter's chances are worth: how often tokens of about that chance held.

    It learns from the first token of a draft even if the draft was not tried, since the token that
    was committed shows whether it would have held.
    """

    def __init__(self) -> None:
        self._trials = [0.0] * _NUM_BINS
        self._held = [0.0] * _NUM_BINS

    def observe(self, chance: float, held: bool) -> None:
        """A drafted token, all of whose predecessors were right, was right or wrong."""
        index = _bin(chance)
        if self._trials[index] >= _TRIALS_MAX:
            self._trials[index] /= 2
            self._held[index] /= 2
        self._trials[index] += 1
        self._held[index] += held

    def chance(self, claimed: float) -> float:
        """The chance to reckon with."""
        index = _bin(claimed)
        return (self._held[index] + _PRIOR_TRIALS * claimed) / (self._trials[index] + _PRIOR_TRIALS)

    def path_chances(self, claimed: Sequence[float]) -> list[float]:
        """For each token of a draft the chance that it and all before it hold."""
        return list(accumulate(map(self.chance, claimed), mul))


def paying_lengths(
    path_chances: Sequence[Sequence[float]], batch: int, seconds: Callable[[int, int], float]
) -> list[int]:
    """How much of each draft to try, for a step of `batch` sequences whose cost is `seconds`."""
    ranked = sorted(
        ((chance, index) for index, chances in enumerate(path_chances) for chance in chances),
        key=lambda entry: -entry[0],
    )
    expected = float(batch)
    best_rate, best_num = expected / seconds(batch, batch), 0
    for num, (chance, _index) in enumerate(ranked, start=1):
        expected += chance
        cost = seconds(batch, batch + num)
        if expected / cost > best_rate:
            best_rate, best_num = expected / cost, num
        elif expected + chance * (len(ranked) - num) <= best_rate * cost:
            break  # chances fall and costs do not: no more of them can do better
    lengths = [0] * len(path_chances)
    for _chance, index in ranked[:best_num]:
        lengths[index] += 1
    return lengths


def _bin(chance: float) -> int:
    return min(int(chance * _NUM_BINS), _NUM_BINS - 1)
