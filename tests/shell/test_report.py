"""What a node says it is doing: one sentence for each state, still while nothing happens."""

import asyncio
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from memory_swarm import (
    BOOT,
    TIMES,
    TOKENS_PER_STEP,
    A,
    B,
    Living,
    Network,
    Swarm,
    open_node,
    play_swarm,
    rot,
)
from virtual_clock import run_virtual

from p2pdiloco.protocol.topology import PAIRS, GossipPlan
from p2pdiloco.spec import RunSpec
from p2pdiloco_bootstrap.serving import Traffic
from p2pdiloco_daemon.lag import LagMonitor
from p2pdiloco_daemon.learner import learner as learners
from p2pdiloco_daemon.report import STILL_S, LearnerReport, Reporter
from p2pdiloco_daemon.rollouts import worker as rollouts
from p2pdiloco_daemon.rollouts.report import RolloutReport
from p2pdiloco_daemon.status import view


class FakeNetwork:
    """Up, and perhaps without a bootstrap peer."""

    problem: str | None = None
    restarts = 0
    last_error: str | None = None

    def __init__(self, loneliness: Callable[[], str | None]) -> None:
        self.loneliness = loneliness

    def reach(self) -> str:
        return "other nodes can dial this one"


def report_of(living: Living, problem: Callable[[], str | None] = lambda: None) -> Reporter:
    return Reporter(
        spec=RunSpec(name="first"),
        run_id="run",
        started=0.0,
        now=asyncio.get_running_loop().time,
        node=living.node,
        shell=living.shell,
        holdings=living.holdings,
        traffic=Traffic(),
        lag=LagMonitor(),
        learner=LearnerReport(state=view.LearnerState.TRAINING),
        network=FakeNetwork(problem),
    )


async def still(swarm: Swarm, reporter: Reporter) -> str:
    """The sentence, which does not tick: a reader of the page sees it change when something did."""
    sentence = reporter.status().sentence
    await swarm.train(7)
    assert reporter.status().sentence == sentence
    return sentence


def test_a_node_that_trains_says_with_whom(tmp_path: Path) -> None:
    async def scenario(swarm: Swarm) -> None:
        swarm.start(A, B)
        await swarm.train(60)
        sentences = [report_of(living).status().sentence for living in swarm.nodes.values()]
        for sentence in sentences:
            assert sentence.startswith("Training with 1 other node; this node learns and ")
        assert any("is the synchronizer" in sentence for sentence in sentences)
        assert report_of(swarm.nodes[A]).status().state is view.NodeState.TRAINING

    play_swarm(tmp_path, scenario)


def test_a_learner_without_rollouts_says_that_it_waits_for_them(tmp_path: Path) -> None:
    async def scenario(swarm: Swarm) -> None:
        swarm.start(A, B)
        await swarm.train(60)
        reporter = report_of(swarm.nodes[A])
        reporter.learner.take(learners.Idle(), 0.0)
        status = reporter.status()
        assert "; this node waits for rollouts and " in status.sentence
        assert status.learner.state is view.LearnerState.IDLE
        reporter.learner.take(learners.StepsDone(1, 1, 8, 0.1, 0.0, 0.0), reporter.now())
        assert "; this node learns and " in reporter.status().sentence

    play_swarm(tmp_path, scenario)


def test_a_node_that_gossips_says_so_and_how_far_apart_it_is(tmp_path: Path) -> None:
    async def scenario(swarm: Swarm) -> None:
        swarm.start(A, B)
        await swarm.train(60)
        status = report_of(swarm.nodes[A]).status()
        assert status.sentence.startswith("Training with 1 other node, without a synchronizer;")
        assert status.synchronizer is None
        assert not any(member.is_synchronizer for member in status.members)
        assert status.disagreement and 0 < (status.disagreement.parameters_share or 0) < 0.1
        assert {r.outcome for r in status.rounds} == {"mixed"}

    play_swarm(tmp_path, scenario, gossip=GossipPlan(mix1=PAIRS, mix2=None, seed="test"))


def test_a_dead_bootstrap_peer_worries_nobody_who_trains(tmp_path: Path) -> None:
    async def scenario(swarm: Swarm) -> None:
        swarm.start(A, B)
        await swarm.train(60)
        status = report_of(swarm.nodes[A], lambda: "cannot reach boot").status()
        assert "boot" not in status.sentence

    play_swarm(tmp_path, scenario)


