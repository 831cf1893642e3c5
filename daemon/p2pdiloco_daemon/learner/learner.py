"""The daemon's handle on its learner process.

It starts the process, restarts it when it dies, turns its messages into events and moves fragments
through shared memory. It keeps no values: after each `Ready` the daemon installs every fragment.

One process at a time lives, in a session of its own, so that a Ctrl-C in the terminal reaches the
daemon only. Whatever happens to the daemon, the process leaves (see `learner.process`).
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

import numpy as np

from p2pdiloco.optim.fragments import Fragment
from p2pdiloco.spec import RunSpec
from p2pdiloco_daemon.children.child import Child
from p2pdiloco_daemon.children.forkserver import Forkserver
from p2pdiloco_daemon.children.keeper import ChildKeeper, kept_alive
from p2pdiloco_daemon.children.shared_memory import SharedTensors, Vector
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
    Learned,
    Message,
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
    pieces_of_share,
)

__all__ = [
    "Blended",
    "CheckpointFailed",
    "Died",
    "Evaluated",
    "Idle",
    "Installed",
    "Learned",
    "Learner",
    "LearnerEvent",
    "LearnerOptions",
    "Ready",
    "RoundLeft",
    "Saving",
    "Snapshot",
    "SnapshotRefused",
    "StepsDone",
    "running_learner",
]

STOP_ASKED_S = 3.5
"""How long a stop waits for the step in hand and the inner checkpoint, before SIGTERM."""

LOOP_COPY_BYTES_MAX = 4 << 20
"""Larger vectors are copied in the worker thread: 4 MB take about a millisecond."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A fragment's local values, grown from the anchor of `base_version`."""

    request_id: int
    fragment: int
    base_version: int
    steps: int
    tokens: int
    values: Vector = field(compare=False, repr=False)
    """float32 [size of the fragment]; a copy, the receiver's own."""


@dataclass(frozen=True, slots=True)
class RoundLeft:
    """A round of gossip ended with these values; the learner has gone on with `version`."""

    fragment: int
    version: int
    steps: int
    tokens: int
    values: Vector = field(compare=False, repr=False)
    """float32 [size of the fragment]; a copy, the receiver's own."""


@dataclass(frozen=True, slots=True)
class Died:
    """The process ended by itself. Snapshots asked for before will not be answered."""

    reason: str
    restart_in_s: float


@dataclass(frozen=True, slots=True)
class Taught:
    """The learner was given episodes to learn from."""


LearnerEvent = (
    Ready
    | StepsDone
    | Installed
    | RoundLeft
    | Blended
    | Snapshot
    | SnapshotRefused
    | Evaluated
    | Idle
    | Learned
    | Saving
    | CheckpointFailed
    | Died
    | Taught
)

