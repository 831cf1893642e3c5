"""The boundaries between steps, scripted: what the daemon says after which step, what it hears."""

import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import get_args

import numpy as np
import numpy.typing as npt
import pytest
from rl_builders import episode

from p2pdiloco.errors import StoreError
from p2pdiloco.learn.local_model import StepResult
from p2pdiloco.rl.episodes import pack as pack_episode
from p2pdiloco.rl.shares import Shares
from p2pdiloco_daemon.children.channel import ChannelError, MessageReader, pack
from p2pdiloco_daemon.children.shared_memory import SharedTensors, memory_bytes, open_memory_file
from p2pdiloco_daemon.learner import messages
from p2pdiloco_daemon.learner.control import Control
from p2pdiloco_daemon.learner.messages import (
    Blend,
    Blended,
    CheckpointFailed,
    Command,
    EndRound,
    Evaluate,
    Evaluated,
    Idle,
    Install,
    Installed,
    Learn,
    Learned,
    Message,
    ReleaseSnapshot,
    RoundEnded,
    Saving,
    SetPaused,
    SnapshotRefused,
    SnapshotTaken,
    Start,
    StepsDone,
    Stop,
    TakeSnapshot,
    pieces_of_share,
)
from p2pdiloco_daemon.learner.process import LearnerProcess

SIZES = (3, 2)
STEP_TOKENS = 10
BOTH = (Install(0, 0, 1), Install(1, 0, 1))


@dataclass
class FakeTrainer:
    """Every step adds 1 to every value; `after_step` is the daemon's turn."""

    after_step: Callable[[int], None]
    shares: Shares | None = None
    num_steps: int = 0
    steps: list[int] = field(default_factory=lambda: [0, 0])
    tokens: list[int] = field(default_factory=lambda: [0, 0])
    values: list[npt.NDArray[np.float32]] = field(
        default_factory=lambda: [np.zeros(size, np.float32) for size in SIZES]
    )
    saved: int = 0
    disk_full: bool = False

    def step(self) -> StepResult:
        self.num_steps += 1
        tokens = STEP_TOKENS
        if self.shares:
            part = self.shares.take()
            self.shares.learnt(part, None)
            tokens = part.num_tokens
        for p in range(len(SIZES)):
            self.steps[p] += 1
            self.tokens[p] += tokens
            self.values[p] += 1
        self.after_step(self.num_steps)
        return StepResult(loss=2.5, tokens=tokens)

    def read_fragment(self, p: int, out: npt.NDArray[np.float32]) -> None:
        out[:] = self.values[p]

    def overwrite_fragment(self, p: int, values: npt.NDArray[np.float32]) -> None:
        self.values[p][:] = values
        self.steps[p] = self.tokens[p] = 0

    def add_to_fragment(self, p: int, values: npt.NDArray[np.float32]) -> None:
        self.values[p] += values

    def save(self, path: Path) -> None:
        if self.disk_full:
            raise StoreError("the disk is full")
        self.saved += 1


class FakeJudge:
    def held_out_loss(self) -> float:
        return 1.25

    def predictions(self) -> bytes:
        return b"predicted"


@dataclass
class Clock:
    """Every look at it takes a while."""

    look_s: float = 0.001
    now: float = 100.0

    def __call__(self) -> float:
        self.now += self.look_s
        return self.now


