"""The learner process: inner steps for ever, and the swarm's business at the boundaries between.

At a boundary it first installs the fragments that have arrived, then hands out the snapshots that
were asked for. It blocks on nothing but its own steps, except while it is paused, has not yet
received every fragment, or, in an rl run, has no episodes to learn from: then it waits for the next
command. It leaves when told to, or when the control socket closes because the daemon is gone.

Started by `learner` as `p2pdiloco_daemon.learner.process CONTROL_FD MEMORY_FD`, bound to it (see
`bound`); the first message on the control socket is `Start`.
"""

import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Protocol, assert_never

import torch

from p2pdiloco.errors import P2PDilocoError, StoreError
from p2pdiloco.learn.disagreement import output_distributions, probe_batch
from p2pdiloco.learn.evaluate import held_out_loss
from p2pdiloco.learn.inner_loop import InnerLoop, bf16_is_faster
from p2pdiloco.learn.local_model import StepResult
from p2pdiloco.learn.models import build_model, num_parameters
from p2pdiloco.learn.predictions import POSITIONS, pack_predictions
from p2pdiloco.learn.text import Text, TextStream, open_text
from p2pdiloco.optim.fragments import fragments_of
from p2pdiloco.optim.mixing import Continuation
from p2pdiloco.rl.episodes import unpack
from p2pdiloco.rl.loop import RlLoop, shares_of
from p2pdiloco.rl.shares import Shares
from p2pdiloco.spec import RunSpec
from p2pdiloco_daemon.children.background import work_in_background
from p2pdiloco_daemon.children.channel import ChannelError
from p2pdiloco_daemon.children.shared_memory import SharedTensors, Vector
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
    Ready,
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
    episodes_in,
)
from p2pdiloco_daemon.learner.stopwatch import Clock, Stopwatch, queued_clock

CHECKPOINT_NAME = "inner.safetensors"
"""In the node's directory: Adam's moments, cursor and step count, not the weights."""

CHECKPOINT_PERIOD_S = 60.0
"""What a crash may cost of Adam's moments; a write is tens of milliseconds for a model of 10 M."""

EVALUATION_SHARE_MAX = 0.05
"""Part of the time that scheduled evaluations may take, however often they are asked for."""


class Trainer(Protocol):
    """What the process needs of `p2pdiloco.learn.inner_loop.InnerLoop`."""

    @property
    def num_steps(self) -> int: ...

    @property
    def steps(self) -> Sequence[int]: ...

    @property
    def tokens(self) -> Sequence[int]: ...

    def step(self) -> StepResult: ...

    def read_fragment(self, p: int, out: Vector) -> None: ...

    def overwrite_fragment(self, p: int, values: Vector) -> None: ...

    def add_to_fragment(self, p: int, values: Vector) -> None: ...

    def save(self, path: Path) -> None: ...


class Judge(Protocol):
    """Looks at the model between steps."""

    def held_out_loss(self) -> float | None:
        """None if nothing is held out."""

    def predictions(self) -> bytes: ...


