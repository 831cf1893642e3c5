from collections.abc import Sequence
from dataclasses import replace

import pytest
from protocol_builders import (
    BOOT,
    GENESIS,
    NO_HEAD,
    A,
    B,
    C,
    D,
    FakeSigner,
    Script,
    committed,
    head_of,
    make_chain,
    make_heartbeat,
    make_node,
    make_record,
    make_records,
    opened,
    training,
)

from p2pdiloco.protocol import events, follower
from p2pdiloco.protocol.actions import (
    Action,
    CatchUp,
    DropRound,
    FetchRecords,
    InstallFragment,
    Send,
)
from p2pdiloco.protocol.election import term_of
from p2pdiloco.protocol.events import SnapshotInfo
from p2pdiloco.protocol.follower import ANSWER_S
from p2pdiloco.protocol.lineage import RECORDS_KEPT, Record
from p2pdiloco.protocol.naming import PeerId
from p2pdiloco.protocol.register import Register
from p2pdiloco.protocol.state import RETRY_MAX_S, UNBELIEVED_AFTER
from p2pdiloco.protocol.wire import Committed, RoundDeclined

ZERO = SnapshotInfo(0, GENESIS[0])
NEXT = make_record()


def joiner(*peers: PeerId) -> Script:
    """A node that holds nothing yet."""
    script = Script(make_node())
    script.do(events.PeersFound(peers))
    return script


def register(script: Script) -> Register:
    return script.node.state.registers[0]


def announce(script: Script, peer: PeerId, lineage: Sequence[Record]) -> list[Action]:
    """The heartbeat of a peer that stands on this lineage of fragment 0."""
    script.now += 0.01
    heads = (head_of(lineage[-1] if lineage else None), NO_HEAD)
    sequence = int(script.now * 100) + 1
    return script.hear(peer, make_heartbeat(sequence, heads=heads))


def answer(
    script: Script, peer: PeerId, lineage: Sequence[Record], *snapshots: SnapshotInfo
) -> list[Action]:
    """The answer of this peer to FetchRecords, whatever was asked for."""
    after = register(script).asked_after
    kept = tuple(r for r in lineage if r.version > after)
    return script.do(events.RecordsFetched(peer, 0, kept, snapshots))


def reached(record: Record) -> events.StateReached:
    return events.StateReached(0, record.version, record.state_digest, record)


def loaded(snapshot: SnapshotInfo) -> events.StateReached:
    return events.StateReached(0, snapshot.version, snapshot.state_digest, None)


def snapshot_of(record: Record) -> SnapshotInfo:
    return SnapshotInfo(record.version, record.state_digest)


def catch_up(actions: list[Action]) -> CatchUp:
    (found,) = [a for a in actions if isinstance(a, CatchUp)]
    return found


# -------------------------------------------------------------------- the next merge


def test_the_next_merge_is_applied_and_given_to_the_learner() -> None:
    script = training(B)
    follow = catch_up(script.do(committed(B, NEXT)))
    assert (follow.snapshot, follow.records, follow.donors) == (None, (NEXT,), (B, BOOT))
    assert script.do(reached(NEXT)) == [InstallFragment(0, 1)]
    assert register(script).version == 1


def test_a_record_that_comes_again_is_known() -> None:
    script = training(B)
    script.do(committed(B, NEXT), reached(NEXT))
    assert script.do(committed(C, NEXT)) == []


def test_a_record_that_comes_again_while_it_is_applied_changes_nothing() -> None:
    script = training(B)
    script.do(committed(B, NEXT))
    assert script.do(committed(C, NEXT)) == []


def test_who_sends_an_old_record_is_told_the_head() -> None:
    script = training(B, version=3)
    old = make_record(branch="old")
    head = make_records(3)[-1]
    assert script.do(committed(C, old)) == [Send(C, Committed(head))]


def test_the_synchronizer_comes_after_the_one_who_told_us() -> None:
    script = training(B)
    assert catch_up(script.do(committed(C, NEXT))).donors == (C, B, BOOT)


# -------------------------------------------------------------------- records that are refused


FORGED = replace(make_record(), signature=FakeSigner(C).sign(make_record().signed_part))