class Scene:
    """A process with fakes around it, and the daemon's end of its socket."""

    def __init__(
        self, eval_every_steps: int = 1000, look_s: float = 1.0, shares: Shares | None = None
    ) -> None:
        self.daemon, child = socket.socketpair()
        self.daemon.settimeout(5)
        fd = open_memory_file(memory_bytes(SIZES))
        self.memory = SharedTensors(fd, SIZES)
        self.trainer = FakeTrainer(self._speak, shares)
        self.clock = Clock()
        self._child = child
        self._reader: MessageReader[Message] = MessageReader(get_args(Message))
        self._script: Mapping[int, Sequence[Command]] = {}
        self._process = LearnerProcess(
            Control(child, Clock(look_s)),
            SharedTensors(fd, SIZES),
            self.trainer,
            FakeJudge(),
            Path("inner"),
            eval_every_steps,
            self.clock,
            shares=shares,
        )

    def run(self, script: Mapping[int, Sequence[Command]]) -> list[Message]:
        """Says `script[0]` at once and `script[n]` during step n; returns all it hears."""
        self._script = script
        self._speak(0)
        self._process.run()
        return self._all_heard()

    def run_until(
        self, kind: type[Message], script: Mapping[int, Sequence[Command]]
    ) -> list[Message]:
        """The same for a process that comes to wait: says Stop once it has heard such a message."""
        self._script = script
        self._speak(0)
        heard: list[Message] = []
        with ThreadPoolExecutor(1) as other:
            running = other.submit(self._process.run)
            while not any(isinstance(message, kind) for message in heard):
                heard += self._reader.feed(self.daemon.recv(1 << 16))
            self.daemon.sendall(pack(Stop()))
            running.result()
        return heard + self._all_heard()

    def _all_heard(self) -> list[Message]:
        self._child.close()
        heard: list[Message] = []
        while data := self.daemon.recv(1 << 16):
            heard += self._reader.feed(data)
        return heard

    def _speak(self, step: int) -> None:
        for command in self._script.get(step, ()):
            self.daemon.sendall(pack(command))

    def close(self) -> None:
        self.daemon.close()
        self._child.close()


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    yield scene
    scene.close()


def without_steps(messages: Sequence[Message]) -> list[Message]:
    return [message for message in messages if not isinstance(message, StepsDone)]


def test_it_steps_only_once_every_fragment_was_installed(scene: Scene) -> None:
    heard = scene.run({0: [BOTH[0], Stop()]})
    assert heard == [Installed(0, 0, 0, 0)]
    assert scene.trainer.num_steps == scene.trainer.saved == 0


def test_it_steps_and_reports_until_told_to_stop(scene: Scene) -> None:
    heard = scene.run({0: BOTH, 3: [Stop()]})
    assert heard[:2] == [Installed(0, 0, 0, 0), Installed(1, 0, 0, 0)]
    steps = [message for message in heard[2:] if isinstance(message, StepsDone)]
    assert [(done.step, done.steps, done.tokens, done.loss) for done in steps] == [
        (number, 1, STEP_TOKENS, 2.5) for number in (1, 2, 3)
    ]
    assert scene.trainer.saved == 1


def test_a_receipt_reports_the_counters_up_to_its_boundary(scene: Scene) -> None:
    heard = scene.run({0: BOTH, 2: [Install(1, 1, 2)], 5: [Install(1, 2, 3), Stop()]})
    position = heard.index(Installed(1, 1, 2, 2 * STEP_TOKENS))
    before = heard[position - 1]
    assert isinstance(before, StepsDone)
    assert before.step == 2
    assert heard[-1] == Installed(1, 2, 3, 3 * STEP_TOKENS)


def test_arrivals_are_taken_before_snapshots(scene: Scene) -> None:
    scene.memory.incoming[0][:] = 100
    snapshot = TakeSnapshot(request_id=9, fragment=0, base_version=4, serial=2)
    heard = scene.run({0: BOTH, 2: [snapshot, Install(0, 4, 2)], 3: [Stop()]})
    taken = SnapshotTaken(9, 0, base_version=4, serial=2, steps=1, tokens=STEP_TOKENS)
    assert heard[-1] == taken
    assert scene.memory.outgoing[0].tolist() == [101.0] * 3


def test_a_snapshot_waits_for_its_version_and_a_first_step(scene: Scene) -> None:
    early = TakeSnapshot(request_id=1, fragment=1, base_version=1, serial=1)
    heard = scene.run({0: [*BOTH, early], 4: [Install(1, 1, 2)], 6: [Stop()]})
    position = heard.index(SnapshotTaken(1, 1, 1, 2, steps=1, tokens=STEP_TOKENS))
    last = [message for message in heard[:position] if isinstance(message, StepsDone)][-1]
    assert last.step == 5


