"""The watch over real processes bites: each promise, broken by a node that is made up."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from benchmarks import chaos_watch
from benchmarks.chaos_swarm import Broken, ChaosSwarm
from benchmarks.chaos_watch import WINDOW_S, Watch
from p2pdiloco_daemon.status import view
from p2pdiloco_daemon.status.view import JsonObject


class Node:
    """Trains with one fragment; a test changes what its page says."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name = name
        self.lives = 1
        self.disturbances = 0
        self.log = directory / f"{name}.log"
        self.compute_s = 0.0
        self.step = 0
        self.state = "state"
        self.record = "record"
        self.pending = 10
        self.corrections: list[str] = []
        """What the page says of the state from the next look on, one after the other."""

    async def status(self) -> JsonObject:
        if self.corrections:
            self.state = self.corrections.pop(0)
        return view.Status(
            protocol_version=1,
            app_version="0",
            peer_id=self.name,
            node_name=self.name,
            run=view.Run(id="run", name="run"),
            state=view.NodeState.TRAINING,
            sentence="Training.",
            uptime_s=1.0,
            learner=view.Learner(
                state=view.LearnerState.TRAINING, step=self.step, compute_s=self.compute_s
            ),
            tokens=view.TokenLedger(processed=10, pending=self.pending),
            fragments=[
                view.Fragment(
                    index=0,
                    version=3,
                    head_version=3,
                    state=view.FragmentSync.IN_SYNC,
                    num_values=1,
                    digest=self.state,
                    record_digest=self.record,
                )
            ],
        ).to_json()


class Stage:
    """Two nodes, a watch over them, and a clock."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        clock: Any = SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr(chaos_watch, "time", clock)
        self.a, self.b = Node("a", directory), Node("b", directory)
        swarm: Any = SimpleNamespace(nodes={"a": self.a, "b": self.b})
        self.watch = Watch(cast(ChaosSwarm, swarm))

    def look(self) -> None:
        asyncio.run(self.look_once())

    async def look_once(self) -> None:
        await self.watch.look()

    def passes(self, seconds: float, a_steps: bool = True) -> None:
        """Looks at every second, in which both learners step, or only that of b."""
        for _ in range(int(seconds)):
            self.now += 1
            for node in (self.a, self.b):
                if a_steps or node is self.b:
                    node.compute_s += 1
                    node.step += 10
            self.look()


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(tmp_path, monkeypatch)


def test_nodes_that_train_break_nothing(stage: Stage) -> None:
    stage.look()
    stage.passes(60)


def test_a_learner_that_waits_is_noticed(stage: Stage) -> None:
    stage.look()
    with pytest.raises(Broken, match=r"a: .* seconds without a step"):
        stage.passes(2 * WINDOW_S, a_steps=False)


def test_a_long_step_is_no_waiting(stage: Stage) -> None:
    stage.look()
    for _ in range(10):
        stage.passes(WINDOW_S / 2, a_steps=False)
        stage.a.compute_s += WINDOW_S / 2
        stage.passes(1)


def test_a_learner_that_was_stopped_is_excused_until_it_goes_on(stage: Stage) -> None:
    stage.look()
    stage.a.disturbances += 1
    stage.passes(2 * WINDOW_S, a_steps=False)
    stage.a.disturbances += 1
    stage.passes(WINDOW_S)
    with pytest.raises(Broken, match="seconds without a step"):
        stage.passes(3 * WINDOW_S, a_steps=False)


def test_the_same_record_with_another_state_is_noticed(stage: Stage) -> None:
    stage.look()
    stage.b.state = "another"
    with pytest.raises(Broken, match="the same record, another state"):
        stage.look()


def test_a_page_between_two_versions_is_looked_at_again(stage: Stage) -> None:
    stage.look()
    stage.b.corrections = ["another", "state"]
    stage.look()


def test_a_ledger_that_does_not_add_up_is_noticed(stage: Stage) -> None:
    stage.a.pending = 9
    with pytest.raises(Broken, match="a: the ledger does not add up"):
        stage.look()


def test_a_traceback_in_a_log_is_noticed_once_it_is_there(stage: Stage) -> None:
    stage.a.log.write_text("fine\n")
    stage.look()
    with stage.a.log.open("a") as log:
        log.write("Traceback (most recent call last):\n  boom\n")
    with pytest.raises(Broken, match=r"a logs: Traceback"):
        stage.look()
