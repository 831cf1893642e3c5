"""The node without a synchronizer: events in, actions out."""

import json
import random

from hypothesis import given, settings
from hypothesis import strategies as st
from protocol_builders import (
    BOOT,
    GENESIS,
    A,
    B,
    C,
    D,
    Script,
    committed,
    digest,
    make_node,
    make_record,
)

from p2pdiloco.protocol import actions, events
from p2pdiloco.protocol.actions import CutRound, FetchMix, FinishRound, OpenMix, Send
from p2pdiloco.protocol.gossip import (
    BLOCKED_MIN_S,
    LAST_WORD_S,
    LEAP_MAX,
    PATIENCE_S,
    REPLACED,
    Stage,
)
from p2pdiloco.protocol.lineage import Chain
from p2pdiloco.protocol.naming import MixId, PeerId
from p2pdiloco.protocol.node import UNSAVED
from p2pdiloco.protocol.topology import ALONE, PAIRS, GossipPlan, Row, everybody
from p2pdiloco.protocol.wire import Head, Link, LinkStage, Mixing, pack, unpack

PLAN = GossipPlan(mix1=everybody, mix2=None, seed="seed")
BLOCKING = GossipPlan(mix1=everybody, mix2=PAIRS, seed="seed")
FACTORED = GossipPlan(mix1=PAIRS, mix2=everybody, seed="seed", by_quorum=True)
H = 12


def heads(version: int) -> tuple[Head, Head]:
    return tuple(Head(version, digest("state", version, p), 0) for p in (0, 1))  # type: ignore[return-value]


def gossiping(*peers: PeerId, plan: GossipPlan = PLAN, version: int = 3, quorum: int = 1) -> Script:
    """A node in a round of both fragments, among peers that are in it too."""
    chains = [Chain(version, digest("own", version, p)) for p in (0, 1)]
    script = Script(make_node(A, chains=chains, gossip=plan, quorum=quorum))
    script.do(events.PeersFound(peers), events.LearnerStarted())
    script.do(*(events.FragmentInstalled(p, version, 0) for p in (0, 1)))
    script.beat(*peers, heads=heads(version))
    script.wait(1.0)
    return script


def says(stage: LinkStage, *, round_: int = 3, part: str = "start", weight: float = 0.5) -> Mixing:
    return Mixing((Link(0, round_, part, stage, weight),))  # type: ignore[arg-type]


def told(done: list[actions.Action], part: str = "start") -> list[tuple[PeerId, LinkStage]]:
    """What was said to partners of fragment 0."""
    return [
        (a.peer, link.stage)
        for a in done
        if isinstance(a, Send) and isinstance(a.message, Mixing)
        for link in a.message.links
        if link.fragment == 0 and link.part == part
    ]


def swap(script: Script, peer: PeerId = B) -> None:
    """The exchange of starts of fragment 0 succeeds at both ends."""
    script.hear(peer, says("open"))
    script.do(events.MixFetched(MixId(0, 3, "start"), peer))
    script.hear(peer, says("half"))


def finish_rounds(script: Script, *done: actions.Action) -> None:
    """The learner goes on, and the state is held."""
    for action in done:
        if isinstance(action, FinishRound):
            pending = script.node.state.ledger.pending[action.fragment]
            script.do(
                events.FragmentInstalled(action.fragment, action.version, pending),
                events.RoundFinished(
                    action.fragment, action.version, digest("own", action.version)
                ),
            )


# -------------------------------------------------------------------- swapping starts


def test_a_round_begins_with_an_offer_to_its_partners() -> None:
    script = gossiping(B)
    mixes = script.node.gossiper
    assert mixes and mixes.partners == [B]
    assert [told(script.wait(1.0))] == [[(B, "open")]]


def test_a_start_that_lies_ready_is_fetched_once() -> None:
    script = gossiping(B)
    fetch = FetchMix(MixId(0, 3, "start"), B)
    assert fetch in script.hear(B, says("open"))
    assert fetch not in script.hear(B, says("open"))