def test_a_node_alone_says_so_and_why(tmp_path: Path) -> None:
    async def scenario(swarm: Swarm) -> None:
        swarm.start(A)
        await swarm.train(60)
        reporter = report_of(swarm.nodes[A], lambda: "cannot reach boot; trying again")
        assert reporter.status().state is view.NodeState.ISOLATED
        sentence = await still(swarm, reporter)
        assert sentence.startswith("No other node can be reached: training locally")
        assert sentence.endswith(" Cannot reach boot; trying again.")

    play_swarm(tmp_path, scenario)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "merging only with itself"),
        ({"times": replace(TIMES, quorum=2)}, "2 are needed for a merge"),
        ({"gossip": GossipPlan(mix1=PAIRS, mix2=None, seed="test")}, "mixing with nobody"),
    ],
)
def test_a_node_alone_says_what_becomes_of_its_steps(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    async def scenario(swarm: Swarm) -> None:
        swarm.start(A)
        await swarm.train(20)
        sentence = await still(swarm, report_of(swarm.nodes[A]))
        assert sentence == (
            f"No other node can be reached: training locally, {words}, and looking for the others."
        )

    play_swarm(tmp_path, scenario, **changes)


def test_a_node_that_holds_nothing_is_fetching(tmp_path: Path) -> None:
    async def scenario(swarm: Swarm) -> None:
        swarm.network.shelves.pop(BOOT)
        swarm.start(A)
        await swarm.train(60)
        reporter = report_of(swarm.nodes[A])
        assert reporter.status().state is view.NodeState.FETCHING
        assert await still(swarm, reporter) == "Fetching the model: 0 of 3 fragments are here."

    play_swarm(tmp_path, scenario)


@pytest.mark.parametrize(
    ("learner", "sentence"),
    [
        (view.LearnerState.WAITING, "Waiting for the learner to start; 1 other node"),
        (view.LearnerState.RESTARTING, "The learner process ended and is started again"),
    ],
)
def test_without_a_learner_it_does_not_claim_to_train(
    tmp_path: Path, learner: view.LearnerState, sentence: str
) -> None:
    async def scenario(swarm: Swarm) -> None:
        swarm.start(A, B)
        await swarm.train(60)
        reporter = report_of(swarm.nodes[A])
        reporter.learner.state = learner
        assert (await still(swarm, reporter)).startswith(sentence)

    play_swarm(tmp_path, scenario)


def test_settling_is_told_until_it_is_done(tmp_path: Path) -> None:
    async def scenario(swarm: Swarm) -> None:
        swarm.start(A, B)
        await swarm.train(60)
        reporter = report_of(swarm.nodes[A])
        await swarm.settle()
        assert reporter.status().state is view.NodeState.SETTLED
        assert "everything that was merged has arrived" in await still(swarm, reporter)
        swarm.nodes[A].node.state.registers[0].asked = B
        assert reporter.status().state is not view.NodeState.SETTLED
        assert "still on its way" in reporter.status().sentence

    play_swarm(tmp_path, scenario)


def test_a_node_that_leaves_says_so(tmp_path: Path) -> None:
    async def main() -> None:
        async with open_node(Network(), tmp_path) as living:
            reporter = report_of(living)
            reporter.stopping = True
            assert reporter.status().state is view.NodeState.STOPPING
            assert reporter.status().sentence == "Leaving: saving and saying goodbye."
            await living.shell.leave(1.0)
            reporter.stopping = False
            assert reporter.status().state is view.NodeState.STOPPING

    run_virtual(main())


def test_a_disk_that_refuses_is_in_the_sentence(tmp_path: Path) -> None:
    async def main() -> None:
        async with open_node(Network(), tmp_path) as living:
            living.holdings.save_json("node", {"no JSON": object()})
            await living.holdings.disk.run(lambda: None)
            await asyncio.sleep(0)
            status = report_of(living).status()
            assert "the checkpoint cannot be written" in status.sentence
            assert "not JSON serializable" in str(status.checkpoint.error)

    run_virtual(main())


def test_damage_in_memory_stays_visible_after_it_was_mended(tmp_path: Path) -> None:
    async def scenario(swarm: Swarm) -> None:
        swarm.start(A)
        await swarm.train(20)
        reporter = report_of(swarm.nodes[A])
        rot(swarm.nodes[A].holdings.replica.state(2))
        await swarm.train(20)
        whole, _, damaged = reporter.status().fragments
        assert (whole.damaged_times, whole.mended_s_ago) == (0, None)
        assert damaged.damaged_times == 1 and damaged.state is view.FragmentSync.IN_SYNC
        assert damaged.mended_s_ago is not None and 0 < damaged.mended_s_ago < 20
        told = [event.text for event in reporter.status().events]
        assert any(re.match(r"fragment 2 v\d+ was damaged in memory", text) for text in told)

    play_swarm(tmp_path, scenario)


def test_the_parts_of_the_status_agree_with_the_swarm(tmp_path: Path) -> None:
    async def scenario(swarm: Swarm) -> None:
        swarm.start(A, B)
        await swarm.train(60)
        status = report_of(swarm.nodes[A]).status()
        assert status.tokens.adds_up and status.tokens.processed % TOKENS_PER_STEP == 0
        assert status.tokens.merged > 0 and status.merges_total > 10
        assert [m.peer for m in status.members if m.is_self] == [A]
        assert {m.peer: m.role for m in status.members}[BOOT] is view.Role.BOOTSTRAP
        assert all(re.fullmatch("[0-9a-f]{12}", str(f.digest)) for f in status.fragments)
        assert status.first_merge_s is not None and 5 < status.first_merge_s < 20
        assert status.rounds[0].seconds_ago <= status.rounds[-1].seconds_ago
        assert status.events[0].seconds_ago <= status.events[-1].seconds_ago
        assert status.to_json()["tokens"]["adds_up"]

    play_swarm(tmp_path, scenario)


def test_a_learner_adds_up() -> None:
    report = LearnerReport()
    report.take(learners.Ready(5, "cpu", 3), 0.0)
    assert (report.state, report.step) == (view.LearnerState.WAITING, 3)
    for step, loss in ((4, 2.0), (5, 1.0)):
        report.take(
            learners.StepsDone(step=step, steps=1, tokens=8, step_s=0.99, stall_s=0.01, loss=loss),
            float(step),
        )
    assert report.state is view.LearnerState.TRAINING
    assert report.loss == pytest.approx(1.9)
    assert report.stall_share == pytest.approx(0.01)
    report.take(learners.Evaluated(step=5, loss=1.5, seconds=0.1), 6.0)
    report.take(learners.Died("killed by SIGKILL", 1.0), 7.0)
    assert (report.held_out_loss, report.restarts) == (1.5, 1)
    assert (report.state, report.last_error) == (
        view.LearnerState.RESTARTING,
        "killed by SIGKILL",
    )


STEP = learners.StepsDone(step=1, steps=1, tokens=8, step_s=1.0, stall_s=0.0, loss=1.0)


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_the_loss_is_shown_again_after_a_step_that_went_wrong(loss: float) -> None:
    report = LearnerReport()
    for each in (3.0, loss, 2.0):
        report.take(replace(STEP, loss=each), 1.0)
    assert report.loss == 2.0


@pytest.mark.parametrize(
    ("step_s", "silence_s", "stands_still"),
    [(1.0, STILL_S, False), (1.0, STILL_S + 1, True), (9.0, STILL_S + 1, False), (9.0, 200, True)],
)
def test_a_learner_without_a_step_for_long_stands_still(
    step_s: float, silence_s: float, stands_still: bool
) -> None:
    report = LearnerReport()
    report.take(STEP, 10.0)
    assert report.stands_still(10.0 + silence_s, step_s) is stands_still


def test_who_has_not_begun_or_rests_or_is_started_again_does_not_stand_still() -> None:
    beginning, resting, dead = LearnerReport(), LearnerReport(paused=True), LearnerReport()
    resting.take(STEP, 0.0)
    dead.take(STEP, 0.0)
    dead.take(learners.Died("killed by SIGKILL", 1.0), 1.0)
    assert not any(report.stands_still(1e6, 1.0) for report in (beginning, resting, dead))


def test_a_learner_with_a_share_does_not_wait_for_rollouts() -> None:
    report = LearnerReport()
    for event, state in (
        (STEP, view.LearnerState.TRAINING),
        (learners.Idle(), view.LearnerState.IDLE),
        (learners.Taught(), view.LearnerState.TRAINING),
    ):
        report.take(event, 10.0)
        assert report.state is state
    assert report.stands_still(11.0 + STILL_S, 1.0)


def test_a_learner_that_hangs_is_told_and_has_no_speed(tmp_path: Path) -> None:
    async def scenario(swarm: Swarm) -> None:
        swarm.start(A, B)
        await swarm.train(60)
        reporter = report_of(swarm.nodes[A])
        reporter.learner.take(STEP, reporter.now())
        assert reporter.status().learner.tokens_per_s
        reporter.learner.stepped_at = reporter.now() - 2 * STILL_S
        assert "has taken no step for more than 60 s" in await still(swarm, reporter)
        assert reporter.status().learner.tokens_per_s is None

    play_swarm(tmp_path, scenario)


def test_a_rollout_worker_that_is_down_is_told(tmp_path: Path) -> None:
    async def scenario(swarm: Swarm) -> None:
        swarm.start(A, B)
        await swarm.train(20)
        reporter = report_of(swarm.nodes[A])
        reporter.rollouts = RolloutReport()
        told = "The rollout worker ended and is started again."
        assert told not in reporter.status().sentence
        reporter.rollouts.take(rollouts.Died("killed by SIGKILL", 1.0), reporter.now())
        assert reporter.status().sentence.endswith(told)

    play_swarm(tmp_path, scenario)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (view.LearnerState.TRAINING, "training locally"),
        (view.LearnerState.STARTING, "; waiting for the learner to start"),
        (view.LearnerState.RESTARTING, "; the learner process ended and is started again"),
    ],
)
def test_a_node_alone_says_that_it_trains_only_while_it_does(
    tmp_path: Path, state: view.LearnerState, words: str
) -> None:
    async def scenario(swarm: Swarm) -> None:
        swarm.start(A)
        await swarm.train(20)
        reporter = report_of(swarm.nodes[A])
        reporter.learner.state = state
        sentence = await still(swarm, reporter)
        assert sentence.startswith("No other node can be reached") and words in sentence
        assert ("training locally" in sentence) is (state is view.LearnerState.TRAINING)

    play_swarm(tmp_path, scenario)
