"""What a dispatcher has of a step's trajectories: grown turn by turn, taken back when it lies."""

from dataclasses import replace

import pytest

from p2pdiloco.errors import PeerError
from p2pdiloco.protocol.naming import PeerId
from p2pdiloco.protocol.turns import Step, TurnId
from p2pdiloco.rl.episodes import Answer, Episode, pack, unpack
from p2pdiloco.rl.harvest import Grown, Harvest, grown, until

ANNA, BERT = PeerId("anna"), PeerId("bert")
STEP = Step(number=7, prompt_tokens=(3, 3), group_size=2)


def episode(num_turns: int, trajectory: int = 0) -> Episode:
    """Three tokens of prompt; then each turn has two chosen ones and one of the environment."""
    answers = tuple(Answer(3 + 3 * i, (-0.5, -0.25), (7, 7)) for i in range(num_turns))
    tokens = tuple(range(3 + 3 * num_turns))
    return Episode(step=7, trajectory=trajectory, tokens=tokens, answers=answers, reward=0.0)


def turn(number: int, trajectory: int = 0) -> TurnId:
    return TurnId(7, trajectory, number)


def grown_to(num_turns: int, trajectory: int = 0, *, is_ended: bool = False) -> Grown:
    whole = episode(num_turns, trajectory)
    return Grown(whole, pack(whole), is_ended)


def taken(harvest: Harvest, *givers: PeerId, trajectory: int = 0, ends: bool = False) -> None:
    for number, giver in enumerate(givers, 1):
        is_last = number == len(givers)
        assert harvest.take(grown_to(number, trajectory, is_ended=ends and is_last), giver)


def test_an_answer_goes_on_from_what_was_before_it() -> None:
    got = grown(pack(episode(1)), pack(episode(2)), turn(1), is_ended=True)
    assert (got.num_turns, got.num_tokens) == (2, 9)


@pytest.mark.parametrize(
    "data",
    [
        pack(episode(1)),
        pack(episode(2, trajectory=1)),
        pack(replace(episode(2), step=6)),
        pack(replace(episode(2), tokens=(9, *episode(2).tokens[1:]))),
        b"rubbish",
    ],
    ids=["another turn", "another trajectory", "another step", "other tokens", "rubbish"],
)
def test_an_answer_to_something_else_is_refused(data: bytes) -> None:
    with pytest.raises(PeerError):
        grown(pack(episode(1)), data, turn(1), is_ended=False)


def test_the_history_of_a_turn_is_there_until_it_is_answered() -> None:
    harvest = Harvest(STEP)
    assert harvest.history(turn(0)) == b""
    taken(harvest, ANNA)
    assert harvest.history(turn(0)) is None
    assert harvest.history(turn(1)) == pack(episode(1))
    assert harvest.holder(0) == ANNA


def test_a_turn_that_is_there_already_is_not_taken_again() -> None:
    harvest = Harvest(STEP)
    taken(harvest, ANNA, ANNA, ends=True)
    assert not harvest.take(grown_to(2), BERT)
    assert not harvest.take(grown_to(3), BERT)
    assert harvest.holder(0) == ANNA


def test_ended_episodes_are_kept_by_group() -> None:
    harvest = Harvest(STEP)
    taken(harvest, ANNA, ends=True)
    taken(harvest, ANNA, trajectory=2, ends=True)
    taken(harvest, ANNA, trajectory=3)
    assert harvest.ended() == {0: [pack(episode(1, 0))], 1: [pack(episode(1, 2))]}


def test_what_a_liar_gave_is_forgotten_with_all_that_came_after_it() -> None:
    harvest = Harvest(STEP)
    taken(harvest, ANNA, BERT, ANNA, ends=True)
    taken(harvest, BERT, trajectory=1)
    taken(harvest, ANNA, trajectory=2)
    assert list(harvest.revoke(BERT)) == [(turn(1), 6), (turn(0, 1), 3)]
    left = harvest.history(turn(1))
    assert left is not None
    assert unpack(left) == episode(1)
    assert harvest.ended() == {}
    assert harvest.holder(2) == ANNA


def test_nobody_answers_for_what_is_found_at_a_worker() -> None:
    harvest = Harvest(STEP)
    harvest.found(grown_to(2, is_ended=True), BERT)
    assert harvest.givers(0) == (None, None)
    assert harvest.holder(0) == BERT
    assert not list(harvest.revoke(BERT))
    assert list(harvest.revoke(None)) == [(turn(0), 3)]


def test_an_episode_is_cut_to_how_it_was_handed_on() -> None:
    ended = replace(episode(3), reward=0.5)
    assert until(ended, 3) == ended
    assert until(ended, 1) == episode(1)
