import pytest
from protocol_builders import (
    A,
    B,
    C,
    Script,
    committed,
    digest,
    make_record,
    make_records,
    opened,
    ready,
    training,
)

from p2pdiloco.protocol import contributor, events
from p2pdiloco.protocol.actions import (
    Action,
    CatchUp,
    DropContribution,
    InstallFragment,
    PrepareContribution,
    Send,
)
from p2pdiloco.protocol.contributor import ATTEMPT_LEAP_MAX, LEARNER_DIED, NOT_IN_TIME
from p2pdiloco.protocol.ledger import NOT_ASKED, OVERLAP
from p2pdiloco.protocol.lineage import Record, Refused
from p2pdiloco.protocol.naming import PeerId, RoundId
from p2pdiloco.protocol.synchronizer import IMPATIENT_MIN_S
from p2pdiloco.protocol.wire import Head, RoundDeclined, RoundOpened

FIRST = opened(None)
ROUND = FIRST.round


def prepared(round_id: RoundId = ROUND, tokens: int = 1000) -> events.ContributionPrepared:
    return events.ContributionPrepared(round_id, steps=10, tokens=tokens, num_bytes=500)


def worked(tokens: int) -> events.StepsDone:
    return events.StepsDone(1, tokens, 1.0)


def declines(actions: list[Action]) -> list[str]:
    return [
        a.message.reason
        for a in actions
        if isinstance(a, Send) and isinstance(a.message, RoundDeclined)
    ]


def reached(record: Record) -> events.StateReached:
    return events.StateReached(record.fragment, record.version, record.state_digest, record)


def turns(script: Script, attempt: int) -> PeerId:
    """Whose turn it is in this attempt at version 1 of fragment 0."""
    state = script.node.state
    for peer in (A, B, C):
        if state.is_turn_of(peer, RoundId(0, 1, 0, attempt)):
            return peer
    raise AssertionError


# -------------------------------------------------------------------- offers


def test_in_synchronous_diloco_the_learner_stands_still_after_its_snapshot() -> None:
    script = training(B, blocks=True)
    assert script.hear(B, FIRST) == [PrepareContribution(ROUND, hold=True)]


def test_a_member_answers_an_open_round_with_its_outer_gradient() -> None:
    script = training(B)
    assert script.hear(B, FIRST) == [PrepareContribution(ROUND)]
    assert script.do(worked(1000), prepared()) == [Send(B, ready(ROUND))]


def test_a_learner_that_has_not_received_the_base_receives_it_first() -> None:
    script, record = training(B), make_record()
    script.do(committed(B, record), reached(record))
    second = opened(record)
    assert script.hear(B, second) == []
    script.do(events.FragmentInstalled(0, 1, 0))
    assert script.node.state.registers[0].offer
    assert script.node.state.registers[0].offer.preparing


def test_the_newest_round_replaces_an_older_offer() -> None:
    script = training(B)
    script.hear(B, FIRST)
    again = opened(None, 1)
    assert script.hear(B, again) == [DropContribution(0), PrepareContribution(again.round)]


def test_a_repeated_opening_gets_the_same_report_again() -> None:
    script = training(B)
    script.hear(B, FIRST)
    assert script.hear(B, FIRST) == []
    script.do(worked(1000), prepared())
    assert script.hear(B, FIRST) == [Send(B, ready(ROUND))]


def test_what_lies_ready_for_a_round_that_was_replaced_is_not_reported() -> None:
    script = training(B)
    script.hear(B, FIRST)
    script.hear(B, opened(None, 1))
    assert script.do(prepared()) == []


def test_a_failure_to_prepare_is_told() -> None:
    script = training(B)
    script.hear(B, FIRST)
    failed = events.ContributionFailed(ROUND, "the learner\nwas busy")
    assert declines(script.do(failed)) == ["the learner was busy"]
    assert script.node.state.registers[0].offer is None


# -------------------------------------------------------------------- refusals


def test_a_member_says_why_it_does_not_contribute() -> None:
    script = training(B, version=4)
    assert declines(script.hear(B, opened(make_records(3)[-1]))) == ["already at v4"]
    assert declines(script.hear(B, opened(make_records(5)[-1]))) == ["still at v4"]
    assert declines(script.hear(B, opened(make_records(4, branch="x")[-1]))) == [
        "on another lineage"
    ]


