import random
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pdiloco.protocol.calibration import (
    ANSWERS_MIN,
    CHANGE_ANSWERS,
    EXTRA_GUESSED,
    LEVELS,
    MISSES_WANTED,
    Answer,
    Coverage,
    Forecast,
    LatencyModel,
    level_of,
)


def serve(
    model: LatencyModel, rng: random.Random, num: int, *, slower: float = 1.0, sync_s: float = 0.1
) -> None:
    """Answers take some 20 ms each beside the others, and `sync_s` more during a sync."""
    for _ in range(num):
        load, syncing = rng.choice((0, 1, 3, 9)), rng.random() < 0.2
        latency_s = rng.lognormvariate(0, 0.3) * slower * (0.02 * (1 + load) + sync_s * syncing)
        model.add(Answer(latency_s, load, syncing))


@settings(max_examples=60, deadline=None)
@given(st.floats(-1, 1e6))
def test_every_load_has_a_level(load: float) -> None:
    assert 0 <= level_of(load) < LEVELS


def test_two_levels_make_a_double() -> None:
    loads = (0, 0.5, 1, 2, 3, 4, 7, 15, 100, 1000)
    assert [level_of(load) for load in loads] == [0, 1, 2, 3, 4, 4, 6, 8, 13, 15]


def test_a_model_that_saw_nothing_forecasts_nothing() -> None:
    model = LatencyModel()
    assert model.bound_s(0, False) is None
    assert model.forecast(0, rate=1.0, target_s=0.2) is None


def test_before_the_first_sync_it_guesses() -> None:
    model = LatencyModel()
    model.add(Answer(0.1, 0, False))
    forecast = model.forecast(0, rate=2.0, target_s=0.2)
    assert forecast == Forecast(
        target_s=0.2,
        bound_s=inf,
        quiet_bound_s=0.1,
        quiet_late=0.0,
        extra_late=EXTRA_GUESSED,
        rate=2.0,
    )


def test_what_syncs_did_at_one_load_is_presumed_of_the_others_until_they_are_known() -> None:
    model = LatencyModel()
    for number in range(300):
        model.add(Answer(0.1, 0, False))
        model.add(Answer(0.1, 7, False))
        model.add(Answer(0.5, 0, number % 2 == 0))
    at_7 = model.extra_late(7, 0.2)
    assert 0.4 < at_7 < model.extra_late(0, 0.2)
    for _ in range(300):
        model.add(Answer(0.1, 7, True))
    assert model.extra_late(7, 0.2) < 0.1


@pytest.mark.parametrize("syncing", [False, True])
def test_bounds_hold_for_as_many_answers_as_they_should(syncing: bool) -> None:
    model = LatencyModel()
    serve(model, random.Random(1), 6000)
    assert model.coverage[syncing].share == pytest.approx(1 - MISSES_WANTED, abs=0.02)
    assert model.relearned == 0


def test_a_sync_costs_what_it_made_late_before() -> None:
    model = LatencyModel()
    serve(model, random.Random(2), 4000)
    calm, busy = (model.forecast(load, rate=10.0, target_s=0.1) for load in (0, 3))
    assert calm and busy
    assert calm.quiet_late < 0.01 and calm.extra_late > 0.5
    assert calm.bound_s > 0.1 > calm.quiet_bound_s
    assert busy.quiet_late == pytest.approx(0.23, abs=0.1)
    assert calm.cost == pytest.approx(10 * calm.extra_late)


def test_a_sync_that_disturbs_nothing_costs_nothing() -> None:
    model = LatencyModel()
    serve(model, random.Random(3), 4000, sync_s=0.0)
    forecast = model.forecast(3, rate=10.0, target_s=0.15)
    assert forecast and forecast.extra_late < 0.05


def test_a_level_without_answers_borrows_from_its_neighbours() -> None:
    model = LatencyModel()
    for _ in range(ANSWERS_MIN):
        model.add(Answer(0.3, 3, True))
    assert model.bound_s(40, True) == 0.3
    assert model.late(0, True, 0.2) == 1.0


@pytest.mark.parametrize("slower", [3.0, 1 / 3])
def test_a_machine_that_has_changed_is_learnt_anew(slower: float) -> None:
    model, rng = LatencyModel(), random.Random(4)
    serve(model, rng, 4000)
    before_s = model.bound_s(3, False)
    serve(model, rng, 1000, slower=slower)
    after_s = model.bound_s(3, False)
    assert model.relearned == 1
    assert before_s and after_s
    assert after_s == pytest.approx(slower * before_s, rel=0.35)


def test_a_coarse_clock_is_no_change_of_the_machine() -> None:
    model = LatencyModel()
    for number in range(1000):
        model.add(Answer(0.06 if number % 10 == 0 else 0.05, 0, False))
    assert model.relearned == 0


def test_it_is_noticed_within_a_few_hundred_answers() -> None:
    model, rng = LatencyModel(), random.Random(5)
    serve(model, rng, 4000)
    serve(model, rng, 2 * CHANGE_ANSWERS, slower=4.0)
    assert model.relearned == 1


def test_the_level_follows_its_own_errors() -> None:
    coverage = Coverage()
    coverage.add(held=False)
    assert coverage.level < MISSES_WANTED
    for _ in range(30):
        coverage.add(held=True)
    assert coverage.level > MISSES_WANTED
    assert coverage.share == pytest.approx(30 / 31)


@pytest.mark.parametrize("drift", [0.9995, 1.0005, 1.0015])
def test_coverage_comes_right_while_latencies_drift(drift: float) -> None:
    model, rng = LatencyModel(), random.Random(6)
    for n in range(1500):
        model.add(Answer(0.05 * drift**n * rng.lognormvariate(0, 0.3), 0, False))
    assert model.coverage[False].share == pytest.approx(1 - MISSES_WANTED, abs=0.04)
