"""The loss against cases computed by hand, and its gradient."""

import math
from typing import get_args

import pytest
import torch
from torch import Tensor

from p2pdiloco.rl.losses import (
    LossRules,
    Totals,
    Variant,
    advantages,
    drift,
    policy_loss,
    token_logprobs,
)

VARIANTS: tuple[Variant, ...] = get_args(Variant)
RATIOS_BT = torch.tensor([[9.0, 1.1, 0.5, 2.0], [9.0, 9.0, 1.5, 9.0]])
MASK_BT = torch.tensor([[0.0, 1.0, 1.0, 1.0], [0.0, 0.0, 1.0, 0.0]])
BEHAVIOUR_BT = torch.full((2, 4), -2.0)
ADVANTAGES_B = torch.tensor([1.0, -2.0])
TOTALS = Totals(num_trajectories=2, num_tokens=4, num_tokens_max=5)
FIRST = [-1.1, -0.5, -1.28]
"""Losses of the first trajectory's tokens: min(r, clip(r, 0.8, 1.28))."""
CLIPPED_SOONER = [-1.1, -0.5, -1.2]
"""The same where the upper side is 1.2."""
SECOND = 3.0
"""Of the second's: a negative advantage is not clipped from above before `ratio_max`."""


def loss(
    variant: Variant, logprobs_BT: Tensor, reference_BT: Tensor | None = None, **rules: float
) -> Tensor:
    chosen = LossRules(variant=variant, **rules)
    return policy_loss(
        logprobs_BT, BEHAVIOUR_BT, ADVANTAGES_B, MASK_BT, TOTALS, chosen, reference_BT
    )


def at_ratios(ratios_BT: Tensor) -> Tensor:
    return (BEHAVIOUR_BT + ratios_BT.log()).requires_grad_()


@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        ("grpo", (sum(CLIPPED_SOONER) / 3 + SECOND) / 2),
        ("dapo", (sum(FIRST) + SECOND) / 4),
        ("dr_grpo", (sum(CLIPPED_SOONER) + SECOND) / (2 * 5)),
    ],
)
def test_the_loss_is_what_it_is_by_hand(variant: Variant, expected: float) -> None:
    assert loss(variant, at_ratios(RATIOS_BT)).item() == pytest.approx(expected)


@pytest.mark.parametrize("variant", VARIANTS)
def test_on_policy_the_gradient_is_that_of_the_policy_gradient(variant: Variant) -> None:
    logprobs_BT = at_ratios(torch.ones(2, 4))
    loss(variant, logprobs_BT).backward()  # type: ignore[no-untyped-call]
    weight_BT = {
        "grpo": torch.tensor([[1 / 6] * 4, [1 / 2] * 4]),
        "dapo": torch.full((2, 4), 1 / 4),
        "dr_grpo": torch.full((2, 4), 1 / 10),
    }[variant]
    expected = -ADVANTAGES_B[:, None] * MASK_BT * weight_BT
    assert logprobs_BT.grad is not None
    torch.testing.assert_close(logprobs_BT.grad, expected)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_gradient_is_that_of_the_loss(variant: Variant) -> None:
    logprobs_BT = at_ratios(RATIOS_BT).detach().double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: loss(variant, x), (logprobs_BT,))


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_gradient_with_a_reference_is_that_of_the_loss(variant: Variant) -> None:
    logprobs_BT = at_ratios(RATIOS_BT).detach().double().requires_grad_()
    reference_BT = BEHAVIOUR_BT.double()
    assert torch.autograd.gradcheck(
        lambda x: loss(variant, x, reference_BT, kl_weight=0.5), (logprobs_BT,)
    )


def test_the_distance_to_the_reference_is_added_token_by_token() -> None:
    """Equation 4 of GRPO's paper: q - log q - 1, q being the reference's chance over ours."""
    logprobs_BT = at_ratios(RATIOS_BT)
    held = loss("dapo", logprobs_BT, BEHAVIOUR_BT, kl_weight=0.5)
    distances = [1 / r + math.log(r) - 1 for r in (1.1, 0.5, 2.0, 1.5)]
    free = loss("dapo", logprobs_BT)
    assert (held - free).item() == pytest.approx(0.5 * sum(distances) / 4, rel=1e-5)


