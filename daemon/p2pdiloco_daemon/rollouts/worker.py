"""The daemon's handle on its rollout worker: starts it, keeps its policy new, passes answers on.

The worker is a process like the learner's (`child`), restarted whenever it dies. Who waits for an
answer is then told so: nothing is asked twice behind anybody's back. In an rl run it plays turns of
trajectories, too (`trajectories`).
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from typing import get_args

import numpy as np

from p2pdiloco.optim.fragments import Fragment
from p2pdiloco.protocol import turns
from p2pdiloco.protocol.turns import TurnId
from p2pdiloco.spec import RunSpec
from p2pdiloco_daemon.children.child import Child
from p2pdiloco_daemon.children.forkserver import Forkserver
from p2pdiloco_daemon.children.keeper import ChildKeeper, kept_alive
from p2pdiloco_daemon.children.shared_memory import SharedTensors, Vector
from p2pdiloco_daemon.rollouts.backends import TORCH
from p2pdiloco_daemon.rollouts.held_turns import Played
from p2pdiloco_daemon.rollouts.messages import (
    Cancel,
    Command,
    Finished,
    Installed,
    InstallWeights,
    Message,
    Progressed,
    Ready,
    Refused,
    Start,
    Stop,
    Submit,
)
from p2pdiloco_daemon.rollouts.trajectories import ROWS_MAX, TURNS_MAX, RolloutsBusy, Trajectories

WAITING_MAX = 32
"""Questions that wait for the worker, beside those that it runs. One more is refused as busy."""

CACHE_BYTES = 1 << 28
"""For the worker's keys and values."""

REFRESH_S = 5.0
"""Shortest time between two policies: each change voids all keys and values."""
REFRESH_SHARE_MAX = 0.05
"""Part of the time that changes of the policy may take."""
LOOK_S = 0.5
"""Between looks for a newer policy."""
RL_LOOK_S = 0.1
"""In an rl run, where nothing is generated before the newest is there. It is installed at once."""

STOP_ASKED_S = 1.0
"""How long a stop waits for the step in hand, before SIGTERM."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Policy:
    """A whole model: one float32 vector per fragment, none of which changes any more."""

    version: int
    """Merges in it: the sum of the fragments' versions."""
    values: Sequence[Vector]

    def is_same(self, other: "Policy") -> bool:
        """Vectors are never changed, so the same objects are the same weights."""
        return all(a is b for a, b in zip(self.values, other.values, strict=True))