def test_an_exchange_is_told_of_until_both_have_it() -> None:
    script = gossiping(B)
    script.hear(B, says("open"))
    assert told(script.do(events.MixFetched(MixId(0, 3, "start"), B))) == [(B, "half")]
    script.beat(B, heads=heads(3))
    assert (B, "half") in told(script.wait(1.0))
    assert told(script.hear(B, says("half"))) == [(B, "whole")]
    assert told(script.wait(2.0)) == []


def test_who_is_no_partner_is_not_listened_to() -> None:
    script = gossiping(B)
    assert script.hear(C, says("open")) == []
    assert script.hear(B, says("open", round_=7)) == []


def test_wrong_bytes_are_held_against_the_partner() -> None:
    script = gossiping(B)
    script.hear(B, says("open"))
    failed = events.MixFailed(MixId(0, 3, "start"), B, "values that are not finite", hostile=True)
    script.do(failed)
    assert script.node.state.refusals["values that are not finite"] == 1
    assert not script.node.state.cooled_down(B)


def test_who_is_left_alone_is_told_that_nothing_counts() -> None:
    script = gossiping(B)
    script.hear(B, says("open"))
    failed = events.MixFailed(MixId(0, 3, "start"), B, "values that are not finite", hostile=True)
    script.do(failed)
    assert told(script.hear(B, says("half"))) == [(B, "void")]
    assert script.hear(B, says("void")) == []


def test_a_fragment_that_the_run_does_not_have_is_refused() -> None:
    script = gossiping(B)
    script.hear(B, Mixing((Link(9, 3, "start", "open", 0.5),)))
    assert script.node.state.refusals["fragment 9; the run has 2"] == 1


def test_what_a_synchronizer_would_say_is_refused() -> None:
    script = gossiping(B)
    script.do(committed(B, make_record()))
    assert script.node.state.refusals["it speaks of a committed, this run gossips"] == 1


# -------------------------------------------------------------------- the end of a round


def steps(num: int = H) -> events.StepsDone:
    return events.StepsDone(num, 100 * num, 0.5)


def test_a_round_ends_when_the_median_learner_has_done_its_steps() -> None:
    script = gossiping(B, C)
    for peer in (B, C):
        swap(script, peer)
    assert not any(isinstance(a, FinishRound) for a in script.do(steps()))
    script.now += 0.5
    done = script.beat(B, heads=heads(3), local_steps=(H, 0))
    row = Row(1 - 2 / 3, {B: 1 / 3, C: 1 / 3})
    (finish,) = [a for a in done if isinstance(a, FinishRound)]
    assert (finish.fragment, finish.round, finish.version, finish.outers) == (0, 3, 4, None)
    assert finish.starts.partners == row.partners


def test_a_partner_that_never_began_the_round_leaves_the_identity() -> None:
    script = gossiping(B)
    script.now += 0.5
    script.beat(B, heads=heads(3), local_steps=(H, 0))
    assert FinishRound(0, 3, 4, Row(1.0, {}), None) in script.do(steps())


def test_a_start_on_its_way_is_waited_for_while_the_learner_steps_on() -> None:
    script = gossiping(B)
    script.hear(B, says("open"))
    script.now += 0.5
    script.beat(B, heads=heads(3), local_steps=(H, 0))
    assert not any(isinstance(a, FinishRound) and a.fragment == 0 for a in script.do(steps()))
    script.do(events.MixFetched(MixId(0, 3, "start"), B))
    (finish,) = script.hear(B, says("half"))[1:]
    assert isinstance(finish, FinishRound) and finish.starts.partners == {B: 0.5}


def test_a_partner_without_a_last_word_is_given_up_after_a_while() -> None:
    script = gossiping(B)
    script.hear(B, says("open"))
    script.do(events.MixFetched(MixId(0, 3, "start"), B), steps(3 * H))
    done: list[actions.Action] = []
    for _ in range(int(PATIENCE_S) + 2):
        script.beat(B, heads=heads(3), local_steps=(H, H))
        done += script.wait(1.0)
    assert FinishRound(0, 3, 4, Row(1.0, {}), None) in done


def test_a_swarm_that_takes_no_steps_does_not_hold_us() -> None:
    script = gossiping(B, C)
    script.beat(B, C, heads=heads(3), step_s=0.5)
    assert not any(isinstance(a, FinishRound) for a in script.do(steps(2 * H - 1)))
    done = script.do(steps(1))
    assert {a.fragment for a in done if isinstance(a, FinishRound)} == {0, 1}


