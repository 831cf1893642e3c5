"""Below the quorum: learners' values are mixed, and nothing else changes."""

from protocol_builders import B, C, Script, head_of, opened, training

from p2pdiloco.protocol import actions, events
from p2pdiloco.protocol.actions import BlendValues, FetchMix, PrepareContribution, Send, TakeValues
from p2pdiloco.protocol.fallback import LOST_S
from p2pdiloco.protocol.naming import MixId, PeerId
from p2pdiloco.protocol.topology import Row
from p2pdiloco.protocol.wire import Link, LinkStage, Mixing

H = 12
LOCAL = MixId(0, 0, "local")


def short(*peers: PeerId, steps: int = H) -> Script:
    """A node among too few for a quorum of three, for long enough to notice."""
    script = training(*peers, quorum=3, mixes_below_quorum=True)
    pass_time(script, LOST_S + 2, *peers)
    script.do(events.StepsDone(steps, 100 * steps, 0.5))
    return script


def pass_time(script: Script, seconds: float, *peers: PeerId) -> list[actions.Action]:
    done: list[actions.Action] = []
    for _ in range(int(seconds)):
        done += script.wait(1.0)
        done += script.beat(*peers)
    return done


def says(stage: LinkStage, number: int = 0, part: str = "local") -> Mixing:
    return Mixing((Link(0, number, part, stage, 0.5),))  # type: ignore[arg-type]


def told(done: list[actions.Action]) -> list[LinkStage]:
    messages = [a.message for a in done if isinstance(a, Send) and isinstance(a.message, Mixing)]
    return [link.stage for m in messages for link in m.links if link.fragment == 0]


def fallback(script: Script) -> bool:
    assert script.node.fallback
    return script.node.fallback.active


def test_a_swarm_below_its_quorum_is_noticed_after_a_while() -> None:
    script = training(B, quorum=3, mixes_below_quorum=True)
    pass_time(script, LOST_S - 2, B)
    assert not fallback(script)
    pass_time(script, 4, B)
    assert fallback(script)
    assert any("fewer members than the quorum of 3" in note for note in script.notes)


def test_where_the_run_does_not_allow_it_nothing_is_mixed() -> None:
    script = training(B, quorum=3)
    script.do(events.StepsDone(H, 100, 0.5))
    done = pass_time(script, LOST_S + 3, B)
    assert not any(isinstance(a, TakeValues) for a in done)
    script.hear(B, says("open"))
    assert script.node.state.refusals["it gossips, this run has synchronizers"] == 1


def test_values_are_swapped_and_blended_after_each_period() -> None:
    script = short(B)
    assert TakeValues(0, 0, 0, (B,)) in pass_time(script, 1, B)
    assert told(script.do(events.ValuesTaken(0, 0))) == ["open"]
    assert FetchMix(LOCAL, B) in script.hear(B, says("open"))
    script.do(events.MixFetched(LOCAL, B))
    done = script.hear(B, says("half"))
    assert BlendValues(0, 0, Row(0.5, {B: 0.5})) in done and "whole" in told(done)
    script.do(events.ValuesBlended(0, 0))
    assert not any(isinstance(a, TakeValues) and a.fragment == 0 for a in pass_time(script, 3, B))
    script.do(events.StepsDone(H, 100, 0.5))
    assert TakeValues(0, 1, 0, (B,)) in pass_time(script, 1, B)


def test_no_token_is_settled_and_no_version_made() -> None:
    script = short(B)
    script.do(events.ValuesTaken(0, 0))
    script.hear(B, says("half"))
    script.do(events.MixFetched(LOCAL, B), events.ValuesBlended(0, 0))
    totals = script.node.state.ledger.totals()
    assert totals.pending == totals.processed > 0
    assert [r.version for r in script.node.state.registers] == [0, 0]


def test_a_node_joins_the_round_of_its_partner() -> None:
    script = short(B, steps=3)
    assert TakeValues(0, 5, 0, (B,)) in script.hear(B, says("open", 5))
    assert told(script.hear(B, says("half", 2))) == ["void"]


def test_who_was_started_anew_joins_the_round_of_one_that_mixed_for_days() -> None:
    script = short(B, steps=3)
    assert TakeValues(0, 100_000, 0, (B,)) in script.hear(B, says("open", 100_000))
    script = short(B, steps=3)
    assert told(script.hear(B, says("open", 2**40))) == ["void"], "out of this world"


def test_many_words_of_a_partner_get_one_answer() -> None:
    script, first = short(B), 2**40
    words = tuple(Link(0, first + k, "local", "open", 0.5) for k in range(9))
    (answer,) = (a for a in script.hear(B, Mixing(words)) if isinstance(a, Send))
    assert answer.message == Mixing(tuple(link._replace(stage="void") for link in words))


def test_members_on_another_version_are_no_partners() -> None:
    script = training(B, quorum=3, mixes_below_quorum=True)
    heads = (head_of(None, 1), head_of(None, 1))  # of fragment 0 it holds something else
    for _ in range(int(LOST_S) + 3):
        script.wait(1.0)
        script.beat(B, heads=heads)
    script.do(events.StepsDone(H, 100, 0.5))
    script.wait(1.0)
    taken = [a for a in script.beat(B, heads=heads) + script.wait(1.0) if isinstance(a, TakeValues)]
    assert 0 not in {a.fragment for a in taken}


def test_a_partner_that_falls_silent_is_given_up() -> None:
    script = short(B)
    pass_time(script, 1, B)
    script.do(events.ValuesTaken(0, 0))
    script.wait(30.0)
    assert script.node.fallback and script.node.fallback.rounds[0] is None


def test_when_the_quorum_is_back_contributions_are_made_as_always() -> None:
    script = short(B)
    script.beat(B, C)
    pass_time(script, 2, B, C)
    assert not fallback(script)
    assert "the quorum is back: merging again" in script.notes
    offered = script.hear(B, opened(None))
    assert any(isinstance(a, PrepareContribution) for a in offered) or any(
        isinstance(a, Send) for a in offered
    )


def test_a_learner_that_died_or_moved_on_ends_the_round() -> None:
    script = short(B)
    pass_time(script, 1, B)
    script.do(events.ValuesLost(0, 0, "the learner died"))
    assert script.node.fallback and script.node.fallback.rounds[0] is None
    script.do(events.LearnerStopped("killed"))
    assert script.node.fallback.rounds == [None, None]


def test_gossip_of_another_kind_is_refused() -> None:
    script = short(B)
    script.hear(B, says("open", part="start"))
    assert "it speaks of rounds of gossip, this run has synchronizers" in (
        script.node.state.refusals
    )
    script.hear(B, Mixing((Link(9, 0, "local", "open", 0.5),)))
    assert script.node.state.refusals["fragment 9; the run has 2"] == 1
