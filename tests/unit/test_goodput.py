"""The failure models against closed forms, and what the table is made of."""

import itertools
import math
import random
from statistics import fmean

import pytest

from p2pdiloco.errors import UserError
from p2pdiloco.simulation.goodput import PUBLISHED, Question, half_width, run_table, to_json
from p2pdiloco.simulation.goodput_failures import YEAR_S, Cluster, Failures, Standby, delay_s
from p2pdiloco.simulation.goodput_mixed import synchronous_goodput
from p2pdiloco.simulation.goodput_parallel import (
    Run,
    elastic_runs,
    goodput,
    rigid_runs,
    uptime,
    window,
)
from p2pdiloco.simulation.goodput_volunteers import ABSENCE_S, SESSION_S, sessions

NUM_FAILURES = 4000


def rng() -> random.Random:
    return random.Random(1)


# -------------------------------------------------------------------- failures


@pytest.mark.parametrize("mean_s", [0.5, 20.0])
def test_delays_have_the_mean_that_was_asked_for(mean_s: float) -> None:
    source = rng()
    drawn = [delay_s(mean_s, source) for _ in range(20_000)]
    assert fmean(drawn) == pytest.approx(mean_s, rel=0.02)
    assert min(drawn) > 0


def test_a_delay_of_zero_is_zero() -> None:
    assert delay_s(0.0, rng()) == 0.0


def test_a_cluster_fails_as_often_as_its_chips_together() -> None:
    failures = Failures(Cluster(), 150_000, rng())
    times = [failures.fail() for _ in range(NUM_FAILURES)]
    assert times == sorted(times)
    assert times[-1] / NUM_FAILURES == pytest.approx(YEAR_S / 150_000, rel=0.05)


def test_a_returned_slice_stands_by_for_a_while_and_serves_once() -> None:
    failures = Failures(Cluster(return_s=10.0), 150_000, rng())
    standby = Standby(failures, standby_s=60.0)
    failed = failures.fail()
    assert not standby.take(failed)
    returns = failures.next_return_s
    assert not standby.take(returns - 0.1)
    assert standby.take(returns + 59.0)
    assert not standby.take(returns + 59.0)
    failures.fail()
    assert not standby.take(failures.next_return_s + 61.0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("interruption_s", 0.0),
        ("scale_down_s", -1.0),
        ("restart_s", float("nan")),
        ("restart_s", 1e9),
        ("step_s", float("inf")),
        ("slice_chips", 0),
        ("step_spread", 1.0),
    ],
)
def test_what_means_nothing_is_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(UserError, match=f"^{field}: expected a number from"):
        Cluster(**{field: value})  # type: ignore[arg-type]


# -------------------------------------------------------------------- data parallel


def share(runs: object, cluster: Cluster, chips: int) -> float:
    span_s = NUM_FAILURES * cluster.interruption_s / chips
    assert callable(runs)
    return goodput([window(runs(cluster, chips, rng()), 0.0, span_s)], span_s, cluster.step_s)


@pytest.mark.parametrize("runs", [rigid_runs, elastic_runs])
@pytest.mark.parametrize("chips", [150_000, 1_200_000])
def test_one_stop_per_failure_is_an_alternating_renewal(runs: object, chips: int) -> None:
    """Failures during a stop are taken in by it: goodput is MTBF / (MTBF + stop), less half a step
    per failure.
    """
    cluster = Cluster(
        scale_down_s=30.0,
        restart_s=30.0,
        scale_up_s=0.0,
        replace_s=0.0,
        return_s=0.0,
        standby_s=0.0,
        step_s=0.1,
    )
    between_s = YEAR_S / chips
    closed_form = between_s / (between_s + 30.0)
    assert share(runs, cluster, chips) == pytest.approx(closed_form, abs=0.015)


def test_rare_failures_cost_their_stops_one_by_one() -> None:
    """The limit of one failure at a time: both stops, half a step, and a slice until it is back."""
    chips = 2_000
    cluster = Cluster(standby_s=30.0, return_s=200.0)
    per_failure_s = (
        cluster.scale_down_s
        + cluster.scale_up_s
        + cluster.step_s / 2
        + (cluster.return_s + cluster.standby_s) * cluster.slice_chips / chips
    )
    lost = per_failure_s * chips / cluster.interruption_s
    assert 1 - share(elastic_runs, cluster, chips) == pytest.approx(lost, rel=0.06)


def test_returned_slices_ride_along_when_failures_are_frequent() -> None:
    """Then no stop is made for them alone: the time for scaling up does not matter."""
    slow, fast = Cluster(scale_up_s=60.0), Cluster(scale_up_s=0.0)
    rare = share(elastic_runs, fast, 75_000) - share(elastic_runs, slow, 75_000)
    frequent = share(elastic_runs, fast, 4_800_000) - share(elastic_runs, slow, 4_800_000)
    assert rare > 0.05
    assert abs(frequent) < 0.005


