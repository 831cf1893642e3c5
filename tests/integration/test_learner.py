"""The real learner process: tiny model, real text, signals, and what is left behind.

One process serves most tests, since its imports take seconds. Each test pauses it when it is done.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from learner_stage import START_S, Stage, open_stage
from swarm_processes import is_running, wait_until

from benchmarks.made_up import made_up_spec
from p2pdiloco.optim.fragments import fragments_of
from p2pdiloco.spec import DataSpec, ModelSpec, RunSpec, SyncSpec
from p2pdiloco_daemon.children.background import NICENESS
from p2pdiloco_daemon.children.shared_memory import open_memory_file
from p2pdiloco_daemon.learner.learner import (
    CheckpointFailed,
    Died,
    Evaluated,
    Installed,
    LearnerEvent,
    Ready,
    Snapshot,
    SnapshotRefused,
    StepsDone,
)
from p2pdiloco_daemon.learner.process import CHECKPOINT_NAME

pytestmark = [pytest.mark.loopback, pytest.mark.timeout(1200)]

DRAFT = RunSpec(name="test", sync=SyncSpec(num_fragments=3), data=DataSpec(sequence_length=32))


SPEC = made_up_spec(DRAFT)
FRAGMENTS = fragments_of(SPEC)
TOKENS_PER_STEP = SPEC.inner.batch_size * SPEC.data.sequence_length


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    """One event loop for the tests that share a process."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def shared_stage(
    runner: asyncio.Runner,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Stage]:
    opened: asyncio.Queue[Stage] = asyncio.Queue()
    done = asyncio.Event()

    async def hold() -> None:
        async with open_stage(tmp_path_factory.mktemp("node"), SPEC) as stage:
            opened.put_nowait(stage)
            await done.wait()

    async def open_it() -> tuple[Stage, asyncio.Task[None]]:
        holding = asyncio.create_task(hold())
        return await opened.get(), holding

    async def close_it(holding: asyncio.Task[None]) -> None:
        done.set()
        await holding

    stage, holding = runner.run(open_it())
    yield stage
    runner.run(close_it(holding))


Play = Callable[[Callable[[Stage], Coroutine[None, None, None]]], None]


@pytest.fixture
def play(runner: asyncio.Runner, shared_stage: Stage) -> Play:
    """Plays a scene with the shared process, which trains during the scene only."""

    async def framed(scene: Callable[[Stage], Coroutine[None, None, None]]) -> None:
        shared_stage.learner.resume()
        shared_stage.install_all(version=0)
        await shared_stage.installed_all(version=0)
        await scene(shared_stage)
        shared_stage.learner.pause()

    return lambda scene: runner.run(framed(scene))


