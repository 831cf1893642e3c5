"""The runs of the quality study: how each is set up, and which ones belong together."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from p2pdiloco.compress.quantize import WireFormat
from p2pdiloco.optim.merge import MergeRule
from p2pdiloco.spec import InnerSpec, OuterSpec, SyncSpec

LEARNERS = 4
SPREAD = (1.0, 1.0, 1.18, 1.18)
"""Step times of the paper's two kinds of accelerator, 18 % apart; each step varies by 10 %."""
SPREAD_NOISE = 0.1
SPREAD_SYNC_STEPS = 0.5
"""Time from the close of a round to the new fragment at every learner, in steps."""

Admit = Literal["first", "grace", "all", "wait"]
"""Whom a round waits for: the quorum of one, a quorum of one and the grace window, everybody; the
learners go on meanwhile. Under "wait" they do not: the synchronous baseline, K = M, where each
stands still at every H/P steps until all have arrived.
"""


@dataclass(frozen=True, slots=True)
class Swarm:
    """The outer settings of M learners; H, P and tau as in the paper."""

    outer_learning_rate: float = OuterSpec().learning_rate
    outer_momentum: float = OuterSpec().momentum
    inner_steps: int = SyncSpec().inner_steps
    num_fragments: int = SyncSpec().num_fragments
    overlap_steps: int = SyncSpec().overlap_steps
    merge: MergeRule = SyncSpec().merge
    wire: WireFormat = SyncSpec().wire
    admit: Admit = "all"
    step_times: tuple[float, ...] = (1.0,) * LEARNERS
    noise: float = 0.0
    sync_steps: float | None = None
    """None: the whole overlap, the worst case."""

    def __str__(self) -> str:
        rule = f"{self.merge} {self.outer_learning_rate}/{self.outer_momentum}"
        return f"{rule} H{self.inner_steps} P{self.num_fragments} {self.wire} {self.admit}"


@dataclass(frozen=True, slots=True)
class Setting:
    """One run: a swarm, or with `swarm=None` one learner with a batch of `batches` learners."""

    seed: int
    swarm: Swarm | None = None
    batches: int = 1
    inner_learning_rate: float = InnerSpec().learning_rate

    @property
    def kind(self) -> str:
        """What the command line calls it."""
        if self.swarm is not None:
            return "swarm"
        return "alone" if self.batches == 1 else "parallel"

    def __str__(self) -> str:
        what = str(self.swarm) if self.swarm else f"batch {self.batches * InnerSpec().batch_size}"
        return f"{what} inner {self.inner_learning_rate} seed {self.seed}"


def baselines(seed: int) -> list[Setting]:
    """One learner alone, and data parallel."""
    return [Setting(seed), Setting(seed, batches=LEARNERS)]


_SWEPT: list[tuple[MergeRule, float, float, int, int]] = [
    # merge, outer learning rate, momentum, H, P
    ("rda", 0.7, 0.3, 24, 6),
    ("mean", 1.0, 0.3, 24, 6),
    ("mean", 1.0, 0.5, 24, 6),
    ("rda", 1.0, 0.0, 24, 6),
    ("rda", 0.7, 0.3, 8, 4),
    ("mean", 1.0, 0.5, 8, 4),
    ("rda", 0.7, 0.3, 12, 6),
    ("mean", 1.0, 0.3, 8, 4),
    ("rda", 0.7, 0.0, 8, 4),
    ("rda", 0.5, 0.3, 8, 4),
    ("rda", 0.5, 0.3, 24, 6),
    ("rda", 0.5, 0.3, 12, 6),
    ("mean", 0.7, 0.3, 12, 6),
    ("mean", 1.0, 0.0, 12, 6),
]

SWEEP = [
    Swarm(
        merge=rule,
        outer_learning_rate=rate,
        outer_momentum=momentum,
        inner_steps=h,
        num_fragments=p,
        wire="int8",
    )
    for rule, rate, momentum, h, p in _SWEPT
]


def sweep(seeds: Sequence[int]) -> list[Setting]:
    """Outer settings against both baselines."""
    return [
        run
        for seed in seeds
        for run in [*baselines(seed), *(Setting(seed, swarm) for swarm in SWEEP)]
    ]


def final(seeds: Sequence[int]) -> list[Setting]:
    """The defaults of the run spec against both baselines."""
    return [run for seed in seeds for run in [Setting(seed, Swarm()), *baselines(seed)]]


def merge_rules(seeds: Sequence[int]) -> list[Setting]:
    """The other merge rule at the same outer settings."""
    return [Setting(seed, replace(Swarm(), merge=rule)) for seed in seeds for rule in MERGES]


def wires(seeds: Sequence[int]) -> list[Setting]:
    """The wire formats."""
    return [Setting(seed, replace(Swarm(), wire=wire)) for seed in seeds for wire in WIRES]


def spread(seeds: Sequence[int]) -> list[Setting]:
    """Learners of two speeds under the ways to close a round."""
    uneven = replace(Swarm(), step_times=SPREAD, noise=SPREAD_NOISE, sync_steps=SPREAD_SYNC_STEPS)
    return [Setting(seed, replace(uneven, admit=admit)) for seed in seeds for admit in ADMITS]


MERGES: tuple[MergeRule, ...] = ("rda", "mean")
WIRES: tuple[WireFormat, ...] = ("float32", "int8", "int4")
ADMITS: tuple[Admit, ...] = ("first", "grace", "wait")

STUDIES: dict[str, tuple[Callable[[Sequence[int]], list[Setting]], int, list[int]]] = {
    "sweep": (sweep, 300, [0]),
    "final": (final, 1000, [0, 1, 2]),
    "long": (final, 4000, [0]),
    "merge": (merge_rules, 1000, [0]),
    "wire": (wires, 1000, [0]),
    "spread": (spread, 400, [0, 1, 2]),
}
"""Name -> settings for given seeds, steps, seeds."""
