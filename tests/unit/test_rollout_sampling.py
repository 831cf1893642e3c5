import math
import random

import pytest
import torch

from p2pdiloco.rollout.sampling import Sampling, decide, gumbel, noise_key


def keys(number: int, seed: int = 0) -> list[int]:
    return [noise_key(seed, "t", position) for position in range(number)]


def frequencies(logits: list[float], sampling: Sampling, number: int = 20_000) -> torch.Tensor:
    logits_NV = torch.tensor([logits]).expand(number, -1)
    choices = decide(logits_NV, [sampling] * number, keys(number, sampling.seed), 1e-5)
    return torch.bincount(torch.tensor([c.token for c in choices]), minlength=len(logits)) / number


def test_noise_has_the_moments_of_gumbel() -> None:
    noise = gumbel(torch.tensor(keys(2000)), 100)
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.01)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.03)
    assert noise.isfinite().all()


def test_noise_does_not_depend_on_its_company() -> None:
    together = gumbel(torch.tensor(keys(5)), 33)
    assert torch.equal(gumbel(torch.tensor(keys(5)[3:4]), 33)[0], together[3])
    assert torch.equal(gumbel(torch.tensor(keys(5)), 9), together[:, :9])


def test_noise_is_the_same_for_ever() -> None:
    assert noise_key(1, "trajectory", 2) == -5813353962789489315
    noise = gumbel(torch.tensor([noise_key(1, "trajectory", 2)]), 3)[0]
    assert noise.tolist() == pytest.approx([-0.0893369966, 0.4733309976, 0.2915138467])


@pytest.mark.parametrize("other", [(1, "t", 5), (0, "t", 6), (0, "u", 5)])
def test_seed_trajectory_and_position_each_change_the_noise(other: tuple[int, str, int]) -> None:
    pair = gumbel(torch.tensor([noise_key(0, "t", 5), noise_key(*other)]), 1000)
    assert abs(torch.corrcoef(pair)[0, 1].item()) < 0.15


def test_tokens_follow_softmax_at_the_temperature() -> None:
    logits = [0.0, 1.0, 2.0, -1.0]
    expected = (torch.tensor(logits) / 0.7).softmax(dim=0)
    observed = frequencies(logits, Sampling(temperature=0.7))
    torch.testing.assert_close(observed, expected, atol=0.012, rtol=0)


def test_top_k_renormalizes_the_largest() -> None:
    observed = frequencies([0.0, 1.0, 2.0, -1.0], Sampling(top_k=2))
    expected = torch.tensor([0.0, *torch.tensor([1.0, 2.0]).softmax(dim=0).tolist(), 0.0])
    torch.testing.assert_close(observed, expected, atol=0.012, rtol=0)


def test_top_p_keeps_the_smallest_set_that_reaches_its_share() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().tolist()
    observed = frequencies(logits, Sampling(top_p=0.7))
    expected = torch.tensor([0.625, 0.375, 0.0, 0.0])
    torch.testing.assert_close(observed, expected, atol=0.012, rtol=0)


def test_top_p_is_a_share_of_what_top_k_leaves() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().tolist()
    assert frequencies(logits, Sampling(top_k=2, top_p=0.57), 200)[1] == 0
    assert frequencies(logits, Sampling(top_p=0.57), 200)[1] > 0


def test_temperature_zero_takes_the_largest() -> None:
    assert frequencies([0.0, 1.0, 0.9], Sampling(temperature=0.0, top_p=0.5), 50)[1] == 1


def test_log_probability_ignores_the_cuts_but_not_the_temperature() -> None:
    logits_NV = torch.tensor([[0.0, 3.0, 1.0]])
    [choice] = decide(logits_NV, [Sampling(temperature=0.5, top_k=1)], [0], 1e-6)
    expected = (logits_NV[0] / 0.5).log_softmax(dim=0)[1].item()
    assert choice.token == 1
    assert choice.logprob == pytest.approx(expected)


def test_a_certain_choice_survives_any_change_within_the_margin() -> None:
    generator = torch.Generator().manual_seed(1)
    rng = random.Random(1)
    margin = 0.03
    num_certain = num_changed = 0
    for round_key in range(60):
        samplings = [
            Sampling(
                temperature=rng.choice([0.0, 0.3, 1.0, 2.0]),
                top_k=rng.choice([None, 1, 3, 10]),
                top_p=rng.choice([1.0, 0.9, 0.5]),
            )
            for _ in range(64)
        ]
        logits_NV = 2 * torch.randn(64, 24, generator=generator)
        noise = [noise_key(round_key, "t", row) for row in range(64)]
        choices = decide(logits_NV, samplings, noise, margin)
        shift_NV = margin * (2 * torch.rand(64, 24, generator=generator) - 1).sign()
        shifted = decide(logits_NV + shift_NV, samplings, noise, 0.0)
        num_certain += sum(choice.certain for choice in choices)
        for choice, after in zip(choices, shifted, strict=True):
            num_changed += choice.token != after.token
            assert not choice.certain or choice.token == after.token
    assert num_changed > 20
    assert num_certain > 0.7 * 60 * 64


def test_almost_all_choices_are_certain_at_a_small_margin() -> None:
    logits_NV = torch.randn(4000, 50, generator=torch.Generator().manual_seed(2))
    for sampling in (Sampling(), Sampling(top_k=5), Sampling(top_p=0.9), Sampling(temperature=0.0)):
        choices = decide(logits_NV, [sampling] * 4000, keys(4000), 1e-5)
        assert sum(not choice.certain for choice in choices) < 8


def test_equal_logits_at_the_edge_of_top_k_are_left_open() -> None:
    choices = decide(torch.tensor([[1.0, 1.0, 0.0]] * 40), [Sampling(top_k=1)] * 40, keys(40), 1e-6)
    assert not any(choice.certain for choice in choices)


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1.0}, {"temperature": math.nan}, {"top_k": 0}, {"top_p": 0.0}]
)
def test_impossible_settings_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be"):
        Sampling(**wrong)  # type: ignore[arg-type]
