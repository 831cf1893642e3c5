import json
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from protocol_builders import (
    BOOT,
    GENESIS,
    NO_HEAD,
    A,
    B,
    C,
    D,
    Script,
    committed,
    digest,
    head_of,
    make_chain,
    make_heartbeat,
    make_node,
    make_record,
    make_records,
    opened,
    training,
)

from p2pdiloco.protocol import events
from p2pdiloco.protocol.actions import DropRound, FetchRecords, Send
from p2pdiloco.protocol.events import SnapshotInfo
from p2pdiloco.protocol.ledger import NOT_ASKED, OTHER_REASONS
from p2pdiloco.protocol.lineage import Record, Refused
from p2pdiloco.protocol.membership import FANOUT, HEARTBEAT_S, REPORTERS_MAX
from p2pdiloco.protocol.naming import PeerId, RoundId
from p2pdiloco.protocol.node import EVENTS_KEPT, FAREWELLS_MAX, STOPPED
from p2pdiloco.protocol.pauses import PAUSES_MAX
from p2pdiloco.protocol.state import (
    AT_ONCE_MAX,
    NUM_DEPUTIES,
    REFUSALS_KEPT,
    Condition,
)
from p2pdiloco.protocol.wire import (
    Committed,
    ContributionReady,
    Head,
    Heartbeat,
    Left,
    Message,
    RoundDeclined,
    RoundOpened,
    Sighting,
    pack,
    unpack,
)

# -------------------------------------------------------------------- heartbeats


def heartbeats(script: Script, *happened: events.Event) -> list[tuple[PeerId, Heartbeat]]:
    return [
        (a.peer, a.message)
        for a in script.everything(*happened)
        if isinstance(a, Send) and isinstance(a.message, Heartbeat)
    ]


def test_a_node_tells_the_others_what_it_holds() -> None:
    script = training(B, C, version=2)
    script.do(events.StepsDone(3, 300, 2.0))
    script.now = 1.0
    told = heartbeats(script, events.Woke())
    assert [peer for peer, _ in told] == [B, C]
    heartbeat = told[0][1]
    assert heartbeat.heads[0] == head_of(make_records(2)[-1])
    assert (heartbeat.local_steps, heartbeat.step_s, heartbeat.tokens_per_s) == ((3, 3), 2.0, 50.0)
    assert heartbeat.ready
    assert unpack(pack(heartbeat)) == heartbeat


def test_heartbeats_keep_their_interval() -> None:
    script = training(B)
    script.wait(1.0)
    assert script.node.deadline == pytest.approx(script.now + HEARTBEAT_S, abs=1.0)
    assert heartbeats(script, events.StepsDone(1, 100, 1.0)) == []


def test_the_synchronizer_hears_at_once_that_a_round_is_due_here() -> None:
    script = training(B, C)
    register = script.node.state.registers[1]
    while (synchronizer := script.node.state.post(register)[0]) == A:
        register.fence = (0, register.fence[1] + 1)
    told = heartbeats(script, *[events.StepsDone(1, 100, 1.0)] * 12)
    assert synchronizer in [peer for peer, heartbeat in told if heartbeat.local_steps[1] == 12]


def test_a_name_that_cannot_be_shown_is_shown_anyhow() -> None:
    script = training(B)
    script.node.state.config.__dict__["name"] = "line\nbreak" + "x" * 100
    script.now = 1.0
    heartbeat = heartbeats(script, events.Woke())[0][1]
    assert heartbeat.name.startswith("line break")
    assert unpack(pack(heartbeat)) == heartbeat


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"run_id": "other"}, "it takes part in another run"),
        ({"protocol_version": 99}, "it speaks protocol 99, this node 1; update the older one"),
        ({"heads": (NO_HEAD,)}, "a heartbeat of 1 fragments, the run has 2"),
        ({"local_steps": (1, 2, 3)}, "a heartbeat of 2 fragments, the run has 2"),
    ],
    ids=str,
)
def test_a_heartbeat_that_does_not_fit_is_refused(changes: dict[str, Any], reason: str) -> None:
    script = training(B)
    script.hear(D, make_heartbeat(**changes))
    assert script.node.state.refusals == {reason: 1}
    assert not script.node.state.is_alive(D)