@pytest.mark.parametrize(
    ("lie", "reason"),
    [
        (FORGED, "the signature on a merge record is not that of its synchronizer"),
        (make_record(run_id="other"), "a merge record of another run; this is run run"),
        (make_record(tokens_total=10**9), "tokens_total of 1 does not add up"),
    ],
    ids=["signature", "run", "tokens"],
)
def test_a_record_that_is_wrong_is_refused_and_its_sender_left_alone(
    lie: Record, reason: str
) -> None:
    script = training(B)
    assert script.do(committed(B, lie)) == []
    assert script.node.state.refusals == {reason: 1}
    assert not script.node.state.cooled_down(B)
    assert register(script).version == 0


def test_a_known_record_is_not_verified_again(monkeypatch: pytest.MonkeyPatch) -> None:
    script = training(B, version=1)
    chain = register(script).chain
    assert chain and chain.head
    verified: list[PeerId] = []
    monkeypatch.setattr(FakeSigner, "verify", lambda _, peer, *rest: verified.append(peer))
    assert script.do(committed(C, chain.head)) == []
    assert verified == []


def test_a_record_with_a_broken_link_is_looked_into_not_applied() -> None:
    script = training(B)
    stranger = make_record(parent="e" * 64)
    assert script.do(committed(B, stranger)) == [FetchRecords(B, 0, 0)]


def test_a_record_far_ahead_is_looked_into() -> None:
    script = training(B)
    assert script.do(committed(B, make_records(9)[-1])) == [FetchRecords(B, 0, 0)]


def test_a_page_of_wrong_records_is_held_against_its_donor() -> None:
    script, lineage = training(B), make_records(3)
    announce(script, B, lineage)
    assert answer(script, B, [lineage[0], lineage[2]], ZERO) == []
    assert not script.node.state.cooled_down(B)


# -------------------------------------------------------------------- joining


def test_a_joiner_asks_and_plans_a_snapshot_and_the_replay_of_the_rest() -> None:
    script, lineage = joiner(B), make_records(6)
    assert announce(script, B, lineage) == [FetchRecords(B, 0, 0)]
    snapshot = snapshot_of(lineage[3])
    plan = catch_up(answer(script, B, lineage, ZERO, snapshot))
    assert (plan.snapshot, plan.vouching) == (snapshot, tuple(lineage[:4]))
    assert plan.records == tuple(lineage[4:])


def test_a_joiner_that_got_there_gives_its_learner_the_newest() -> None:
    script, lineage = joiner(B), make_records(6)
    script.do(events.LearnerStarted())
    announce(script, B, lineage)
    answer(script, B, lineage, snapshot_of(lineage[3]))
    assert script.do(loaded(snapshot_of(lineage[3])), reached(lineage[4])) == []
    assert script.do(reached(lineage[5])) == [InstallFragment(0, 6)]


def test_a_joiner_of_a_fresh_run_takes_the_genesis_weights_at_once() -> None:
    script = joiner()
    assert script.do(events.Woke()) == []
    script.now = 1.0
    assert script.do(events.Woke()) == [FetchRecords(BOOT, 0, 0), FetchRecords(BOOT, 1, 0)]
    plan = catch_up(script.do(events.RecordsFetched(BOOT, 0, (), (ZERO,))))
    assert (plan.snapshot, plan.records, plan.donors) == (ZERO, (), (BOOT,))


def test_a_joiner_that_knows_of_members_waits_for_their_word_first() -> None:
    script = joiner(B)
    assert script.wait(4.5) == []
    assert FetchRecords(BOOT, 0, 0) in script.wait(1.5)


def test_a_joiner_does_not_start_anew_while_somebody_is_ahead() -> None:
    script = joiner(B)
    announce(script, B, make_records(6))
    assert FetchRecords(BOOT, 0, 0) not in script.wait(2.9)


def test_few_questions_are_open_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "PURSUITS_MAX", 1)
    script = joiner(B)
    heads = (head_of(make_record()), head_of(make_record(fragment=1)))
    assert script.beat(B, heads=heads) == [FetchRecords(B, 0, 0)]


# -------------------------------------------------------------------- sleepers and forks


def test_a_sleeper_replays_what_it_missed() -> None:
    script, lineage = training(B, version=2), make_records(6)
    assert announce(script, B, lineage) == [FetchRecords(B, 0, 2)]
    plan = catch_up(answer(script, B, lineage, ZERO))
    assert (plan.snapshot, plan.records) == (None, tuple(lineage[2:]))


