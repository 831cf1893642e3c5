from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from protocol_builders import TIMES

from p2pdiloco.protocol.pacing import (
    GRACE_UNKNOWN_S,
    Average,
    Window,
    grace_s,
    is_due,
    is_put_off,
    launch_floor_s,
    next_offset,
    steps_due,
    window,
)

SIX = replace(TIMES, inner_steps=24, num_fragments=6)
seconds = st.floats(0, 1e6)


def test_first_rounds_are_staggered_over_the_period() -> None:
    assert [steps_due(SIX, p, version=0) for p in range(6)] == [4, 8, 12, 16, 20, 24]


def test_later_rounds_are_due_after_h_steps() -> None:
    assert {steps_due(SIX, p, version=3) for p in range(6)} == {24}


def test_a_first_round_needs_at_least_one_step() -> None:
    assert steps_due(replace(TIMES, inner_steps=2, num_fragments=8), 0, 0) == 1


def test_the_median_learner_sets_the_pace() -> None:
    assert is_due(SIX, 0, 1, [100, 24, 0])
    assert not is_due(SIX, 0, 1, [100, 23, 23])
    assert not is_due(SIX, 0, 1, [100, 0])


def test_nothing_is_due_where_nobody_steps() -> None:
    assert not is_due(SIX, 0, 1, [])


PACED = replace(SIX, slack_steps=8)


def test_a_round_that_may_be_put_off_has_a_window() -> None:
    assert window(PACED, 0, version=1, offset=0) == Window(24, 32)
    assert window(PACED, 0, version=1, offset=8) == Window(16, 24)
    assert window(SIX, 0, version=1, offset=0) == Window(24, 24)


def test_the_first_windows_are_staggered() -> None:
    assert [window(PACED, p, 0, 0).opens for p in range(6)] == [4, 8, 12, 16, 20, 24]


def test_a_late_merge_makes_the_next_one_due_earlier() -> None:
    assert next_offset(PACED, 0, version=2, offset=0, period_steps=29) == 5
    assert next_offset(PACED, 0, version=3, offset=5, period_steps=19) == 0
    assert not is_due(PACED, 0, 2, [18], offset=5)
    assert is_due(PACED, 0, 2, [19], offset=5)


@settings(max_examples=60, deadline=None)
@given(slack=st.integers(0, 23), chosen=st.lists(st.floats(0, 1), min_size=1, max_size=60))
def test_periods_are_h_steps_on_average_wherever_in_its_window_each_sync_comes(
    slack: int, chosen: list[float]
) -> None:
    times, offset, total = replace(SIX, slack_steps=slack), 0, 0
    for number, share in enumerate(chosen):
        opens, closes = window(times, 0, number + 1, offset)
        steps = opens + round(share * (closes - opens))
        offset = next_offset(times, 0, number + 2, offset, steps)
        assert 24 - slack <= steps <= 24 + slack
        total += steps
        assert total == 24 * (number + 1) + offset


def test_a_round_waits_while_anybody_of_a_few_asks_for_time() -> None:
    at = Window(10, 20)
    assert is_put_off(at, [12, 12, 12], [False, True, False])
    assert not is_put_off(at, [12, 12, 12], [False, False, False])
    assert not is_put_off(at, [12, 20, 12], [False, True, False])


def test_one_of_many_holds_nobody_back() -> None:
    at = Window(10, 20)
    assert not is_put_off(at, [12] * 16, [True] * 2 + [False] * 14)
    assert is_put_off(at, [12] * 16, [True] * 3 + [False] * 13)


def test_launches_keep_half_of_a_period_over_the_owned_fragments() -> None:
    assert launch_floor_s(SIX, step_s=2.0, num_owned=6) == 0.5 * 24 * 2.0 / 6
    assert launch_floor_s(SIX, step_s=2.0, num_owned=0) == 24.0


def test_grace_is_a_share_of_the_slack() -> None:
    assert grace_s(TIMES, step_s=5.0, quorum_s=2.0, sync_s=3.0) == pytest.approx(0.8 * (10 - 2 - 3))


@settings(max_examples=60, deadline=None)
@given(step_s=seconds, quorum_s=seconds, sync_s=seconds)
def test_grace_is_zero_whenever_the_overlap_does_not_hide_it(
    step_s: float, quorum_s: float, sync_s: float
) -> None:
    grace = grace_s(TIMES, step_s, quorum_s, sync_s)
    slack = TIMES.overlap_steps * step_s - quorum_s - sync_s
    assert 0 <= grace <= max(0.0, slack)
    assert grace == 0 or TIMES.overlap_steps * step_s > quorum_s + sync_s


def test_grace_is_never_less_than_the_run_allows_in_any_case() -> None:
    times = replace(TIMES, grace_least_s=2.0)
    assert grace_s(times, step_s=0.1, quorum_s=1.0, sync_s=1.0) == 2.0
    assert grace_s(times, step_s=0.1, quorum_s=1.0, sync_s=None) == 2.0
    assert grace_s(times, step_s=60.0, quorum_s=1.0, sync_s=1.0) > 2.0


def test_grace_is_capped_until_a_sync_was_measured() -> None:
    assert grace_s(TIMES, step_s=60.0, quorum_s=1.0, sync_s=None) == GRACE_UNKNOWN_S


def test_an_average_begins_with_its_first_sample() -> None:
    average = Average()
    for sample in (4.0, 2.0, 2.0):
        average.add(sample)
    assert average.value == 2.5
