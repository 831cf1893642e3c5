"""Distances whose value is known, and what nodes publish of their predictions."""

import math

import numpy as np
import pytest

from p2pdiloco.errors import PeerError
from p2pdiloco.learn.predictions import (
    BUCKETS,
    POSITIONS,
    PREDICTIONS_BYTES,
    pack_predictions,
    prediction_distance,
    unpack_predictions,
)


def says(*positions: list[float]) -> np.ndarray:
    return np.array(positions, np.float32)


def drawn(seed: int, vocabulary: int = 256, num: int = POSITIONS, scale: float = 1.0) -> np.ndarray:
    odds = np.exp(scale * np.random.default_rng(seed).standard_normal((num, vocabulary)))
    drawn: np.ndarray = (odds / odds.sum(axis=1, keepdims=True)).astype(np.float32)
    return drawn


def published(seed: int, vocabulary: int = 256) -> np.ndarray:
    return unpack_predictions(pack_predictions(drawn(seed, vocabulary)))


def test_workers_that_say_the_same_are_at_distance_0() -> None:
    assert prediction_distance(drawn(0), drawn(0)) < 1e-3
    assert prediction_distance(says([0.5, 0.5]), says([0.5, 0.5])) == 0


def test_workers_that_never_say_the_same_are_at_distance_1() -> None:
    assert prediction_distance(says([1.0, 0.0]), says([0.0, 1.0])) == pytest.approx(1)


def test_a_chance_at_the_end_of_float32_counts_as_none() -> None:
    least = float(np.finfo(np.float32).smallest_subnormal)
    assert prediction_distance(says([1.0, least]), says([1.0, 0.0])) == 0


def test_a_coin_against_certainty_is_at_a_known_distance() -> None:
    """JSD((1/2, 1/2), (1, 0)) = 3/4 log2(4/3) bits."""
    got = prediction_distance(says([0.5, 0.5]), says([1.0, 0.0]))
    assert got == pytest.approx(math.sqrt(0.75 * math.log2(4 / 3)))


def test_divergence_not_distance_is_averaged_over_positions() -> None:
    got = prediction_distance(says([1.0, 0.0], [0.5, 0.5]), says([0.0, 1.0], [0.5, 0.5]))
    assert got == pytest.approx(math.sqrt(0.5))


def test_the_distance_is_symmetric_and_obeys_the_triangle() -> None:
    p, q, r = (drawn(seed, 16, 20, seed) for seed in (1, 2, 4))
    assert prediction_distance(p, q) == pytest.approx(prediction_distance(q, p))
    assert prediction_distance(p, r) <= prediction_distance(p, q) + prediction_distance(q, r)


def test_for_bytes_the_distance_is_that_of_the_whole_distributions() -> None:
    whole = prediction_distance(drawn(1), drawn(2))
    assert prediction_distance(published(1), published(2)) == pytest.approx(whole, abs=1e-3)
    assert prediction_distance(published(1), published(1)) == pytest.approx(0, abs=1e-3)


def test_for_large_vocabularies_it_is_at_most_that() -> None:
    whole = prediction_distance(drawn(1, 5000), drawn(2, 5000))
    assert 0 < prediction_distance(published(1, 5000), published(2, 5000)) < whole


def test_positions_are_spread_over_the_probe() -> None:
    told = unpack_predictions(pack_predictions(drawn(1, num=1000)))
    np.testing.assert_allclose(told[-1], drawn(1, num=1000)[-1], atol=1e-4)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        bytes(PREDICTIONS_BYTES),
        np.full((POSITIONS, BUCKETS), np.nan, "<f2").tobytes(),
        np.full((POSITIONS, BUCKETS), -1, "<f2").tobytes(),
    ],
)
def test_what_is_no_distribution_is_refused(data: bytes) -> None:
    with pytest.raises(PeerError, match="expected"):
        unpack_predictions(data)