def test_a_policy_that_is_its_reference_is_pulled_nowhere() -> None:
    logprobs_BT = at_ratios(RATIOS_BT)
    reference_BT = logprobs_BT.detach()
    [free] = torch.autograd.grad(loss("dapo", logprobs_BT), logprobs_BT)
    [held] = torch.autograd.grad(loss("dapo", logprobs_BT, reference_BT, kl_weight=9), logprobs_BT)
    torch.testing.assert_close(held, free)


def test_what_is_clipped_has_no_gradient() -> None:
    logprobs_BT = at_ratios(RATIOS_BT)
    loss("dapo", logprobs_BT).backward()  # type: ignore[no-untyped-call]
    assert logprobs_BT.grad is not None
    assert logprobs_BT.grad[0, 3] == 0
    assert (logprobs_BT.grad[MASK_BT == 0] == 0).all()


@pytest.mark.parametrize("log_ratio", [50.0, 500.0, -500.0])
def test_a_ratio_beyond_all_bounds_gives_finite_numbers(log_ratio: float) -> None:
    logprobs_BT = (BEHAVIOUR_BT + log_ratio).requires_grad_()
    value = loss("dapo", logprobs_BT, BEHAVIOUR_BT, kl_weight=0.04)
    value.backward()  # type: ignore[no-untyped-call]
    assert value.isfinite()
    assert logprobs_BT.grad is not None
    assert logprobs_BT.grad.isfinite().all()


def test_a_bad_token_pushes_no_harder_than_ratio_max() -> None:
    ratios_BT = RATIOS_BT.clone()
    ratios_BT[1, 2] = 100.0
    assert loss("dapo", at_ratios(ratios_BT), ratio_max=4.0).item() == pytest.approx(
        (sum(FIRST) + 2 * 4.0) / 4
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_losses_of_the_parts_of_a_batch_add_up(variant: Variant) -> None:
    logprobs_BT = at_ratios(RATIOS_BT)
    rules = LossRules(variant=variant)
    parts = [
        policy_loss(
            logprobs_BT[row : row + 1],
            BEHAVIOUR_BT[row : row + 1],
            ADVANTAGES_B[row : row + 1],
            MASK_BT[row : row + 1],
            TOTALS,
            rules,
        )
        for row in range(2)
    ]
    torch.testing.assert_close(sum(parts), loss(variant, logprobs_BT))


def test_advantages_have_mean_zero_and_spread_one() -> None:
    weights = advantages([1.0, 0.0, 0.0, 1.0], "grpo")
    assert weights == pytest.approx([1, -1, -1, 1])
    assert advantages([1.0, 0.0, 0.0, 1.0], "dr_grpo") == pytest.approx([0.5, -0.5, -0.5, 0.5])


def test_a_group_that_is_all_alike_has_no_advantage() -> None:
    assert advantages([0.7] * 5, "dapo") == [0.0] * 5
    assert advantages([0.7], "grpo") == [0.0]


def test_log_probabilities_are_those_of_the_next_token_at_the_temperature() -> None:
    logits_BTV = torch.tensor([[[0.0, 1.0, 2.0], [3.0, 0.0, 0.0], [9.0, 9.0, 9.0]]])
    logprobs_BT = token_logprobs(logits_BTV, torch.tensor([[2, 1, 0]]), 0.5)
    first = 2.0 - math.log(1 + math.exp(2) + math.exp(4))
    second = 6.0 - math.log(math.exp(6) + 2)
    torch.testing.assert_close(logprobs_BT, torch.tensor([[0.0, first, second]]))


def test_drift_is_zero_on_policy_and_positive_off_it() -> None:
    assert drift(BEHAVIOUR_BT, BEHAVIOUR_BT, MASK_BT) == 0
    expected = sum(r - 1 - math.log(r) for r in (1.1, 0.5, 2.0, 1.5)) / 4
    assert drift(at_ratios(RATIOS_BT), BEHAVIOUR_BT, MASK_BT) == pytest.approx(expected, rel=1e-5)