def test_what_was_installed_comes_back_after_one_small_step(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        since = len(stage.events)
        request_id = stage.learner.snapshot(1, base_version=0)
        snapshot = await stage.next(Snapshot, since)
        assert (snapshot.request_id, snapshot.fragment) == (request_id, 1)
        assert snapshot.tokens == snapshot.steps * TOKENS_PER_STEP
        moved = np.abs(snapshot.values - stage.values[1]).max()
        assert 0 < moved < 4 * SPEC.inner.learning_rate * snapshot.steps

    play(scene)


def test_counters_at_each_receipt_equal_the_steps_reported_before_it(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        since = len(stage.events)
        for version in range(1, 6):
            await stage.steps(version)
            stage.learner.install(version % 3, version, stage.values[version % 3])
        await stage.next(Installed, since, lambda event: event.version == 5)
        assert_receipts_match_steps(stage.events)

    play(scene)


def test_only_the_newest_of_several_installs_is_taken(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        since = len(stage.events)
        for version in range(100, 150):
            stage.learner.install(0, version, stage.values[0] + np.float32(version))
        await stage.next(Installed, since, lambda event: event.version == 149)
        taken = [event.version for event in stage.events[since:] if isinstance(event, Installed)]
        assert len(taken) <= 2
        stage.learner.snapshot(0, base_version=149)
        snapshot = await stage.next(Snapshot, since)
        assert np.median(snapshot.values) == pytest.approx(149, abs=0.1)

    play(scene)


def test_a_snapshot_never_mixes_two_installs(play: Play) -> None:
    """The version number may be the same as before: another lineage."""

    async def scene(stage: Stage) -> None:
        for height in np.linspace(0.1, 1, 10, dtype=np.float32):
            since = len(stage.events)
            stage.learner.snapshot(2, base_version=0)
            stage.learner.install(2, 0, stage.values[2] + height)
            answer = await stage.next((Snapshot, SnapshotRefused), since)
            if isinstance(answer, Snapshot):
                assert np.median(answer.values) == pytest.approx(height, abs=0.04)

    play(scene)


def test_a_snapshot_of_a_version_gone_by_is_refused(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        since = len(stage.events)
        stage.learner.install(2, 7, stage.values[2])
        stage.learner.snapshot(2, base_version=6)
        refused = await stage.next(SnapshotRefused, since)
        assert refused.reason == "the learner has version 7, not 6"

    play(scene)


def test_while_paused_it_serves_and_does_not_step(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        await stage.steps(1)
        stage.learner.pause()
        stage.learner.evaluate()
        since = len(stage.events)
        evaluated = await stage.next(Evaluated, since)
        since = stage.events.index(evaluated, since)
        stage.learner.install(0, 1, stage.values[0])
        await stage.next(Installed, since)
        assert not [event for event in stage.events[since:] if isinstance(event, StepsDone)]
        assert 1 < evaluated.loss < 7
        stage.learner.resume()
        await stage.steps(1)

    play(scene)


def test_training_from_real_text_lowers_the_held_out_loss(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        since = len(stage.events)
        stage.learner.evaluate()
        before = await stage.next(Evaluated, since)
        await stage.steps(60)
        since = len(stage.events)
        stage.learner.evaluate()
        after = await stage.next(Evaluated, since)
        assert after.loss < before.loss - 0.3

    play(scene)


def test_it_trains_in_the_background(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        await stage.steps(1)
        nicer = psutil.Process(stage.learner.pid).nice() - psutil.Process().nice()
        assert nicer == min(NICENESS, 19 - psutil.Process().nice())

    play(scene)


def test_kill_9_costs_the_open_counters_and_nothing_else(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        await stage.steps(2)
        stage.learner.pause()  # which holds for the next process, too
        since = len(stage.events)
        assert stage.learner.pid is not None
        os.kill(stage.learner.pid, signal.SIGKILL)
        died = await stage.next(Died, since)
        assert "SIGKILL" in died.reason
        assert died.restart_in_s == 1.0
        stage.learner.snapshot(0, base_version=0)
        refused = await stage.next(SnapshotRefused, since)
        assert refused.reason == "the learner is not running"
        await stage.next(Ready, since)
        stage.install_all(version=3)
        last = await stage.installed_all(version=3)
        assert (last.steps, last.tokens) == (0, 0)
        stage.learner.resume()
        await stage.steps(1)

    play(scene)


def test_a_stop_remembers_and_leaves_nothing(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    monkeypatch.setenv("TMPDIR", str(elsewhere))

    async def first_life() -> StepsDone:
        async with open_stage(tmp_path, SPEC) as stage:
            stage.install_all(version=0)
            await stage.steps(2)
            pid = stage.learner.pid
            await stage.learner.stop()
            assert stage.learner.pid is None
            assert pid is not None and not process_exists(pid)
            assert not [event for event in stage.events if isinstance(event, Died)]
            return [event for event in stage.events if isinstance(event, StepsDone)][-1]

    async def second_life() -> Ready:
        async with open_stage(tmp_path, SPEC) as stage:
            return await stage.next(Ready)

    last = asyncio.run(first_life())
    assert [path.name for path in tmp_path.iterdir()] == [CHECKPOINT_NAME]
    assert not list(elsewhere.iterdir())
    assert asyncio.run(second_life()).step == last.step


def test_a_damaged_checkpoint_is_reported_and_done_without(tmp_path: Path) -> None:
    (tmp_path / CHECKPOINT_NAME).write_bytes(b"\x00" * 100)

    async def life() -> list[LearnerEvent]:
        async with open_stage(tmp_path, SPEC) as stage:
            return stage.events

    failed, ready, *_ = asyncio.run(life())
    assert isinstance(failed, CheckpointFailed) and CHECKPOINT_NAME in failed.reason
    assert isinstance(ready, Ready) and ready.step == 0


def test_a_learner_that_cannot_start_says_why_and_is_tried_again(tmp_path: Path) -> None:
    """Also: a stop while it waits for the next try is quick."""
    other_model = made_up_spec(DRAFT).model_copy(update={"model": ModelSpec(preset="small")})

    async def life() -> list[LearnerEvent]:
        async with open_stage(tmp_path, other_model) as stage:
            return stage.events

    [died] = asyncio.run(life())
    assert isinstance(died, Died)
    assert "exit code 1" in died.reason
    assert "the fragments were planned for another model" in died.reason
    assert died.restart_in_s == 1.0


def test_no_orphan_is_left_when_the_daemon_is_killed(tmp_path: Path) -> None:
    """A daemon in a process of its own, killed while its learner trains."""
    daemon = subprocess.Popen(
        [sys.executable, __file__, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    with daemon:
        assert daemon.stdout is not None
        child_pid = int(daemon.stdout.readline())
        child = psutil.Process(child_pid)
        daemon.kill()
        wait_until("the learner is gone", lambda: not is_running(child))


@pytest.mark.parametrize("bytes_sent", [b"", b"\xff" * 64], ids=["closed", "garbage"])
def test_a_control_socket_that_closes_or_talks_garbage_ends_it(bytes_sent: bytes) -> None:
    daemon, child = socket.socketpair()
    memory_fd = open_memory_file(8)
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "p2pdiloco_daemon.learner.process",
            str(child.fileno()),
            str(memory_fd),
        ],
        pass_fds=(child.fileno(), memory_fd),
        stderr=subprocess.PIPE,
        text=True,
    )
    child.close()
    os.close(memory_fd)
    with process, daemon:
        daemon.sendall(bytes_sent)
        daemon.shutdown(socket.SHUT_WR)
        _, stderr = process.communicate(timeout=START_S)
    assert process.returncode == (1 if bytes_sent else 0)
    assert len(stderr.splitlines()) == (1 if bytes_sent else 0)


def assert_receipts_match_steps(events: list[LearnerEvent]) -> None:
    """The ledger's promise, over the whole history: every token is in exactly one receipt."""
    steps, tokens = [0] * 3, [0] * 3
    for event in events:
        match event:
            case StepsDone():
                steps = [count + event.steps for count in steps]
                tokens = [count + event.tokens for count in tokens]
            case Installed(fragment=p):
                assert (event.steps, event.tokens) == (steps[p], tokens[p])
                steps[p] = tokens[p] = 0
            case Died():
                steps, tokens = [0] * 3, [0] * 3
            case _:
                pass


def process_exists(pid: int) -> bool:
    return bool(psutil.pid_exists(pid))


async def _be_a_daemon(directory: Path) -> None:
    async with open_stage(directory, SPEC) as stage:
        stage.install_all(version=0)
        await stage.steps(1)
        print(stage.learner.pid, flush=True)  # noqa: T201
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_be_a_daemon(Path(sys.argv[1])))
