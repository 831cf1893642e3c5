"""A node in a run that leaves slack: who asks for time gets it, and no round waits for ever."""

from typing import Any

import pytest
from protocol_builders import A, B, C, Script, make_record, training

from p2pdiloco.protocol import events
from p2pdiloco.protocol.actions import Action, Send
from p2pdiloco.protocol.calibration import Answer
from p2pdiloco.protocol.naming import PeerId, RoundId
from p2pdiloco.protocol.pacer import Pacer, Served, policy_called
from p2pdiloco.protocol.policies import Calibrated, Fixed, Pressure, Tokens
from p2pdiloco.protocol.wire import Heartbeat, RoundOpened, pack, unpack

H, SLACK = 12, 4
BUSY = events.MachineMeasured(Pressure(owner=0.9))
CALM = events.MachineMeasured(Pressure())


def paced(*peers: PeerId, leads: bool = True, **changes: Any) -> Script:
    """A leads fragment 0 where it `leads`, else B."""
    usual: dict[str, Any] = {"slack_steps": SLACK, "pacing": "pressure-gate"}
    script = training(*peers, **(usual | changes))
    register, wanted = script.node.state.registers[0], A if leads else B
    attempt = 0
    while not script.node.state.is_turn_of(wanted, RoundId(0, 1, 0, attempt)):
        attempt += 1
    register.fence = (0, attempt)
    step(script)
    script.now = 1.0
    return script


def step(script: Script, steps: int = 1) -> list[Action]:
    return script.do(events.StepsDone(steps, 100 * steps, 0.1, loss=2.0))


def opened_for_0(script: Script) -> bool:
    return script.node.state.registers[0].round is not None


def heartbeats(done: list[Action], peer: PeerId) -> list[Heartbeat]:
    return [
        a.message
        for a in done
        if isinstance(a, Send) and a.peer == peer and isinstance(a.message, Heartbeat)
    ]


def test_a_calm_machine_opens_as_soon_as_the_period_is_over() -> None:
    script = paced(B)
    script.do(CALM)
    script.beat(B, local_steps=(6, 6))
    step(script, 5)
    assert opened_for_0(script)


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_the_loss_of_a_step_that_went_wrong_does_not_hide_that_of_all_others(loss: float) -> None:
    script = paced(B)
    for each in (loss, 2.0):
        script.do(events.StepsDone(1, 100, 0.1, loss=each))
    assert script.node.state.loss == 2.0


def test_a_busy_machine_puts_the_round_off() -> None:
    script = paced(B)
    script.do(BUSY)
    script.beat(B, local_steps=(6, 6))
    step(script, 5)
    assert not opened_for_0(script)
    assert script.node.synchronizer.explanation == "learners ask for time, 1 times"
    decision = script.node.state.pacer.decisions[0]
    assert decision.reason == "other programs is at 0.90, the limit 0.60"
    assert decision.wait_steps == SLACK


def test_the_round_is_opened_as_soon_as_the_machine_is_calm() -> None:
    script = paced(B)
    script.do(BUSY)
    script.beat(B, local_steps=(6, 6))
    step(script, 5)
    script.do(CALM)
    assert opened_for_0(script)


def test_no_round_is_put_off_beyond_its_window() -> None:
    script = paced(B)
    script.do(BUSY)
    script.beat(B, local_steps=(10, 10), asks_for_time=(0, 1))
    step(script, 5 + SLACK - 1)
    assert not opened_for_0(script)
    step(script)
    assert opened_for_0(script)


def test_another_learner_of_a_few_gets_the_time_that_it_asks_for() -> None:
    script = paced(B, C)
    script.do(CALM)
    script.beat(B, local_steps=(6, 6), asks_for_time=(0,))
    script.beat(C, local_steps=(6, 6))
    step(script, 5)
    assert not opened_for_0(script)
    script.now = 2.0
    script.beat(B, local_steps=(7, 7))
    assert opened_for_0(script)


def test_the_others_hear_that_a_node_asks_and_at_once_that_it_no_longer_does() -> None:
    script = paced(B, leads=False)
    script.do(BUSY)
    script.everything(events.StepsDone(5, 500, 0.1))
    script.now = 2.0
    asked = heartbeats(script.everything(events.Woke()), B)
    assert [h.asks_for_time for h in asked] == [(0,)]
    told = heartbeats(script.everything(CALM), B)
    assert [h.asks_for_time for h in told] == [()]
    assert unpack(pack(asked[0])) == asked[0]


def test_a_run_without_slack_asks_nobody() -> None:
    script = paced(B, slack_steps=0)
    script.do(BUSY)
    script.beat(B, local_steps=(6, 6), asks_for_time=(0,))
    step(script, 5)
    assert opened_for_0(script)
    assert script.node.state.pacer.decisions == {}


def test_a_late_merge_brings_the_next_appointment_nearer() -> None:
    script = paced(B)
    state, register = script.node.state, script.node.state.registers[0]
    assert register.chain
    parts = make_record(tokens={B: 900, C: 900}).contributors
    late = make_record(tokens={B: 900, C: 900})
    assert [part.steps for part in parts] == [10, 10]
    register.chain.append(late)
    assert late.period_steps == 10
    assert state.offset(register) == 4
    assert state.window(register) == (H - 4, H)


def test_what_is_served_teaches_the_node() -> None:
    script = paced(B, pacing="calibrated")
    pacer = script.node.state.pacer
    answers = tuple(Answer(0.1 + 0.2 * (n % 2), 1, n % 2 == 1) for n in range(400))
    script.do(events.MachineMeasured(Pressure(), Served(0.2, 1, 5.0, answers)))
    assert pacer.forecast is not None
    assert pacer.forecast.extra_late > 0.7 and pacer.forecast.quiet_late == 0.0
    assert isinstance(pacer.policy, Calibrated)
    assert list(pacer.policy.history.costs) == [pacer.forecast.cost]
    script.do(CALM)
    assert pacer.forecast is None


def test_policies_are_called_by_their_names_in_the_spec() -> None:
    rng = paced(B).node.state.rng
    assert isinstance(policy_called("fixed", rng), Fixed)
    assert isinstance(Pacer(policy_called("calibrated", rng)).policy, Calibrated)
    assert policy_called("tokens", rng, 5000) == Tokens(5000)
    with pytest.raises(ValueError, match="no policy is called 'often'"):
        policy_called("often", rng)


def test_a_learner_that_is_paced_by_tokens_asks_for_time_until_it_has_done_so_many() -> None:
    script = paced(B, leads=False, pacing="tokens", pacing_tokens=100 * 8)
    asked = []
    for _ in range(8):
        step(script)
        asked.append(script.node.state.registers[0].asks_for_time)
    assert asked == [False] * 4 + [True] * 2 + [False] * 2


def test_a_round_is_opened_to_all_when_it_is() -> None:
    script = paced(B)
    script.beat(B, local_steps=(6, 6))
    done = step(script, 5)
    assert any(isinstance(a, Send) and isinstance(a.message, RoundOpened) for a in done)
