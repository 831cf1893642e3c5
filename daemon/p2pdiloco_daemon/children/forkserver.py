"""A process that has imported what a child needs, and forks: the next child is there at once.

To import torch and transformers keeps a core busy for 5 s and more, at each start of a child and at
each restart. The forkserver is forked from the daemon, which has imported the half of it for
itself, before that has a loop or sockets; it imports the rest, and forks for each order.

A child becomes the daemon's own: what forked it ends at once, and the daemon is a *subreaper*, to
which Linux hands orphans. So it is bound to the daemon and waited for as any other. Elsewhere, and
once the forkserver has died, children are executed instead (`child`).
"""

import asyncio
import ctypes
import gc
import importlib
import os
import runpy
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import NoReturn

from setproctitle import setproctitle

from p2pdiloco_daemon.children.bound import bind_to

FORK_S = 120.0
"""How long a fork may take, with the imports before it, on a busy machine."""

PRELOADED = ("p2pdiloco_daemon.learner.process", "transformers.models.llama.modeling_llama")
"""Each node has a learner, and most learn a model of this family, which transformers would import
once it is built."""

_PR_SET_CHILD_SUBREAPER = 36
_ORDER_BYTES = 256
_PID_BYTES = 4


class ForkedProcess:
    """A child that the forkserver made, with the face of an `asyncio.subprocess.Process`."""

    def __init__(self, pid: int, stderr: asyncio.StreamReader) -> None:
        self.pid = pid
        self.stderr = stderr
        self.returncode: int | None = None
        self._pidfd = os.pidfd_open(pid)
        self._ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._pidfd, self._on_end)

    async def wait(self) -> int | None:
        await self._ended.wait()
        return self.returncode

    def terminate(self) -> None:
        if self.returncode is None:  # else its id may be another's
            os.kill(self.pid, signal.SIGTERM)

    def _on_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        _pid, status = os.waitpid(self.pid, 0)
        self.returncode = os.waitstatus_to_exitcode(status)
        self._ended.set()


class Forkserver:
    """The daemon's side; made by `running_forkserver`."""

    def __init__(self, orders: socket.socket, pid: int) -> None:
        self.pid = pid
        self._orders = orders

    async def fork(
        self, module: str, memory_fd: int
    ) -> tuple[ForkedProcess, asyncio.StreamReader, asyncio.StreamWriter]:
        """Has a new process run MODULE CONTROL_FD MEMORY_FD; (it, the streams of its control
        socket). OSError if that cannot be.
        """
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        try:
            with theirs:
                stderr = await self._order(module, theirs.fileno(), memory_fd)
            async with asyncio.timeout(FORK_S):
                return ForkedProcess(await _pid_told(reader), stderr), reader, writer
        except BaseException:
            writer.close()
            raise

    async def _order(self, module: str, control_fd: int, memory_fd: int) -> asyncio.StreamReader:
        """-> what the child will write to stderr, which ends with it, or if there will be none."""
        output, their_stderr = os.pipe()
        try:
            stderr = asyncio.StreamReader()
            await asyncio.get_running_loop().connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(stderr), os.fdopen(output, "rb", 0)
            )
            socket.send_fds(self._orders, [module.encode()], [control_fd, memory_fd, their_stderr])
        finally:
            os.close(their_stderr)
        return stderr


@contextmanager
def running_forkserver() -> Iterator[Forkserver | None]:
    """As long as the block lasts; None where there is no such thing. Before it, nothing may have
    been opened that a child must not have.
    """
    if sys.platform != "linux":
        yield None
        return
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    daemon = os.getpid()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        ours.close()
        _leave_with(partial(_serve, theirs, daemon))
    theirs.close()
    ours.setblocking(False)
    try:
        with ours:
            yield Forkserver(ours, pid)
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


async def _pid_told(reader: asyncio.StreamReader) -> int:
    """The first that comes from a child."""
    try:
        return int.from_bytes(await reader.readexactly(_PID_BYTES), "big")
    except asyncio.IncompleteReadError as error:
        raise ConnectionError("the forkserver has ended") from error


def _serve(orders: socket.socket, daemon: int) -> None:
    """Until the daemon closes its end, or is gone."""
    os.setsid()
    if not bind_to(daemon):
        return
    setproctitle("p2pdiloco forkserver")
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(nothing, fd)
    for module in PRELOADED:
        _import(module)
    while True:
        order, fds, _flags, _address = socket.recv_fds(orders, _ORDER_BYTES, 3)
        if not order:
            return
        module = order.decode()
        _import(module)
        gc.freeze()  # what is here by now, children do not look through: they share its memory
        if os.fork() == 0:
            orders.close()
            _fork_for_adoption(partial(_be_child, module, daemon, os.getpid(), *fds))
        os.wait()
        for fd in fds:
            os.close(fd)


def _import(module: str) -> None:
    with suppress(Exception):  # which the child will meet, too, and can say
        importlib.import_module(module)


def _fork_for_adoption(run: Callable[[], None]) -> NoReturn:
    """Ends at once, whereupon the daemon adopts who is to run."""
    if os.fork() == 0:
        _leave_with(run)
    os._exit(0)


def _be_child(
    module: str, daemon: int, middle: int, control_fd: int, memory_fd: int, stderr_fd: int
) -> None:
    """What `children.bound` does, once the daemon has adopted this process."""
    os.setsid()
    _until_ended(middle)
    if not bind_to(daemon):
        return
    os.dup2(stderr_fd, sys.stderr.fileno())
    os.close(stderr_fd)
    setproctitle(f"{sys.executable} -m {module}")
    os.write(control_fd, os.getpid().to_bytes(_PID_BYTES, "big"))
    sys.argv = [module, str(control_fd), str(memory_fd)]
    sys.modules.pop(module, None)  # it has been imported, not run
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _until_ended(pid: int) -> None:
    with suppress(ProcessLookupError):
        pidfd = os.pidfd_open(pid)
        select.select([pidfd], [], [])
        os.close(pidfd)


def _leave_with(run: Callable[[], None]) -> NoReturn:
    """Ends this process as Python would, had it been executed for what it runs."""
    code = 1
    try:
        run()
        code = 0
    except SystemExit as error:
        if isinstance(error.code, str):
            sys.stderr.write(f"{error.code}\n")
        else:
            code = error.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(OSError):
            sys.stderr.flush()
        os._exit(code)
