"""Distances between workers, on distributions whose distance is known."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from p2pdiloco.learn.disagreement import (
    output_disagreement,
    output_distributions,
    parameter_disagreement,
    probe_batch,
)
from p2pdiloco.learn.text import ByteTokenizer, split_text


def test_of_several_workers_it_is_the_mean_over_pairs() -> None:
    left, right = np.array([[1.0, 0.0]], np.float32), np.array([[0.0, 1.0]], np.float32)
    assert output_disagreement([left, left, right]) == pytest.approx(2 / 3)
    assert output_disagreement([left]) == 0


def test_parameters_are_compared_by_euclidean_distance() -> None:
    a, b = np.zeros(2, np.float32), np.array([3, 4], np.float32)
    assert parameter_disagreement([a, b]) == 5
    assert parameter_disagreement([a, a, b]) == pytest.approx(10 / 3)


class Table(torch.nn.Module):
    """Next-token logits by the last token; uncertain while training."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.eye(4))

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> SimpleNamespace:
        return SimpleNamespace(logits=self.weight[input_ids] * (0 if self.training else 1))


def test_outputs_are_those_of_evaluation_and_leave_the_model_training() -> None:
    model = Table().train()
    got = output_distributions(model, torch.tensor([[0, 1], [2, 3]]))
    np.testing.assert_allclose(got, torch.eye(4).softmax(-1).numpy(), rtol=1e-6)
    assert model.training


def test_the_probe_is_held_out_text_and_always_the_same() -> None:
    content = bytes(np.arange(100 * 4096, dtype=np.uint32) % 251)
    text = split_text(content, ByteTokenizer())
    probe = probe_batch(text, 16, 3)
    assert probe.shape == (3, 16)
    held_out = [text.tokens[part.start : part.start + 16].tolist() for part in text.held_out]
    assert all(row in held_out for row in probe.tolist())
    assert torch.equal(probe, probe_batch(text, 16, 3))


def test_a_probe_of_long_sequences_is_held_out_text_too() -> None:
    blocks = (bytes([number]) * 4096 for number in range(100))
    text = split_text(b"".join(blocks), ByteTokenizer())
    assert probe_batch(text, 5000, 2).tolist() == [[49] * 4096, [99] * 4096]