def test_a_snapshot_waits_for_the_install_it_was_asked_after(scene: Scene) -> None:
    """Another lineage may have the same version number."""
    asked = TakeSnapshot(request_id=1, fragment=0, base_version=0, serial=2)
    heard = scene.run({0: BOTH, 1: [asked], 3: [Install(0, 0, 2)], 5: [Stop()]})
    assert SnapshotTaken(1, 0, 0, 2, steps=1, tokens=STEP_TOKENS) in heard


def test_a_snapshot_of_an_older_version_is_refused(scene: Scene) -> None:
    heard = scene.run({0: BOTH, 1: [Install(0, 3, 2)], 2: [TakeSnapshot(5, 0, 2, 2), Stop()]})
    assert heard[-1] == SnapshotRefused(5, 0, "the learner has version 3, not 2")


def test_a_newer_request_replaces_one_that_waits(scene: Scene) -> None:
    heard = scene.run(
        {0: BOTH, 1: [TakeSnapshot(1, 0, 9, 1)], 2: [TakeSnapshot(2, 0, 0, 1), Stop()]}
    )
    assert without_steps(heard)[-2:] == [
        SnapshotRefused(1, 0, "a newer request for the same fragment came"),
        SnapshotTaken(2, 0, 0, 1, steps=2, tokens=2 * STEP_TOKENS),
    ]


def test_a_snapshot_is_not_overwritten_before_it_was_read(scene: Scene) -> None:
    script: dict[int, list[Command]] = {
        0: list(BOTH),
        1: [TakeSnapshot(1, 0, 0, 1)],
        2: [TakeSnapshot(2, 0, 0, 1)],
        4: [ReleaseSnapshot(0), Stop()],
    }
    taken = [message for message in scene.run(script) if isinstance(message, SnapshotTaken)]
    assert [(message.request_id, message.steps) for message in taken] == [(1, 1), (2, 4)]


def test_a_round_is_left_for_the_next_start_without_a_wait(scene: Scene) -> None:
    scene.memory.incoming[0][:] = 100
    ending = EndRound(fragment=0, version=1, serial=2, share=0.5)
    heard = scene.run({0: BOTH, 2: [ending], 3: [ReleaseSnapshot(0), Stop()]})
    left = RoundEnded(0, 1, steps=2, tokens=2 * STEP_TOKENS)
    assert left in heard
    assert scene.memory.outgoing[0].tolist() == [102.0] * 3
    assert scene.trainer.values[0].tolist() == [100 + 51 + 1.0] * 3
    assert scene.trainer.num_steps == 3


def test_a_round_ends_after_a_first_step_and_once_its_vector_is_free(scene: Scene) -> None:
    script: dict[int, list[Command]] = {
        0: list(BOTH),
        1: [TakeSnapshot(1, 0, 0, 1)],
        2: [EndRound(0, 1, 2, 0.5), EndRound(1, 1, 2, 0.5)],
        4: [ReleaseSnapshot(0), ReleaseSnapshot(1)],
        5: [EndRound(1, 2, 3, 0.5), Stop()],
    }
    ended = [message for message in scene.run(script) if isinstance(message, RoundEnded)]
    assert [(m.fragment, m.version, m.steps) for m in ended] == [(1, 1, 2), (0, 1, 4), (1, 2, 3)]


def test_what_partners_differ_by_is_added_while_counters_go_on(scene: Scene) -> None:
    scene.memory.incoming[0][:] = 10
    heard = scene.run({0: BOTH, 2: [Blend(0, 0)], 3: [Blend(0, 7), Stop()]})
    assert [m for m in heard if isinstance(m, Blended)] == [Blended(0, True), Blended(0, False)]
    assert scene.trainer.steps[0] == 3


def test_held_it_stands_still_until_the_fragment_is_installed(scene: Scene) -> None:
    asked = TakeSnapshot(1, 0, 0, 1, hold=True)
    heard = scene.run({0: BOTH, 1: [asked, ReleaseSnapshot(0), Install(1, 1, 2), Stop()]})
    assert scene.trainer.num_steps == 1
    assert heard[-1] == Installed(1, 1, 1, STEP_TOKENS) or isinstance(heard[-1], SnapshotTaken)


