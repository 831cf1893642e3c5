"""What a step learns from, and the tensors it becomes."""

import pytest
import torch
from rl_builders import LIMITS, episode, told

from p2pdiloco.rl.episodes import Answer, Episode
from p2pdiloco.rl.packing import Weighted, batches, select


def test_only_what_the_policy_chose_is_learnt_from() -> None:
    conversation = told("ab.", "c.", "ddd.")
    [batch] = batches([Weighted(conversation, 0.5)], 1000)
    written = "beginab.morec.moreddd."
    mask = "0000011100001100001111"
    assert batch.tokens_BT.shape == (1, len(written))
    assert batch.mask_BT[0].tolist() == [float(bit) for bit in mask]
    assert (batch.behaviour_BT[0] == -0.5 * batch.mask_BT[0]).all()
    assert batch.advantages_B.tolist() == [0.5]


def test_rows_are_padded_and_padding_is_not_learnt_from() -> None:
    [batch] = batches([Weighted(episode(answer=5), 1.0), Weighted(episode(answer=1), -1.0)], 100)
    assert batch.tokens_BT.tolist() == [[1, 2, 3, 0, 0, 0, 0], [1, 2, 3, 4, 5, 6, 7]]
    assert batch.mask_BT.sum(dim=1).tolist() == [1, 5]
    assert batch.advantages_B.tolist() == [-1.0, 1.0]


def test_no_batch_is_larger_than_allowed_unless_one_episode_is() -> None:
    chosen = [Weighted(episode(answer=length), 1.0) for length in (3, 30, 4, 5, 3)]
    shapes = [tuple(batch.tokens_BT.shape) for batch in batches(chosen, 16)]
    assert shapes == [(2, 5), (2, 7), (1, 32)]


def test_nothing_gives_no_batch() -> None:
    assert list(batches([], 100)) == []


def test_an_episode_of_a_policy_too_old_is_left_out() -> None:
    group = [episode(1.0, version=7), episode(0.0, version=9), episode(0.5, version=10)]
    selection = select([group], version=10, lag_max=1, variant="grpo")
    assert selection.num_too_old == 1
    assert [w.episode.oldest_version for w in selection.chosen] == [9, 10]
    assert [w.advantage for w in selection.chosen] == pytest.approx([-1, 1])


def test_one_old_token_makes_an_episode_old() -> None:
    mixed = Episode(
        step=5,
        trajectory=0,
        tokens=(1, 2, 3, 4),
        answers=(Answer(1, (-1.0, -1.0), (3, 9)),),
        reward=1.0,
    )
    assert select([[mixed, episode(0.0, version=9)]], 9, 2, "grpo").num_too_old == 1


def test_a_group_without_differences_is_left_out_and_counted() -> None:
    selection = select(
        [[episode(1.0)] * 3, [episode(0.3)], [], [episode(1.0), episode(0.0)]], 0, 0, "dapo"
    )
    assert len(selection.alike) == 4
    assert len(selection.chosen) == 2
    totals = selection.totals(LIMITS.answer_tokens_max)
    assert (totals.num_trajectories, totals.num_tokens, totals.num_tokens_max) == (2, 6, 6)


def test_behaviour_is_kept_per_token() -> None:
    one = Episode(
        step=5,
        trajectory=0,
        tokens=(1, 2, 3),
        answers=(Answer(1, (-0.25, -1.5), (0, 0)),),
        reward=1.0,
    )
    [batch] = batches([Weighted(one, 1.0)], 10)
    assert torch.equal(batch.behaviour_BT, torch.tensor([[0.0, -0.25, -1.5]]))
