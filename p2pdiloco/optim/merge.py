"""Merging the outer gradients of several learners into one.

Decoupled DiLoCo (arXiv 2604.21428), section 3.2. With Delta_m = anchor - local value of learner m:

    weight  w_m = c_tokens^2 / c_steps                       ("quantity x quality")
    mean    sum_m w_m Delta_m / sum_m w_m
    RDA     ( sum_m w_m ||Delta_m|| / sum_m w_m ) * phi( sum_m w_m phi(Delta_m) / sum_m w_m )
            with phi(x) = x/||x||, phi(0) = 0

Radial-Directional Averaging keeps the length of one learner's outer gradient however many learners
there are: theirs are nearly orthogonal, so the mean shrinks like 1/sqrt(M) and the outer learning
rate would have to follow M. As printed, the paper's radial factor is a vector; the weighted mean of
the norms is meant. The paper is silent on granularity; we take each tensor by itself. Embedding
tensors are merged by mean under both rules, as in the paper's main runs.

Only the node that merges computes this, so it need not agree to the last bit between machines; on
one machine it does. Sums run in the order of the arguments; norms are taken in float64, vectors in
float32.
"""

import math
from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from p2pdiloco.optim.fragments import Fragment

Vector: TypeAlias = npt.NDArray[np.float32]
"""A flat float32 vector."""

MergeRule: TypeAlias = Literal["rda", "mean"]

NEGLIGIBLE_NORM = 1e-12
"""A vector this short has no direction: phi is zero, and a mean direction this short falls back to
the mean.
"""

_PIECE = 1 << 16
"""Elements taken at once; 512 KiB of float64 stay in the cache."""


def token_weight(tokens: int, steps: int) -> float:
    """c_tokens^2 / c_steps: 100 tokens in 10 steps weigh 1000; a learner without steps weighs
    nothing.
    """
    return tokens * tokens / steps if steps else 0.0


def merge(
    deltas: Sequence[Vector], weights: Sequence[float], fragment: Fragment, rule: MergeRule
) -> Vector:
    """The merged outer gradient of a fragment, float32[fragment.size].

    A single learner's outer gradient comes back unchanged. Learners of weight 0 take no part;
    someone must have weight. ValueError if the arguments do not fit together.
    """
    present = _present(deltas, weights, fragment)
    if len(present) == 1:
        return present[0][0].copy()
    vectors = [delta for delta, _ in present]
    shares = _shares([weight for _, weight in present])
    merged = np.empty(fragment.size, np.float32)
    for slot in fragment.slots:
        parts = [vector[slot.span] for vector in vectors]
        if rule == "mean" or slot.is_embedding:
            merged[slot.span] = _combine(parts, shares)
        else:
            merged[slot.span] = _radial_directional(parts, shares)
    return merged


def norm(vector: Vector) -> float:
    """Euclidean length, accumulated in float64; nan or inf if the vector holds one."""
    pieces = (
        vector[start : start + _PIECE].astype(np.float64) for start in range(0, vector.size, _PIECE)
    )
    return math.sqrt(sum(float(np.square(piece).sum()) for piece in pieces))


def _present(
    deltas: Sequence[Vector], weights: Sequence[float], fragment: Fragment
) -> list[tuple[Vector, float]]:
    if len(deltas) != len(weights) or any(delta.shape != (fragment.size,) for delta in deltas):
        raise ValueError(
            f"fragment {fragment.index} needs one weight per vector of {fragment.size} values, "
            f"got {len(weights)} weights and shapes {[delta.shape for delta in deltas]}"
        )
    present = [pair for pair in zip(deltas, weights, strict=True) if pair[1] > 0]
    if not present:
        raise ValueError(
            f"nothing to merge for fragment {fragment.index}: no contribution has weight"
        )
    return present


def _shares(weights: Sequence[float]) -> list[float]:
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def _combine(vectors: Sequence[Vector], factors: Sequence[float]) -> Vector:
    """sum_m factor_m vector_m in float32, in the order given."""
    total = vectors[0] * np.float32(factors[0])
    for vector, factor in zip(vectors[1:], factors[1:], strict=True):
        total += vector * np.float32(factor)
    return total


def _radial_directional(vectors: Sequence[Vector], shares: Sequence[float]) -> Vector:
    """RDA of one tensor; shares sum to 1."""
    norms = [norm(vector) for vector in vectors]
    radius = math.fsum(share * length for share, length in zip(shares, norms, strict=True))
    direction = _combine(vectors, [_over(*pair) for pair in zip(shares, norms, strict=True)])
    length = norm(direction)
    if length < NEGLIGIBLE_NORM:
        return _combine(vectors, shares)
    direction *= np.float32(radius / length)
    return direction


def _over(share: float, length: float) -> float:
    return share / length if length >= NEGLIGIBLE_NORM else 0.0
