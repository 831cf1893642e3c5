"""GRPO and its named variants, on trajectories that an older policy may have generated.

Per generated token, with r = exp(logprob - behaviour logprob), A the advantage of its trajectory:

    l = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) + kl_weight (q - 1 - log q)

with r in the first term at most `ratio_max`, and q = exp(reference logprob - logprob). The first
term is PPO's surrogate (the bound on r of negative advantages is INTELLECT-2's delta), the second
GRPO's estimate of KL(policy, reference), equation 4. The behaviour is that which the engine
recorded when it chose the token, so r also corrects for a policy that is some versions older. The
variants differ in how l is averaged, and in the upper side of the clip:

    grpo      mean over trajectories of each one's mean over its tokens, 0.2   arXiv 2402.03300
    dapo      mean over all tokens of the batch, 0.28 ("clip-higher")          arXiv 2503.14476
    dr_grpo   sum over tokens / (trajectories * longest allowed answer), 0.2   arXiv 2503.20783

and in the advantage: R - mean of the group, divided by the group's standard deviation except in
dr_grpo. GRPO was published with a kl_weight of 0.04, without saying the clip, for which we take
PPO's; the other two without the second term. What the reference is says `loop.py`.

Shapes: B trajectories, T tokens, V vocabulary. Position t of a [B, T] tensor speaks of token t.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Literal, TypeAlias, assert_never

import torch
from torch import Tensor

Variant: TypeAlias = Literal["grpo", "dapo", "dr_grpo"]

_STD_LEAST = 1e-6
"""A group whose rewards differ by no more says nothing."""
_LOG_RATIO_MAX = 20.0
"""Keeps r finite: where it is this large it is clipped anyway, and infinity has no gradient. Keeps
q finite, too: it pulls no harder than this."""
_CLIP_HIGH: dict[Variant, float] = {"grpo": 0.2, "dapo": 0.28, "dr_grpo": 0.2}


@dataclass(frozen=True, slots=True, kw_only=True)
class LossRules:
    """The numbers of the objective; `ratio_max` is INTELLECT-2's."""

    variant: Variant = "dapo"
    clip_low: float = 0.2
    ratio_max: float = 4.0
    kl_weight: float = 0.0

    @property
    def clip_high(self) -> float:
        return _CLIP_HIGH[self.variant]


@dataclass(frozen=True, slots=True)
class Totals:
    """What a whole batch is divided by, so that the losses of its parts add up."""

    num_trajectories: int
    num_tokens: int
    """Generated ones."""
    num_tokens_max: int
    """That one trajectory may generate."""


def advantages(rewards: Sequence[float], variant: Variant) -> list[float]:
    """Of the trajectories of one group. All 0 where the rewards do not differ."""
    mean = fmean(rewards)
    spread = pstdev(rewards)
    if spread < _STD_LEAST:
        return [0.0] * len(rewards)
    scale = 1.0 if variant == "dr_grpo" else spread
    return [(reward - mean) / scale for reward in rewards]


def token_logprobs(logits_BTV: Tensor, tokens_BT: Tensor, temperature: float) -> Tensor:
    """[B, T] in the engine's convention (rollout/sampling.py); 0 for the first token, which nothing
    predicts. `logits_BTV` are the model's for the same tokens."""
    scaled_BTV = logits_BTV[:, :-1].float() / (temperature or 1.0)
    chosen_BT = scaled_BTV.gather(2, tokens_BT[:, 1:, None])[:, :, 0]
    logprobs_BT = chosen_BT - scaled_BTV.logsumexp(dim=2)
    return torch.nn.functional.pad(logprobs_BT, (1, 0))


def policy_loss(
    logprobs_BT: Tensor,
    behaviour_BT: Tensor,
    advantages_B: Tensor,
    mask_BT: Tensor,
    totals: Totals,
    rules: LossRules,
    reference_BT: Tensor | None = None,
) -> Tensor:
    """This part's share of the batch's loss. `mask_BT` is 1 where the policy chose the token, 0 on
    prompts, what environments and tools wrote, and padding. `reference_BT` are log-probabilities
    too; without them there is no second term."""
    log_ratio_BT = (logprobs_BT - behaviour_BT).where(mask_BT > 0, 0.0)
    ratio_BT = log_ratio_BT.clamp(max=_LOG_RATIO_MAX).exp()
    advantages_B1 = advantages_B[:, None]
    clipped_BT = ratio_BT.clamp(1 - rules.clip_low, 1 + rules.clip_high)
    surrogate_BT = torch.minimum(
        ratio_BT.clamp(max=rules.ratio_max) * advantages_B1, clipped_BT * advantages_B1
    )
    loss_BT = -surrogate_BT * mask_BT
    if reference_BT is not None:
        log_q_BT = (reference_BT - logprobs_BT).where(mask_BT > 0, 0.0).clamp(max=_LOG_RATIO_MAX)
        loss_BT = loss_BT + rules.kl_weight * (log_q_BT.exp() - 1 - log_q_BT)
    match rules.variant:
        case "grpo":
            means_B = loss_BT.sum(dim=1) / mask_BT.sum(dim=1).clamp(min=1)
            return means_B.sum() / totals.num_trajectories
        case "dapo":
            return loss_BT.sum() / totals.num_tokens
        case "dr_grpo":
            return loss_BT.sum() / (totals.num_trajectories * totals.num_tokens_max)
        case _:
            assert_never(rules.variant)


def drift(logprobs_BT: Tensor, behaviour_BT: Tensor, mask_BT: Tensor) -> float:
    """Mean of r - 1 - log r over the generated tokens, an estimate of KL(behaviour, policy) that is
    never negative. It shows how far off policy a batch is."""
    log_ratio_BT = (logprobs_BT - behaviour_BT).detach().where(mask_BT > 0, 0.0)
    terms_BT = (log_ratio_BT.exp() - 1 - log_ratio_BT) * mask_BT
    mean = terms_BT.sum().item() / max(1.0, mask_BT.sum().item())
    return mean if math.isfinite(mean) else math.inf