def test_a_member_without_learner_says_so() -> None:
    script = training(B)
    script.do(events.LearnerStopped("out of memory"))
    assert declines(script.hear(B, FIRST)) == ["the learner is not running"]


def test_a_member_that_settles_says_so() -> None:
    script = training(B)
    script.do(events.SettleAsked())
    assert declines(script.hear(B, FIRST)) == ["not taking part at the moment"]


def test_who_is_behind_is_told_the_head() -> None:
    script = training(B, version=4)
    head = script.node.state.registers[0].chain
    assert head
    told = script.hear(B, opened(make_records(3)[-1]))[0]
    assert told == Send(B, committed(B, make_records(4)[-1]).message)


def test_who_was_started_anew_joins_a_round_of_one_that_waited_for_weeks() -> None:
    """Its attempt grew with each patience that was lost, and is remembered by nobody else."""
    script = training(B)
    asked = opened(None, int(30 * 24 * 3600 / IMPATIENT_MIN_S))
    assert script.hear(B, asked) == [PrepareContribution(asked.round)]
    assert script.node.state.cooled_down(B)


def test_an_old_attempt_is_refused_counted_and_told_the_newer() -> None:
    script = training(B, C)
    script.hear(B, opened(None, 3))
    refused = script.hear(C, opened(None, 2))
    reason = "an old term or attempt: (0, 2) is before (0, 3)"
    assert refused == [Send(C, RoundDeclined(opened(None, 2).round, reason, attempt=3))]
    assert script.node.state.refusals == {contributor.OLD_FENCE: 1}


def test_a_peer_whose_bytes_were_wrong_gets_nothing() -> None:
    script = training(B)
    script.do(events.PullFailed(ROUND, B, "a NaN", hostile=True))
    assert declines(script.hear(B, FIRST)) == ["cooling down after wrong bytes"]


# -------------------------------------------------------------------- hostile synchronizers


@pytest.mark.parametrize(
    "hostile",
    [
        RoundOpened(RoundId(0, 1, 2**62, 0), FIRST.parent),
        RoundOpened(RoundId(0, 5, 0, 0), FIRST.parent),
        RoundOpened(RoundId(0, 1, 0, ATTEMPT_LEAP_MAX + 1), FIRST.parent),
    ],
    ids=str,
)
def test_a_made_up_fence_fences_nobody_off(hostile: RoundOpened) -> None:
    script = training(B, C)
    assert script.hear(C, hostile) == []
    assert not script.node.state.cooled_down(C)
    assert script.hear(B, FIRST) == [PrepareContribution(ROUND)]


def test_an_offer_is_not_taken_over_out_of_turn() -> None:
    script = training(B, C)
    usurper, other = (B, C) if turns(script, 1) != B else (C, B)
    script.hear(other, FIRST)
    refused = declines(script.hear(usurper, opened(None, 1)))
    assert refused == [f"already in {ROUND} of {other}"]


def test_the_next_candidate_takes_an_offer_over_in_its_turn() -> None:
    script = training(B, C)
    attempt = next(k for k in range(1, 20) if turns(script, k) == C)
    script.hear(B, opened(None, 0))
    taken = opened(None, attempt)
    assert script.hear(C, taken) == [DropContribution(0), PrepareContribution(taken.round)]


def test_anybody_takes_over_from_the_dead() -> None:
    script = training(B, C)
    script.hear(B, FIRST)
    script.now = 30.0
    script.beat(C)
    assert declines(script.hear(C, opened(None, 1))) == []


def test_nobody_else_can_open_the_very_same_round() -> None:
    script = training(B, C)
    script.hear(B, FIRST)
    assert declines(script.hear(C, FIRST)) == [f"already in {ROUND} of {B}"]


# -------------------------------------------------------------------- the learner and the ledger


def test_a_learner_that_starts_receives_every_fragment() -> None:
    script = training(B)
    script.do(events.LearnerStopped("crashed"))
    assert script.do(events.LearnerStarted()) == [InstallFragment(0, 0), InstallFragment(1, 0)]


def steps_seen(script: Script) -> list[int]:
    state = script.node.state
    learners = state.learners(state.registers[0], state.membership.ready(state.now))
    return [steps for steps, _ in learners]