def test_a_peer_that_goes_on_being_wrong_is_noted_once() -> None:
    script = training(B)
    for sequence in range(1, 30):
        script.now += 1.0
        script.hear(D, make_heartbeat(sequence, run_id="other"))
    assert script.node.state.refusals.total() == 29
    assert len([note for note in script.notes if "is left alone" in note]) == 1


def test_a_message_of_a_fragment_that_is_not_there_is_refused() -> None:
    script, nowhere = training(B), RoundId(2, 1, 0, 0)
    for message in (
        RoundOpened(nowhere, GENESIS[0]),
        RoundDeclined(nowhere, "no"),
        ContributionReady(nowhere, 1, 1, 1, 1.0),
        Committed(replace(make_record(), fragment=2)),
    ):
        assert script.hear(B, message) == []
    assert script.node.state.refusals == {"fragment 2; the run has 2": 4}


def test_a_message_from_ourselves_is_ignored() -> None:
    script = training(B)
    assert script.hear(A, opened(None)) == []


# -------------------------------------------------------------------- large swarms


def crowd(num: int) -> list[PeerId]:
    return [PeerId(f"peer{i:04d}") for i in range(num)]


def test_of_a_large_swarm_some_report_to_a_synchronizer() -> None:
    small, large = training(*crowd(REPORTERS_MAX)), training(*crowd(4 * REPORTERS_MAX))
    assert all(small.node._reports() for _ in range(100))
    reports = sum(large.node._reports() for _ in range(1000))
    assert reports == pytest.approx(1000 / 4, rel=0.2)


def test_a_synchronizer_tells_its_deputies_of_itself() -> None:
    script = training(*crowd(40))
    register = script.node.state.registers[0]
    while script.node.state.post(register)[0] != A:
        _, term, attempt = script.node.state.post(register)
        register.fence = (term, attempt + 1)
    deputies = script.node.state.deputies(register)
    script.now = 2.0
    told = dict(heartbeats(script, events.Woke()))
    assert len(deputies) == NUM_DEPUTIES
    assert set(deputies) <= set(told)
    assert len([peer for peer, heartbeat in told.items() if heartbeat.sightings]) == FANOUT
    assert len({heartbeat.number for heartbeat in told.values()}) == 1


def test_a_newcomer_without_state_is_answered_once() -> None:
    script = training(B, version=1)
    empty = make_heartbeat(1, heads=(NO_HEAD, NO_HEAD), ready=False)
    told = [peer for peer, _ in heartbeats(script, events.MessageArrived(D, empty))]
    again = replace(empty, sequence=2)
    assert told == [D]
    assert heartbeats(script, events.MessageArrived(D, again)) == []


def test_who_leaves_a_large_swarm_tells_some() -> None:
    script = training(*crowd(2 * FAREWELLS_MAX))
    told = script.do(events.LeaveAsked())
    assert len({a.peer for a in told if isinstance(a, Send)}) == len(told) == FAREWELLS_MAX


def test_the_orders_of_a_large_swarm_are_renewed_with_the_heartbeats() -> None:
    script = training(*crowd(2 * AT_ONCE_MAX))
    before = script.node.state.drawing(0, 0, 0).in_order()
    script.hear(D, make_heartbeat(1))
    assert script.node.state.drawing(0, 0, 0).in_order() == before
    script.wait(6.0)
    assert D in script.node.state.drawing(0, 0, 0).in_order()


# -------------------------------------------------------------------- conditions


def condition(script: Script) -> Condition:
    return script.node.condition


