import struct

import numpy as np

from p2pdiloco.optim.outer import nesterov_step


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
