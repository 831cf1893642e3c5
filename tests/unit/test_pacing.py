from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from protocol_builders import TIMES

from p2pdiloco.protocol.pacing import (
    GRACE_UNKNOWN_S,
    Average,
    grace_s,
    is_due,
    launch_floor_s,
    steps_due,
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


def test_launches_keep_half_of_a_period_over_the_owned_fragments() -> None:
    assert launch_floor_s(SIX, step_s=2.0, num_owned=6) == 0.5 * 24 * 2.0 / 6
    assert launch_floor_s(SIX, step_s=2.0, num_owned=0) == 24.0


def test_grace_is_a_share_of_the_slack() -> None:
    assert grace_s(TIMES, step_s=5.0, quorum_s=2.0, sync_s=3.0) == pytest.approx(0.8 * (10 - 2 - 3))


@given(step_s=seconds, quorum_s=seconds, sync_s=seconds)
def test_grace_is_zero_whenever_the_overlap_does_not_hide_it(
    step_s: float, quorum_s: float, sync_s: float
) -> None:
    grace = grace_s(TIMES, step_s, quorum_s, sync_s)
    slack = TIMES.overlap_steps * step_s - quorum_s - sync_s
    assert 0 <= grace <= max(0.0, slack)
    assert grace == 0 or TIMES.overlap_steps * step_s > quorum_s + sync_s


def test_grace_is_capped_until_a_sync_was_measured() -> None:
    assert grace_s(TIMES, step_s=60.0, quorum_s=1.0, sync_s=None) == GRACE_UNKNOWN_S


def test_an_average_begins_with_its_first_sample() -> None:
    average = Average()
    for sample in (4.0, 2.0, 2.0):
        average.add(sample)
    assert average.value == 2.5