def test_a_node_says_what_it_is_doing() -> None:
    script = Script(make_node())
    assert condition(script) is Condition.FETCHING
    script = training()
    assert condition(script) is Condition.ISOLATED
    script = training(B)
    assert condition(script) is Condition.TRAINING
    script.do(events.SettleAsked())
    assert condition(script) is Condition.SETTLED
    script.do(events.LeaveAsked())
    assert condition(script) is Condition.LEFT


def test_settling_is_told_at_once() -> None:
    told = heartbeats(training(B), events.SettleAsked())
    assert [(peer, heartbeat.ready) for peer, heartbeat in told] == [(B, False)]


def test_leaving_tells_everybody() -> None:
    script = training(B, C)
    assert script.do(events.LeaveAsked()) == [Send(B, Left()), Send(C, Left())]
    assert script.node.deadline is None
    assert script.do(events.StepsDone(1, 100, 1.0), events.Woke()) == []


def test_leaving_gives_up_what_is_under_way() -> None:
    script = training(B)
    for register in script.node.state.registers:
        register.fence = (0, 0 if script.node.state.post(register)[0] == A else 1)
    script.now = 1.0
    script.beat(B, local_steps=(12, 12))
    script.do(events.StepsDone(12, 1200, 1.0))
    (round_id,) = [r.round.id for r in script.node.state.registers if r.round]
    assert script.do(events.LeaveAsked()) == [DropRound(round_id), Send(B, Left())]


def test_who_left_and_comes_back_takes_part_again() -> None:
    script = training(B)
    script.hear(B, Left())
    assert condition(script) is Condition.ISOLATED
    script.now = 5.0
    script.hear(B, make_heartbeat(1, incarnation=2))
    assert condition(script) is Condition.TRAINING


# -------------------------------------------------------------------- time


def test_time_does_not_go_back() -> None:
    node = make_node()
    node.handle(events.Woke(), 1.0)
    with pytest.raises(AssertionError, match="time went back by"):
        node.handle(events.Woke(), 0.5)


def test_a_node_sleeps_between_its_deadlines() -> None:
    script = training(B, quorum=2)
    for _ in range(40):
        script.beat(B, local_steps=(12, 12))
        script.do(events.StepsDone(1, 100, 1.0))
        script.wait(1.0)
    assert script.node.deadline is not None
    assert script.node.deadline > script.now - HEARTBEAT_S


def test_the_newest_events_are_kept_for_the_page() -> None:
    script = training(B)
    for _ in range(EVENTS_KEPT + 5):
        script.do(events.Woke())
    assert len(script.node.history) == EVENTS_KEPT


# -------------------------------------------------------------------- another life


def test_a_node_that_was_stopped_goes_on_where_it_was() -> None:
    script = training(B, version=2)
    script.do(events.StepsDone(1, 100, 1.0))
    saved = json.loads(json.dumps(script.node.save()))
    chains = [make_chain(make_records(2, fragment=p), p) for p in (0, 1)]
    again = make_node(chains=chains, saved=saved)
    totals = again.state.ledger.totals()
    assert (totals.processed, totals.lost, totals.adds_up) == (200, {STOPPED: 200}, True)
    assert [r.version for r in again.state.registers] == [2, 2]


def test_tokens_that_were_merged_while_nobody_looked_are_counted() -> None:
    script = training(B)
    script.do(events.StepsDone(1, 100, 1.0))
    saved = script.node.save()
    merged = make_chain([make_record(tokens={A: 80})])
    again = make_node(chains=[merged, make_chain((), 1)], saved=saved)
    totals = again.state.ledger.totals()
    assert (totals.merged, totals.lost, totals.adds_up) == (80, {STOPPED: 120}, True)


def test_a_node_answers_for_its_records() -> None:
    records = make_records(4)
    node = make_node(chains=[make_chain(records), None])
    assert node.records_after(0, 2) == tuple(records[2:])
    assert node.records_after(1, 0) == ()


