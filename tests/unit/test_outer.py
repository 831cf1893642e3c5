import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pdiloco.optim.outer import OuterStep, nesterov_step, outer_step


def test_a_step_follows_the_formula() -> None:
    anchor, momentum = nesterov_step(
        np.array([1.0], np.float32),
        np.array([2.0], np.float32),
        np.array([4.0], np.float32),
        0.5,
        0.5,
    )
    assert momentum.tolist() == [5.0]
    assert anchor.tolist() == [1.0 - 0.5 * (4.0 + 0.5 * 5.0)]


def test_outer_steps_descend_a_quadratic() -> None:
    """Learners halve the distance to the minimum at 3; the anchor must get there, not run away."""
    anchor, momentum = np.zeros(1, np.float32), np.zeros(1, np.float32)
    for _ in range(60):
        local = anchor + (np.float32(3) - anchor) * np.float32(0.5)
        anchor, momentum = nesterov_step(anchor, momentum, anchor - local, 0.7, 0.5)
    np.testing.assert_allclose(anchor, [3], atol=1e-3)


def test_without_momentum_and_rate_one_the_anchor_becomes_the_local_value() -> None:
    anchor, local = np.array([0.5, -2.0], np.float32), np.array([0.25, -4.0], np.float32)
    new, _ = nesterov_step(anchor, np.zeros(2, np.float32), anchor - local, 1.0, 0.0)
    assert new.tolist() == local.tolist()


def test_a_step_equals_scalar_float32_arithmetic_to_the_last_bit() -> None:
    """Odd lengths and offsets exercise the vector loops' heads and tails."""
    random = np.random.default_rng(0)
    values = random.standard_normal((3, 1037)).astype(np.float32) * np.float32(1e-3)
    for start in range(4):
        anchor, momentum, delta = (row[start:] for row in values)
        got = nesterov_step(anchor, momentum, delta, 0.7, 0.9)
        expected = [scalar_step(*triple) for triple in zip(anchor, momentum, delta, strict=True)]
        assert got[0].tobytes() == np.array([new for new, _ in expected], np.float32).tobytes()
        assert got[1].tobytes() == np.array([new for _, new in expected], np.float32).tobytes()


def scalar_step(a: np.float32, m: np.float32, d: np.float32) -> tuple[float, float]:
    lr, mu = float(np.float32(0.7)), float(np.float32(0.9))
    momentum = to_float32(to_float32(mu * float(m)) + float(d))
    direction = to_float32(float(d) + to_float32(mu * momentum))
    return to_float32(float(a) - to_float32(lr * direction)), momentum


def to_float32(value: float) -> float:
    """Rounded once more: for sums and products of two float32 that is the float32 result,
    because float64 has more than twice the bits."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def test_the_arguments_stay_as_they_were() -> None:
    arrays = [np.ones(3, np.float32) for _ in range(3)]
    for array in arrays:
        array.setflags(write=False)
    nesterov_step(arrays[0], arrays[1], arrays[2], 0.7, 0.9)
    assert all(array.tolist() == [1, 1, 1] for array in arrays)


# -------------------------------------------------------------------- periods that vary

H = 12
RATE, MOMENTUM = 0.7, 0.9
REACH = RATE / (1 - MOMENTUM)
"""How often an outer gradient moves the anchor by itself, in the long run."""


def drift(periods: list[int], *, follow: bool = True) -> tuple[list[float], float]:
    """Anchors after each merge, and the momentum, when every inner step moves by 1."""
    anchor, momentum, anchors = np.zeros(1, np.float32), np.zeros(1, np.float32), []
    for period in periods:
        usual = OuterStep.usual(RATE, MOMENTUM)
        step = OuterStep.after(RATE, MOMENTUM, period, H) if follow else usual
        anchor, momentum = outer_step(anchor, momentum, np.array([-period], np.float32), step)
        anchors.append(float(anchor[0]))
    return anchors, float(momentum[0])


def test_a_period_of_h_steps_makes_the_usual_step_to_the_last_bit() -> None:
    assert OuterStep.after(0.7, 0.9, H, H) == OuterStep.usual(0.7, 0.9)
    assert OuterStep.after(0.7, 0.9, 1000, 1000) == OuterStep.usual(0.7, 0.9)


def test_momentum_is_forgotten_by_inner_steps() -> None:
    half = OuterStep.after(0.7, 0.64, 6, 12)
    assert half.momentum == pytest.approx(0.8)
    assert half.learning_rate == pytest.approx(0.7 * (1 - 0.8) / (1 - 0.64))


def test_without_momentum_the_period_does_not_matter() -> None:
    assert OuterStep.after(0.7, 0.0, 3, 12) == OuterStep.usual(0.7, 0.0)


def test_a_period_beyond_h_makes_the_usual_step() -> None:
    assert OuterStep.after(0.7, 0.9, 100, 12) == OuterStep.usual(0.7, 0.9)
    assert OuterStep.after(0.7, 0.9, 0, 12) == OuterStep.after(0.7, 0.9, 1, 12)


@settings(max_examples=60, deadline=None)
@given(periods=st.lists(st.integers(3, 24), min_size=1, max_size=40))
def test_every_gradient_moves_the_anchor_by_the_same_in_the_long_run(periods: list[int]) -> None:
    """What was moved and what momentum has still to move add up, after any periods at all."""
    anchors, momentum = drift(periods)
    to_come = REACH * MOMENTUM**2 * -momentum
    assert anchors[-1] + to_come == pytest.approx(REACH * sum(periods), rel=1e-4)


@settings(max_examples=60, deadline=None)
@given(period=st.sampled_from([3, 6, 9, 12, 18, 24]))
def test_an_anchor_advances_at_the_same_pace_whatever_the_period(period: int) -> None:
    num = 1200 // period
    anchors, _ = drift([period] * 2 * num)
    advance = (anchors[-1] - anchors[num - 1]) / (num * period)
    assert advance == pytest.approx(REACH, rel=1e-3)


def test_left_alone_momentum_would_reach_less_far_as_periods_are_shorter() -> None:
    """The inner steps by which the anchor lags behind where it is bound: with the usual factors
    they shrink with the period, with ours they hardly do.
    """
    lags = {}
    for follow in (True, False):
        for period in (6, 12):
            anchors, _ = drift([period] * (2400 // period), follow=follow)
            lags[follow, period] = 2400 - anchors[-1] / REACH
    assert lags[True, 12] == lags[False, 12]
    assert lags[False, 6] == pytest.approx(lags[False, 12] / 2, rel=1e-3)
    assert lags[True, 6] == pytest.approx(lags[True, 12], rel=0.15)


def test_the_factors_are_the_same_on_every_machine() -> None:
    step = OuterStep.after(0.5, 0.3, 9, 12)
    assert step.learning_rate.hex() == "0x1.b2efc868a55f6p-2"
    assert step.momentum.hex() == "0x1.9f16b43a4baddp-2"
    assert step.lookahead.hex() == "0x1.c6b4f5c3e7370p-3"
    assert step.weight.hex() == "0x1.d363d1848dcc2p+0"