def test_a_torn_step_does_not_count() -> None:
    assert Run(10.0, 14.7, speed=1.0, torn=True).useful_s(step_s=2.0) == 4.0
    assert Run(10.0, 14.7, speed=1.0, torn=False).useful_s(step_s=2.0) == pytest.approx(4.7)
    assert Run(10.0, 20.0, speed=0.5, torn=False).useful_s(step_s=2.0) == pytest.approx(5.0)


def test_a_window_cuts_what_reaches_over_its_edges() -> None:
    runs = (Run(float(at), at + 8.0, 1.0, torn=True) for at in itertools.count(0, 10))
    assert window(runs, 5.0, 25.0) == [
        Run(5.0, 8.0, 1.0, torn=True),
        Run(10.0, 18.0, 1.0, torn=True),
        Run(20.0, 25.0, 1.0, torn=False),
    ]


def test_uptime_needs_one_job_only_and_forgives_short_pauses() -> None:
    one = [Run(0.0, 10.0, 1.0, torn=True), Run(40.0, 100.0, 1.0, torn=False)]
    other = [Run(0.0, 30.0, 1.0, torn=True), Run(90.0, 100.0, 1.0, torn=False)]
    idle = [Run(0.0, 100.0, 0.0, torn=False)]
    assert uptime([one], 100.0, 0.0) == pytest.approx(0.7)
    assert uptime([one, other], 100.0, 0.0) == pytest.approx(0.9)
    assert uptime([one, other], 100.0, 4.0) == pytest.approx(0.94)
    assert uptime([one, other, idle], 100.0, 10.0) == pytest.approx(1.0)
    assert uptime([idle], 100.0, 0.0) == pytest.approx(0.0)


# -------------------------------------------------------------------- the table


def test_data_parallel_comes_within_three_points_of_the_paper() -> None:
    cells = list(run_table(Question(learners=(), seeds=1)))
    assert [(cell.row, cell.chips) for cell in cells] == list(PUBLISHED)[:10]
    for cell in cells:
        assert cell.difference is not None
        assert abs(cell.difference) < 0.03, cell


def test_another_cluster_is_not_compared_with_the_paper() -> None:
    question = Question(cluster=Cluster(restart_s=10.0), chips=(150_000,), learners=(), seeds=1)
    assert [cell.published for cell in run_table(question)] == [None, None]


def test_one_seed_gives_the_same_table_again() -> None:
    question = Question(chips=(2_400_000,), learners=(), seeds=2)
    assert list(run_table(question)) == list(run_table(question))


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ({"chips": (0,)}, "chips: expected a whole number from 1 to 1000000000, got 0"),
        ({"learners": (1,)}, "learners: expected a whole number from 2 to 64, got 1"),
        ({"seeds": 0}, "seeds: expected a whole number from 1 to 1000, got 0"),
        ({"chips": (3, 9), "learners": (4,)}, "4 learners cannot share 3 chips"),
        ({"chips": (10**9,)}, "1000000000 chips would fail every 0.032 s"),
    ],
)
def test_a_question_without_sense_is_refused(question: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        Question(**question)  # type: ignore[arg-type]


def test_the_interval_is_students() -> None:
    assert half_width([0.5]) is None
    assert half_width([0.4, 0.5, 0.6]) == pytest.approx(4.30 * 0.1 / math.sqrt(3))
    assert half_width([0.5, 0.5]) == 0.0


def test_the_json_has_every_figure() -> None:
    question = Question(chips=(600_000,), learners=(), seeds=2)
    told = to_json(question, list(run_table(question)), [])
    assert list(told) == ["cluster", "chips", "rows", "seeds", "cells", "mixed"]
    assert told["rows"] == ["rigid", "elastic"]
    assert isinstance(told["cells"], list)
    assert list(told["cells"][0]) == [
        "row",
        "chips",
        "goodput",
        "low",
        "high",
        "uptime",
        "uptime_instant",
        "published",
        "merging",
        "difference",
    ]


# -------------------------------------------------------------------- learners that wait; sessions


def test_who_waits_at_every_step_gets_the_papers_84_percent() -> None:
    assert synchronous_goodput(seed=1) == pytest.approx(0.84, abs=0.01)


def test_volunteers_are_online_for_their_share_of_the_time() -> None:
    end = 24 * 3600.0
    online_s = 0.0
    for person in range(400):
        spells = list(sessions(random.Random(person), end))
        assert spells == sorted(spells)
        assert all(0 <= on < off <= end for on, off in spells)
        online_s += sum(off - on for on, off in spells)
    expected = SESSION_S / (SESSION_S + ABSENCE_S)
    assert online_s / (400 * end) == pytest.approx(expected, abs=0.04)