@dataclass(frozen=True, slots=True)
class Died:
    """The process ended by itself, and with it all answers."""

    reason: str
    restart_in_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a client asks for; see `messages.Submit`."""

    prompt: str = ""
    prompt_tokens: bytes = b""
    trajectory: str = ""
    num_tokens_max: int = 16
    seed: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    stops: str = "[]"


AnswerEvent = Progressed | Finished | Refused | Died
Answer = asyncio.Queue[AnswerEvent]
"""Every event but `Progressed` is the last. No longer than the tokens asked for, and one."""

RolloutEvent = Message | Died
OnEvent = Callable[[RolloutEvent], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutOptions:
    """`newest` gives the policy to serve, or None while there is none."""

    spec: RunSpec
    run_id: str
    fragments: tuple[Fragment, ...]
    newest: Callable[[], Policy | None]
    device: str = "cpu"
    threads: int = 1
    backend: str = TORCH
    forkserver: Forkserver | None = None


def running_rollouts(
    options: RolloutOptions, on_event: OnEvent, executor: Executor
) -> AbstractAsyncContextManager["Rollouts"]:
    """A worker that lives as long as the block. `executor` copies the weights."""
    return kept_alive(
        lambda memory_fd: Rollouts(options, on_event, executor, memory_fd),
        [fragment.size for fragment in options.fragments],
    )


class Rollouts(ChildKeeper[Command, Message]):
    """Questions to the worker; made by `running_rollouts`."""

    name = "the rollout worker"
    module = "p2pdiloco_daemon.rollouts.process"
    messages = get_args(Message)
    goodbye = Stop()
    asked_s = STOP_ASKED_S

    def __init__(
        self, options: RolloutOptions, on_event: OnEvent, executor: Executor, memory_fd: int
    ) -> None:
        super().__init__(options.threads, memory_fd, options.forkserver)
        self._options = options
        self._on_event = on_event
        self._executor = executor
        self._memory = SharedTensors(memory_fd, [f.size for f in options.fragments])
        self._answers: dict[int, Answer] = {}
        self._last_id = 0
        self._version: int | None = None
        self._policy: Policy | None = None
        """The newest that a worker was given, perhaps in an earlier life."""
        self._trajectories = Trajectories(self._serving_child, self._next_id)
        self._installed: asyncio.Queue[Installed] = asyncio.Queue()

    @property
    def version(self) -> int | None:
        """Of the policy that generates; None while there is none."""
        return self._version

    @property
    def num_unsent(self) -> int:
        """Bytes of what was asked here that wait for the worker to read them."""
        return self._child.num_unsent if self._child else 0

    @contextmanager
    def answering(self, question: Question) -> Iterator[Answer]:
        """The answer as it comes; leaving the block ends it. RolloutsBusy if none can begin."""
        child = self._serving_child()
        if len(self._answers) >= ROWS_MAX + WAITING_MAX:
            raise RolloutsBusy(f"{len(self._answers)} requests are in work; ask again later")
        number = self._next_id()
        self._answers[number] = answer = Answer()
        child.send(
            Submit(
                id=number,
                prompt=question.prompt,
                prompt_tokens=question.prompt_tokens,
                trajectory=question.trajectory,
                num_tokens_max=question.num_tokens_max,
                seed=question.seed,
                temperature=question.temperature,
                top_k=question.top_k,
                top_p=question.top_p,
                stops=question.stops,
            )
        )
        try:
            yield answer
        finally:
            if self._answers.pop(number, None) is not None:
                child.send(Cancel(number))

    def load(self) -> turns.Load | None:
        """How the worker is, and what it holds of the present step. None while it has no policy."""
        return self._trajectories.load() if self._version is not None else None

    def held(self, step: int, trajectory: int) -> Played | None:
        """What it played last of a trajectory of the present step."""
        return self._trajectories.held(step, trajectory)

    async def play(self, turn: TurnId, history: bytes, *, dispatched: bool = True) -> Played:
        """Generates a turn and lets the environment act. `history` is the packed episode so far; it
        may be empty before the first turn, and for the turn that is next after what is `held`.

        What others than the dispatcher ask for goes on from nothing that is held, and is not held:
        its history may be another than what the policy chose, and the dispatcher, who need not send
        one, would get an answer to that.

        RolloutsBusy or TurnRefused. Cancelling withdraws the turn, unless others wait for the same.
        """
        return await self._trajectories.play(turn, history, dispatched=dispatched)

    async def check(
        self,
        step: int,
        episodes: Sequence[bytes],
        replayed: Collection[int] = (),
        *,
        ended: bool = True,
    ) -> list[str | None]:
        """What is wrong with each of these packed episodes of a step, as a sentence; None where
        nothing was found. Those at the indices `replayed` are computed again, too, as far as the
        worker has the policy that chose their tokens: it has the newest.

        Without `ended` they must be episodes so far. RolloutsBusy if it cannot be said now,
        TurnRefused in a run that has no trajectories.
        """
        return await self._trajectories.check(step, episodes, replayed, ended=ended)

    def _serving_child(self) -> Child[Command]:
        if self._child is None or self._version is None:
            raise RolloutsBusy("the rollout worker is starting; ask again in some seconds")
        return self._child

    def _next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    # ---------------------------------------------------------------- its lives

    def _tell_death(self, reason: str, restart_in_s: float) -> None:
        logger.warning("%s; started again in %.0f s", reason, restart_in_s)
        self._on_event(Died(reason, restart_in_s))

    def _greeting(self) -> Start:
        return Start(
            spec=self._options.spec.model_dump_json(),
            run_id=self._options.run_id,
            device=self._options.device,
            threads=self._options.threads,
            rows_max=ROWS_MAX,
            waiting_max=WAITING_MAX + TURNS_MAX,
            cache_bytes=CACHE_BYTES,
            backend=self._options.backend,
        )

    def _life_over(self, reason: str) -> None:
        self._version = None
        self._trajectories.life_over(reason)
        for answer in self._answers.values():
            answer.put_nowait(Died(reason, 0.0))
        self._answers.clear()

    async def _deliver(self, child: Child[Command], message: Message) -> None:
        match message:
            case Progressed():
                if answer := self._answers.get(message.id):
                    answer.put_nowait(message)
            case Finished() | Refused():
                if answer := self._answers.pop(message.id, None):
                    answer.put_nowait(message)
            case Installed():
                self._version = message.version
                self._installed.put_nowait(message)
            case Ready():
                child.is_ready = True
            case _:
                pass
        self._trajectories.take(message)
        self._on_event(message)

    async def _accompany(self, child: Child[Command]) -> None:
        """Hands the worker the newest policy, not too often, as long as it lives."""
        self._installed = asyncio.Queue()
        served: Policy | None = None
        is_rl = self._options.spec.rl is not None
        look_s = RL_LOOK_S if is_rl else LOOK_S
        while True:
            policy = self._options.newest() if child.is_ready else None
            pause_s = look_s
            if policy is not None and (served is None or not policy.is_same(served)):
                self._void_if_replaced_by(policy)
                loop = asyncio.get_running_loop()
                await loop.run_in_executor(self._executor, self._copy, policy)
                child.send(InstallWeights(policy.version))
                installed = await self._installed.get()
                served = self._policy = policy
                if not is_rl:
                    pause_s = max(REFRESH_S, installed.seconds / REFRESH_SHARE_MAX)
            await asyncio.sleep(pause_s)

    def _void_if_replaced_by(self, policy: Policy) -> None:
        """Another one of the same version is that of another lineage."""
        before = self._policy
        if before and before.version == policy.version and not policy.is_same(before):
            self._trajectories.void()

    def _copy(self, policy: Policy) -> None:
        for target, source in zip(self._memory.incoming, policy.values, strict=True):
            np.copyto(target, source)
