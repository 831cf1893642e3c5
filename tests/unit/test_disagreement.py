"""Distances between workers, on distributions whose distance is known."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from p2pdiloco.learn.disagreement import (
    jensen_shannon_distance,
    output_disagreement,
    output_distributions,
    parameter_disagreement,
    probe_batch,
)
from p2pdiloco.learn.text import ByteTokenizer, split_text


def logs(*positions: list[float]) -> torch.Tensor:
    return torch.tensor(positions).log()


def test_workers_that_say_the_same_are_at_distance_0() -> None:
    p = torch.randn(50, 256, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    assert jensen_shannon_distance(p, p.clone()) < 1e-3
    assert jensen_shannon_distance(logs([0.5, 0.5]), logs([0.5, 0.5])) == 0


def test_workers_that_never_say_the_same_are_at_distance_1() -> None:
    assert jensen_shannon_distance(logs([1.0, 0.0]), logs([0.0, 1.0])) == pytest.approx(1)


def test_a_coin_against_certainty_is_at_a_known_distance() -> None:
    """JSD((1/2, 1/2), (1, 0)) = 3/4 log2(4/3) bits."""
    got = jensen_shannon_distance(logs([0.5, 0.5]), logs([1.0, 0.0]))
    assert got == pytest.approx(math.sqrt(0.75 * math.log2(4 / 3)))


def test_divergence_not_distance_is_averaged_over_positions() -> None:
    got = jensen_shannon_distance(logs([1.0, 0.0], [0.5, 0.5]), logs([0.0, 1.0], [0.5, 0.5]))
    assert got == pytest.approx(math.sqrt(0.5))


def test_the_distance_is_symmetric_and_obeys_the_triangle() -> None:
    generator = torch.Generator().manual_seed(0)
    p, q, r = (
        torch.randn(20, 16, generator=generator).mul(scale).log_softmax(-1) for scale in (1, 2, 4)
    )
    assert jensen_shannon_distance(p, q) == pytest.approx(jensen_shannon_distance(q, p))
    through_q = jensen_shannon_distance(p, q) + jensen_shannon_distance(q, r)
    assert jensen_shannon_distance(p, r) <= through_q


def test_of_several_workers_it_is_the_mean_over_pairs() -> None:
    left, right = logs([1.0, 0.0]), logs([0.0, 1.0])
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
    torch.testing.assert_close(got, torch.eye(4).log_softmax(-1))
    assert model.training


def test_the_probe_is_held_out_text_and_always_the_same() -> None:
    content = bytes(np.arange(100 * 4096, dtype=np.uint32) % 251)
    text = split_text(content, ByteTokenizer())
    probe = probe_batch(text, 16, 3)
    assert probe.shape == (3, 16)
    held_out = [text.tokens[part.start : part.start + 16].tolist() for part in text.held_out]
    assert all(row in held_out for row in probe.tolist())
    assert torch.equal(probe, probe_batch(text, 16, 3))