def test_a_heavier_lineage_is_adopted_and_what_was_lost_is_named() -> None:
    trunk = make_records(2)
    ours = [*trunk, make_record(trunk[-1], {A: 70}, branch="ours")]
    theirs = [*trunk, *make_records(2, trunk[-1], branch="theirs")]
    script = training(B, version=2)
    script.do(committed(B, ours[-1]), reached(ours[-1]))
    assert announce(script, C, theirs) == [FetchRecords(C, 0, 3)]
    assert answer(script, C, theirs) == [FetchRecords(C, 0, 0)], "the fork lies further back"
    plan = catch_up(answer(script, C, theirs, snapshot_of(theirs[1])))
    assert (plan.snapshot, plan.records) == (snapshot_of(trunk[1]), tuple(theirs[2:]))
    script.do(loaded(snapshot_of(trunk[1])), reached(theirs[2]), reached(theirs[3]))
    assert register(script).chain.records == theirs  # type: ignore[union-attr]
    named = "another lineage has more merged tokens; 1 of our versions"
    assert any(named in note for note in script.notes)


def test_of_two_siblings_the_heavier_wins_at_the_same_version() -> None:
    light, heavy = make_record(tokens={A: 1}), make_record(tokens={B: 900}, branch="heavy")
    script = training(B)
    script.do(committed(B, light), reached(light))
    assert script.do(committed(C, heavy)) == [FetchRecords(C, 0, 1)]


def test_a_lighter_lineage_is_not_followed() -> None:
    light, heavy = make_record(tokens={A: 1}), make_record(tokens={B: 900}, branch="heavy")
    script = training(B)
    script.do(committed(B, heavy), reached(heavy))
    assert script.do(committed(C, light)) == [Send(C, Committed(heavy))]


def test_a_merge_that_cannot_be_had_is_replaced_by_a_snapshot() -> None:
    script, lineage = training(B, version=2), make_records(6)
    announce(script, B, lineage)
    answer(script, B, lineage, ZERO)
    script.do(events.CatchUpFailed(0, "nobody has the merge of v3"))
    script.now += 1.0
    announce(script, C, lineage)
    plan = catch_up(answer(script, C, lineage, snapshot_of(lineage[4])))
    assert (plan.snapshot, plan.records) == (snapshot_of(lineage[4]), (lineage[5],))


# -------------------------------------------------------------------- donors that are of no use


def test_a_head_that_is_not_served_does_not_keep_us_from_asking_others() -> None:
    script, lineage = training(B, C), make_records(6)
    announce(script, C, [make_record(tokens_total=2**60)])
    assert answer(script, C, []) == []
    assert announce(script, C, [make_record(tokens_total=2**60)]) == []
    assert announce(script, B, lineage) == [FetchRecords(B, 0, 0)]


def test_an_unreachable_donor_does_not_keep_us_from_asking_others() -> None:
    script, lineage = training(B, C), make_records(6)
    announce(script, C, lineage)
    script.do(events.RecordsFailed(C, 0, "connection refused"))
    assert announce(script, B, lineage) == [FetchRecords(B, 0, 0)]


def test_a_donor_that_was_of_no_use_is_asked_again_later() -> None:
    script, lineage = training(B), make_records(6)
    for _ in range(2000):
        announce(script, B, lineage)
        script.do(events.RecordsFailed(B, 0, "connection refused"))
        script.now += RETRY_MAX_S
    assert announce(script, B, lineage) == [FetchRecords(B, 0, 0)]


def test_a_question_without_answer_is_forgotten() -> None:
    script, lineage = training(B, C), make_records(6)
    announce(script, C, lineage)
    script.wait(ANSWER_S - 2)
    assert announce(script, B, lineage) == []
    script.wait(4)
    assert announce(script, B, lineage) == [FetchRecords(B, 0, 0)]
    assert answer(script, C, lineage, ZERO) == [], "an answer that comes after all"


def test_a_catch_up_that_failed_waits_and_the_next_donor_gets_its_turn() -> None:
    script, lineage = training(B, C), make_records(3)
    announce(script, B, lineage)
    answer(script, B, lineage)
    script.do(events.CatchUpFailed(0, "it stalled"))
    assert announce(script, C, lineage) == []
    script.now += 0.5
    assert announce(script, C, lineage) == [FetchRecords(C, 0, 0)]


