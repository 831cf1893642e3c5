import numpy as np
import numpy.typing as npt
import pytest

from p2pdiloco.optim.fragments import Fragment, plan_fragments
from p2pdiloco.optim.merge import MergeRule, merge, norm, token_weight

RULES: tuple[MergeRule, ...] = ("rda", "mean")


def vector(*values: float) -> npt.NDArray[np.float32]:
    return np.array(values, np.float32)


def one_tensor(size: int, *, embedding: bool = False) -> Fragment:
    return plan_fragments({"t": (size,)}, 1, ["t"] if embedding else [])[0]


def test_a_hundred_tokens_in_ten_steps_weigh_a_thousand() -> None:
    assert token_weight(100, 10) == 1000


def test_no_steps_weigh_nothing() -> None:
    assert token_weight(0, 0) == 0


def test_rda_of_two_orthogonal_vectors_keeps_their_norm() -> None:
    merged = merge([vector(2, 0), vector(0, 2)], [1, 1], one_tensor(2), "rda")
    np.testing.assert_allclose(merged, [2**0.5, 2**0.5], rtol=1e-6)
    assert norm(merged) == pytest.approx(2, rel=1e-6)


def test_the_mean_of_two_orthogonal_vectors_is_shorter() -> None:
    merged = merge([vector(2, 0), vector(0, 2)], [1, 1], one_tensor(2), "mean")
    assert merged.tolist() == [1, 1]


def test_rda_weighs_radius_and_direction() -> None:
    merged = merge([vector(4, 0), vector(0, 1)], [3, 1], one_tensor(2), "rda")
    radius, direction = (3 * 4 + 1) / 4, np.array([3, 1]) / np.sqrt(10)
    np.testing.assert_allclose(merged, radius * direction, rtol=1e-6)


@pytest.mark.parametrize("rule", RULES)
def test_one_learner_is_the_identity_to_the_last_bit(rule: MergeRule) -> None:
    delta = np.random.default_rng(0).standard_normal(100).astype(np.float32)
    merged = merge([delta, delta * 2], [7.5, 0], one_tensor(100), rule)
    assert merged.tobytes() == delta.tobytes()
    assert merged is not delta


def test_cancelling_directions_fall_back_to_the_mean() -> None:
    merged = merge([vector(4, 0), vector(-2, 0)], [1, 1], one_tensor(2), "rda")
    assert merged.tolist() == [1, 0]


def test_a_vector_without_length_has_no_direction() -> None:
    merged = merge([vector(0, 0), vector(0, 2)], [1, 1], one_tensor(2), "rda")
    np.testing.assert_allclose(merged, [0, 1], rtol=1e-6)


@pytest.mark.parametrize("rule", RULES)
def test_all_zero_stays_zero(rule: MergeRule) -> None:
    assert merge([vector(0, 0), vector(0, 0)], [1, 1], one_tensor(2), rule).tolist() == [0, 0]


def test_a_vanishing_but_positive_norm_does_not_overflow() -> None:
    merged = merge([vector(1e-44, 0), vector(0, 2)], [1, 1], one_tensor(2), "rda")
    assert np.isfinite(merged).all()


def test_rda_takes_each_tensor_by_itself() -> None:
    fragment = plan_fragments({"a": (2,), "b": (2,)}, 1, [])[0]
    merged = merge([vector(2, 0, 8, 0), vector(0, 2, 8, 0)], [1, 1], fragment, "rda")
    np.testing.assert_allclose(merged, [2**0.5, 2**0.5, 8, 0], rtol=1e-6)


def test_embeddings_are_averaged_under_rda() -> None:
    merged = merge([vector(2, 0), vector(0, 2)], [1, 1], one_tensor(2, embedding=True), "rda")
    assert merged.tolist() == [1, 1]


@pytest.mark.parametrize("rule", RULES)
def test_merging_twice_gives_the_same_bits(rule: MergeRule) -> None:
    random = np.random.default_rng(1)
    deltas = [random.standard_normal(200_000).astype(np.float32) for _ in range(5)]
    weights = [1.0, 2.0, 3.5, 0.1, 9.0]
    fragment = plan_fragments({"a": (150_000,), "b": (50_000,)}, 1, [])[0]
    first = merge(deltas, weights, fragment, rule)
    assert merge(deltas, weights, fragment, rule).tobytes() == first.tobytes()


def test_nobody_with_weight_is_an_error() -> None:
    with pytest.raises(ValueError, match="no contribution has weight"):
        merge([vector(1, 2)], [0], one_tensor(2), "rda")


def test_another_shape_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"vector of 2 values.*\(3,\)"):
        merge([vector(1, 2, 3)], [1], one_tensor(2), "rda")


def test_the_norm_of_large_values_does_not_overflow() -> None:
    assert norm(vector(3e38, 0)) == pytest.approx(3e38)
