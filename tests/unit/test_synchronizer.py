from dataclasses import replace

import pytest
from protocol_builders import (
    GENESIS,
    RUN,
    A,
    B,
    C,
    D,
    FakeSigner,
    Script,
    digest,
    head_of,
    make_heartbeat,
    make_records,
    ready,
    training,
)

from p2pdiloco.protocol import events
from p2pdiloco.protocol.actions import (
    Action,
    CommitRecord,
    DropRound,
    InstallFragment,
    MergeRound,
    PrepareContribution,
    PullContribution,
    Send,
)
from p2pdiloco.protocol.lineage import (
    CONTRIBUTORS_MAX,
    Contributor,
    Record,
    check_record,
    unpack_record,
)
from p2pdiloco.protocol.naming import PeerId, RoundId
from p2pdiloco.protocol.round import Round, Stage
from p2pdiloco.protocol.synchronizer import IMPATIENT_MIN_S
from p2pdiloco.protocol.wire import Committed, Heartbeat, Left, RoundDeclined, RoundOpened

H = 12


def mine(*peers: PeerId, **times: object) -> Script:
    """A is the synchronizer: those before it were passed over."""
    script = training(*peers, **times)  # type: ignore[arg-type]
    for register in script.node.state.registers:
        attempt = 0
        while not script.node.state.is_turn_of(A, RoundId(register.index, 1, 0, attempt)):
            attempt += 1
        register.fence = (0, attempt)
    return script


def step(script: Script, steps: int = 1, step_s: float = 1.0) -> list[Action]:
    return script.do(events.StepsDone(steps, 100 * steps, step_s))