def test_thousands_of_failed_catch_ups_end_in_a_bounded_wait() -> None:
    script, lineage = training(B), make_records(3)
    for _ in range(1200):
        announce(script, B, lineage)
        answer(script, B, lineage, ZERO)
        script.do(events.CatchUpFailed(0, "it stalled"))
        script.now += RETRY_MAX_S + 0.1
    assert register(script).failures == 1200


def test_a_record_of_a_peer_that_was_of_no_use_is_not_followed() -> None:
    script = training(B)
    script.do(committed(B, NEXT), events.CatchUpFailed(0, "it stalled"))
    assert script.do(committed(B, NEXT)) == []


def test_wrong_bytes_are_a_strike_and_the_donor_is_cooled_down() -> None:
    script, lineage = training(B), make_records(3)
    script.do(events.WrongBytes(B, "it sent bytes of another digest"))
    assert announce(script, B, lineage) == []
    script.now += 31
    assert announce(script, B, lineage) == [FetchRecords(B, 0, 0)]


def test_a_donor_that_cooled_down_serves_no_bytes() -> None:
    script, lineage = training(B, C, D), make_records(1)
    for peer in (B, C, D):
        announce(script, peer, lineage)
    script.do(events.WrongBytes(C, "it sent bytes of another digest"))
    assert catch_up(script.do(committed(D, NEXT))).donors == (D, B, BOOT)


# -------------------------------------------------------------------- divergence


def diverge(script: Script) -> None:
    """Our state leads elsewhere than NEXT says."""
    script.do(committed(B, NEXT), events.CatchUpFailed(0, "another digest", diverged=True))
    script.now += 1.0


def heal(script: Script, peer: PeerId, lineage: Sequence[Record] = ()) -> None:
    announce(script, peer, lineage)
    answer(script, peer, lineage, ZERO)
    script.do(loaded(ZERO))


def test_a_state_that_diverged_is_distrusted_and_healed_by_a_snapshot() -> None:
    script = training(B, C)
    diverge(script)
    assert register(script).distrusted
    assert announce(script, C, [NEXT]) == [FetchRecords(C, 0, 0)]
    plan = catch_up(answer(script, C, [NEXT], ZERO))
    assert (plan.snapshot, plan.records) == (ZERO, (NEXT,))
    script.do(loaded(ZERO), reached(NEXT))
    assert (register(script).distrusted, register(script).version) == (False, 1)


def test_a_distrusted_state_is_not_replayed_upon() -> None:
    script = training(B, C)
    diverge(script)
    assert script.do(committed(C, NEXT)) == [FetchRecords(C, 0, 0)]


def test_peers_that_stand_where_we_stand_heal_us_too() -> None:
    script = training(B, C)
    diverge(script)
    heal(script, C)
    assert (register(script).distrusted, register(script).version) == (False, 0)


def test_a_record_that_nobodys_state_leads_to_is_disbelieved() -> None:
    script = training(B, C)
    diverge(script)
    heal(script, C)
    diverge(script)
    assert register(script).disbelieved == NEXT.digest
    assert not register(script).distrusted
    assert not script.node.state.cooled_down(B), "its synchronizer"
    assert script.do(committed(C, NEXT)) == []


def test_a_joiner_trains_on_what_was_there_before_a_record_that_is_wrong() -> None:
    script, wrong = joiner(B, C), make_record()
    script.do(events.LearnerStarted())
    announce(script, B, [wrong])
    for snapshot_is_believed in (False, True):
        plan = catch_up(answer(script, B, [wrong], ZERO))
        assert (plan.snapshot, plan.records) == (ZERO, (wrong,))
        done = script.do(loaded(ZERO), events.CatchUpFailed(0, "another digest", diverged=True))
        script.now += 1.0
        assert (InstallFragment(0, 0) in done) is snapshot_is_believed
        announce(script, B, [wrong])
    assert register(script).disbelieved == wrong.digest


def test_a_lineage_over_a_disbelieved_record_needs_a_snapshot_behind_it() -> None:
    script, lineage = training(B, C), make_records(4)
    register(script).disbelieved = lineage[0].digest
    announce(script, C, lineage)
    assert answer(script, C, lineage, ZERO) == []
    register(script).failures = 1
    script.now += 1.0
    announce(script, C, lineage)
    assert catch_up(answer(script, C, lineage, snapshot_of(lineage[2]))).records == (lineage[3],)


