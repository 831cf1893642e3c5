"""What is held of turns as policies follow each other, with a worker that installs them at once."""

import asyncio
import os
from array import array
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from p2pdiloco.optim.fragments import plan_fragments
from p2pdiloco.protocol.turns import TurnId
from p2pdiloco.spec import RlSpec, RunSpec, SyncSpec
from p2pdiloco_daemon.children.child import Child
from p2pdiloco_daemon.children.shared_memory import memory_bytes, open_memory_file
from p2pdiloco_daemon.rollouts.messages import (
    Command,
    Installed,
    InstallWeights,
    Message,
    Play,
    Played,
    Speeds,
)
from p2pdiloco_daemon.rollouts.worker import Policy, RolloutOptions, Rollouts

FRAGMENTS = plan_fragments({"weight": (4,)}, 1, ())
SPEC = RunSpec(name="policies", seed=0, rl=RlSpec(), sync=SyncSpec(num_fragments=1))
TURN = TurnId(3, 0, 0)


class Worker:
    """`newest` is what it is to be given."""

    def __init__(self, executor: ThreadPoolExecutor, memory: int) -> None:
        self.newest = policy(TURN.step)
        self.num_installed = 0
        options = RolloutOptions(
            spec=SPEC, run_id="run", fragments=FRAGMENTS, newest=lambda: self.newest
        )
        self.rollouts = Rollouts(options, lambda _: None, executor, memory)
        child = SimpleNamespace(is_ready=True, num_unsent=0, send=self._send)
        self._child = cast("Child[Command]", child)
        self._more = asyncio.Event()
        self._answers: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def living(self) -> AsyncIterator[None]:
        """One life of its process."""
        self.rollouts._child = self._child
        ones = array("i", [1]).tobytes(), array("f", [1.0]).tobytes()
        await self.rollouts._deliver(self._child, Speeds(1, 64, 1.0, *ones))
        life = asyncio.create_task(self.rollouts._accompany(self._child))
        try:
            await self.installs()
            yield
        finally:
            life.cancel()
            await asyncio.wait((life,))
            self.rollouts._life_over("it was left")

    async def installs(self) -> None:
        """The next policy."""
        self._more.clear()
        await self._more.wait()

    def _send(self, command: Command) -> None:
        match command:
            case InstallWeights(version):
                self._answer(Installed(version, 0.0))
            case Play(number, _, _, turn, _):
                self._answer(Played(number, turn + 1, False, 9, 0, b"episode"))

    def _answer(self, message: Message) -> None:
        async def answer() -> None:
            await self.rollouts._deliver(self._child, message)
            if isinstance(message, Installed):
                self._more.set()

        task = asyncio.create_task(answer())
        self._answers.add(task)
        task.add_done_callback(self._answers.discard)


def policy(version: int) -> Policy:
    return Policy(version, [np.zeros(4, np.float32)])


@pytest.fixture
def memory() -> Iterator[int]:
    fd = open_memory_file(memory_bytes([4]))
    yield fd
    os.close(fd)


def test_turns_are_held_as_long_as_their_policy_and_not_its_version(memory: int) -> None:
    async def story(worker: Worker) -> None:
        async with worker.living():
            await worker.rollouts.play(TURN, b"")
            assert worker.rollouts.held(TURN.step, 0)
        async with worker.living():
            assert worker.rollouts.held(TURN.step, 0)
            worker.newest = policy(TURN.step)
            await worker.installs()
            assert not worker.rollouts.held(TURN.step, 0)
            load = worker.rollouts.load()
            assert load and not load.held

    async def main() -> None:
        with ThreadPoolExecutor(1) as executor:
            async with asyncio.timeout(300):
                await story(Worker(executor, memory))

    asyncio.run(main())
