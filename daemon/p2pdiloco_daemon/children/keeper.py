"""Keeps a child process: starts it again whenever it died, until it is stopped.

What is said to it, and what is to be done beside it, is the subclass's: `learner` and `rollouts`.
"""

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Generic, TypeVar

from p2pdiloco_daemon.children.channel import ChannelError, MessageReader
from p2pdiloco_daemon.children.child import EXIT_S, Child, start_child
from p2pdiloco_daemon.children.forkserver import Forkserver
from p2pdiloco_daemon.children.shared_memory import memory_bytes, open_memory_file

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

RESTART_DELAY_MAX_S = 60.0
"""Restarts wait 1, 2, 4, ... seconds, at most this; imports alone keep a core busy for 4 s."""

HEALTHY_S = 60.0
"""A process that has run this long was no crash at the start: the next delay is 1 s again."""

CRASH_LOOP_DEATHS = 3
"""From so many deaths in a row on, the reason says that it is a crash loop."""

READ_BYTES = 1 << 16

C = TypeVar("C", bound="DataclassInstance")
"""The commands that it takes."""
M = TypeVar("M", bound="DataclassInstance")
"""The messages that it sends."""
K = TypeVar("K", bound="ChildKeeper")  # type: ignore[type-arg]


class ChildKeeper(ABC, Generic[C, M]):
    """At most one process lives at a time. `goodbye` asks it to end, for which it has `asked_s`
    seconds before it is made to.
    """

    name: str
    """As a sentence begins with it."""
    module: str
    messages: Sequence[type[M]]
    goodbye: C
    asked_s: float

    def __init__(self, threads: int, memory_fd: int, forkserver: Forkserver | None) -> None:
        self._threads = threads
        self._memory_fd = memory_fd
        self._forkserver = forkserver
        self._child: Child[C] | None = None
        self._stopping = asyncio.Event()
        self._ended = asyncio.Event()

    @property
    def pid(self) -> int | None:
        """Of the living process."""
        return self._child.process.pid if self._child else None

    async def keep_alive(self) -> None:
        """One life after the other, until `stop`."""
        deaths, delay_s, loop = 0, 0.0, asyncio.get_running_loop()
        try:
            while not self._stopping.is_set():
                started = loop.time()
                reason = await self._live()
                if self._stopping.is_set():
                    break
                deaths = 1 if loop.time() - started >= HEALTHY_S else deaths + 1
                delay_s = min(1.0 if deaths == 1 else 2 * delay_s, RESTART_DELAY_MAX_S)
                if deaths >= CRASH_LOOP_DEATHS:
                    reason = f"crash loop, {deaths} deaths in a row: {reason}"
                self._tell_death(reason, delay_s)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), delay_s)
        finally:
            self._ended.set()

    async def stop(self) -> None:
        """Ends the process for good: asked, then terminated, then killed."""
        self._stopping.set()
        try:
            if child := self._child:
                child.send(self.goodbye)
                await child.end(asked_s=self.asked_s if child.is_ready else 0.0)
            await self._ended.wait()
        finally:
            if self._child:
                self._child.kill()

    @abstractmethod
    def _greeting(self) -> C:
        """The first command to a new process."""

    @abstractmethod
    async def _deliver(self, child: Child[C], message: M) -> None:
        """A message came."""

    @abstractmethod
    async def _accompany(self, child: Child[C]) -> None:
        """Runs beside the process; cancelled when it ends."""

    @abstractmethod
    def _tell_death(self, reason: str, restart_in_s: float) -> None:
        """It ended, and not because of `stop`."""

    @abstractmethod
    def _life_over(self, reason: str) -> None:
        """A life has ended, however."""

    async def _live(self) -> str:
        """One life of the process; returns why it ended."""
        try:
            child = await self._started()
        except OSError as error:
            return f"{self.name} could not be started: {error}"
        reason = f"{self.name} was left"
        if child is None:
            return reason
        self._child = child
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(child.keep_last_words(), name=f"{self.name}: stderr")
                beside = tasks.create_task(self._accompany(child), name=f"{self.name}: beside")
                child.send(self._greeting())
                if self._stopping.is_set():
                    child.kill()
                problem = await self._hear(child)
                beside.cancel()
                if problem is None:
                    child.was_killed_here = not await child.ends_within(EXIT_S)
                child.kill()
            await child.process.wait()
            reason = problem or child.last_words()
        finally:
            child.kill()
            self._child = None
            child.writer.close()
            self._life_over(reason)
        return reason

    async def _started(self) -> Child[C] | None:
        """None if `stop` came first."""
        starting: asyncio.Task[Child[C]] = asyncio.create_task(
            start_child(self.name, self.module, self._threads, self._memory_fd, self._forkserver)
        )
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            return starting.result() if starting.done() else None
        finally:
            starting.cancel()
            stopping.cancel()

    async def _hear(self, child: Child[C]) -> str | None:
        """Until the process closes its socket, or says what cannot be understood (returned)."""
        reader: MessageReader[M] = MessageReader(self.messages)
        try:
            while data := await child.reader.read(READ_BYTES):
                for message in reader.feed(data):
                    await self._deliver(child, message)
        except ChannelError as error:
            return f"{self.name} sent garbage: {error}"
        except ConnectionError:
            pass
        return None


@asynccontextmanager
async def kept_alive(make: Callable[[int], K], sizes: Sequence[int]) -> AsyncIterator[K]:
    """What `make` makes of a shared memory file for vectors of these sizes, with its process, as
    long as the block lasts. An exception in the block or in an event leaves as an ExceptionGroup.
    """
    memory_fd = open_memory_file(memory_bytes(sizes))
    try:
        keeper = make(memory_fd)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(keeper.keep_alive(), name=keeper.name)
            try:
                yield keeper
            finally:
                await keeper.stop()
    finally:
        os.close(memory_fd)
