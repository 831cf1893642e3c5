"""When the next round of a fragment is due, how long it may be put off, and how long it may wait.

Self-clocking: a period is H inner steps of the *median* ready learner, counted per fragment since
its last receipt, so slow learners do not hold the swarm and fast ones do not empty it. The first
rounds are staggered, fragment p at step (p + 1) H / P, and a launch floor keeps them apart
afterwards (Decoupled DiLoCo 1.2 and 1.4, where t_p spreads fragments over the period).

Where the run leaves slack, a round may be put off by so many steps (`policies.py` says when it is).
Merges then keep appointments, H steps apart: how late the last one came, its *offset*, shortens the
next period. So a period has between H - slack and H + slack steps, and H on average, whatever the
policy; and since the offset follows from the records of the lineage, all nodes see one window.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

FLOOR_SHARE = 0.5
"""Launches may come twice as fast as H steps / P, to catch up after a pause, not faster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncTimes:
    """The symbols of Decoupled DiLoCo: H, P, tau, K, gamma."""

    inner_steps: int
    num_fragments: int
    overlap_steps: int
    quorum: int
    grace_factor: float
    slack_steps: int = 0
    """By how many steps a round may be put off; less than H."""
    grace_least_s: float = 0.0
    """Of every grace window: where learners have nothing else to do until the merge, waiting for
    more of them costs little."""


@dataclass
class Average:
    """Exponential moving average, seeded with the first sample (1.3); None before it. `weight` is
    that of a new sample.
    """

    value: float | None = None
    weight: float = 0.5

    def add(self, sample: float) -> None:
        before = sample if self.value is None else self.value
        self.value = (1 - self.weight) * before + self.weight * sample


@dataclass
class Clocks:
    """xi_quorum and xi_sync, in seconds, as this synchronizer has seen them."""

    quorum_s: Average = field(default_factory=Average)
    sync_s: Average = field(default_factory=Average)


def steps_due(times: SyncTimes, fragment: int, version: int) -> int:
    """Inner steps since receipt of `version` after which the next version is due."""
    if version > 0:
        return times.inner_steps
    return max(1, (fragment + 1) * times.inner_steps // times.num_fragments)


class Window(NamedTuple):
    """Inner steps since receipt: the next round comes from `opens` on, and by `closes`."""

    opens: int
    closes: int


def window(times: SyncTimes, fragment: int, version: int, offset: int) -> Window:
    opens = max(1, steps_due(times, fragment, version) - offset)
    return Window(opens, opens + times.slack_steps)


def next_offset(
    times: SyncTimes, fragment: int, version: int, offset: int, period_steps: int
) -> int:
    """How many steps after its appointment the merge of `version` came, whose period had so many;
    `offset` is that of the merge before it.
    """
    late = period_steps - steps_due(times, fragment, version - 1) + offset
    return min(max(late, 0), times.slack_steps)


def is_due(
    times: SyncTimes, fragment: int, version: int, steps: Sequence[int], offset: int = 0
) -> bool:
    """`steps` since receipt of this version, of every ready learner (0 for one that has not
    received it).
    """
    due = window(times, fragment, version, offset).opens
    behind = sum(num < due for num in steps)
    return behind <= (len(steps) - 1) // 2 if steps else False


DEFERRING_SHARE = 0.125
"""If more than this part of the learners asks for time, a round waits: in a swarm of less than
eight, if anybody does. No vote holds a round beyond its window.
"""


def is_put_off(window: Window, steps: Sequence[int], defers: Sequence[bool]) -> bool:
    """Of every ready learner, its steps since receipt and whether it asks for time."""
    asking = sum(asks and num < window.closes for num, asks in zip(steps, defers, strict=True))
    return asking > DEFERRING_SHARE * len(steps)


def launch_floor_s(times: SyncTimes, step_s: float, num_owned: int) -> float:
    """Least time between two launches of a synchronizer that owns `num_owned` of the fragments."""
    return FLOOR_SHARE * times.inner_steps * step_s / max(1, num_owned)


GRACE_UNKNOWN_S = 1.0
"""Grace before xi_sync was ever measured, at most; the hard cap of [C]."""


def grace_s(times: SyncTimes, step_s: float, quorum_s: float, sync_s: float | None) -> float:
    """Eq. 3: gamma * (tau xi_step - xi_quorum - xi_sync), at least 0. `quorum_s` is this round's or
    its average.

    Ours differs in xi_step: the median ready learner's, where others take the slowest, since
    periods are counted in median steps and a laptop that needs a minute for a step must not hold a
    GPU's merges for a minute.
    """
    slack = times.overlap_steps * step_s - quorum_s - (sync_s or 0.0)
    grace = times.grace_factor * max(0.0, slack)
    if sync_s is None:
        grace = min(grace, GRACE_UNKNOWN_S)
    return max(grace, times.grace_least_s)