def due(*peers: PeerId, **times: object) -> tuple[Script, RoundId]:
    """Everybody has done enough steps for fragment 0; the round is open."""
    script = mine(*peers, **times)
    script.now = 1.0
    script.beat(*peers, local_steps=(H, H))
    step(script, H // 2)
    return script, round_of(script).id


def round_of(script: Script, fragment: int = 0) -> Round:
    round_ = script.node.state.registers[fragment].round
    assert round_
    return round_


def report(script: Script, *peers: PeerId, tokens: int = 1000) -> list[Action]:
    """Who has its outer gradient ready; for A itself that is an answer of the shell."""
    id_, done = round_of(script).id, list[Action]()
    for peer in peers:
        if peer == A:
            done += script.do(events.ContributionPrepared(id_, 10, tokens, 500))
        else:
            done += script.hear(peer, ready(id_, tokens=tokens))
    return done


def pulled(round_id: RoundId, peer: PeerId, tokens: int = 1000) -> events.ContributionPulled:
    return events.ContributionPulled(round_id, peer, 10, tokens)


def merged(round_id: RoundId) -> events.RoundMerged:
    return events.RoundMerged(round_id, digest("payload"), 777, digest("state"))


def commit(actions: list[Action]) -> Record:
    (record,) = [a.record for a in actions if isinstance(a, CommitRecord)]
    return record


# -------------------------------------------------------------------- opening


def test_the_first_rounds_are_staggered_over_the_period() -> None:
    script = mine(B)
    opened_at = {}
    for steps in range(1, H + 1):
        script.now += 1.0
        for action in step(script):
            if isinstance(action, PrepareContribution):
                opened_at[action.round.fragment] = steps
        script.beat(B, local_steps=(H, H))
    assert opened_at == {0: H // 2, 1: H}


def test_a_round_after_rollouts_waits_for_the_rest_as_long_again_as_the_median_took() -> None:
    script = mine(B, C, rolls_out=True)
    step(script, H)
    for second in range(1, 20):
        script.now = float(second)
        script.beat(B, local_steps=(H if second >= 10 else 0, 0))
        script.beat(C, local_steps=(0, 0))
        assert script.node.state.registers[0].round is None
    script.now = 20.0
    script.beat(B, C, local_steps=(H, 0))
    assert round_of(script).invited == (A, B, C)


def test_a_round_after_rollouts_opens_at_once_when_all_are_done() -> None:
    script = mine(B, C, rolls_out=True)
    step(script, H)
    script.now = 1.0
    script.beat(B, C, local_steps=(H, 0))
    assert round_of(script)


def test_a_round_opens_when_the_median_learner_is_due() -> None:
    script = mine(B)
    script.now = 1.0
    script.beat(B, local_steps=(5, 5))
    assert step(script, 6) == []
    assert script.node.synchronizer.explanation == "no fragment is due yet"
    script.now = 2.0
    round_id = RoundId(0, 1, *script.node.state.registers[0].fence)
    assert script.beat(B, local_steps=(6, 6)) == [
        Send(B, RoundOpened(round_id, GENESIS[0])),
        PrepareContribution(round_id),
    ]


def test_only_members_that_stand_on_the_base_are_invited() -> None:
    script = mine(B, C, D)
    script.now = 1.0
    script.beat(B, local_steps=(H, H))
    script.beat(C, local_steps=(H, H), ready=False)
    script.beat(D, local_steps=(H, H), heads=(make_heartbeat().heads[0]._replace(version=-1),) * 2)
    step(script, H)
    assert round_of(script).invited == (A, B)


def test_a_peer_whose_bytes_were_wrong_is_not_invited() -> None:
    script = mine(B, C)
    script.do(events.WrongBytes(C, "it sent bytes of another digest"))
    script.now = 1.0
    script.beat(B, C, local_steps=(H, H))
    step(script, H)
    assert round_of(script).invited == (A, B)


def test_launches_keep_a_floor_between_them() -> None:
    script, _ = due(B)
    step(script, H)
    assert script.node.state.registers[1].round is None
    assert script.node.synchronizer.explanation == "launches are at least 3.00 s apart"
    script.now += 3.0
    step(script)
    assert script.node.state.registers[1].round


def test_at_most_tau_rounds_are_in_flight() -> None:
    script, _ = due(B, overlap_steps=1)
    script.now += 10.0
    script.beat(B, local_steps=(H, H))
    step(script, H)
    assert script.node.state.registers[1].round is None
    assert script.node.synchronizer.explanation == "1 rounds are open, as many as tau allows"


def test_without_enough_members_for_a_quorum_no_round_opens() -> None:
    script = mine(B, quorum=3)
    script.now = 1.0
    script.beat(B, local_steps=(H, H))
    step(script, H)
    assert script.node.state.registers[0].round is None
    assert script.node.synchronizer.explanation == "quorum 3 needed, 2 could contribute"


def test_a_node_that_settles_opens_nothing() -> None:
    script, round_id = due(B)
    assert script.do(events.SettleAsked()) == [DropRound(round_id)]
    assert step(script, H) == []
    assert script.node.synchronizer.explanation == "not taking part at the moment"


# -------------------------------------------------------------------- gathering


def test_the_kth_report_opens_the_grace_window() -> None:
    script, _ = due(B, C, quorum=2, overlap_steps=4)
    script.now = 1.5
    report(script, A, B)
    grace_s = 0.8 * (4 * 1.0 - 0.5)
    assert round_of(script).grace_until == pytest.approx(1.5 + min(grace_s, 1.0))
    assert round_of(script).reason == "2/3 ready, 1.00 s of grace for 1 more"


def test_grace_counts_what_a_sync_takes() -> None:
    script, _ = due(B, C, quorum=2, overlap_steps=4)
    script.node.state.clocks.sync_s.add(2.0)
    script.now = 1.5
    report(script, A, B)
    assert round_of(script).grace_until == pytest.approx(1.5 + 0.8 * (4 - 0.5 - 2.0))


def test_there_is_no_grace_where_overlap_does_not_hide_it() -> None:
    script, id_ = due(B, C, quorum=2)
    script.node.state.clocks.sync_s.add(2.0)
    assert report(script, A, B) == [PullContribution(id_, A), PullContribution(id_, B)]
    assert round_of(script).reason == (
        "quorum 2 met, 2 of 3 ready when the grace window of 0.00 s closed"
    )


def test_the_round_closes_when_all_have_answered() -> None:
    script, id_ = due(B)
    assert report(script, A, B) == [PullContribution(id_, A), PullContribution(id_, B)]


def test_a_silent_peer_is_left_out_when_grace_is_over() -> None:
    script, id_ = due(B, C)
    report(script, A)
    assert script.wait(1.5) == [PullContribution(id_, A)]


def test_a_member_that_declines_is_not_waited_for() -> None:
    script, id_ = due(B)
    report(script, A)
    assert script.hear(B, RoundDeclined(id_, "on another lineage")) == [PullContribution(id_, A)]


def test_a_member_that_leaves_is_not_waited_for() -> None:
    script, id_ = due(B)
    report(script, A)
    assert script.hear(B, Left()) == [PullContribution(id_, A)]


def test_our_own_learner_may_fail_too() -> None:
    script, id_ = due(B)
    report(script, B)
    failed = events.ContributionFailed(id_, "the learner died")
    assert script.do(failed) == [PullContribution(id_, B)]
    assert round_of(script).refused == {A: "the learner died"}


def test_a_report_for_no_open_round_is_counted() -> None:
    script = mine(B)
    script.hear(B, ready(RoundId(0, 1, 0, 7)))
    assert script.node.state.refusals == {"a report for no open round": 1}


def test_a_member_that_has_seen_a_later_attempt_says_so() -> None:
    script, id_ = due(B)
    later = id_.attempt + 2
    script.hear(B, RoundDeclined(id_, "an old term or attempt", attempt=later))
    assert script.node.state.registers[0].fence == (0, later)


def test_a_member_that_waited_for_a_quorum_for_weeks_is_believed_its_attempt() -> None:
    script, id_ = due(B)
    later = id_.attempt + int(30 * 24 * 3600 / IMPATIENT_MIN_S)
    script.hear(B, RoundDeclined(id_, "an old term or attempt", attempt=later))
    assert script.node.state.registers[0].fence == (0, later)


def test_an_attempt_out_of_this_world_is_not_believed() -> None:
    script, id_ = due(B)
    script.hear(B, RoundDeclined(id_, "an old term or attempt", attempt=2**62))
    assert script.node.state.registers[0].fence == id_.fence


def test_a_round_without_quorum_is_given_up_and_opened_again() -> None:
    script, id_ = due(B, quorum=2)
    report(script, A)
    done = script.hear(B, RoundDeclined(id_, "still at v-1"))
    assert done == [DropRound(id_)]
    assert script.node.state.rounds[-1].outcome == "given up"
    script.now += 4.0
    script.beat(B, local_steps=(H, H))
    step(script)
    assert round_of(script).reports == {A: ready(id_)}, "ours still lies ready"


def test_a_round_that_all_decline_at_once_is_not_opened_again_at_once() -> None:
    script = mine(B)
    script.now = 1.0
    script.beat(B, local_steps=(H, 0), step_s=0.01)
    step(script, H // 2, step_s=0.01)
    id_ = round_of(script).id
    script.do(events.ContributionFailed(id_, "the learner had nothing to learn from"))
    script.hear(B, RoundDeclined(id_, "the learner had nothing to learn from"))
    script.now += 0.9
    step(script, step_s=0.01)
    assert script.node.state.registers[0].round is None
    script.now += 0.1
    step(script, step_s=0.01)
    assert round_of(script).stage is Stage.GATHERING


# -------------------------------------------------------------------- pulling and merging


@pytest.mark.parametrize("how", ["not pulled", "not merged"])
def test_a_round_that_fails_at_once_is_not_opened_again_at_once(how: str) -> None:
    script = mine(B, quorum=2)
    script.now = 1.0
    script.beat(B, local_steps=(H, 0), step_s=0.01)
    step(script, H // 2, step_s=0.01)
    id_ = round_of(script).id
    report(script, A, B)
    script.do(pulled(id_, A))
    if how == "not pulled":
        script.do(events.PullFailed(id_, B, "it hands out nothing"))
    else:
        script.do(pulled(id_, B), events.MergeFailed(id_, "values that are not finite"))
    script.now += 0.9
    step(script, step_s=0.01)
    assert script.node.state.registers[0].round is None
    script.now += 0.1
    step(script, step_s=0.01)
    assert round_of(script).stage is Stage.GATHERING


def test_what_was_pulled_is_merged_with_its_counters() -> None:
    script, id_ = due(B)
    report(script, A, B)
    assert script.do(pulled(id_, B)) == []
    parts = (Contributor(A, 1000, 10), Contributor(B, 1000, 10))
    assert script.do(pulled(id_, A)) == [MergeRound(id_, parts)]
    assert round_of(script).stage is Stage.MERGING


def test_wrong_bytes_are_a_strike_and_left_out() -> None:
    script, id_ = due(B)
    report(script, A, B)
    script.do(events.PullFailed(id_, B, "PayloadError: a NaN", hostile=True))
    assert script.do(pulled(id_, A)) == [MergeRound(id_, (Contributor(A, 1000, 10),))]
    assert not script.node.state.cooled_down(B)
    script.do(merged(id_))
    record = script.node.state.registers[0].chain.head  # type: ignore[union-attr]
    assert record
    assert record.refusal_of(B) == "PayloadError: a NaN"


def test_an_unreachable_contributor_is_left_out_without_a_strike() -> None:
    script, id_ = due(B)
    report(script, A, B)
    script.do(pulled(id_, A), events.PullFailed(id_, B, "timed out"))
    assert round_of(script).stage is Stage.MERGING
    assert script.node.state.cooled_down(B)


def test_other_counters_than_reported_are_a_strike() -> None:
    script, id_ = due(B)
    report(script, A, B)
    script.do(pulled(id_, B, tokens=10**6), pulled(id_, A))
    assert round_of(script).refused == {B: "other counters than it reported"}
    assert not script.node.state.cooled_down(B)


def test_a_pull_that_takes_too_long_is_left_out() -> None:
    script, id_ = due(B)
    report(script, A, B)
    script.do(pulled(id_, A))
    assert script.wait(10.0) == [MergeRound(id_, (Contributor(A, 1000, 10),))]
    assert round_of(script).refused == {B: "its outer gradient did not arrive in time"}


def test_a_quorum_that_cannot_be_pulled_gives_the_round_up() -> None:
    script, id_ = due(B, quorum=2)
    report(script, A, B)
    script.do(pulled(id_, A))
    assert script.do(events.PullFailed(id_, B, "gone")) == [DropRound(id_)]


def test_a_merge_that_fails_gives_the_round_up() -> None:
    script, id_ = due(B)
    report(script, A, B)
    script.do(pulled(id_, A), pulled(id_, B))
    assert script.do(events.MergeFailed(id_, "nothing finite")) == [DropRound(id_)]


def test_a_merge_is_committed_told_and_given_to_the_learner() -> None:
    script, id_ = due(B)
    report(script, A, B)
    script.do(pulled(id_, A), pulled(id_, B))
    done = script.do(merged(id_))
    record = commit(done)
    assert done == [CommitRecord(record), Send(B, Committed(record)), *done[2:]]
    assert InstallFragment(0, 1) in done
    check_record(record, RUN, FakeSigner(A))
    assert (record.version, record.parent, record.tokens_total) == (1, GENESIS[0], 2000)
    assert (record.term, record.attempt) == id_.fence
    assert record.reason == "all 2 of 2 invited have answered"
    assert script.node.state.registers[0].chain.head == record  # type: ignore[union-attr]


def test_those_that_came_too_late_are_named_in_the_record() -> None:
    script, id_ = due(B, C)
    report(script, A)
    script.wait(1.5)
    script.hear(C, ready(id_))
    script.do(pulled(id_, A))
    record = commit(script.do(merged(id_)))
    assert record.refusal_of(C) == "late: the round had closed"
    assert record.refusal_of(B) is None


def test_whatever_members_decline_with_their_synchronizers_record_can_be_read() -> None:
    others = [PeerId(f"{k:0128d}") for k in range(CONTRIBUTORS_MAX - 1)]
    script = mine(*others)
    script.wait(3.0)
    script.beat(*others, local_steps=(H, H))
    step(script, H // 2)
    id_ = round_of(script).id
    report(script, A)
    for peer in others:
        script.hear(peer, RoundDeclined(id_, "\N{FIRE}" * 200))
    script.do(pulled(id_, A))
    record = commit(script.do(merged(id_)))
    assert unpack_record(record.pack()) == record
    check_record(record, RUN, FakeSigner(A))
    assert [r.peer for r in record.refused] == others


def test_an_answer_to_a_round_that_was_given_up_changes_nothing() -> None:
    script, id_ = due(B)
    report(script, A, B)
    script.do(pulled(id_, A), pulled(id_, B), events.MergeFailed(id_, "no memory"))
    assert script.do(merged(id_), pulled(id_, A), events.PullFailed(id_, B, "gone")) == []


def test_the_answer_to_a_former_try_does_not_commit_the_next() -> None:
    script, id_ = due(B)
    report(script, A, B)
    script.do(pulled(id_, A), pulled(id_, B), events.MergeFailed(id_, "no memory"))
    script.now += 4.0
    script.beat(B, local_steps=(H, H))
    step(script)
    assert round_of(script).id == id_
    assert script.do(merged(id_)) == []


# -------------------------------------------------------------------- patience


def test_impatience_moves_the_attempt() -> None:
    script, id_ = due(B, quorum=2)
    before = script.node.state.registers[0].fence
    done = []
    for _ in range(30):
        script.now += 1.0
        done += script.beat(B, local_steps=(H, H)) + step(script)
    assert DropRound(id_) in done
    assert script.node.state.registers[0].fence > before


def test_a_synchronizer_that_never_closes_its_rounds_is_passed_over() -> None:
    script = training(B, C)
    register = script.node.state.registers[1]
    while (silent := script.node.state.post(register)[0]) == A:
        register.fence = (0, register.fence[1] + 1)
    for _ in range(30):
        script.now += 1.0
        script.beat(B, C, local_steps=(0, H))
        step(script)
    assert f"fragment 1 has been due for 24 s; {silent} is passed over in term 0" in script.notes


def test_nobody_is_passed_over_while_nothing_is_due() -> None:
    script = training(B)
    for _ in range(60):
        script.now += 1.0
        script.beat(B, local_steps=(0, 0))
    assert script.node.state.registers[0].fence == (0, 0)


def test_a_round_invites_no_more_than_the_run_allows() -> None:
    script = mine(B, C, D)
    script.node.state.config = replace(script.node.state.config, contributors_max=2)
    script.now = 1.0
    script.beat(B, C, D, local_steps=(H, H))
    step(script, H // 2)
    assert len(round_of(script).invited) == 2


def test_a_member_that_never_catches_up_does_not_stop_the_merges() -> None:
    script = mine(B)
    script.now = 1.0
    boast = head_of(make_records(5)[-1])
    script.beat(B, local_steps=(0, 0), heads=(boast, head_of(None, 1)))
    step(script, H // 2)
    assert script.node.state.registers[0].asked == B, "its records are asked for"
    script.do(events.RecordsFailed(B, 0, "silent"))
    assert round_of(script).invited == (A,)


# -------------------------------------------------------------------- coming to an agreement


def late(*peers: PeerId, since_s: float) -> Script:
    """Fragment 1 has been due for so long, and its synchronizer is another."""
    script = training(*peers)
    register = script.node.state.registers[1]
    attempt = 0
    while script.node.state.is_turn_of(A, RoundId(1, 1, 0, attempt)):
        attempt += 1
    register.fence = (0, attempt)
    script.now = 1.0
    script.beat(*peers, local_steps=(0, H))
    step(script, H)
    script.wait(1.0)
    script.now += since_s
    return script


def test_who_does_not_answer_a_round_is_asked_again_with_its_heartbeats() -> None:
    script, id_ = due(B, C, quorum=3)
    report(script, A, C)
    again = Send(B, RoundOpened(id_, GENESIS[0]))
    assert again not in script.beat(B), "it has hardly had time"
    script.now += 3.0
    assert again in script.beat(B)
    assert not script.beat(C), "it has answered"


def test_members_that_wait_for_each_other_agree_on_the_highest_attempt() -> None:
    script = late(B, C, since_s=4.0)
    _, attempt = script.node.state.registers[1].fence
    script.beat(B, local_steps=(0, H), attempts=(0, attempt + 3))
    assert script.node.state.registers[1].fence == (0, attempt + 3)
    script.beat(C, local_steps=(0, H), attempts=(0, attempt + 2**40))
    assert script.node.state.registers[1].fence == (0, attempt + 3), "out of this world"


def test_who_was_started_anew_agrees_with_one_that_waited_for_a_quorum_for_weeks() -> None:
    script, attempt = late(B, since_s=4.0), int(30 * 24 * 3600 / IMPATIENT_MIN_S)
    script.beat(B, local_steps=(0, H), attempts=(0, attempt))
    assert script.node.state.registers[1].fence == (0, attempt)


def test_attempts_are_hearsay_while_nothing_is_late() -> None:
    script = late(B, C, since_s=1.0)
    before = script.node.state.registers[1].fence
    script.beat(B, local_steps=(0, H), attempts=(0, before[1] + 3))
    assert script.node.state.registers[1].fence == before


def test_a_heartbeat_says_the_highest_attempt_seen() -> None:
    script = training(B)
    script.node.state.registers[1].fence = (0, 2)
    sent = [a.message for a in script.everything(events.SettleAsked()) if isinstance(a, Send)]
    assert [m.attempts for m in sent if isinstance(m, Heartbeat)] == [(0, 2)]


def test_a_synchronizer_that_was_passed_over_is_not_waited_for_in_its_next_terms() -> None:
    script = late(B, since_s=0.0)
    assert script.node.state.post(script.node.state.registers[1])[0] == B
    for _ in range(26):
        script.now += 1.0
        script.beat(B, local_steps=(0, H))
        step(script)
    assert not script.node.state.is_of_use(B)
    script.now += 61.0
    script.beat(B)
    assert script.node.state.is_of_use(B)


def test_a_peer_that_is_left_alone_is_not_waited_for_as_a_synchronizer() -> None:
    script = late(B, since_s=0.0)
    script.do(events.WrongBytes(B, "bytes of another digest"))
    assert script.node.state.post(script.node.state.registers[1])[0] == A


def test_a_merge_ends_the_doubt_about_a_synchronizer() -> None:
    script = training(B)
    (record,) = make_records(1, synchronizer=B)
    script.node.state.idle.begin(B, script.now)
    script.hear(B, Committed(record))
    script.do(events.StateReached(0, 1, record.state_digest, record))
    assert script.node.state.is_of_use(B)
