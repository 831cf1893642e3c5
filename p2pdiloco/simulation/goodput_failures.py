"""Chips that fail and return, and how long everything takes.

Chips fail independently, each once per `interruption_s` in the mean, so a cluster of N chips sees a
Poisson process of rate N / interruption_s (Decoupled DiLoCo 1.7 in our notes: MTBF = MTBI / N).
Delays are exponentiated-Weibull, as the paper says; it prints neither means nor shapes. The means
below were calibrated once against its Table 1, all rows together, see
`benchmarks/results/goodput.md`; the shapes are ours and hardly matter, since goodput depends on the
means alone wherever a failure during a stop is taken in by that stop.
"""

import heapq
import math
import random
from collections import deque
from dataclasses import dataclass, fields

from p2pdiloco.errors import UserError

YEAR_S = 365.25 * 24 * 3600
DELAY_SHAPE = 1.5
"""Exponent of the Weibull distribution; 1 would be memoryless."""
DELAY_POWER = 2
"""Of the distribution function: no delay is very short. An integer, for the mean's closed form."""


def delay_s(mean_s: float, rng: random.Random) -> float:
    """Draws from (1 - exp(-(x / scale)^shape))^power with the given mean."""
    level: float = rng.random() ** (1 / DELAY_POWER)
    drawn: float = (-math.log1p(-level)) ** (1 / DELAY_SHAPE)
    return mean_s / _UNIT_MEAN * drawn


def _unit_mean() -> float:
    """Mean at scale 1: the binomial expansion of the density, term by term."""
    terms: list[float] = [
        (-1) ** i * math.comb(DELAY_POWER - 1, i) * (i + 1) ** -(1 + 1 / DELAY_SHAPE)
        for i in range(DELAY_POWER)
    ]
    return DELAY_POWER * math.gamma(1 + 1 / DELAY_SHAPE) * math.fsum(terms)


_UNIT_MEAN = _unit_mean()


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """What fails and how long it takes to go on; the same values for every row of the table.

    Raises UserError for values that mean nothing.
    """

    interruption_s: float = YEAR_S
    """Mean time between interruptions of one chip: a year in the paper."""
    slice_chips: int = 256
    """Chips that are out of use together when one of them fails."""
    return_s: float = 300.0
    """Mean time until a failed slice works again."""
    standby_s: float = 60.0
    """A slice that works again stands by for so long: the next stop takes it in (elastic), or it
    replaces the next one that fails (rigid). Afterwards an elastic job makes a stop of its own for
    it, and a rigid one hands it back.
    """
    scale_down_s: float = 18.0
    """Mean stop of an elastic job after a failure: it notices, and goes on with the other slices,
    which hold the whole state.
    """
    scale_up_s: float = 14.0
    """Mean stop of an elastic job that takes returned slices in."""
    restart_s: float = 66.0
    """Mean stop of a rigid job after a failure: every chip starts anew."""
    replace_s: float = 31.0
    """Mean time on top to obtain another slice where none stands by."""
    step_s: float = 1.0
    """Time of an inner step. A failure costs the step under way."""
    step_spread: float = 0.1
    """Learners differ: their step times are drawn from `step_s * (1 +- step_spread)`. Nobody waits
    for anybody, so it costs no goodput. Within a job all chips keep pace.
    """

    def __post_init__(self) -> None:
        for field in fields(self):
            least, most = _RANGES[field.name]
            value = getattr(self, field.name)
            if not least <= value <= most:
                raise UserError(
                    f"{field.name}: expected a number from {least:g} to {most:g}, got {value:g}"
                )


_DAY_S = 24 * 3600.0
_RANGES = {
    "interruption_s": (1.0, 1e6 * YEAR_S),
    "slice_chips": (1, 1_000_000),
    "return_s": (0.0, 7 * _DAY_S),
    "standby_s": (0.0, 7 * _DAY_S),
    "scale_down_s": (0.0, _DAY_S),
    "scale_up_s": (0.0, _DAY_S),
    "restart_s": (0.0, _DAY_S),
    "replace_s": (0.0, _DAY_S),
    "step_s": (0.1, 60.0),
    "step_spread": (0.0, 0.9),
}


class Failures:
    """The chips of one job: when the next one fails, and when slices that failed work again."""

    def __init__(self, cluster: Cluster, num_chips: float, rng: random.Random):
        self._cluster, self._rng = cluster, rng
        self._rate = num_chips / cluster.interruption_s
        self._returns: list[float] = []
        self.next_s = rng.expovariate(self._rate)

    @property
    def next_return_s(self) -> float:
        return self._returns[0] if self._returns else math.inf

    def fail(self) -> float:
        """The next failure happens; returns when that was."""
        now = self.next_s
        heapq.heappush(self._returns, now + delay_s(self._cluster.return_s, self._rng))
        self.next_s = now + self._rng.expovariate(self._rate)
        return now

    def take_return(self) -> float:
        """The slice that works again first; returns when."""
        return heapq.heappop(self._returns)

    def returned_until(self, when: float) -> int:
        """Takes all slices that work again by then; returns how many."""
        count = 0
        while self.next_return_s <= when:
            self.take_return()
            count += 1
        return count


class Standby:
    """Returned slices that wait for `standby_s`, and are gone afterwards."""

    def __init__(self, failures: Failures, standby_s: float):
        self._failures, self._standby_s = failures, standby_s
        self._since: deque[float] = deque()

    def take(self, now: float) -> bool:
        """Whether one stands by, which is then taken."""
        while self._failures.next_return_s <= now:
            self._since.append(self._failures.take_return())
        while self._since and self._since[0] < now - self._standby_s:
            self._since.popleft()
        if self._since:
            self._since.popleft()
            return True
        return False
