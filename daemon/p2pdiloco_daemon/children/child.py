"""A child process of the daemon, with a control socket and shared memory: started, heard, ended.

It has a session of its own, so that a Ctrl-C in the terminal reaches the daemon only, and is killed
with all that it started. Not here: what is said over the socket; `keeper` starts another one.
"""

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from p2pdiloco_daemon.children.bound import bound_command
from p2pdiloco_daemon.children.channel import pack
from p2pdiloco_daemon.children.forkserver import ForkedProcess, Forkserver, reading

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

STOP_TERMINATED_S = 0.8
"""How long a stop waits for the process after SIGTERM."""

EXIT_S = 10.0
"""How long a process may take to end after it closed its socket; torch is slow to go, too."""

STDERR_TAIL_BYTES = 8192
"""What is kept of its last words; a traceback through torch is about 4 KB."""

C = TypeVar("C", bound="DataclassInstance")
"""The commands that it takes."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Child(Generic[C]):
    """One process: the daemon's end of its control socket, and its last words."""

    name: str
    """As a sentence begins with it."""
    process: asyncio.subprocess.Process | ForkedProcess
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    is_ready: bool = False
    installing: set[int] = field(default_factory=set)
    """Fragments whose `incoming` vector the process has yet to read."""
    was_killed_here: bool = False
    stderr_tail: bytes = b""

    @property
    def num_unsent(self) -> int:
        """Bytes of commands that wait for it to read those before them."""
        return self.writer.transport.get_write_buffer_size()

    def send(self, command: C) -> None:
        if not self.writer.is_closing():
            self.writer.write(pack(command))

    async def keep_last_words(self) -> None:
        assert self.process.stderr is not None
        while data := await self.process.stderr.read(STDERR_TAIL_BYTES):
            logger.debug("%s: %s", self.name, data.decode(errors="replace").rstrip())
            self.stderr_tail = (self.stderr_tail + data)[-STDERR_TAIL_BYTES:]

    def last_words(self) -> str:
        """How the process ended and the end of what it wrote."""
        code = self.process.returncode
        if code is not None and code < 0:
            how = f"killed by {_named(-code)}"
            if self.was_killed_here:
                how += f" by its node, which it had left {EXIT_S:.0f} s before"
            elif -code == signal.SIGKILL:
                how += " (out of memory?)"
        else:
            how = f"exit code {code}"
        lines = self.stderr_tail.decode(errors="replace").strip().splitlines()[-5:]
        return "; ".join([f"{self.name} ended: {how}", *map(str.strip, lines)])

    async def ends_within(self, timeout_s: float) -> bool:
        try:
            await asyncio.wait_for(self.process.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    async def end(self, asked_s: float) -> None:
        """Waits for a process that was asked to stop, then makes it."""
        if not await self.ends_within(asked_s):
            with suppress(ProcessLookupError):
                self.process.terminate()
            if not await self.ends_within(STOP_TERMINATED_S):
                self.kill()

    def kill(self) -> None:
        """The process and all that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


def _named(number: int) -> str:
    """A signal; most of the real-time ones have no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


async def start_child(
    name: str, module: str, threads: int, memory_fd: int, forkserver: Forkserver | None
) -> Child[C]:
    """Has a new process run MODULE CONTROL_FD MEMORY_FD, bound to us: forked where that can be,
    else executed. OSError if it can be neither.
    """
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_unix_connection(sock=ours)
    try:
        with theirs:
            fds = (theirs.fileno(), memory_fd)
            process = await _forked(name, module, fds, forkserver)
            return Child(name, process or await _executed(module, threads, fds), reader, writer)
    except BaseException:
        writer.close()
        raise


async def _forked(
    name: str, module: str, fds: Sequence[int], forkserver: Forkserver | None
) -> ForkedProcess | None:
    """None if that cannot be."""
    if forkserver is None:
        return None
    said, stderr_end = socket.socketpair()
    stderr = await reading(said)
    try:
        with stderr_end:
            process = await forkserver.fork(module, stderr_end.fileno(), fds)
        process.stderr = stderr
        return process
    except OSError as error:
        logger.warning("%s is executed, since it cannot be forked: %s", name, error)
        return None


async def _executed(module: str, threads: int, fds: Sequence[int]) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *bound_command(module, *map(str, fds)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        pass_fds=fds,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": str(threads), "GOMP_SPINCOUNT": "0"},
    )
