"""The rule that turns logits into a token, and how sure of the token one can be.

With canonical logits z, the token at a position is

    argmax over kept i of  z_i + T * G_i(seed, trajectory, position)

the Gumbel-max form of sampling from softmax(z / T). G is standard Gumbel noise, a pure function of
its arguments and of i, so the token depends on nothing but z: neither on the batch nor on drafts.
T = 0 is greedy. Kept are the tokens with z_i at least the top_k-th largest (ties stay), and of
those the ones before which less than the share top_p of their mass lies, at temperature T.

Nobody has z itself: float32 logits differ in the last bits with the shape of the batch. `decide`
takes logits that are within `margin` of z, each, and says of its answer whether every z that close
gives the same one. What is uncertain is for the referee (verify.py).

Log-probabilities are those of a trainer that divides logits by the temperature (as TRL does):
log softmax(z / T), with neither top-k nor top-p; for T = 0 those of T = 1.

Shapes: N decisions, V tokens in the vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor

_GOLDEN = -0x61C8864680B583EB
"""2^64 / golden ratio as a signed integer: SplitMix64's increment."""
_MIX_1 = -0x40A7B892E31B1A47
_MIX_2 = -0x6B2FB644ECCEEE15
"""SplitMix64's multipliers (Steele, Lea, Flood 2014), signed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the tokens of one request are drawn."""

    seed: int = 0
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be finite and at least 0, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, or None for all, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")


@dataclass(frozen=True, slots=True)
class Choice:
    """A token, the log-probability the trainer would give it, and whether it is beyond doubt."""

    token: int
    logprob: float
    certain: bool