def test_a_dead_learner_does_not_set_the_pace() -> None:
    script = training(B)
    script.do(worked(100))
    assert steps_seen(script) == [1, 0]
    script.do(events.LearnerStopped("crashed"))
    assert script.node.state.step_s == 0
    assert steps_seen(script) == [0]
    script.now = 1.0
    script.beat(B, step_s=0.0)
    assert steps_seen(script) == []


def fates(script: Script) -> tuple[int, dict[str, int], dict[str, int]]:
    totals = script.node.state.ledger.totals()
    assert totals.adds_up
    return totals.merged, dict(totals.rejected), dict(totals.lost)


def test_tokens_that_were_merged_are_settled_when_the_fragment_is_received() -> None:
    script, record = training(B), make_record(tokens={A: 1000})
    script.hear(B, FIRST)
    script.do(worked(1000), prepared(), worked(50), committed(B, record), reached(record))
    assert fates(script) == (0, {}, {})
    script.do(events.FragmentInstalled(0, 1, 1050))
    assert fates(script) == (1000, {}, {OVERLAP: 50})


def test_tokens_that_came_late_are_rejected_with_the_synchronizers_reason() -> None:
    script = training(B)
    record = make_record(refused=(Refused(A, "late: the round had closed"),))
    script.hear(B, FIRST)
    script.do(worked(1000), prepared(), committed(B, record), reached(record))
    script.do(events.FragmentInstalled(0, 1, 1000))
    assert fates(script) == (0, {"late: the round had closed": 1000}, {})


def test_tokens_that_no_word_is_said_of_were_not_in_time() -> None:
    script, record = training(B), make_record()
    script.hear(B, FIRST)
    script.do(worked(1000), prepared(), committed(B, record), reached(record))
    script.do(events.FragmentInstalled(0, 1, 1000))
    assert fates(script) == (0, {NOT_IN_TIME: 1000}, {})


def test_tokens_of_a_fragment_that_nobody_asked_for_are_lost() -> None:
    script, record = training(B), make_record()
    script.do(worked(100), committed(B, record), reached(record))
    script.do(events.FragmentInstalled(0, 1, 100))
    assert fates(script) == (0, {}, {NOT_ASKED: 100})


def test_a_learner_that_dies_takes_its_tokens_along() -> None:
    script = training(B)
    script.do(worked(100), events.LearnerStopped("crashed"))
    assert fates(script) == (0, {}, {LEARNER_DIED: 200})


def test_a_record_that_lists_us_after_the_learner_died_revises_the_ledger() -> None:
    script, record = training(B), make_record(tokens={A: 100})
    script.hear(B, FIRST)
    script.do(worked(100), prepared(tokens=100), events.LearnerStopped("crashed"))
    script.do(committed(B, record), reached(record))
    assert fates(script) == (100, {}, {LEARNER_DIED: 100})


def test_a_fork_names_the_tokens_of_the_losing_branch() -> None:
    script, ours = training(B), make_record(tokens={A: 100}, synchronizer=C)
    script.hear(B, FIRST)
    script.do(worked(100), prepared(tokens=100), committed(C, ours), reached(ours))
    script.do(events.FragmentInstalled(0, 1, 100))
    theirs = make_records(2, branch="theirs", tokens={C: 500})
    adopt(script, theirs)
    assert fates(script) == (0, {}, {"merged on a lineage that lost": 100})


def adopt(script: Script, lineage: list[Record]) -> list[Action]:
    """B has this lineage, and a snapshot of its head."""
    head = lineage[-1]
    snapshot = events.SnapshotInfo(head.version, head.state_digest)
    script.now += 1
    heads = (Head(head.version, head.digest, head.tokens_total), Head(0, digest("genesis", 1), 0))
    script.beat(B, heads=heads)
    page = events.RecordsFetched(B, 0, tuple(lineage), (snapshot,))
    done = script.do(page)
    if not any(isinstance(a, CatchUp) for a in done):
        done = script.do(page)
    assert any(isinstance(a, CatchUp) for a in done), done
    return script.do(events.StateReached(0, head.version, head.state_digest, None))


def test_a_wrong_count_of_the_learner_is_our_bug() -> None:
    script = training(B)
    script.do(worked(100))
    with pytest.raises(AssertionError, match="the learner counted 99 tokens, we 100"):
        script.do(events.FragmentInstalled(0, 0, 99))