def test_a_record_that_makes_everybody_diverge_does_not_end_the_run() -> None:
    script = training(B, C)
    diverge(script)
    heartbeats = [
        a.message
        for a in script.everything(events.Woke())
        if isinstance(a, Send) and a.message.kind == "heartbeat"
    ]
    assert heartbeats
    assert all(h.heads[0] == head_of(None) for h in heartbeats), "others can be healed by us"


# -------------------------------------------------------------------- settling


def test_a_node_has_settled_when_nobody_has_anything_newer() -> None:
    script = training(B)
    script.do(events.SettleAsked())
    assert script.node.is_settled
    announce(script, B, [NEXT])
    assert not script.node.is_settled
    answer(script, B, [NEXT])
    assert not script.node.is_settled
    script.do(reached(NEXT))
    assert not script.node.is_settled, "the learner has still to receive it"
    script.do(events.FragmentInstalled(0, 1, 0))
    assert script.node.is_settled


def test_a_node_that_was_not_asked_to_has_not_settled() -> None:
    assert not training(B).node.is_settled


def test_a_boast_does_not_keep_a_node_from_settling() -> None:
    script = training(B)
    script.do(events.SettleAsked())
    for _ in range(UNBELIEVED_AFTER):
        announce(script, B, [make_record(tokens_total=2**60, version=2**50)])
        script.do(events.RecordsFailed(B, 0, "connection refused"))
        script.now += 2.5
    announce(script, B, [make_record(tokens_total=2**60, version=2**50)])
    script.do(events.RecordsFailed(B, 0, "connection refused"))
    assert script.node.is_settled


def test_questions_reach_back_as_far_as_records_are_kept() -> None:
    script = training(B, version=3)
    register(script).distrusted = True
    assert announce(script, B, make_records(4)) == [FetchRecords(B, 0, max(0, 3 - RECORDS_KEPT))]


def test_a_record_that_comes_while_a_question_is_open_is_caught_up_to_once() -> None:
    script, records = training(B, C), make_records(2)
    assert announce(script, B, records) == [FetchRecords(B, 0, 0)]
    script.do(committed(C, records[0]))
    assert answer(script, B, records) == []
    script.do(reached(records[0]))
    assert register(script).version == 1


def test_what_the_learner_was_given_is_not_given_again_when_a_catch_up_fails() -> None:
    script, records = training(B), make_records(2)
    script.do(committed(B, records[0]))
    assert InstallFragment(0, 1) in script.do(reached(records[0]))
    script.do(committed(B, records[1]))
    failed = script.do(events.CatchUpFailed(0, "no donor has what is needed"))
    assert not [action for action in failed if isinstance(action, InstallFragment)]


def test_merges_that_a_donor_cannot_show_are_not_called_lost() -> None:
    trunk = make_records(3, tokens={A: 50})
    ours = [*trunk, make_record(trunk[-1], {A: 70}, branch="ours")]
    theirs = [*trunk, *make_records(3, trunk[-1], branch="theirs")]
    script = Script(make_node(chains=[make_chain(ours), make_chain((), 1)]))
    for record in ours:
        script.node.state.ledger.revise(0, record.version, record.tokens_of(A))
    shown = theirs[4:]
    announce(script, C, theirs)
    answer(script, C, shown)
    answer(script, C, shown, snapshot_of(theirs[4]))
    script.do(loaded(snapshot_of(theirs[4])))
    assert script.node.state.ledger.totals().merged == 3 * 50 + 70


# -------------------------------------------------------------------- memory that went wrong


def test_a_state_damaged_in_memory_is_replaced_from_our_own_disk() -> None:
    script, lineage = training(B, version=6), make_records(6)
    assert script.do(events.StateDamaged(0, 6)) == [FetchRecords(A, 0, 0)]
    assert script.notes[-1].startswith("fragment 0 v6 was damaged in memory")
    snapshot = snapshot_of(lineage[3])
    plan = catch_up(answer(script, A, lineage, snapshot, ZERO))
    assert (plan.snapshot, plan.vouching) == (snapshot, tuple(lineage[:4]))
    assert plan.records == tuple(lineage[4:])
    assert plan.donors == (B, BOOT), "for what our own disk has not"
    assert script.do(loaded(snapshot), reached(lineage[4])) == []
    assert script.do(reached(lineage[5])) == [InstallFragment(0, 6)], "the learner may have it too"
    healed = register(script)
    assert (healed.distrusted, healed.damaged, healed.mended_at) == (False, 1, script.now)