def test_who_is_faster_than_the_others_waits_for_their_steps() -> None:
    script = gossiping(B, C)
    script.beat(B, C, heads=heads(3), step_s=5.0)
    assert not any(isinstance(a, FinishRound) for a in script.do(steps(20 * H - 1)))
    done = script.do(steps(1))
    assert {a.fragment for a in done if isinstance(a, FinishRound)} == {0, 1}


def test_tokens_of_a_round_that_nobody_has_mixed_in_are_not_merged() -> None:
    script = gossiping()
    finish_rounds(script, *script.do(steps()))
    totals = script.node.state.ledger.totals()
    assert totals.pending == totals.processed == 2 * 100 * H
    assert [r.version for r in script.node.state.registers] == [4, 4]
    assert {r.outcome for r in script.node.state.rounds} == {"alone"}
    assert script.node.state.merges == 0


def test_tokens_are_merged_when_a_partner_has_the_start_that_they_are_in() -> None:
    script = gossiping()
    finish_rounds(script, *script.do(steps()))
    script.do(events.PeersFound((B,)))
    script.beat(B, heads=heads(4))
    script.wait(1.0)
    script.hear(B, says("open", round_=4))
    script.do(events.MixFetched(MixId(0, 4, "start"), B))
    script.hear(B, says("half", round_=4))
    script.now += 0.5
    script.beat(B, heads=heads(4), local_steps=(H, 0))
    finish_rounds(script, *[a for a in script.do(steps()) if _ends(a, 0)])
    totals = script.node.state.ledger.totals()
    assert totals.merged == 100 * H  # of round 3 in fragment 0; those of round 4 are still carried
    assert totals.pending == 3 * 100 * H and totals.adds_up
    assert script.node.state.merges == 1


def _ends(action: actions.Action, fragment: int) -> bool:
    return isinstance(action, FinishRound) and action.fragment == fragment


def test_who_fell_behind_jumps_into_the_round_of_the_others() -> None:
    script = gossiping(B, C)
    script.now += 0.5
    script.beat(B, C, heads=heads(9))
    finishes = [a for a in script.do(steps(1)) if isinstance(a, FinishRound)]
    assert {(a.round, a.version) for a in finishes} == {(3, 9)}


