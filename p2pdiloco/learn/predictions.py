"""What learners predict on a fixed probe: how far two are apart, and small enough to be sent.

For two workers with next-token distributions p, q at each of N positions the distance is

    JS(p, q) = sqrt( 1/N sum over positions of ( KL(p | m) + KL(q | m) ) / 2 ),  m = (p + q) / 2

with logarithms to base 2: 0 if they always say the same, 1 if they never do.

No node holds another's whole model at one moment, so each publishes what its own says at
`POSITIONS` places of the same held-out text, with the vocabulary folded into `BUCKETS` classes:
token t counts to class t mod BUCKETS. For bytes that changes nothing; for larger vocabularies what
is compared is at most as far apart as the whole distributions are. What is published is of the
learner in the middle of its round: the drift since its start is in it.

numpy alone, since the daemon compares.
"""

from math import sqrt

import numpy as np
import numpy.typing as npt

from p2pdiloco.errors import PeerError

POSITIONS = 64
BUCKETS = 256
PREDICTIONS_BYTES = POSITIONS * BUCKETS * 2
"""float16 probabilities, position by position."""


def pack_predictions(distributions: npt.NDArray[np.float32]) -> bytes:
    """Of f32 [N, V], N >= POSITIONS, at evenly spread positions."""
    num, vocabulary = distributions.shape
    probabilities = distributions[np.linspace(0, num - 1, POSITIONS).astype(int)]
    folded = np.zeros((POSITIONS, BUCKETS), np.float32)
    for first in range(0, vocabulary, BUCKETS):
        part = probabilities[:, first : first + BUCKETS]
        folded[:, : part.shape[1]] += part
    return folded.astype("<f2").tobytes()


def unpack_predictions(data: bytes | bytearray) -> npt.NDArray[np.float32]:
    """f32 [POSITIONS, BUCKETS] whose rows sum to 1. PeerError for anything else."""
    if len(data) != PREDICTIONS_BYTES:
        raise PeerError(f"expected predictions of {PREDICTIONS_BYTES} bytes, got {len(data)}")
    told = np.frombuffer(data, "<f2").reshape(POSITIONS, BUCKETS).astype(np.float32)
    sums = told.sum(axis=1, keepdims=True)
    if not (np.isfinite(told).all() and (told >= 0).all() and (sums > 0.5).all()):
        raise PeerError("expected probabilities of each position, got other numbers")
    normalized: npt.NDArray[np.float32] = told / sums
    return normalized


def prediction_distance(p: npt.NDArray[np.float32], q: npt.NDArray[np.float32]) -> float:
    """Jensen-Shannon distance of f32 [N, V] each, 0 to 1."""
    middle = (p + q) * np.float32(0.5)
    bits = (_information(p, middle) + _information(q, middle)) / 2
    return sqrt(min(1.0, max(0.0, bits)))


def _information(p: npt.NDArray[np.float32], middle: npt.NDArray[np.float32]) -> float:
    """KL(p | middle) in bits, mean over positions; an impossible token adds nothing, nor does
    one of whose chance the half is 0 in float32."""
    ratio = np.divide(p, middle, out=np.ones_like(p), where=(p > 0) & (middle > 0))
    return float((p * np.log2(ratio)).sum(axis=1, dtype=np.float64).mean())