class LearnerProcess:
    """The main loop and what it remembers: versions, snapshots asked for, pause."""

    def __init__(
        self,
        control: Control,
        memory: SharedTensors,
        trainer: Trainer,
        judge: Judge,
        checkpoint: Path,
        eval_every_steps: int,
        clock: Clock = time.perf_counter,
        queued: Clock = lambda: 0.0,
        shares: Shares | None = None,
    ) -> None:
        self._control = control
        self._memory = memory
        self._trainer = trainer
        self._judge = judge
        self._checkpoint = checkpoint
        self._eval_every_steps = eval_every_steps
        self._paused = False
        self._clock = clock
        self._shares = shares
        """What the trainer learns from, in an rl run."""
        self._share_pieces = bytearray()
        self._is_idle = False
        num_fragments = len(memory.incoming)
        self._versions: list[int | None] = [None] * num_fragments
        self._serials = [0] * num_fragments
        self._arrivals: dict[int, Install] = {}
        self._endings: dict[int, EndRound] = {}
        self._held: set[int] = set()
        """Fragments whose snapshot it stands still for."""
        self._wanted: dict[int, TakeSnapshot] = {}
        self._unreleased: set[int] = set()
        self._evaluation_wanted = False
        self._evaluated_step = trainer.num_steps
        self._next_evaluation = clock()
        self._next_checkpoint = clock() + CHECKPOINT_PERIOD_S
        self._steps = Stopwatch(clock, queued)
        self._stalls = Stopwatch(clock, queued)
        self._stopping = False

    def run(self) -> None:
        """Until `Stop` or until the daemon is gone; the inner checkpoint is then on disk."""
        try:
            stepped = False
            while not self._stopping:
                if not stepped:
                    self._tell_idle()
                    self._control.wait()
                with self._stalls.running():
                    self._pass_boundary()
                self._look_at_the_model()
                if stepped := self._may_step():
                    self._step()
        except EOFError:
            pass
        with suppress(EOFError):
            if self._complete():
                self._save()
            self._control.drain()

    def _complete(self) -> bool:
        return None not in self._versions

    def _may_step(self) -> bool:
        return self._is_free() and (self._shares is None or self._shares.has_part)

    def _is_free(self) -> bool:
        return self._complete() and not (self._paused or self._held or self._stopping)

    def _tell_idle(self) -> None:
        if not self._is_idle and self._is_free() and not self._may_step():
            self._is_idle = True
            self._control.post(Idle())

    def _pass_boundary(self) -> None:
        for command in self._control.commands():
            self._take(command)
        self._install_arrivals()
        self._tell_lessons()
        self._end_rounds()
        self._answer_snapshots()
        if self._may_step() and self._clock() >= self._next_checkpoint:
            self._control.post(Saving(True))
            self._save()
            self._control.post(Saving(False))

    def _take(self, command: Command) -> None:  # noqa: C901 (one case for each command)
        match command:
            case Install():
                self._arrivals[command.fragment] = command
                self._endings.pop(command.fragment, None)
            case EndRound():
                self._endings[command.fragment] = command
            case Blend():
                self._blend(command)
            case TakeSnapshot():
                if superseded := self._wanted.get(command.fragment):
                    self._refuse(superseded, "a newer request for the same fragment came")
                self._wanted[command.fragment] = command
            case ReleaseSnapshot():
                self._unreleased.discard(command.fragment)
            case SetPaused():
                self._paused = command.paused
            case Evaluate():
                self._evaluation_wanted = True
            case Learn():
                self._take_share(command)
            case Stop():
                self._stopping = True
            case Start():
                raise ChannelError("a learner is started once, got Start again")
            case _:
                assert_never(command)

    def _install_arrivals(self) -> None:
        for p, arrival in sorted(self._arrivals.items()):
            steps, tokens = self._trainer.steps[p], self._trainer.tokens[p]
            self._trainer.overwrite_fragment(p, self._memory.incoming[p])
            self._versions[p], self._serials[p] = arrival.version, arrival.serial
            self._held.discard(p)
            self._control.post(Installed(p, arrival.version, steps, tokens))
            if self._shares:
                self._shares.stand_on(arrival.version)
        self._arrivals.clear()

    def _take_share(self, command: Learn) -> None:
        if self._shares is None:
            raise ChannelError("a share of a step, in a run that learns from text")
        self._share_pieces += command.piece
        if command.is_last:
            episodes = map(unpack, episodes_in(bytes(self._share_pieces)))
            self._share_pieces.clear()
            self._shares.add(command.step, episodes)
            self._is_idle = False

    def _tell_lessons(self) -> None:
        for lesson in self._shares.take_ended() if self._shares else ():
            self._control.post(Learned(**asdict(lesson)))

    def _blend(self, wanted: Blend) -> None:
        p = wanted.fragment
        done = self._versions[p] == wanted.version and p not in self._arrivals
        if done:
            self._trainer.add_to_fragment(p, self._memory.incoming[p])
        self._control.post(Blended(p, done))

    def _end_rounds(self) -> None:
        for p, ending in sorted(self._endings.items()):
            if not self._trainer.steps[p] or p in self._unreleased:
                continue
            del self._endings[p]
            steps, tokens = self._trainer.steps[p], self._trainer.tokens[p]
            local = self._memory.outgoing[p]
            self._trainer.read_fragment(p, local)
            start = Continuation(self._memory.incoming[p], ending.share).start(local)
            self._trainer.overwrite_fragment(p, start)
            self._unreleased.add(p)
            self._versions[p], self._serials[p] = ending.version, ending.serial
            self._control.post(RoundEnded(p, ending.version, steps, tokens))

    def _answer_snapshots(self) -> None:
        for p, wanted in sorted(self._wanted.items()):
            version = self._versions[p]
            if version is None or self._serials[p] < wanted.serial or version < wanted.base_version:
                continue
            if version > wanted.base_version:
                del self._wanted[p]
                self._refuse(
                    wanted, f"the learner has version {version}, not {wanted.base_version}"
                )
            elif self._trainer.steps[p] and p not in self._unreleased:
                del self._wanted[p]
                if self._trainer.tokens[p]:
                    self._hand_out(wanted)
                else:
                    self._refuse(wanted, "the learner had nothing to learn from")

    def _hand_out(self, wanted: TakeSnapshot) -> None:
        p = wanted.fragment
        self._trainer.read_fragment(p, self._memory.outgoing[p])
        self._unreleased.add(p)
        if wanted.hold:
            self._held.add(p)
        self._control.post(
            SnapshotTaken(
                request_id=wanted.request_id,
                fragment=p,
                base_version=wanted.base_version,
                serial=self._serials[p],
                steps=self._trainer.steps[p],
                tokens=self._trainer.tokens[p],
            )
        )

    def _refuse(self, wanted: TakeSnapshot, reason: str) -> None:
        self._control.post(SnapshotRefused(wanted.request_id, wanted.fragment, reason))

    def _save(self) -> None:
        try:
            self._trainer.save(self._checkpoint)
        except StoreError as error:
            self._control.post(CheckpointFailed(str(error)))
        self._next_checkpoint = self._clock() + CHECKPOINT_PERIOD_S

    def _look_at_the_model(self) -> None:
        """Evaluates where asked or due; not counted as stall."""
        is_ready = self._complete() and not self._stopping
        if is_ready and (self._evaluation_wanted or self._evaluation_due()):
            self._evaluate()

    def _evaluation_due(self) -> bool:
        return (
            self._may_step()
            and self._trainer.num_steps - self._evaluated_step >= self._eval_every_steps
            and self._clock() >= self._next_evaluation
        )

    def _evaluate(self) -> None:
        started = self._clock()
        loss, predictions = self._judge.held_out_loss(), self._judge.predictions()
        ended = self._clock()
        self._evaluation_wanted = False
        self._evaluated_step = self._trainer.num_steps
        self._next_evaluation = ended + (ended - started) * (1 / EVALUATION_SHARE_MAX - 1)
        if loss is not None:
            self._control.post(
                Evaluated(loss, self._trainer.num_steps, ended - started, predictions)
            )

    def _step(self) -> None:
        self._is_idle = False
        with self._steps.running():
            result = self._trainer.step()
        step_s, step_queued_s = self._steps.take()
        stall_s, stall_queued_s = self._stalls.take()
        self._control.post(
            StepsDone(
                step=self._trainer.num_steps,
                steps=1,
                tokens=result.tokens,
                step_s=step_s,
                stall_s=stall_s,
                loss=result.loss,
                step_queued_s=step_queued_s,
                stall_queued_s=stall_queued_s,
            )
        )


