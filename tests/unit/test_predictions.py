"""What nodes publish of their predictions, against the distance of whole distributions."""

import numpy as np
import pytest
import torch

from p2pdiloco.errors import PeerError
from p2pdiloco.learn.disagreement import jensen_shannon_distance
from p2pdiloco.learn.predictions import (
    BUCKETS,
    POSITIONS,
    PREDICTIONS_BYTES,
    pack_predictions,
    prediction_distance,
    unpack_predictions,
)


def log_probabilities(seed: int, vocabulary: int = 256, num: int = POSITIONS) -> torch.Tensor:
    logits = torch.randn(num, vocabulary, generator=torch.Generator().manual_seed(seed))
    return torch.log_softmax(logits, dim=-1)


def published(seed: int, vocabulary: int = 256) -> np.ndarray:
    return unpack_predictions(pack_predictions(log_probabilities(seed, vocabulary).numpy()))


def test_for_bytes_the_distance_is_that_of_the_whole_distributions() -> None:
    whole = jensen_shannon_distance(log_probabilities(1), log_probabilities(2))
    assert prediction_distance(published(1), published(2)) == pytest.approx(whole, abs=1e-3)
    assert prediction_distance(published(1), published(1)) == pytest.approx(0, abs=1e-3)


def test_for_large_vocabularies_it_is_at_most_that() -> None:
    whole = jensen_shannon_distance(log_probabilities(1, 5000), log_probabilities(2, 5000))
    assert 0 < prediction_distance(published(1, 5000), published(2, 5000)) < whole


def test_positions_are_spread_over_the_probe() -> None:
    told = unpack_predictions(pack_predictions(log_probabilities(1, num=1000).numpy()))
    last = log_probabilities(1, num=1000)[-1].exp().numpy()
    np.testing.assert_allclose(told[-1], last, atol=1e-4)


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