def test_paused_it_serves_but_does_not_step(scene: Scene) -> None:
    paused: list[Command] = [SetPaused(True), Install(0, 1, 2), Evaluate(), Stop()]
    heard = scene.run({0: BOTH, 1: paused})
    assert heard[-1] == Installed(0, 1, 1, STEP_TOKENS)
    assert scene.trainer.num_steps == 1


def test_an_evaluation_comes_between_steps(scene: Scene) -> None:
    heard = scene.run({0: BOTH, 1: [Evaluate()], 2: [Stop()]})
    [evaluated] = without_steps(heard)[2:]
    assert isinstance(evaluated, Evaluated)
    assert (evaluated.loss, evaluated.step) == (1.25, 1)
    assert evaluated.predictions == b"predicted"


def test_scheduled_evaluations_take_a_twentieth_of_the_time_at_most() -> None:
    scene = Scene(eval_every_steps=1)
    heard = scene.run({0: BOTH, 200: [Stop()]})
    scene.close()
    spent = sum(message.seconds for message in heard if isinstance(message, Evaluated))
    assert 0 < spent < 0.05 * (scene.clock.now - 100.0)


def test_an_inner_checkpoint_is_written_every_minute(scene: Scene) -> None:
    def pass_time(step: int) -> None:
        scene.clock.now += 10

    scene.trainer.after_step = pass_time
    scene.daemon.sendall(b"".join(map(pack, BOTH)))
    scene.trainer.after_step = lambda step: (
        pass_time(step) if step < 14 else scene.daemon.sendall(pack(Stop()))
    )
    heard = scene.run({})
    assert scene.trainer.saved == 3
    assert [each.under_way for each in heard if isinstance(each, Saving)] == [True, False] * 2


def test_a_checkpoint_that_cannot_be_written_is_reported_and_survived(scene: Scene) -> None:
    scene.trainer.disk_full = True
    assert scene.run({0: BOTH, 1: [Stop()]})[-1] == CheckpointFailed("the disk is full")


def test_it_leaves_when_the_daemon_is_gone(scene: Scene) -> None:
    scene.trainer.after_step = lambda step: scene.daemon.shutdown(socket.SHUT_RDWR)
    scene.run({0: BOTH})
    assert (scene.trainer.num_steps, scene.trainer.saved) == (1, 1)


def test_garbage_ends_it_with_a_sentence(scene: Scene) -> None:
    scene.daemon.sendall(b"\xff" * 100)
    with pytest.raises(ChannelError, match="at most"):
        scene.run({})


def test_a_second_start_is_refused(scene: Scene) -> None:
    with pytest.raises(ChannelError, match="started once"):
        scene.run({0: [Start("", "", "", "", 1, 1)]})


def test_quick_steps_are_reported_together_and_before_any_answer() -> None:
    scene = Scene(look_s=0.001)
    heard = scene.run({0: BOTH, 20: [Install(0, 1, 2)], 30: [Stop()]})
    scene.close()
    assert [type(message) for message in heard[2:]] == [StepsDone, Installed, StepsDone]
    assert [message.steps for message in heard[2:] if isinstance(message, StepsDone)] == [20, 10]


def test_a_daemon_that_does_not_read_costs_no_step_and_loses_no_count(scene: Scene) -> None:
    """The socket's buffer fills up; what waits stays small; everything arrives in the end."""
    reader: MessageReader[Message] = MessageReader(get_args(Message))
    heard: list[Message] = []

    def daemon(step: int) -> None:
        if step == 5000:
            scene.daemon.setblocking(False)
            with suppress(BlockingIOError):
                while True:
                    heard.extend(reader.feed(scene.daemon.recv(1 << 16)))
            scene.daemon.settimeout(5)
        if step == 5010:
            scene.daemon.sendall(pack(Stop()))

    scene.daemon.sendall(b"".join(map(pack, BOTH)))
    scene.trainer.after_step = daemon
    heard += scene.run({})
    done = [message for message in heard if isinstance(message, StepsDone)]
    assert sum(message.steps for message in done) == 5010
    assert len(done) < 4000