def test_one_of_two_others_that_claims_a_later_round_does_not_end_ours_at_once() -> None:
    script = gossiping(B, C)
    script.now += 0.5
    script.beat(B, heads=heads(2**52))
    assert not any(isinstance(a, FinishRound) for a in script.do(steps(2)))
    finishes = [a for a in script.do(steps(H // 2 - 2)) if isinstance(a, FinishRound)]
    assert {a.version for a in finishes} == {4}


def test_nobody_is_led_far_astray() -> None:
    script = gossiping(B)
    script.now += 0.5
    script.beat(B, heads=heads(2**52))
    finishes = [a for a in script.do(steps(1)) if isinstance(a, FinishRound)]
    assert {a.version for a in finishes} == {3 + LEAP_MAX}


def test_who_is_left_alone_leads_nobody_into_its_round() -> None:
    script = gossiping(B)
    script.do(events.WrongBytes(B, "values that are not finite"))
    script.now += 0.5
    script.beat(B, heads=heads(9))
    finishes = [a for a in script.do(steps(H)) if isinstance(a, FinishRound)]
    assert finishes and {a.version for a in finishes} == {4}


def test_a_partner_that_missed_the_last_word_is_told_what_counted() -> None:
    script = gossiping(B)
    swap(script)
    script.now += 0.5
    script.beat(B, heads=heads(3), local_steps=(H, 0))
    finish_rounds(
        script,
        *[a for a in script.do(steps()) if a == FinishRound(0, 3, 4, Row(0.5, {B: 0.5}), None)],
    )
    assert script.node.state.registers[0].version == 4
    assert told(script.hear(B, says("half"))) == [(B, "whole")]
    assert told(script.hear(C, says("half"))) == [(C, "void")]
    assert told(script.hear(B, says("half", round_=1))) == [(B, "void")]


# -------------------------------------------------------------------- a blocking mix


def cut(script: Script) -> None:
    """Both fragments' rounds end, and the learner stands still."""
    for fragment in (0, 1):
        for message in (says("open"), says("half")):
            link = message.links[0]._replace(fragment=fragment)
            script.hear(B, Mixing((link,)))
        script.do(events.MixFetched(MixId(fragment, 3, "start"), B))
    script.now += 0.5
    script.beat(B, heads=heads(3), local_steps=(H, H))
    done = script.do(steps())
    assert [a for a in done if isinstance(a, CutRound)] == [
        CutRound(0, 3, (B,)),
        CutRound(1, 3, (B,)),
    ]


def test_outer_gradients_are_swapped_while_the_learner_stands_still() -> None:
    script = gossiping(B, plan=BLOCKING)
    cut(script)
    assert told(script.do(events.RoundCut(0, 3)), "outer") == [(B, "open")]
    fetch = FetchMix(MixId(0, 3, "outer"), B)
    assert fetch in script.hear(B, says("half", part="outer"))
    done = script.do(events.MixFetched(fetch.mix, B))
    halves = Row(0.5, {B: 0.5})
    assert FinishRound(0, 3, 4, halves, halves) in done


def test_an_outer_gradient_is_not_fetched_before_our_own_is_cut() -> None:
    script = gossiping(B, plan=BLOCKING)
    cut(script)
    fetch = FetchMix(MixId(0, 3, "outer"), B)
    assert fetch not in script.hear(B, says("open", part="outer"))
    assert fetch in script.do(events.RoundCut(0, 3))


def test_a_learner_stands_still_for_half_a_period_at_most() -> None:
    script = gossiping(B, plan=BLOCKING)
    cut(script)
    script.do(events.RoundCut(0, 3))
    done: list[actions.Action] = []
    for _ in range(int(BLOCKED_MIN_S) + 3):
        script.beat(B, heads=heads(3), local_steps=(H, H))
        done += script.wait(1.0)
    assert FinishRound(0, 3, 4, Row(0.5, {B: 0.5}), Row(1.0, {})) in done


def test_when_the_learner_dies_its_round_goes_on_with_the_next_one() -> None:
    script = gossiping(B, plan=BLOCKING)
    cut(script)
    script.do(events.RoundCut(0, 3), events.LearnerStopped("killed"))
    script.do(events.RoundUnfinished(1, 3, "the learner died"))
    assert script.node.gossiper
    assert [r.stage for r in script.node.gossiper.rounds if r] == [Stage.TRAINING] * 2
    totals = script.node.state.ledger.totals()
    assert sum(totals.lost.values()) == totals.processed > 0


def test_a_round_whose_values_went_wrong_is_lost_by_name() -> None:
    script = gossiping()
    done = script.do(steps())
    assert FinishRound(0, 3, 4, ALONE, None) in done
    script.do(events.FragmentInstalled(0, 4, 100 * H))
    again = script.do(events.RoundUnfinished(0, 3, "a state whose values are not finite"))
    assert actions.InstallFragment(0, 3) in again
    totals = script.node.state.ledger.totals()
    assert totals.lost == {"a state whose values are not finite": 100 * H} and totals.adds_up


def test_tokens_in_a_damaged_state_that_nobody_else_had_are_lost_by_name() -> None:
    script = gossiping(B)
    finish_rounds(script, *[a for a in script.do(steps(2 * H)) if _ends(a, 0)])
    script.do(events.StateDamaged(0, 4))
    script.do(events.RecordsFailed(A, 0, "nothing of it is on disk"))
    script.now += 0.5
    script.beat(B, heads=heads(4))
    offered = events.SnapshotInfo(4, digest("state", 4, 0))
    script.do(events.RecordsFetched(B, 0, (), (offered,)))
    script.do(events.StateReached(0, 4, offered.state_digest, None))
    totals = script.node.state.ledger.totals()
    assert totals.lost == {REPLACED: 2 * 100 * H} and totals.adds_up


# -------------------------------------------------------------------- a quorum


def cut_among_three(quorum: int) -> Script:
    """Round 3 of fragment 0, which nobody has mixed starts in, has ended at 0.5 s a step, and the
    outer gradient lies ready.
    """
    script = gossiping(B, C, plan=FACTORED, quorum=quorum)
    script.now += 0.5
    script.beat(B, C, heads=heads(3), local_steps=(H, 0), step_s=0.5)
    assert CutRound(0, 3, (B, C)) in script.do(steps())
    script.do(events.RoundCut(0, 3))
    return script


def swap_outers(script: Script, peer: PeerId) -> list[actions.Action]:
    script.hear(peer, says("open", part="outer", weight=1 / 3))
    fetched = script.do(events.MixFetched(MixId(0, 3, "outer"), peer))
    return [*fetched, *script.hear(peer, says("half", part="outer", weight=1 / 3))]


def finishes(done: list[actions.Action]) -> list[dict[PeerId, float]]:
    """Whose outer gradients count where fragment 0's round is finished."""
    return [
        dict(a.outers.partners)
        for a in done
        if isinstance(a, FinishRound) and a.fragment == 0 and a.outers
    ]


def test_a_round_ends_at_once_when_all_outer_gradients_are_there() -> None:
    script = cut_among_three(quorum=2)
    assert finishes(swap_outers(script, B)) == []
    assert finishes(swap_outers(script, C)) == [{B: 1 / 3, C: 1 / 3}]


def test_from_the_quorum_on_a_learner_waits_for_the_grace_window_alone() -> None:
    """gamma (tau step - what the quorum took) is 0.8 s for tau 2 and steps of 0.5 s."""
    script = cut_among_three(quorum=2)
    swap_outers(script, B)
    ends = script.now + 0.8 * 2 * 0.5
    assert script.node.deadline == ends
    assert finishes(script.wait(0.7)) == []
    done = script.wait(0.2)
    assert finishes(done) == [{B: 1 / 3}]
    assert told(done, "outer") == [(C, "void")]


def test_without_a_quorum_it_waits_half_a_period() -> None:
    script = cut_among_three(quorum=2)
    assert script.node.gossiper and script.node.gossiper.deadline is None
    assert finishes(script.wait(BLOCKED_MIN_S)) == []
    script.beat(B, C, heads=heads(3), local_steps=(H, 0), step_s=0.5)
    assert finishes(script.wait(H * 0.5 / 2)) == [{}]


def test_who_has_ours_has_the_last_word_after_the_window() -> None:
    script = cut_among_three(quorum=2)
    swap_outers(script, B)
    script.hear(C, says("open", part="outer", weight=1 / 3))
    script.do(events.MixFetched(MixId(0, 3, "outer"), C))
    assert finishes(script.wait(0.9)) == []
    assert finishes(script.hear(C, says("half", part="outer"))) == [{B: 1 / 3, C: 1 / 3}]


def test_a_last_word_that_does_not_come_is_not_waited_for_long() -> None:
    script = cut_among_three(quorum=1)
    script.hear(C, says("open", part="outer", weight=1 / 3))
    script.do(events.MixFetched(MixId(0, 3, "outer"), C))
    assert finishes(script.wait(1.0)) == []
    assert finishes(script.wait(LAST_WORD_S)) == [{}]


def test_a_state_that_is_replaced_does_not_wake_the_node_for_its_window() -> None:
    script = cut_among_three(quorum=2)
    swap_outers(script, B)
    script.do(events.StateDamaged(0, 3))
    script.wait(1.0)
    assert script.node.deadline is not None and script.node.deadline > script.now


def test_a_round_tells_who_was_left_out_and_why() -> None:
    script = cut_among_three(quorum=2)
    swap_outers(script, B)
    finish_rounds(script, *[a for a in script.wait(0.9) if isinstance(a, FinishRound)])
    (told_of,) = [r.reason for r in script.node.state.rounds]
    assert "then 1 of 2 (cleo: the grace window was over)" in told_of, told_of
    assert script.node.state.clocks.sync_s.value is not None


# -------------------------------------------------------------------- joining, restarting, leaving


def test_a_joiner_takes_the_state_of_a_member_and_its_round() -> None:
    script = Script(make_node(A, gossip=PLAN))
    script.do(events.PeersFound((B,)))
    asked = script.beat(B, heads=heads(7))
    assert actions.FetchRecords(B, 0, 0) in asked
    offered = events.SnapshotInfo(7, digest("state", 7, 0))
    (catch_up,) = script.do(events.RecordsFetched(B, 0, (), (offered,)))
    assert catch_up == actions.CatchUp(0, offered, (), (), (B,))
    script.do(events.StateReached(0, 7, offered.state_digest, None))
    assert script.node.state.registers[0].version == 7


def test_a_joiner_takes_no_round_that_nobody_could_be_in() -> None:
    script = Script(make_node(A, gossip=PLAN))
    script.do(events.PeersFound((B, C, D)))
    script.beat(B, heads=heads(2**53 - 1))
    script.beat(C, D, heads=heads(7))
    last = events.SnapshotInfo(2**53 - 1, digest("state", 0))
    assert script.do(events.RecordsFetched(B, 0, (), (last,))) == []
    assert not script.node.state.may_ask(B)
    script.now += 1.0
    assert actions.FetchRecords(C, 0, 0) in script.beat(C, heads=heads(7))
    ahead = events.SnapshotInfo(7 + LEAP_MAX, digest("state", 1))
    assert script.do(events.RecordsFetched(C, 0, (), (ahead,)))


def test_the_first_node_takes_the_genesis_weights_and_no_others() -> None:
    script = Script(make_node(A, gossip=PLAN))
    script.do(events.PeersFound(()))
    assert actions.FetchRecords(BOOT, 0, 0) in script.wait(1.0)
    forged = events.SnapshotInfo(0, digest("forged"))
    assert script.do(events.RecordsFetched(BOOT, 0, (), (forged,))) == []
    script.wait(20.0)
    script.do(events.RecordsFetched(BOOT, 0, (), (events.SnapshotInfo(0, GENESIS[0]),)))
    assert script.node.state.registers[0].pursuit


def test_rounds_that_were_not_on_disk_are_lost_by_name_after_a_restart() -> None:
    script = gossiping()
    finish_rounds(script, *script.do(steps()))
    saved = json.loads(json.dumps(script.node.save()))
    chains = [Chain(4, digest("own", 4)), Chain(3, digest("own", 3, 1))]
    node = make_node(A, chains=chains, saved=saved, gossip=PLAN)
    totals = node.state.ledger.totals()
    assert totals.lost == {UNSAVED: 100 * H} and totals.pending == 100 * H and totals.adds_up


def test_who_claims_merges_where_there_are_none_does_not_keep_a_node_from_settling() -> None:
    script = gossiping(B)
    script.now += 0.5
    script.beat(B, heads=tuple(Head(3, digest("other", 3, p), 10**9) for p in (0, 1)))
    script.do(events.SettleAsked())
    assert script.node.is_settled
    assert not script.node.state.cooled_down(B)


def test_a_node_that_settles_ends_what_it_has_begun_and_begins_nothing() -> None:
    script = gossiping()
    done = script.do(steps())
    script.do(events.SettleAsked())
    assert not script.node.is_settled
    finish_rounds(script, *done)
    for p in (0, 1):
        script.do(events.FragmentInstalled(p, 4, 0))
    assert script.node.is_settled
    assert not any(isinstance(a, OpenMix | FinishRound) for a in script.wait(5.0))


# -------------------------------------------------------------------- anything at all


PLANS = [PLAN, BLOCKING, FACTORED]
LINKS = st.builds(
    Link,
    fragment=st.integers(0, 3),
    round=st.integers(0, 5),
    part=st.sampled_from(["start", "outer"]),
    stage=st.sampled_from(["open", "half", "whole", "void"]),
    weight=st.sampled_from([0.1, 0.5, 1.0]),
)


@given(st.lists(LINKS, min_size=1, max_size=3), st.integers(0, 2**32), st.sampled_from(PLANS))
@settings(max_examples=60, deadline=None)
def test_whatever_partners_say_the_node_goes_on(
    links: list[Link], seed: int, plan: GossipPlan
) -> None:
    rng = random.Random(seed)
    script = gossiping(B, C, plan=plan)
    for _ in range(8):
        message = Mixing(tuple(rng.choices(links, k=2)))
        assert unpack(pack(message)) == message
        script.hear(rng.choice([B, C]), message)
        script.do(steps(rng.randrange(1, 9)))
    finish_rounds(script, *script.do(steps(3 * H)))
    assert script.node.state.ledger.totals().adds_up