def test_tokens_are_accounted_for_to_the_end() -> None:
    script, record = training(B), make_record()
    script.do(events.StepsDone(2, 200, 1.0), committed(B, record))
    script.do(events.StateReached(0, 1, record.state_digest, record))
    script.do(events.FragmentInstalled(0, 1, 200))
    totals = script.node.state.ledger.totals()
    assert (totals.lost, totals.pending, totals.adds_up) == ({NOT_ASKED: 200}, 200, True)


# -------------------------------------------------------------------- hostile peers

PEERS = [A, B, C, D, BOOT, PeerId("nobody")]
peers = st.sampled_from(PEERS)
counts = st.one_of(st.integers(0, 6), st.sampled_from([2**40, 2**53 - 2, 2**63 - 1]))
small = st.integers(0, 6)
round_ids = st.builds(RoundId, st.integers(0, 3), st.integers(1, 6), counts, counts)
digests = st.sampled_from([*GENESIS, digest("x"), *(r.digest for r in make_records(2))])
sightings = st.builds(Sighting, peers, counts, counts, st.booleans(), st.floats(0, 100))
heads = st.builds(Head, st.one_of(st.integers(-1, 6), st.just(2**52)), digests, counts)


@st.composite
def records(draw: Callable[[st.SearchStrategy[Any]], Any]) -> Record:
    after = draw(st.sampled_from([None, *make_records(2)]))
    tokens = {peer: draw(st.integers(1, 2**50)) for peer in draw(st.sets(peers, min_size=1))}
    changes: dict[str, Any] = draw(
        st.fixed_dictionaries(
            {},
            optional={
                "fragment": st.integers(0, 1),
                "version": st.integers(1, 6),
                "parent": digests,
                "term": counts,
                "attempt": counts,
                "tokens_total": counts,
                "refused": st.just((Refused(A, "for no reason"),)),
                "signature": st.just(b"forged"),
            },
        )
    )
    return make_record(after, dict(sorted(tokens.items())), synchronizer=draw(peers), **changes)


messages: st.SearchStrategy[Message] = st.one_of(
    st.builds(
        make_heartbeat,
        counts,
        incarnation=counts,
        ready=st.booleans(),
        step_s=st.sampled_from([0.0, 1e-9, 1.0, 1e9]),
        uplink_mb_s=st.sampled_from([0.0, 1e-9, 1.0, 1e9]),
        local_steps=st.tuples(counts, counts),
        heads=st.tuples(heads, heads),
        sightings=st.lists(sightings, max_size=3).map(tuple),
    ),
    st.builds(RoundOpened, round_ids, digests),
    st.builds(
        ContributionReady,
        round_ids,
        st.integers(1, 9),
        st.integers(1, 2**49),
        st.integers(1, 9),
        st.just(1.0),
    ),
    st.builds(RoundDeclined, round_ids, st.just("no"), counts),
    st.builds(Committed, records()),
    st.just(Left()),
)
deeds = st.one_of(
    st.tuples(st.just("message"), peers, messages),
    st.tuples(st.just("steps"), st.integers(1, 12), st.none()),
    st.tuples(st.just("wait"), st.sampled_from([0.1, 1.0, 30.0]), st.none()),
)


@settings(max_examples=120, deadline=None)
@given(st.lists(deeds, max_size=25), st.integers(0, 2**32))
def test_no_message_makes_a_node_raise(happened: list[tuple[str, Any, Any]], seed: int) -> None:
    shell = Shell(random.Random(seed))
    for kind, what, message in happened:
        if kind == "message":
            shell.script.now += 0.01
            shell.do(events.MessageArrived(what, message))
        elif kind == "steps":
            shell.steps(what)
        else:
            shell.wait(what)
    assert shell.script.node.state.ledger.totals().adds_up


