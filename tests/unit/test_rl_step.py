"""The gradient of a step: in parts as in one, and towards what was rewarded."""

from dataclasses import replace

import pytest
import torch
from rl_builders import RULES, generated
from rollout_builders import small_model
from transformers import PreTrainedModel

from p2pdiloco.rl.losses import LossRules
from p2pdiloco.rl.packing import Selection, batches, select
from p2pdiloco.rl.step import Gradient, accumulate

TEMPERATURE = RULES.policy.temperature


def chosen(model: PreTrainedModel) -> Selection:
    episodes = [generated(model, trajectory=i) for i in range(4)]
    rewarded = [replace(e, reward=reward) for e, reward in zip(episodes, (1, 0, 0, 1), strict=True)]
    return select([rewarded], version=0, lag_max=0, variant="dapo")


def gradient(model: PreTrainedModel, selection: Selection, num_tokens_max: int) -> Gradient:
    model.train()
    model.requires_grad_()
    parts = batches(selection.chosen, num_tokens_max)
    return accumulate(model, parts, selection.totals(6), LossRules(), TEMPERATURE)


def test_what_was_just_generated_is_on_policy() -> None:
    model = small_model()
    selection = chosen(model)
    made = gradient(model, selection, 1000)
    assert made.drift < 1e-6
    assert made.num_tokens == sum(w.episode.num_generated for w in selection.chosen)


def test_in_parts_the_gradient_is_the_same() -> None:
    whole, parted = small_model(), small_model()
    selection = chosen(small_model())
    one, many = gradient(whole, selection, 1000), gradient(parted, selection, 1)
    assert many.loss == pytest.approx(one.loss, abs=1e-5)
    assert many.num_tokens == one.num_tokens
    for ours, theirs in zip(whole.parameters(), parted.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-5, rtol=1e-3)


def test_a_step_makes_rewarded_answers_likelier_than_the_others() -> None:
    model = small_model()
    selection = chosen(model)
    before = gradient(model, selection, 1000)
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter -= 1e-3 * parameter.grad
    model.zero_grad()
    after = gradient(model, selection, 1000)
    assert after.loss < before.loss
    assert after.drift > before.drift