# ---------------------------------------------------------------- an rl run


@pytest.fixture
def rl_scene() -> Iterator[Scene]:
    """Two steps are a period."""
    scene = Scene(shares=Shares(2, 4, 1, "dapo"))
    yield scene
    scene.close()


def share(step: int, first: int = 0) -> list[Learn]:
    episodes = (replace(episode(trajectory=first + i, version=step), step=step) for i in range(4))
    return list(pieces_of_share(step, [pack_episode(each) for each in episodes]))


def num_steps_in(messages: Sequence[Message]) -> int:
    return sum(message.steps for message in messages if isinstance(message, StepsDone))


def test_without_a_share_it_waits_and_takes_commands(rl_scene: Scene) -> None:
    heard = rl_scene.run_until(Evaluated, {0: [*BOTH, Evaluate()]})
    assert [type(message) for message in heard[2:]] == [Evaluated, Idle]
    assert rl_scene.trainer.num_steps == 0


def test_after_a_share_that_comes_too_late_it_says_again_that_it_waits(rl_scene: Scene) -> None:
    installs = [Install(0, 3, 1), Install(1, 3, 1)]
    heard = rl_scene.run_until(Learned, {0: [*installs, *share(0)]})
    assert num_steps_in(heard) == 0
    assert [type(message) for message in heard[-2:]] == [Learned, Idle]


def test_a_share_is_learnt_from_and_told_of_before_it_waits_again(rl_scene: Scene) -> None:
    heard = rl_scene.run_until(Learned, {0: [*BOTH, *share(0)]})
    assert num_steps_in(heard) == 2
    [learned] = [message for message in heard if isinstance(message, Learned)]
    assert (learned.step, learned.num_episodes, learned.num_dropped) == (0, 4, 0)
    assert learned.reward == 1.0
    assert [type(message) for message in without_steps(heard)[-2:]] == [Learned, Idle]


def test_a_snapshot_that_waits_for_a_step_is_taken_before_it_waits_for_a_share(
    rl_scene: Scene,
) -> None:
    asked = TakeSnapshot(request_id=9, fragment=0, base_version=0, serial=1)
    heard = rl_scene.run_until(SnapshotTaken, {0: [*BOTH, *share(0)], 2: [asked]})
    assert SnapshotTaken(9, 0, 0, 1, steps=2, tokens=12) in heard


def test_who_had_nothing_to_learn_from_has_nothing_to_hand_out(rl_scene: Scene) -> None:
    asked = TakeSnapshot(request_id=9, fragment=0, base_version=0, serial=1)
    heard = rl_scene.run_until(SnapshotRefused, {0: [*BOTH, *pieces_of_share(0, [])], 2: [asked]})
    assert SnapshotRefused(9, 0, "the learner had nothing to learn from") in heard
    assert num_steps_in(heard) == 2


def test_what_is_too_old_once_a_version_arrives_is_told_of(rl_scene: Scene) -> None:
    heard = rl_scene.run({0: [*BOTH, *share(0)], 1: [Install(0, 2, 2), Install(1, 2, 2), Stop()]})
    [learned] = [message for message in heard if isinstance(message, Learned)]
    assert (learned.step, learned.num_dropped) == (0, 2)
    assert num_steps_in(heard) == 1


def test_a_share_may_come_in_many_pieces(rl_scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "PIECE_BYTES_MAX", 100)
    pieces = share(0)
    assert len(pieces) > 3
    heard = rl_scene.run({0: [*BOTH, *pieces], 2: [Stop()]})
    assert num_steps_in(heard) == 2


def test_a_share_in_a_run_that_learns_from_text_breaks_the_channel(scene: Scene) -> None:
    with pytest.raises(ChannelError, match="learns from text"):
        scene.run({0: [*BOTH, *share(0)]})


def test_nothing_is_evaluated_where_nothing_is_held_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeJudge, "held_out_loss", lambda self: None)
    scene = Scene(eval_every_steps=1)
    heard = scene.run({0: BOTH, 3: [Evaluate()], 5: [Stop()]})
    scene.close()
    assert not [message for message in heard if isinstance(message, Evaluated)]
