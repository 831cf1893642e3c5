"""When a learner stops counting on who dispatches."""

from p2pdiloco.protocol.waiting import PATIENCE_S, Waiting


def test_a_dispatcher_of_which_nothing_comes_is_passed_over_once() -> None:
    waiting = Waiting()
    assert not waiting.is_over(3, "anna", 0, 10.0)
    assert not waiting.is_over(3, "anna", 0, 9.0 + PATIENCE_S)
    assert waiting.is_over(3, "anna", 0, 10.0 + PATIENCE_S)
    assert not waiting.is_over(3, "anna", 0, 11.0 + PATIENCE_S)


def test_whatever_it_does_and_whoever_follows_it_begins_the_wait_anew() -> None:
    for later in ((3, "anna", 1), (3, "bert", 0), (4, "anna", 0)):
        waiting = Waiting()
        assert not waiting.is_over(3, "anna", 0, 0.0)
        assert not waiting.is_over(*later, PATIENCE_S)
        assert waiting.is_over(*later, 2 * PATIENCE_S)


def test_who_need_do_nothing_is_not_waited_for() -> None:
    waiting = Waiting()
    for minutes in range(9):
        assert not waiting.is_over(3, "anna", None, 60.0 * minutes)
