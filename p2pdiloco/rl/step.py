"""The gradient of one step's episodes: what a learner does between rollouts and its optimizer."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from p2pdiloco.rl.losses import LossRules, Totals, drift, policy_loss, token_logprobs
from p2pdiloco.rl.packing import Batch


@dataclass(frozen=True, slots=True)
class Gradient:
    """What the gradients that the parameters now hold were made of."""

    loss: float
    num_tokens: int
    """Generated ones, which the policy learns from."""
    drift: float
    """How far the policy is from the one that generated them (losses.py)."""


def accumulate(
    model: torch.nn.Module,
    parts: Iterable[Batch],
    totals: Totals,
    rules: LossRules,
    temperature: float,
    reference: torch.nn.Module | None = None,
) -> Gradient:
    """Adds the gradient of the loss of all parts to the parameters' `grad`. `temperature` is the
    one at which the tokens were drawn; the policy is held to the `reference`, if there is one."""
    device = next(model.parameters()).device
    loss = off_policy = 0.0
    num_tokens = 0
    for part in parts:
        tokens_BT, behaviour_BT = part.tokens_BT.to(device), part.behaviour_BT.to(device)
        mask_BT = part.mask_BT.to(device)
        logprobs_BT = _logprobs(model, tokens_BT, temperature)
        reference_BT = None
        if reference is not None:
            with torch.no_grad():
                reference_BT = _logprobs(reference, tokens_BT, temperature)
        share = policy_loss(
            logprobs_BT,
            behaviour_BT,
            part.advantages_B.to(device),
            mask_BT,
            totals,
            rules,
            reference_BT,
        )
        share.backward()  # type: ignore[no-untyped-call]
        part_tokens = int(part.mask_BT.sum().item())
        loss += share.item()
        off_policy += drift(logprobs_BT, behaviour_BT, mask_BT) * part_tokens
        num_tokens += part_tokens
    return Gradient(loss, num_tokens, off_policy / max(1, num_tokens))


def _logprobs(model: torch.nn.Module, tokens_BT: torch.Tensor, temperature: float) -> torch.Tensor:
    logits_BTV = model(input_ids=tokens_BT, use_cache=False).logits
    return token_logprobs(logits_BTV, tokens_BT, temperature)
