"""When, within the window that a period leaves, a sync should come: the policies.

A policy looks at one moment and says "sync" or "wait", with its reason; `decide` keeps every one of
them within the window. Fixed steps, tokens, load, pressure gate and workload-aware are those of
WA-DiLoCo (Maincode, 2026; sync-papers 3.2), which chooses when an outer sync may disturb serving on
shared machines. `Calibrated` is ours: it compares what a sync would cost now, as measured on this
machine, with what may be expected of waiting. `RandomMoment` is what any of them must beat.
"""

import operator
import random
from collections import deque
from dataclasses import astuple, dataclass, field
from itertools import pairwise
from math import exp
from statistics import fmean
from typing import NamedTuple, Protocol

from p2pdiloco.protocol.calibration import Forecast

LOSS_FALL_FULL = 0.05
"""Nats by which the loss fell since the last sync, at which progress counts in full."""
TOKENS_FULL = 1_000_000
STALENESS_FULL_S = 1800.0
COSTS_KEPT = 600
"""Ten minutes at one per second: some cycles of whatever the machine is used for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pressure:
    """What shares this machine, each from 0, idle, to 1, full."""

    link: float = 0.0
    serving: float = 0.0
    checkpoint: float = 0.0
    owner: float = 0.0

    @property
    def highest(self) -> tuple[float, str]:
        """The strongest, and its name for people."""
        named = (
            (self.link, "the link"),
            (self.serving, "serving"),
            (self.checkpoint, "a checkpoint"),
            (self.owner, "other programs"),
        )
        return max(named, key=lambda pair: pair[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What a policy looks at.

    `steps` and `tokens` since the learner received `version` - 1 of the fragment, `staleness_s`
    seconds ago; `loss_fall` nats since then. A sync comes from `opens` steps on and by `closes`.
    `forecast` is None while nothing that shares the machine has been measured.
    """

    fragment: int
    version: int
    steps: int
    tokens: int
    opens: int
    closes: int
    step_s: float
    staleness_s: float = 0.0
    loss_fall: float = 0.0
    pressure: Pressure = Pressure()
    forecast: Forecast | None = None

    @property
    def left_s(self) -> float:
        """How long the sync can still be put off."""
        return max(0, self.closes - self.steps) * self.step_s


class Decision(NamedTuple):
    """`wait_steps` is how many steps it may take at most until a sync; 0 for one now."""

    sync: bool
    reason: str
    wait_steps: int = 0


class Policy(Protocol):
    def judge(self, moment: Moment) -> tuple[bool, str]:
        """(sync now, why or why not), for a moment inside its window."""
        ...


def decide(policy: Policy, moment: Moment) -> Decision:
    """What the policy says, within the window."""
    steps, left = moment.steps, moment.closes - moment.steps
    if steps < moment.opens:
        return Decision(False, f"{steps} of {moment.opens} steps are done", left)
    if left <= 0:
        return Decision(True, f"put off as long as it may be: {moment.closes} steps are done")
    sync, reason = policy.judge(moment)
    return Decision(sync, reason, 0 if sync else left)


# -------------------------------------------------------------------- as published


@dataclass(frozen=True, slots=True)
class Fixed:
    """As soon as the window opens: H steps, whatever else the machine does."""

    def judge(self, moment: Moment) -> tuple[bool, str]:
        return True, f"{moment.steps} steps are done"


@dataclass(frozen=True, slots=True)
class Tokens:
    """After so many tokens."""

    tokens: int = TOKENS_FULL

    def judge(self, moment: Moment) -> tuple[bool, str]:
        return moment.tokens >= self.tokens, f"{moment.tokens} of {self.tokens} tokens are done"


_LOAD_WEIGHTS = Pressure(link=0.5, serving=0.75, checkpoint=0.25, owner=0.75)
"""WA-DiLoCo's for network, inference and checkpoint; other programs weigh like serving."""


def _weighted(pressure: Pressure, weights: Pressure = _LOAD_WEIGHTS) -> float:
    return float(sum(map(operator.mul, astuple(pressure), astuple(weights))))


@dataclass(frozen=True, slots=True)
class Load:
    """Not while the weighted mean load is above the limit."""

    limit: float = 0.6

    def judge(self, moment: Moment) -> tuple[bool, str]:
        load = _weighted(moment.pressure) / sum(astuple(_LOAD_WEIGHTS))
        return load <= self.limit, f"the load is {load:.2f}, the limit {self.limit:.2f}"


