"""Goodput and uptime of a run under failures: the paper's table, beside what it published.

*Goodput* is the share of the allocated chip time spent on inner steps that were finished. What does
not count: stops, chips that are out of use, the step that a failure tears, and a learner's start
and catching up. What does: every finished step, also one whose tokens a merge overwrote; how many
tokens were merged is told apart. *Uptime* is the share of slots of `RESOLUTION_S` in which anybody
trained; at every instant, `uptime_instant`.

Data parallel comes from the failure process alone (`goodput_parallel.py`), the decoupled rows from
the production protocol under it (`goodput_decoupled.py`).
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, stdev

from p2pdiloco.errors import UserError
from p2pdiloco.simulation.goodput_decoupled import Merging, run_decoupled
from p2pdiloco.simulation.goodput_failures import Cluster
from p2pdiloco.simulation.goodput_mixed import Mixed
from p2pdiloco.simulation.goodput_parallel import (
    RESOLUTION_S,
    elastic_runs,
    goodput,
    rigid_runs,
    uptime,
    window,
)

CHIPS = (150_000, 300_000, 600_000, 1_200_000, 2_400_000)
LEARNERS = (2, 4, 8, 16)
RIGID, ELASTIC = "rigid", "elastic"
PUBLISHED: dict[tuple[str, int], int] = {
    (row, chips): percent
    for row, percents in {
        RIGID: (72, 57, 38, 27, 18),
        ELASTIC: (88, 80, 69, 58, 40),
        "M=2": (94, 88, 80, 70, 54),
        "M=4": (96, 93, 89, 82, 73),
        "M=8": (98, 96, 94, 88, 80),
        "M=16": (99, 98, 96, 93, 86),
    }.items()
    for chips, percent in zip(CHIPS, percents, strict=True)
}
"""Decoupled DiLoCo, Table 1 (1.7 in our notes): goodput in percent at one interruption per chip and
year.
"""
FAILURES_PER_SEED = 10_000
CHIPS_MAX = 1_000_000_000
LEARNERS_MAX = 64
SEEDS_MAX = 1000
BETWEEN_FAILURES_MIN_S = 1.0
"""More failures than that leave nothing to simulate."""


@dataclass(frozen=True, slots=True)
class Cell:
    """Shares from 0 to 1; means over the seeds. `low` and `high` are the ends of the 95 % interval
    of the mean, which one seed does not give.
    """

    row: str
    chips: int
    goodput: float
    low: float | None
    high: float | None
    uptime: float
    uptime_instant: float
    published: float | None
    merging: Merging | None
    """Of the decoupled rows: sums over the seeds, and the mean efficiency."""

    @property
    def difference(self) -> float | None:
        return None if self.published is None else self.goodput - self.published

    def to_json(self) -> dict[str, object]:
        return asdict(self) | {"difference": self.difference}


@dataclass(frozen=True, slots=True)
class Question:
    """What to simulate. Raises UserError where it makes no sense."""

    cluster: Cluster = field(default_factory=Cluster)
    chips: tuple[int, ...] = CHIPS
    learners: tuple[int, ...] = LEARNERS
    seeds: int = 3

    def __post_init__(self) -> None:
        for chips in self.chips:
            _require("chips", chips, 1, CHIPS_MAX)
        for learners in self.learners:
            _require("learners", learners, 2, LEARNERS_MAX)
        _require("seeds", self.seeds, 1, SEEDS_MAX)
        most, fewest = max(self.chips), min(self.chips)
        if self.learners and max(self.learners) > fewest:
            raise UserError(
                f"{max(self.learners)} learners cannot share {fewest} chips: "
                f"give fewer learners or more chips"
            )
        between_s = self.cluster.interruption_s / most
        if between_s < BETWEEN_FAILURES_MIN_S:
            raise UserError(
                f"{most} chips would fail every {between_s:.2g} s; expected at least "
                f"{BETWEEN_FAILURES_MIN_S:g} s between failures: give fewer chips or a longer "
                f"time between interruptions"
            )

    @property
    def rows(self) -> tuple[str, ...]:
        return (RIGID, ELASTIC, *(f"M={learners}" for learners in self.learners))


def _require(what: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise UserError(f"{what}: expected a whole number from {least} to {most}, got {value}")


@dataclass(frozen=True, slots=True)
class _Sample:
    """One seed of one cell."""

    goodput: float
    uptime: float
    uptime_instant: float
    merging: Merging | None = None


def run_table(
    question: Question, begin: Callable[[str, int], None] = lambda row, chips: None
) -> Iterator[Cell]:
    """Row by row; `begin` is told what is being simulated."""
    for row, sample in _rows(question):
        for chips in question.chips:
            begin(row, chips)
            samples = [sample(chips, seed) for seed in range(question.seeds)]
            yield _cell(question.cluster, row, chips, samples)


def _rows(question: Question) -> Iterator[tuple[str, Callable[[int, int], _Sample]]]:
    cluster = question.cluster

    def span_s(chips: int) -> float:
        return FAILURES_PER_SEED * cluster.interruption_s / chips

    def parallel(kind: str, chips: int, seed: int) -> _Sample:
        make = rigid_runs if kind == RIGID else elastic_runs
        rng = random.Random(f"{kind} {chips} {seed}")
        job = [window(make(cluster, chips, rng), 0.0, span_s(chips))]
        return _Sample(
            goodput(job, span_s(chips), cluster.step_s),
            uptime(job, span_s(chips), RESOLUTION_S),
            uptime(job, span_s(chips), 0.0),
        )

    def decoupled(learners: int, chips: int, seed: int) -> _Sample:
        got = run_decoupled(cluster, chips, learners, span_s(chips), seed)
        return _Sample(got.goodput, got.uptime, got.uptime_instant, got.merging)

    for kind in (RIGID, ELASTIC):
        yield kind, lambda chips, seed, kind=kind: parallel(kind, chips, seed)  # type: ignore[misc]
    for m in question.learners:
        yield f"M={m}", lambda chips, seed, m=m: decoupled(m, chips, seed)  # type: ignore[misc]


def _cell(cluster: Cluster, row: str, chips: int, samples: Sequence[_Sample]) -> Cell:
    shares = [sample.goodput for sample in samples]
    published = PUBLISHED.get((row, chips)) if cluster == Cluster() else None
    half = half_width(shares)
    middle = fmean(shares)
    return Cell(
        row=row,
        chips=chips,
        goodput=middle,
        low=None if half is None else max(0.0, middle - half),
        high=None if half is None else min(1.0, middle + half),
        uptime=fmean(sample.uptime for sample in samples),
        uptime_instant=fmean(sample.uptime_instant for sample in samples),
        published=None if published is None else published / 100,
        merging=_together([sample.merging for sample in samples if sample.merging]),
    )


def _together(seeds: Sequence[Merging]) -> Merging | None:
    if not seeds:
        return None
    return Merging(
        window_s=sum(m.window_s for m in seeds),
        efficiency=fmean(m.efficiency for m in seeds),
        num_merges=sum(m.num_merges for m in seeds),
        num_contributions=sum(m.num_contributions for m in seeds),
        num_forks=sum(m.num_forks for m in seeds),
        merged_tokens=sum(m.merged_tokens for m in seeds),
        processed_tokens=sum(m.processed_tokens for m in seeds),
        longest_pause_s=max(m.longest_pause_s for m in seeds),
    )


STUDENT_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
"""Two-sided 95 % quantiles of Student's t for 1, 2, ... degrees of freedom."""
NORMAL_95 = 1.96


def half_width(samples: Sequence[float]) -> float | None:
    """Of the 95 % interval of the mean; None for one sample."""
    freedom = len(samples) - 1
    if freedom < 1:
        return None
    factor = STUDENT_95[freedom - 1] if freedom <= len(STUDENT_95) else NORMAL_95
    return factor * stdev(samples) / math.sqrt(len(samples))


def to_json(question: Question, cells: Sequence[Cell], mixed: Sequence[Mixed]) -> dict[str, object]:
    """What `p2pdiloco simulate --json` writes."""
    return {
        "cluster": asdict(question.cluster),
        "chips": list(question.chips),
        "rows": list(question.rows),
        "seeds": question.seeds,
        "cells": [cell.to_json() for cell in cells],
        "mixed": [asdict(policy) for policy in mixed],
    }