class _ModelJudge:
    """The local model's held-out loss. `text` is None in an rl run."""

    def __init__(self, model: torch.nn.Module, text: Text | None, spec: RunSpec) -> None:
        self._model = model
        self._text = text
        self._sequence_length = spec.data.sequence_length
        self._is_compared = spec.sync.gossips

    def held_out_loss(self) -> float | None:
        if self._text is None:
            return None
        return held_out_loss(self._model, self._text, self._sequence_length)

    def predictions(self) -> bytes:
        if self._text is None or not self._is_compared:
            return b""
        sequences = -(-POSITIONS // self._sequence_length) + 3
        probe = probe_batch(self._text, self._sequence_length, sequences)
        return pack_predictions(output_distributions(self._model, probe))


def main(control_fd: int, memory_fd: int) -> None:
    """Runs one learner; returns when it was told to leave or the daemon is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for fd in (control_fd, memory_fd):
        os.set_inheritable(fd, False)
    control = Control(socket.socket(fileno=control_fd))
    try:
        process = _build(receive_start(control), control, memory_fd)
    except EOFError:
        return
    work_in_background()  # not before: importing torch is what everybody waits for
    process.run()


def receive_start(control: Control) -> Start:
    """The first message; the daemon sends nothing more before `Ready`."""
    while True:
        control.wait()
        match control.commands():
            case []:
                continue
            case [Start() as start]:
                return start
            case others:
                raise ChannelError(f"expected Start and nothing else, got {others!r:.80}")


def _build(start: Start, control: Control, memory_fd: int) -> LearnerProcess:
    torch.set_num_threads(start.threads)
    spec = RunSpec.model_validate_json(start.spec)
    memory = SharedTensors(memory_fd, [fragment.size for fragment in fragments_of(spec)])
    model = build_model(spec.architecture, spec.seed, spec.data.sequence_length)
    text = None if spec.rl else open_text(spec.data)
    shares = shares_of(spec) if spec.rl else None
    trainer = _build_trainer(start, spec, model, text, shares)
    checkpoint = Path(start.directory) / CHECKPOINT_NAME
    if checkpoint.exists():
        try:
            trainer.load(checkpoint)
        except StoreError as error:
            control.post(CheckpointFailed(str(error)))
    control.post(Ready(num_parameters(model), start.device, trainer.num_steps))
    return LearnerProcess(
        control,
        memory,
        trainer,
        _ModelJudge(model, text, spec),
        checkpoint,
        start.eval_every_steps,
        queued=queued_clock(),
        shares=shares,
    )


def _build_trainer(
    start: Start, spec: RunSpec, model: torch.nn.Module, text: Text | None, shares: Shares | None
) -> InnerLoop | RlLoop:
    fragments = fragments_of(spec)
    if shares:
        return RlLoop(model, shares, spec, fragments, start.device)
    assert text, "a run learns from text or from episodes"
    return InnerLoop(
        model,
        TextStream(text, spec.data.sequence_length, spec.seed, start.node_key),
        spec.inner,
        fragments,
        start.device,
        bf16=bf16_is_faster(num_parameters(model), start.device, time.perf_counter),
    )


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]), int(sys.argv[2]))
    except P2PDilocoError as error:
        sys.exit(str(error))