def noise_key(seed: int, trajectory: str, position: int) -> int:
    """The name of one position's noise, a signed 64-bit integer.

    `position` counts from the first token of the trajectory, prompt included.
    """
    digest = blake2b(f"{seed}/{position}/{trajectory}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def gumbel(keys_N: Tensor, vocabulary: int) -> Tensor:
    """Standard Gumbel noise [N, V], float64: -log(-log u), u from SplitMix64 at counter key + i.

    52 bits make u; it is never 0 or 1, so the noise is finite.
    """
    counter_V = torch.arange(1, vocabulary + 1, device=keys_N.device) * _GOLDEN
    bits_NV = keys_N[:, None] + counter_V
    bits_NV = (bits_NV ^ _shifted(bits_NV, 30)) * _MIX_1
    bits_NV = (bits_NV ^ _shifted(bits_NV, 27)) * _MIX_2
    bits_NV ^= _shifted(bits_NV, 31)
    uniform_NV = (_shifted(bits_NV, 12).double() + 0.5).mul_(2.0**-52)
    return uniform_NV.log_().neg_().log_().neg_()


def _shifted(bits: Tensor, places: int) -> Tensor:
    """Logical shift to the right of signed 64-bit integers."""
    return (bits >> places) & ((1 << (64 - places)) - 1)


def decide(
    logits_NV: Tensor, samplings: Sequence[Sampling], keys: Sequence[int], margin: float
) -> list[Choice]:
    """The token of each row. `certain` holds if no change of the logits by up to `margin` each can
    change the token; with margin 0 the token is the rule itself, applied to these logits."""
    if not samplings:
        return []
    logits_NV = logits_NV.double()
    cut = _Cut.of(samplings, logits_NV)
    keys_N = torch.tensor(keys, dtype=torch.int64, device=logits_NV.device)
    scores_NV = gumbel(keys_N, logits_NV.shape[1]).mul_(cut.temperature_N[:, None]).add_(logits_NV)
    if cut.applies:
        scores_NV.masked_fill_(logits_NV < cut.least_kept(logits_NV, margin)[:, None], -math.inf)
    best_N2, tokens_N2 = scores_NV.topk(2)
    chosen_N = logits_NV.gather(1, tokens_N2[:, :1])[:, 0]
    certain_N = best_N2[:, 0] - best_N2[:, 1] > 2 * margin
    if cut.applies:
        certain_N &= cut.surely_keeps(chosen_N, logits_NV, margin)
    total_N = (logits_NV / cut.divisor_N[:, None]).logsumexp(dim=1)
    logprobs_N = chosen_N / cut.divisor_N - total_N
    return [
        Choice(token, logprob, certain)
        for token, logprob, certain in zip(
            tokens_N2[:, 0].tolist(), logprobs_N.tolist(), certain_N.tolist(), strict=True
        )
    ]


@dataclass(frozen=True, slots=True)
class _Cut:
    """Temperature, top-k and top-p of each row, and what they keep when logits are uncertain.

    If every logit may move by a margin, two that are less than two margins apart may swap places,
    and a share of the mass changes by a factor within exp(±2 margin / T).
    """

    temperature_N: Tensor
    top_k_N: Tensor
    top_p_N: Tensor
    k_max: int
    """The largest top_k of a row."""
    p_min: float

    @classmethod
    def of(cls, samplings: Sequence[Sampling], logits_NV: Tensor) -> "_Cut":
        """Greedy rows keep everything: the largest logit is in every cut."""
        vocabulary, device = logits_NV.shape[1], logits_NV.device
        top_k = [
            min(s.top_k, vocabulary) if s.top_k and s.temperature else vocabulary for s in samplings
        ]
        top_p = [s.top_p if s.temperature else 1.0 for s in samplings]
        temperatures = [s.temperature for s in samplings]
        return cls(
            torch.tensor(temperatures, dtype=torch.float64, device=device),
            torch.tensor(top_k, device=device),
            torch.tensor(top_p, dtype=torch.float64, device=device),
            max(k if k < vocabulary else 0 for k in top_k),
            min(top_p),
        )

    @property
    def applies(self) -> bool:
        """Some row keeps less than everything."""
        return self.k_max > 0 or self.p_min < 1

    @property
    def divisor_N(self) -> Tensor:
        """The temperature where it is not 0, or else 1."""
        return torch.where(self.temperature_N > 0, self.temperature_N, 1.0)

    def least_kept(self, logits_NV: Tensor, margin: float) -> Tensor:
        """No token below this logit can be kept."""
        vocabulary = logits_NV.shape[1]
        num_ranked = vocabulary if self.p_min < 1 else self.k_max + 1
        ranked_NR = logits_NV.topk(num_ranked).values
        kth_N = ranked_NR.gather(1, (self.top_k_N[:, None] - 1).clamp(max=num_ranked - 1))[:, 0]
        in_top_k_N = torch.where(self.top_k_N < vocabulary, kth_N - 2 * margin, -math.inf)
        if self.p_min == 1:
            return in_top_k_N
        weights_NV = self._weights(ranked_NR, ranked_NR[:, :1])
        mass_N = weights_NV.masked_fill(ranked_NR < in_top_k_N[:, None], 0).sum(dim=1)
        target_N = self.top_p_N * mass_N * (2 * margin / self.divisor_N).exp()
        last_N = (weights_NV.cumsum(dim=1) < target_N[:, None]).sum(dim=1).clamp(max=vocabulary - 1)
        in_nucleus_N = ranked_NR.gather(1, last_N[:, None])[:, 0] - 2 * margin
        return in_top_k_N.maximum(torch.where(self.top_p_N < 1, in_nucleus_N, -math.inf))

    def surely_keeps(self, chosen_N: Tensor, logits_NV: Tensor, margin: float) -> Tensor:
        """Whether the token with this logit is kept whatever moves by a margin."""
        ahead_NV = logits_NV > chosen_N[:, None] - 2 * margin
        in_top_k_N = ahead_NV.sum(dim=1) <= self.top_k_N
        if self.p_min == 1:
            return in_top_k_N
        largest_N1 = logits_NV.amax(dim=1, keepdim=True)
        weights_NV = self._weights(logits_NV, largest_N1)
        ahead_N = weights_NV.masked_fill(~ahead_NV, 0).sum(dim=1)
        ahead_N -= self._weights(chosen_N[:, None], largest_N1)[:, 0]
        target_N = self.top_p_N * self._least_mass(logits_NV, weights_NV, margin)
        return in_top_k_N & (
            (ahead_N * (2 * margin / self.divisor_N).exp() < target_N) | (self.top_p_N == 1)
        )

    def _least_mass(self, logits_NV: Tensor, weights_NV: Tensor, margin: float) -> Tensor:
        """At least this much mass, of these weights, is surely in the top k."""
        if self.k_max == 0:
            return weights_NV.sum(dim=1)
        ranked_NR = logits_NV.topk(self.k_max + 1).values
        beyond_N = ranked_NR.gather(1, self.top_k_N[:, None].clamp(max=self.k_max))[:, 0]
        beyond_N = torch.where(self.top_k_N < logits_NV.shape[1], beyond_N + 2 * margin, -math.inf)
        return weights_NV.masked_fill(logits_NV <= beyond_N[:, None], 0).sum(dim=1)

    def _weights(self, logits_NV: Tensor, largest_N1: Tensor) -> Tensor:
        return ((logits_NV - largest_N1) / self.divisor_N[:, None]).exp()
