"""What is kept of a step's turns, and for how long."""

import pytest

from p2pdiloco.protocol.turns import Held, Holding, TurnId
from p2pdiloco_daemon.rollouts import held_turns
from p2pdiloco_daemon.rollouts.held_turns import HeldTurns, Played


def played(
    trajectory: int, turn: int, holding: Holding = Holding.READY, episode: bytes = b"so far"
) -> Played:
    return Played(Held(TurnId(5, trajectory, turn), holding, 20), 0, episode)


def holding(*kept: Played) -> HeldTurns:
    held = HeldTurns()
    for one in kept:
        held.keep(one)
    return held


def test_the_newest_turn_of_each_trajectory_is_held() -> None:
    held = holding(played(1, 1), played(2, 1), played(1, 2))
    assert held.all() == (played(2, 1).held, played(1, 2).held)
    assert held.of(5, 1) == played(1, 2)
    assert held.of(5, 3) is None
    assert held.of(4, 1) is None


def test_a_turn_goes_on_from_what_is_held_only_if_it_is_next() -> None:
    held = holding(played(1, 2), played(2, 2, Holding.ENDED))
    assert held.history_of(TurnId(5, 1, 2)) == b"so far"
    for other in (TurnId(5, 1, 1), TurnId(5, 1, 3), TurnId(6, 1, 2), TurnId(5, 2, 2)):
        assert held.history_of(other) == b""


def test_who_begins_a_turn_anew_does_not_count_on_what_came_after_it() -> None:
    held = holding(played(1, 2), played(2, 2, Holding.ENDED), played(3, 2))
    held.begins(TurnId(5, 1, 1))
    held.begins(TurnId(5, 2, 2))
    held.begins(TurnId(5, 3, 2))
    held.begins(TurnId(5, 4, 0))
    assert held.all() == (played(3, 2).held,)


def test_the_oldest_give_way_when_it_gets_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_turns, "HELD_MAX", 3)
    monkeypatch.setattr(held_turns, "HELD_BYTES_MAX", 10)
    few = holding(*(played(i, 1, episode=b"") for i in range(5)))
    assert [held.turn.trajectory for held in few.all()] == [2, 3, 4]
    large = holding(*(played(i, 1, episode=b"long") for i in range(3)))
    assert [held.turn.trajectory for held in large.all()] == [1, 2]


def test_a_step_that_is_over_leaves_nothing() -> None:
    held = holding(played(1, 1))
    held.clear()
    assert held.all() == ()