class Shell:
    """Answers every action of a node, for good or ill, as a shell may."""

    def __init__(self, rng: random.Random):
        self.script = training(B, C)
        self.rng = rng
        self.counted = [0, 0]

    def steps(self, num: int) -> None:
        self.counted = [tokens + 100 * num for tokens in self.counted]
        self.do(events.StepsDone(num, 100 * num, 1.0))

    def wait(self, seconds: float) -> None:
        until = self.script.now + seconds
        for _ in range(1000):
            deadline = self.script.node.deadline
            if deadline is None or deadline > until:
                break
            self.script.now = max(self.script.now, deadline)
            self.do(events.Woke())
        else:
            raise AssertionError("the node wakes without end")
        self.script.now = until

    def do(self, event: events.Event) -> None:
        waiting = [event]
        while waiting:
            for action in self.script.do(waiting.pop(0)):
                waiting += self.answer(action)

    def answer(self, action: object) -> list[events.Event]:
        well, name = self.rng.random() < 0.7, type(action).__name__
        answer = getattr(self, f"_{name}", None)
        return answer(action, well) if answer else []

    def _FetchRecords(self, action: FetchRecords, well: bool) -> list[events.Event]:
        if not well:
            return [events.RecordsFailed(action.peer, action.fragment, "refused")]
        lineage = make_records(
            3, fragment=action.fragment, branch=self.rng.choice(["main", "other"])
        )
        kept = tuple(r for r in lineage if r.version > action.after_version)
        snapshots = (
            SnapshotInfo(0, GENESIS[action.fragment]),
            SnapshotInfo(2, lineage[1].state_digest),
        )
        return [events.RecordsFetched(action.peer, action.fragment, kept, snapshots)]

    def _CatchUp(self, action: Any, well: bool) -> list[events.Event]:
        p, answers = action.fragment, list[events.Event]()
        if action.snapshot:
            version, state_digest = action.snapshot.version, action.snapshot.state_digest
            answers.append(events.StateReached(p, version, state_digest, None))
        for record in action.records:
            if self.rng.random() < 0.2:
                return [*answers, events.CatchUpFailed(p, "no", diverged=not well)]
            answers.append(events.StateReached(p, record.version, record.state_digest, record))
        return answers

    def _InstallFragment(self, action: Any, well: bool) -> list[events.Event]:
        p = action.fragment
        tokens, self.counted[p] = self.counted[p], 0
        return [events.FragmentInstalled(p, action.version, tokens)]

    def _PrepareContribution(self, action: Any, well: bool) -> list[events.Event]:
        p = action.round.fragment
        if not well or not self.counted[p]:
            return [events.ContributionFailed(action.round, "busy")]
        tokens = self.counted[p]
        return [events.ContributionPrepared(action.round, tokens // 100, tokens, 500)]

    def _PullContribution(self, action: Any, well: bool) -> list[events.Event]:
        if not well:
            return [events.PullFailed(action.round, action.peer, "NaN", hostile=True)]
        tokens = self.counted[action.round.fragment]
        return [
            events.ContributionPulled(action.round, action.peer, tokens // 100 or 1, tokens or 1)
        ]

    def _MergeRound(self, action: Any, well: bool) -> list[events.Event]:
        if not well:
            return [events.MergeFailed(action.round, "nothing finite")]
        return [events.RoundMerged(action.round, digest("p"), 100, digest("s"))]


def test_what_a_flood_of_refusals_takes_is_bounded() -> None:
    state = training(B).node.state
    for i in range(5000):
        state.refuse(f"reason {i} " + "x" * 1000, PeerId(f"peer{i}"))
    state.refuse("often")
    for i in range(100):
        state.refuse("often")
        state.refuse(f"another {i}")
    assert len(state.refusals) == REFUSALS_KEPT + 1
    assert state.refusals["often"] == 101
    assert state.refusals.total() == 5201
    assert state.refusals[OTHER_REASONS] > 5000
    assert max(len(reason) for reason in state.refusals) <= 200
    assert len(state.strikes) == PAUSES_MAX


def test_a_peer_struck_for_days_overflows_nothing() -> None:
    script = training(B)
    for _ in range(2000):
        script.now += 3601.0
        script.do(events.WrongBytes(B, "bytes of another digest"))
    assert not script.node.state.cooled_down(B)