@dataclass(frozen=True, slots=True)
class PressureGate:
    """Not while anything presses harder than the limit."""

    limit: float = 0.6

    def judge(self, moment: Moment) -> tuple[bool, str]:
        pressure, name = moment.pressure.highest
        return pressure <= self.limit, f"{name} is at {pressure:.2f}, the limit {self.limit:.2f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadAware:
    """Syncs when progress outweighs pressure; weights and scales as published.

    Staleness is on the side of progress: the older the state, the more likely a sync. The published
    code has it on the side of pressure, which is `staleness=-0.25` here. `cost` is the weight of
    the calibrated cost: 0 in its `wa_diloco`, 1 in its `wa_calibrated`.
    """

    loss: float = 0.5
    tokens: float = 0.5
    staleness: float = 0.25
    cost: float = 0.0
    threshold: float = 0.0

    def judge(self, moment: Moment) -> tuple[bool, str]:
        progress = (
            self.loss * _capped(moment.loss_fall, LOSS_FALL_FULL)
            + self.tokens * _capped(moment.tokens, TOKENS_FULL)
            + self.staleness * _capped(moment.staleness_s, STALENESS_FULL_S)
        )
        pressure = _weighted(moment.pressure)
        if moment.forecast:
            pressure += self.cost * moment.forecast.extra_late
        sync = progress - pressure > self.threshold
        return sync, f"progress {progress:.2f} against pressure {pressure:.2f}"


def _capped(value: float, full: float) -> float:
    return min(1.0, max(0.0, value / full))


# -------------------------------------------------------------------- ours


@dataclass
class CostHistory:
    """Costs of a sync at moments a second apart: what waiting may bring.

    What uses a machine comes in spells. A moment is *dear* if it costs more than the mean, else
    *cheap*; how long spells of dear ones last, and what both cost on average, is what is known.
    """

    costs: deque[float] = field(default_factory=lambda: deque(maxlen=COSTS_KEPT))
    _known: tuple[float, float, float] | None = None

    def add(self, cost: float) -> None:
        self.costs.append(cost)
        self._known = None

    def known(self) -> tuple[float, float, float]:
        """(mean of the cheap ones, mean of the dear ones, mean length of dear spells in seconds)"""
        if self._known is None:
            mean = fmean(self.costs)
            dear = [cost for cost in self.costs if cost > mean]
            cheap = [cost for cost in self.costs if cost <= mean] or [mean]
            ends = sum(a > mean >= b for a, b in pairwise(self.costs))
            spell_s = len(dear) / max(1, ends)
            self._known = fmean(cheap), fmean(dear) if dear else mean, spell_s
        return self._known

    def expected(self, left_s: float) -> float:
        """The cost of a sync that is put off in a dear spell: until it ends, if it does so within
        `left_s` (spells end as if at random), else to the end of the window.
        """
        cheap, dear, spell_s = self.known()
        if not spell_s:
            return cheap
        lasts = exp(-left_s / spell_s)
        return (1 - lasts) * cheap + lasts * dear


@dataclass
class Calibrated:
    """Syncs when the answers that share the machine are safe, else at the least bad moment.

    Safe: the calibrated bound of an answer's latency during a sync lies within the target. If it
    does not, a sync comes when its cost now (late answers per second that a sync would add) is no
    more than what may be expected of waiting on (`CostHistory.expected`). `history` is fed by the
    caller, once a second. While nothing is measured, the pressure gate decides.
    """

    history: CostHistory = field(default_factory=CostHistory)
    gate: PressureGate = PressureGate()

    def judge(self, moment: Moment) -> tuple[bool, str]:
        forecast = moment.forecast
        if forecast is None or not self.history.costs:
            sync, reason = self.gate.judge(moment)
            return sync, f"nothing that serves here tells of it; {reason}"
        if forecast.bound_s <= forecast.target_s:
            return True, (
                f"answers should stay below {1e3 * forecast.bound_s:.0f} ms during a sync, "
                f"{1e3 * forecast.target_s:.0f} are allowed"
            )
        waiting = self.history.expected(moment.left_s)
        cost = f"a sync now would make {forecast.cost:.2f} answers late per second"
        if forecast.cost <= waiting:
            return True, f"{cost}, no more than waiting promises"
        return False, f"{cost}, {waiting:.2f} may be expected of waiting"


# -------------------------------------------------------------------- the baseline


@dataclass
class RandomMoment:
    """A moment of the window drawn at random, every step alike: the count-matched random schedule,
    since every window holds one sync whatever the policy.
    """

    rng: random.Random
    _drawn: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Fragment -> (version, step)."""

    def judge(self, moment: Moment) -> tuple[bool, str]:
        version, at = self._drawn.get(moment.fragment, (-1, 0))
        if version != moment.version:
            at = self.rng.randint(moment.opens, moment.closes)
            self._drawn[moment.fragment] = (moment.version, at)
        return moment.steps >= at, f"step {at} was drawn"
