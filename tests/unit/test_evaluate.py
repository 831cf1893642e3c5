"""Held-out loss and sampling."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
import pytest
import torch

from p2pdiloco.errors import UserError
from p2pdiloco.learn.evaluate import held_out_loss, sample_text
from p2pdiloco.learn.models import build_model
from p2pdiloco.learn.text import ByteTokenizer, Text, split_text
from p2pdiloco.spec import ModelSpec

SEQUENCE = 16


class Uniform(torch.nn.Module):
    """Knows nothing: ln 256 nats per token. Remembers the longest input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.longest = 0

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> SimpleNamespace:
        self.longest = max(self.longest, input_ids.shape[1])
        return SimpleNamespace(logits=torch.zeros(*input_ids.shape, 256))


@pytest.fixture(scope="module")
def text() -> Text:
    return split_text(bytes(np.arange(60 * 4096, dtype=np.uint32) % 251), ByteTokenizer())


def test_a_model_that_knows_nothing_pays_ln_256_per_byte(text: Text) -> None:
    model = Uniform()
    assert held_out_loss(model, text, SEQUENCE) == pytest.approx(math.log(256))
    assert model.longest == SEQUENCE


def test_the_loss_is_per_byte_not_per_token(text: Text) -> None:
    coarse = replace(text, held_out_bytes=2 * text.held_out_bytes)
    assert held_out_loss(Uniform(), coarse, SEQUENCE) == pytest.approx(math.log(256) / 2)


def test_evaluation_leaves_the_training_mode_alone(text: Text) -> None:
    model = Uniform()
    held_out_loss(model, text, SEQUENCE)
    assert model.training
    held_out_loss(model.eval(), text, SEQUENCE)
    assert not model.training


def test_sampling_never_looks_beyond_the_trained_length() -> None:
    model = Uniform()
    assert len(sample_text(model, ByteTokenizer(), "In the beginning God", 50, SEQUENCE)) > 0
    assert model.longest == SEQUENCE


def test_a_seed_gives_one_text() -> None:
    model = build_model(ModelSpec(preset="tiny"), 0, SEQUENCE)
    texts = [sample_text(model, ByteTokenizer(), "", 20, SEQUENCE, seed=seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_cold_sampling_is_greedy_and_equals_a_full_forward() -> None:
    model = build_model(ModelSpec(preset="tiny"), 0, SEQUENCE)
    text = sample_text(model, ByteTokenizer(), "abc", 6, SEQUENCE, temperature=0.0)
    tokens = list(b"abc")
    with torch.no_grad():
        for _ in range(6):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    assert text == ByteTokenizer().decode(tokens[3:])


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("weight", [math.nan, math.inf])
def test_a_model_whose_weights_are_no_numbers_writes_a_sentence(
    weight: float, temperature: float
) -> None:
    model = build_model(ModelSpec(preset="tiny"), 0, SEQUENCE)
    with torch.no_grad():
        next(model.parameters()).fill_(weight)
    with pytest.raises(UserError, match="expected a finite number; its training has diverged"):
        sample_text(model, ByteTokenizer(), "abc", 6, SEQUENCE, temperature=temperature)
    assert model.training


class NoTokenizer(ByteTokenizer):
    """Makes no tokens of anything."""

    def encode(self, text: bytes) -> npt.NDArray[np.uint8]:
        return np.empty(0, np.uint8)


def test_a_prompt_without_tokens_is_answered_with_a_sentence() -> None:
    with pytest.raises(UserError, match="makes nothing of the prompt ' '"):
        sample_text(Uniform(), NoTokenizer(), " ", 6, SEQUENCE)
