import math
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pdiloco.protocol.calibration import Forecast
from p2pdiloco.protocol.policies import (
    Calibrated,
    CostHistory,
    Decision,
    Fixed,
    Load,
    Moment,
    Policy,
    Pressure,
    PressureGate,
    RandomMoment,
    Tokens,
    WorkloadAware,
    decide,
)

share = st.floats(0, 1)
pressures = st.builds(Pressure, link=share, serving=share, checkpoint=share, owner=share)
SAFE = Forecast(
    target_s=0.2, bound_s=0.15, quiet_bound_s=0.1, extra_late=0.01, quiet_late=0.01, rate=10.0
)
RISKY = replace(SAFE, bound_s=0.4, extra_late=0.3)


def moment(**changes: Any) -> Moment:
    """Half way through a window from step 10 to 30."""
    usual = Moment(fragment=0, version=1, steps=20, tokens=20_000, opens=10, closes=30, step_s=1.0)
    return replace(usual, **changes)


def policies() -> list[Policy]:
    history = CostHistory()
    history.add(1.0)
    return [
        Fixed(),
        Tokens(),
        Load(),
        PressureGate(),
        WorkloadAware(),
        WorkloadAware(cost=1.0),
        Calibrated(),
        Calibrated(history),
        RandomMoment(random.Random(1)),
    ]


@settings(max_examples=60, deadline=None)
@given(
    number=st.integers(0, len(policies()) - 1),
    steps=st.integers(0, 60),
    pressure=pressures,
    loss_fall=st.floats(-5, 5),
    staleness_s=st.floats(0, 1e5),
    forecast=st.sampled_from([None, SAFE, RISKY]),
)
def test_every_policy_stays_within_the_window(number: int, **seen: Any) -> None:
    at = moment(**seen)
    decision = decide(policies()[number], at)
    if at.steps < at.opens:
        assert not decision.sync
    if at.steps >= at.closes:
        assert decision.sync
    assert decision.wait_steps == (0 if decision.sync else at.closes - at.steps)
    assert decision.reason


def test_fixed_syncs_as_soon_as_it_may() -> None:
    assert decide(Fixed(), moment(steps=9)) == Decision(False, "9 of 10 steps are done", 21)
    assert decide(Fixed(), moment(steps=10)) == Decision(True, "10 steps are done")


def test_tokens_wait_for_enough_of_them() -> None:
    assert not decide(Tokens(30_000), moment()).sync
    assert decide(Tokens(20_000), moment()).sync


def test_the_gate_closes_at_the_highest_pressure_and_names_it() -> None:
    decision = decide(PressureGate(), moment(pressure=Pressure(link=0.2, owner=0.7)))
    assert decision == Decision(False, "other programs is at 0.70, the limit 0.60", 10)


def test_load_weighs_what_presses() -> None:
    busy = moment(pressure=Pressure(link=1.0, serving=1.0, owner=1.0))
    assert not decide(Load(), busy).sync
    assert decide(Load(), moment(pressure=Pressure(link=1.0))).sync


def test_progress_opens_and_pressure_closes_the_published_gate() -> None:
    ahead = moment(loss_fall=0.05)
    assert decide(WorkloadAware(), ahead).sync
    assert not decide(WorkloadAware(), replace(ahead, pressure=Pressure(serving=0.9))).sync


@settings(max_examples=60, deadline=None)
@given(loss_fall=st.floats(0, 0.1), pressure=pressures, older_s=st.floats(0, 1e4))
def test_staleness_never_makes_a_sync_less_likely(
    loss_fall: float, pressure: Pressure, older_s: float
) -> None:
    young = moment(loss_fall=loss_fall, pressure=pressure)
    if decide(WorkloadAware(), young).sync:
        assert decide(WorkloadAware(), replace(young, staleness_s=older_s)).sync


def test_the_published_sign_of_staleness_holds_back_the_oldest_state() -> None:
    old = moment(loss_fall=0.04, pressure=Pressure(serving=0.4), staleness_s=1800.0)
    assert decide(WorkloadAware(), old).sync
    assert not decide(WorkloadAware(staleness=-0.25), old).sync


def test_a_sync_that_is_safe_comes_at_once() -> None:
    history = CostHistory()
    history.add(0.0)
    decision = decide(Calibrated(history), moment(forecast=SAFE))
    assert decision == Decision(
        True, "answers should stay below 150 ms during a sync, 200 are allowed"
    )


def test_an_unsafe_sync_waits_while_better_moments_may_be_expected() -> None:
    history = CostHistory()
    for cost in (0.0, 0.0, 3.0, 0.0) * 5:
        history.add(cost)
    decision = decide(Calibrated(history), moment(forecast=RISKY))
    assert not decision.sync
    assert decision.reason.startswith("a sync now would make 3.00 answers late per second, 0.0")


def test_an_unsafe_sync_comes_when_waiting_promises_no_better() -> None:
    history = CostHistory()
    for _ in range(20):
        history.add(3.0)
    assert decide(Calibrated(history), moment(forecast=RISKY)).sync


def test_what_was_never_measured_is_left_to_the_gate() -> None:
    decision = decide(Calibrated(), moment(pressure=Pressure(serving=0.9)))
    assert not decision.sync
    assert decision.reason.startswith("nothing that serves here tells of it; serving is at 0.90")


def history_of(*costs: float) -> CostHistory:
    history = CostHistory()
    for cost in costs:
        history.add(cost)
    return history


def test_a_history_knows_cheap_and_dear_and_how_long_dear_spells_last() -> None:
    spells = ((0.1,) * 6 + (1.0,) * 4) * 5 + (0.1,) * 10
    assert history_of(*spells).known() == pytest.approx((0.1, 1.0, 4.0))
    assert history_of(2.0, 2.0).known() == (2.0, 2.0, 0.0)


def test_the_longer_a_sync_may_wait_the_likelier_the_spell_ends_first() -> None:
    history = history_of(*((0.0,) * 6 + (1.0,) * 4) * 5)
    assert history.expected(0.0) == pytest.approx(1.0)
    assert history.expected(4.0) == pytest.approx(math.exp(-4.0 / history.known()[2]))
    assert history.expected(1000.0) == pytest.approx(0.0)


@settings(max_examples=60, deadline=None)
@given(costs=st.lists(st.floats(0, 10), min_size=1, max_size=50), left_s=st.floats(0, 100))
def test_waiting_promises_something_between_cheap_and_dear(
    costs: list[float], left_s: float
) -> None:
    history = history_of(*costs)
    slack = 1e-9
    assert min(costs) - slack <= history.expected(left_s) <= max(costs) + slack
    assert history.expected(left_s + 1) <= history.expected(left_s) + slack


@pytest.mark.parametrize("fragment", [0, 3])
def test_the_random_moment_is_anywhere_in_the_window(fragment: int) -> None:
    policy, moments = RandomMoment(random.Random(1)), Counter[int]()
    for version in range(1, 1001):
        steps = 10
        while not decide(policy, moment(fragment=fragment, version=version, steps=steps)).sync:
            steps += 1
        moments[steps] += 1
    assert set(moments) == set(range(10, 31))
    assert max(moments.values()) < 3 * 1000 / 21