OnEvent = Callable[[LearnerEvent], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerOptions:
    """`fragments` are those of the spec; `directory` keeps the inner checkpoint; `node_key` selects
    the node's order of the data.
    """

    spec: RunSpec
    fragments: tuple[Fragment, ...]
    directory: Path
    node_key: str
    device: str = "cpu"
    threads: int = 1
    """Torch threads; two on a busy machine are slower than one."""
    forkserver: Forkserver | None = None
    eval_every_steps: int = 100
    """At least this many steps between evaluations, and at least 19 times the time one takes."""


def running_learner(
    options: LearnerOptions, on_event: OnEvent, executor: Executor
) -> AbstractAsyncContextManager["Learner"]:
    """A learner that lives as long as the block; its events come in order, in the event loop.

    `executor` copies large vectors; it should have one thread. An exception in the block or in
    `on_event` leaves as an ExceptionGroup.
    """
    return kept_alive(
        lambda memory_fd: Learner(options, on_event, executor, memory_fd),
        [fragment.size for fragment in options.fragments],
    )


class Learner(ChildKeeper[Command, Message]):
    """Commands to the learner; made by `running_learner`."""

    name = "the learner process"
    module = "p2pdiloco_daemon.learner.process"
    messages = get_args(Message)
    goodbye = Stop()
    asked_s = STOP_ASKED_S

    def __init__(
        self, options: LearnerOptions, on_event: OnEvent, executor: Executor, memory_fd: int
    ) -> None:
        super().__init__(options.threads, memory_fd, options.forkserver)
        self._options = options
        self._on_event = on_event
        self._executor = executor
        self._sizes = tuple(fragment.size for fragment in options.fragments)
        self._memory = SharedTensors(memory_fd, self._sizes)
        self._to_install: dict[int, tuple[Install | EndRound | Blend, Vector]] = {}
        self._installable = asyncio.Event()
        self._serials = [0] * len(self._sizes)
        self._last_request = 0
        self._paused = False

    def install(self, fragment: int, version: int, values: Vector) -> bool:
        """Has the learner overwrite a fragment at its next step boundary; answered by `Installed`.

        `values` must not change any more. A newer install replaces one that is not yet on its way,
        which then gets no answer. Before `Ready` it does nothing and returns False, since `Ready`
        asks for all.
        """
        assert values.shape == (self._sizes[fragment],) and values.dtype == np.float32
        if self._ready_child() is None:
            return False
        self._serials[fragment] += 1
        arrival = Install(fragment, version, self._serials[fragment])
        self._to_install[fragment] = (arrival, values)
        self._installable.set()
        return True

    def end_round(self, fragment: int, version: int, base: Vector, share: float) -> bool:
        """Has the learner go on from base + share * local at its next boundary after a step;
        answered by `RoundLeft`, unless it dies. False if it is not running.
        """
        assert base.shape == (self._sizes[fragment],) and base.dtype == np.float32
        if self._ready_child() is None:
            return False
        self._serials[fragment] += 1
        ending = EndRound(fragment, version, self._serials[fragment], share)
        self._to_install[fragment] = (ending, base)
        self._installable.set()
        return True

    def blend(self, fragment: int, version: int, change: Vector) -> bool:
        """Has the learner add `change` to what it has made of `version`; answered by `Blended`,
        unless it dies or receives the fragment anew. False if it is not running.
        """
        assert change.shape == (self._sizes[fragment],) and change.dtype == np.float32
        if self._ready_child() is None:
            return False
        self._to_install[fragment] = (Blend(fragment, version), change)
        self._installable.set()
        return True

    def snapshot(self, fragment: int, base_version: int, *, hold: bool = False) -> int:
        """Asks for the local values of a fragment; answered by `Snapshot` or `SnapshotRefused`.
        With `hold` the learner then stands still until the fragment is installed.

        It waits until the learner has taken all installs asked for before, holds `base_version` and
        has made a step from there; a newer version or a newer request refuses it. The values never
        grew from anything but the last install that was asked for when the answer comes.
        Returns the request id.
        """
        self._last_request += 1
        request_id = self._last_request
        if child := self._ready_child():
            child.send(
                TakeSnapshot(request_id, fragment, base_version, self._serials[fragment], hold)
            )
        else:
            self._answer(SnapshotRefused(request_id, fragment, "the learner is not running"))
        return request_id

    def evaluate(self) -> None:
        """Asks for an `Evaluated`; none comes if the learner is not running."""
        if child := self._ready_child():
            child.send(Evaluate())

    def learn(self, step: int, episodes: Sequence[bytes]) -> bool:
        """A share of a step of an rl run, as packed episodes that have been checked; answered by
        `Learned` once it has been learnt from or dropped, unless the learner dies. False if it is
        not running.
        """
        child = self._ready_child()
        if child is None:
            return False
        for piece in pieces_of_share(step, episodes):
            child.send(piece)
        if episodes:
            self._on_event(Taught())
        return True

    def pause(self) -> None:
        """No steps after the one in hand, after a restart neither; fragments are still served."""
        self._set_paused(True)

    def resume(self) -> None:
        self._set_paused(False)

    # ---------------------------------------------------------------- its lives

    def _tell_death(self, reason: str, restart_in_s: float) -> None:
        self._on_event(Died(reason, restart_in_s))

    def _life_over(self, reason: str) -> None:
        self._to_install.clear()

    def _greeting(self) -> Start:
        options = self._options
        return Start(
            spec=options.spec.model_dump_json(),
            directory=str(options.directory),
            node_key=options.node_key,
            device=options.device,
            threads=options.threads,
            eval_every_steps=options.eval_every_steps,
        )

    async def _deliver(self, child: Child[Command], message: Message) -> None:
        match message:
            case SnapshotTaken():
                self._on_event(await self._fetch_snapshot(child, message))
                return
            case RoundEnded(p, version, steps, tokens):
                values = await self._take_out(child, p)
                child.installing.discard(p)
                self._installable.set()
                self._on_event(RoundLeft(p, version, steps, tokens, values))
                return
            case Ready():
                child.is_ready = True
                child.send(SetPaused(self._paused))
            case Installed() | Blended():
                child.installing.discard(message.fragment)
                self._installable.set()
            case _:
                pass
        self._on_event(message)

    async def _fetch_snapshot(
        self, child: Child[Command], taken: SnapshotTaken
    ) -> Snapshot | SnapshotRefused:
        p = taken.fragment
        values = await self._take_out(child, p)
        if taken.serial != self._serials[p]:
            reason = "the fragment was installed anew in the meantime"
            return SnapshotRefused(taken.request_id, p, reason)
        return Snapshot(taken.request_id, p, taken.base_version, taken.steps, taken.tokens, values)

    async def _take_out(self, child: Child[Command], fragment: int) -> Vector:
        values = np.empty(self._sizes[fragment], np.float32)
        await self._copy(values, self._memory.outgoing[fragment])
        child.send(ReleaseSnapshot(fragment))
        return values

    async def _accompany(self, child: Child[Command]) -> None:
        """Moves what waits into shared memory, unless the process has yet to read what is there."""
        while await self._installable.wait():
            self._installable.clear()
            for p in sorted(self._to_install.keys() - child.installing):
                arrival, values = self._to_install.pop(p)
                child.installing.add(p)
                await self._copy(self._memory.incoming[p], values)
                child.send(arrival)

    async def _copy(self, target: Vector, source: Vector) -> None:
        if target.nbytes <= LOOP_COPY_BYTES_MAX:
            np.copyto(target, source)
        else:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._executor, np.copyto, target, source)

    def _set_paused(self, paused: bool) -> None:
        self._paused = paused
        if child := self._ready_child():
            child.send(SetPaused(paused))

    def _ready_child(self) -> Child[Command] | None:
        return self._child if self._child and self._child.is_ready else None

    def _answer(self, event: LearnerEvent) -> None:
        asyncio.get_running_loop().call_soon(self._on_event, event)