@pytest.mark.parametrize("snapshot_at", [4, 6])
def test_what_was_promised_to_a_synchronizer_outlives_healing(snapshot_at: int) -> None:
    """The lineage stays, so an older attempt at its next version stays out of turn."""
    script, lineage = training(B, version=6), make_records(6)
    register(script).fence = fence = (term_of(7, script.node.state.config.term_merges), 1)
    script.do(events.StateDamaged(0, 6))
    snapshot = snapshot_of(lineage[snapshot_at - 1])
    answer(script, A, lineage, snapshot, ZERO)
    script.do(loaded(snapshot), *map(reached, lineage[snapshot_at:]))
    assert (register(script).version, register(script).fence) == (6, fence)


def test_the_attempts_of_a_lineage_that_lost_do_not_count_on_the_one_that_won() -> None:
    script = training(B, version=2)
    ours = make_record(make_records(2)[-1], {A: 70}, branch="ours")
    script.do(committed(B, ours), reached(ours))
    register(script).fence = (7, 3)
    theirs = [*make_records(2), *make_records(2, make_records(2)[-1], branch="theirs")]
    announce(script, C, theirs)
    answer(script, C, theirs)
    answer(script, C, theirs, snapshot_of(theirs[1]))
    script.do(loaded(snapshot_of(theirs[1])), reached(theirs[2]), reached(theirs[3]))
    assert register(script).fence == (0, 0)


def test_a_node_alone_heals_from_its_own_disk_as_soon_as_that_reads() -> None:
    script = training()
    assert script.do(events.StateDamaged(0, 0)) == [FetchRecords(A, 0, 0)]
    script.do(events.RecordsFailed(A, 0, "the disk refuses"))
    assert FetchRecords(A, 0, 0) in script.wait(2.5)
    assert catch_up(answer(script, A, [], ZERO)).snapshot == ZERO
    script.do(events.CatchUpFailed(0, "the snapshot does not read"))
    assert FetchRecords(A, 0, 0) in script.wait(2.5)
    answer(script, A, [], ZERO)
    assert script.do(loaded(ZERO)) == [InstallFragment(0, 0)]


def test_others_heal_what_our_own_disk_cannot() -> None:
    script = training(B)
    script.do(events.StateDamaged(0, 0), events.RecordsFailed(A, 0, "the disk refuses"))
    assert announce(script, B, []) == [FetchRecords(B, 0, 0)]


def test_nothing_is_built_upon_a_damaged_state() -> None:
    script = training(B, C)
    script.do(events.StateDamaged(0, 0))
    declined = [a.message for a in script.hear(B, opened(None)) if isinstance(a, Send)]
    assert [m.reason for m in declined if isinstance(m, RoundDeclined)] == [
        "its own state is being replaced"
    ]
    assert script.do(committed(B, NEXT)) == [], "it is applied once ours is replaced"
    script.do(events.LearnerStopped("killed"))
    assert InstallFragment(0, 0) not in script.do(events.LearnerStarted())
    assert InstallFragment(1, 0) in script.do(events.LearnerStopped("k"), events.LearnerStarted())


def test_our_round_ends_when_our_state_is_found_damaged() -> None:
    script = training(quorum=1)
    script.do(events.StepsDone(12, 1200, 1.0))
    opened_here = script.node.state.registers[0].round
    assert opened_here
    given_up = script.do(events.StateDamaged(0, 0))
    assert DropRound(opened_here.id) in given_up
    assert register(script).round is None
    script.wait(5.0)
    assert register(script).round is None


def test_damage_that_was_mended_meanwhile_is_no_news() -> None:
    script = training(B)
    script.do(committed(B, NEXT), reached(NEXT))
    assert script.do(events.StateDamaged(0, 0)) == []
    assert script.do(events.StateDamaged(0, 1)) == [FetchRecords(A, 0, 0)]
    assert script.do(events.StateDamaged(0, 1)) == []
    assert register(script).damaged == 1
