"""Turns with a real engine: the same wherever played, and nothing left of withdrawn ones."""

from dataclasses import replace

import pytest
from rl_builders import RULES, TASKS, so_far, with_token
from rollout_builders import small_engine, small_model
from transformers import PreTrainedModel

from p2pdiloco.errors import PeerError
from p2pdiloco.protocol.turns import TurnId
from p2pdiloco.rl.checks import Rulebook
from p2pdiloco.rl.conversation import Conversation
from p2pdiloco.rl.episodes import pack
from p2pdiloco.rl.playing import Player, Turned
from p2pdiloco.rollout.request import QueueFull

TURNS = [TurnId(TASKS.step, 1, turn) for turn in range(3)]


class Worker:
    """An engine and its player."""

    def __init__(self, model: PreTrainedModel | None = None, num_waiting_max: int = 256) -> None:
        self.engine = small_engine(model, num_waiting_max=num_waiting_max)
        self.player = Player(self.engine, RULES)

    def finish(self) -> list[Turned]:
        """What is played until the engine has nothing left to do."""
        turned = []
        while self.engine.has_work:
            turned += [t for p in self.engine.step() if (t := self.player.take(p)) is not None]
        return turned

    def played(self, turn: TurnId, history: bytes) -> Turned:
        self.player.begin(7, turn, history)
        [turned] = self.finish()
        return turned

    def plays_by(self, rules: Rulebook) -> None:
        self.player = Player(self.engine, rules)


def tokens_by(*workers: Worker) -> tuple[int, ...]:
    """Of the trajectory whose turns these play, one after the other."""
    history = b""
    for turn, worker in zip(TURNS, workers, strict=True):
        conversation = worker.played(turn, history).conversation
        history = _history(conversation)
    assert conversation.episode is not None
    return conversation.episode.tokens


def _history(conversation: Conversation) -> bytes:
    return b"" if conversation.episode else pack(conversation.so_far())


def test_a_trajectory_that_moves_between_its_turns_is_the_same() -> None:
    model = small_model()
    one, two, three = Worker(model), Worker(model), Worker(model)
    alone = tokens_by(one, one, one)
    assert tokens_by(one, two, three) == alone
    assert tokens_by(three, three, one) == alone


def test_a_turn_that_is_played_again_is_the_same() -> None:
    worker = Worker()
    first, again = (worker.played(TURNS[0], b"").conversation for _ in range(2))
    assert first.so_far() == again.so_far()


def test_a_worker_does_not_compute_again_what_it_has_of_a_history() -> None:
    worker = Worker()
    worker.plays_by(replace(RULES, limits=replace(RULES.limits, answer_tokens_max=40)))
    first = worker.played(TURNS[0], b"").conversation
    assert worker.played(TURNS[1], pack(first.so_far())).num_reused >= 16


def test_a_withdrawn_turn_leaves_nothing_in_the_engine() -> None:
    worker = Worker()
    worker.player.begin(1, TURNS[0], b"")
    worker.player.begin(2, replace(TURNS[0], trajectory=2), b"")
    worker.engine.step()
    worker.player.withdraw(1)
    worker.player.withdraw(9)
    assert [turned.number for turned in worker.finish()] == [2]
    assert not worker.engine.scheduler.running and not worker.engine.scheduler.waiting
    assert worker.player.withdraw_all() == []


def test_all_turns_can_be_withdrawn_at_once() -> None:
    worker = Worker()
    for trajectory in range(3):
        worker.player.begin(trajectory, replace(TURNS[0], trajectory=trajectory), b"")
    assert worker.player.withdraw_all() == [0, 1, 2]
    assert worker.finish() == []


@pytest.mark.parametrize(
    ("turn", "history", "reason"),
    [
        (replace(TURNS[0], step=6), b"", "is none of step 5, which has 6 trajectories"),
        (replace(TURNS[0], trajectory=6), b"", "is none of step 5"),
        (TURNS[1], b"", "has 0 turns"),
        (TURNS[2], pack(so_far("ab.")), "has 1 turns"),
        (TURNS[1], pack(so_far("ab.", trajectory=2)), "is of trajectory 2"),
        (TURNS[1], b"\x80", "a malformed episode"),
        (TURNS[1], b"garbage", "a malformed episode"),
        (TURNS[1], pack(with_token(so_far("ab."), 0, 9)), "does not begin with the prompt"),
        (TURNS[1], pack(with_token(so_far("ab."), 9, 9)), "would not have said that"),
    ],
)
def test_a_turn_with_a_wrong_history_is_refused(turn: TurnId, history: bytes, reason: str) -> None:
    worker = Worker()
    with pytest.raises(PeerError, match=reason):
        worker.player.begin(1, turn, history)
    assert not worker.engine.has_work


def test_one_turn_too_many_is_for_later() -> None:
    worker = Worker(num_waiting_max=1)
    worker.player.begin(1, TURNS[0], b"")
    with pytest.raises(QueueFull):
        worker.player.begin(2, replace(TURNS[0], trajectory=2), b"")
    assert [turned.number for turned in worker.finish()] == [1]


def test_a_turn_that_is_withdrawn_and_wanted_again_at_once_is_the_same() -> None:
    worker = Worker()
    first = worker.played(TURNS[0], b"").conversation
    worker.player.begin(1, TURNS[0], b"")
    worker.engine.step()
    worker.player.withdraw(1)
    worker.player.begin(2, TURNS[0], b"")
    [again] = worker.finish()
    assert again.number == 2
    assert again.conversation.so_far() == first.so_far()


def test_who_asks_for_a_turn_with_a_history_of_its_own_keeps_nobody_from_it() -> None:
    worker = Worker()
    first = worker.played(TURNS[0], b"").conversation.so_far()
    place = first.answers[0].start
    forged = with_token(first, place, first.tokens[place] % 60 + 1)
    worker.player.begin(1, TURNS[1], pack(forged))
    worker.player.begin(2, TURNS[1], pack(first))
    assert sorted(turned.number for turned in worker.finish()) == [1, 2]
