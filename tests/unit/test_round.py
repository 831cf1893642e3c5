import pytest
from protocol_builders import A, B, C, D, ready

from p2pdiloco.protocol.naming import PeerId, RoundId
from p2pdiloco.protocol.round import Pulled, Round, Stage

ROUND = RoundId(0, 1, 0, 0)
REPORT = ready(ROUND)


def make_round(*invited: PeerId, quorum: int = 2) -> Round:
    return Round(ROUND, "parent", invited or (A, B, C), quorum, opened=0, gather_deadline=20)


def with_reports(*peers: PeerId, quorum: int = 2, grace_s: float = 3) -> Round:
    """The last of `peers` reports at 1 s."""
    round_ = make_round(quorum=quorum)
    for peer in peers:
        if round_.report(peer, REPORT, 1):
            round_.grace_until = 1 + grace_s
    return round_


def test_a_round_without_quorum_says_whom_it_waits_for() -> None:
    assert make_round().decide(1) == (None, "quorum 0/2, waiting for 3 of 3")


def test_the_kth_report_opens_the_grace_window_and_the_sentence_says_so() -> None:
    round_ = make_round()
    assert [round_.report(p, REPORT, 1) for p in (A, B)] == [False, True]
    round_.grace_until = 4
    assert round_.decide(2) == (None, "2/3 ready, 2.00 s of grace for 1 more")
    assert round_.deadline == 4


def test_when_grace_is_over_the_round_closes_with_those_that_are_ready() -> None:
    admitted, why = with_reports(B, A).decide(4)
    assert admitted == [A, B]
    assert why == "quorum 2 met, 2 of 3 ready when the grace window of 3.00 s closed"


def test_a_round_closes_at_once_when_all_have_answered() -> None:
    admitted, why = with_reports(A, B, C).decide(1)
    assert (admitted, why) == ([A, B, C], "all 3 of 3 invited have answered")


def test_who_declined_is_not_waited_for() -> None:
    round_ = with_reports(A, B)
    round_.decline(C, "on another lineage")
    assert round_.decide(1) == ([A, B], "all 2 of 3 invited have answered")
    assert round_.refused == {C: "on another lineage"}


def test_without_quorum_in_time_the_round_is_given_up() -> None:
    assert with_reports(A).decide(19)[0] is None
    assert with_reports(A).decide(20) == ((), "no quorum: 1 of 2 needed were ready")


def test_without_anybody_left_to_wait_for_it_is_given_up_at_once() -> None:
    round_ = with_reports(A)
    round_.decline(B, "no")
    round_.decline(C, "no")
    assert round_.decide(1) == ((), "no quorum: 1 of 2 needed were ready (no)")


def test_a_quorum_that_is_lost_again_closes_the_grace_window() -> None:
    round_ = with_reports(A, B)
    round_.decline(B, "the learner died")
    assert (round_.quorum_at, round_.deadline) == (None, 20)
    assert round_.decide(10)[0] is None
    assert round_.report(C, REPORT, 11)


def test_a_late_report_is_refused_with_a_reason() -> None:
    round_ = with_reports(A, B)
    round_.close([A, B], "closed", 4, 10)
    assert not round_.report(C, REPORT, 5)
    assert round_.refused == {C: "late: the round had closed"}


def test_the_uninvited_are_not_heard_nor_remembered() -> None:
    round_ = make_round()
    assert not round_.report(D, REPORT, 1)
    round_.decline(D, "no")
    round_.close([A], "closed", 4, 10)
    round_.report(D, REPORT, 5)
    assert (round_.reports, round_.refused) == ({}, {})


def test_pulls_end_one_by_one() -> None:
    round_ = with_reports(A, B, C)
    round_.close([A, B, C], "all", 2, 10)
    assert (round_.stage, round_.deadline) == (Stage.PULLING, 12)
    round_.pull_done(A, Pulled(100, 10))
    round_.pull_failed(B, "a NaN")
    assert round_.pulls_open() == [C]
    assert round_.refused == {B: "a NaN"}


def test_the_first_word_on_a_pull_counts() -> None:
    round_ = with_reports(A, B)
    round_.close([A, B], "all", 2, 10)
    round_.pull_done(A, Pulled(100, 10))
    round_.pull_failed(A, "too late")
    round_.pull_failed(B, "gone")
    round_.pull_done(B, Pulled(100, 10))
    assert (sorted(round_.pulled), round_.refused) == ([A], {B: "gone"})


@pytest.mark.parametrize("stage", [Stage.GATHERING, Stage.MERGING])
def test_pulls_count_only_while_pulling(stage: Stage) -> None:
    round_ = with_reports(A, B)
    round_.stage = stage
    round_.pull_done(A, Pulled(100, 10))
    assert round_.pulled == {}


def test_a_merge_has_no_deadline_of_its_own() -> None:
    round_ = with_reports(A, B)
    round_.stage = Stage.MERGING
    assert round_.deadline is None
