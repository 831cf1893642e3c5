"""Who learns from which groups: what is sent to whom as members come, go and refuse."""

from p2pdiloco.protocol.dealing import (
    ORPHANED_S,
    REFUSING_S,
    RETRY_S,
    Dealing,
    Learner,
    LearnersSeen,
    SendShare,
    ShareFailed,
    ShareTaken,
)
from p2pdiloco.protocol.naming import PeerId

ANNA, BERT, CLEO = (PeerId(name) for name in ("anna", "bert", "cleo"))
INNER_STEPS = 4


def seen(*peers: PeerId, steps: int = 0, life: int = 1, trains: bool = True) -> LearnersSeen:
    return LearnersSeen(dict.fromkeys(peers, Learner(life, steps, trains)))


def dealt(num_groups: int, *peers: PeerId) -> tuple[Dealing, list[SendShare]]:
    dealing = Dealing(range(num_groups), INNER_STEPS, {})
    return dealing, dealing.handle(seen(*peers), 0.0)


def all_taken(num_groups: int, *peers: PeerId) -> Dealing:
    dealing, sent = dealt(num_groups, *peers)
    for share in sent:
        assert dealing.handle(ShareTaken(share.peer, share.groups), 0.0) == []
    return dealing


def test_groups_are_dealt_to_all_who_learn_by_name() -> None:
    _, sent = dealt(5, BERT, ANNA)
    assert sent == [SendShare(ANNA, (0, 2, 4)), SendShare(BERT, (1, 3))]


def test_who_gets_no_group_gets_an_empty_share_once() -> None:
    dealing, sent = dealt(1, ANNA, BERT)
    assert sent == [SendShare(ANNA, (0,)), SendShare(BERT, ())]
    dealing.handle(ShareTaken(BERT, ()), 0.0)
    assert dealing.handle(seen(ANNA, BERT), 9.0) == []


def test_a_share_that_did_not_arrive_is_offered_again_after_a_while() -> None:
    dealing, _ = dealt(2, ANNA, BERT)
    dealing.handle(ShareTaken(ANNA, (0,)), 0.0)
    assert dealing.handle(ShareFailed(BERT), 1.0) == []
    assert dealing.handle(seen(ANNA, BERT), 1.0 + RETRY_S / 2) == []
    assert dealing.handle(seen(ANNA, BERT), 1.0 + RETRY_S) == [SendShare(BERT, (1,))]


def test_what_a_member_never_took_goes_to_others_as_soon_as_it_is_gone() -> None:
    dealing, _ = dealt(2, ANNA, BERT)
    dealing.handle(ShareTaken(ANNA, (0,)), 0.0)
    assert dealing.handle(seen(ANNA), 1.0) == [SendShare(ANNA, (1,))]


def test_what_it_took_goes_to_others_only_after_a_silence() -> None:
    dealing = all_taken(2, ANNA, BERT)
    assert dealing.handle(seen(ANNA), ORPHANED_S) == []
    assert dealing.handle(seen(ANNA), ORPHANED_S + 1) == [SendShare(ANNA, (1,))]


def test_what_a_member_learnt_before_it_went_is_not_learnt_again() -> None:
    dealing = all_taken(2, ANNA, BERT)
    dealing.handle(seen(ANNA, BERT, steps=INNER_STEPS), 1.0)
    assert dealing.handle(seen(ANNA), ORPHANED_S + 9) == []


def test_a_second_share_is_learnt_from_after_the_first() -> None:
    """H steps make the first; who goes then had not learnt from the second."""
    dealing = all_taken(2, ANNA, BERT)
    dealing.handle(seen(ANNA, steps=INNER_STEPS), 1.0)
    [orphans] = dealing.handle(seen(ANNA, steps=INNER_STEPS), ORPHANED_S + 1)
    assert orphans == SendShare(ANNA, (1,))
    dealing.handle(ShareTaken(ANNA, (1,)), ORPHANED_S + 1)
    late = 2 * ORPHANED_S + 3
    assert dealing.handle(seen(CLEO, trains=False), late) == [SendShare(CLEO, (1,))]


def test_a_member_that_was_started_anew_gets_its_share_again() -> None:
    dealing = all_taken(2, ANNA, BERT)
    again = LearnersSeen({ANNA: Learner(1, 2, True), BERT: Learner(2, 0, False)})
    assert dealing.handle(again, 3.0) == [SendShare(BERT, (1,))]


def test_a_member_that_comes_later_gets_nothing_unless_the_swarm_waits_for_it() -> None:
    dealing = all_taken(2, ANNA, BERT)
    assert dealing.handle(seen(ANNA, BERT, CLEO, trains=False), 1.0) == []
    dealing = all_taken(2, ANNA, BERT)
    assert dealing.handle(seen(ANNA, BERT, CLEO), 1.0) == [SendShare(CLEO, ())]


def test_orphans_go_to_whoever_has_least() -> None:
    dealing = all_taken(2, ANNA, BERT)
    late = seen(ANNA, CLEO, trains=False)
    assert dealing.handle(late, ORPHANED_S + 1) == [SendShare(CLEO, (1,))]


def test_a_member_that_refuses_for_long_loses_its_groups_and_gets_no_others() -> None:
    dealing, _ = dealt(2, ANNA, BERT)
    dealing.handle(ShareTaken(ANNA, (0,)), 0.0)
    dealing.handle(ShareFailed(BERT), 0.0)
    sent = dealing.handle(seen(ANNA, BERT), REFUSING_S + 1)
    assert sent == [SendShare(ANNA, (1,)), SendShare(BERT, ())]


def test_what_was_taken_of_an_earlier_dispatcher_is_not_dealt_again() -> None:
    dealing = Dealing(range(4), INNER_STEPS, {BERT: {1, 3}, CLEO: ()})
    assert dealing.handle(seen(ANNA, BERT, CLEO), 0.0) == [
        SendShare(ANNA, (0,)),
        SendShare(CLEO, (2,)),
    ]


def test_what_a_dead_member_took_of_an_earlier_dispatcher_is_dealt_in_the_end() -> None:
    dealing = Dealing(range(2), INNER_STEPS, {BERT: {1}})
    [share] = dealing.handle(seen(ANNA, BERT), 0.0)
    dealing.handle(ShareTaken(ANNA, share.groups), 0.0)
    assert dealing.num_waiting == 0
    assert dealing.handle(seen(ANNA), ORPHANED_S + 1) == [SendShare(ANNA, (1,))]


def test_only_groups_that_are_here_are_dealt_whatever_a_member_says_it_took() -> None:
    """It may say anything, and an earlier dispatcher may have had groups that are lost."""
    dealing = Dealing(range(2), INNER_STEPS, {BERT: {1, 999}})
    dealing.handle(seen(BERT), 0.0)
    dealing.handle(LearnersSeen({BERT: Learner(2, 0, False)}), 1.0)
    assert dealing.handle(ShareTaken(BERT, (0,)), 1.0) == [SendShare(BERT, (1,))]


def test_only_groups_that_are_here_are_dealt_after_a_member_that_took_others_is_gone() -> None:
    dealing = Dealing(range(2), INNER_STEPS, {BERT: {1, 999}})
    dealing.handle(seen(ANNA, BERT), 0.0)
    dealing.handle(ShareTaken(ANNA, (0,)), 0.0)
    assert dealing.handle(seen(ANNA), ORPHANED_S + 1) == [SendShare(ANNA, (1,))]
