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
from collections.abc import Callable, Iterator, Sequence
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

COMMANDS = (
    *PRELOADED,
    "p2pdiloco_daemon.app",
    "p2pdiloco_daemon.rollouts.process",
    "p2pdiloco_daemon.demo.forked_command",
    "p2pdiloco_bootstrap.app",
)
"""What nodes and first peers need, and what their own forkservers then find imported."""

_PR_SET_CHILD_SUBREAPER = 36
_ORDER_BYTES = 256
_PID_BYTES = 16
_FDS_MAX = 8


class ForkedProcess:
    """A process that the forkserver made, with the face of an `asyncio.subprocess.Process`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.stdout: asyncio.StreamReader | None = None
        self.stderr: asyncio.StreamReader | None = None
        self.returncode: int | None = None
        self._pidfd = os.pidfd_open(pid)
        self._ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._pidfd, self._on_end)

    async def wait(self) -> int | None:
        await self._ended.wait()
        return self.returncode

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        if self.returncode is None:  # else its id may be another's
            os.kill(self.pid, number)

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

    async def fork(self, module: str, stderr_fd: int, fds: Sequence[int]) -> ForkedProcess:
        """Has a new process run MODULE FDS... in a session of its own; OSError if that cannot
        be.
        """
        told, pid_end = socket.socketpair()
        with told:
            with pid_end:
                order(self._orders, module, [pid_end.fileno(), stderr_fd, *fds])
            told.setblocking(False)
            try:
                async with asyncio.timeout(FORK_S):
                    pid = await asyncio.get_running_loop().sock_recv(told, _PID_BYTES)
            except TimeoutError:
                self._orders.close()  # it is not asked again: each would wait as long
                raise TimeoutError(f"not done within {FORK_S:.0f} s") from None
        if not pid:
            raise ConnectionError("the forkserver has ended")
        return ForkedProcess(int(pid))


async def reading(source: socket.socket) -> asyncio.StreamReader:
    """Closes it at its end."""
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, source)
    return reader


def order(orders: socket.socket, module: str, fds: Sequence[int]) -> None:
    """What `serve` takes. `fds` are where the process id will be told, stderr, and those of which
    the process itself will be told the numbers.
    """
    assert len(module) <= _ORDER_BYTES and len(fds) <= _FDS_MAX
    socket.send_fds(orders, [module.encode()], fds)


@contextmanager
def running_forkserver(preloaded: Sequence[str] = PRELOADED) -> Iterator[Forkserver | None]:
    """As long as the block lasts; None where there cannot be one. Before it, nothing may have been
    opened that a child must not have.
    """
    if sys.platform != "linux":
        yield None
        return
    adopt_orphans()
    me = os.getpid()
    sys.stdout.flush()  # or each child would write it again
    ours, theirs = order_sockets()
    with ours:
        with theirs:
            pid = _fork_if_possible()
            if pid == 0:
                ours.close()
                _leave_with(partial(serve, theirs, me, preloaded))
        if pid is None:
            yield None
            return
        ours.setblocking(False)
        try:
            yield Forkserver(ours, pid)
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _fork_if_possible() -> int | None:
    """Where there may be no more processes, whoever needs one can say so."""
    with suppress(OSError):
        return os.fork()
    return None


def adopt_orphans() -> None:
    """From now on, of all that descend from this process."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def order_sockets() -> tuple[socket.socket, socket.socket]:
    """An order is a message, whole or not there."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def serve(orders: socket.socket, parent: int, preloaded: Sequence[str]) -> None:
    """Until the other end is closed, or `parent`, for whom it forks, is gone."""
    os.setsid()
    if not bind_to(parent):
        return
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(nothing, fd)
    os.close(nothing)
    setproctitle("p2pdiloco forkserver")
    for module in preloaded:
        _import(module)
    while True:
        message, fds, _flags, _address = socket.recv_fds(orders, _ORDER_BYTES, _FDS_MAX)
        if not message:
            return
        module = message.decode()
        _import(module)
        gc.freeze()  # what is here by now, children do not look through: they share its memory
        if os.fork() == 0:
            orders.close()
            _fork_for_adoption(partial(_be_child, parent, os.getpid(), module, *fds))
        os.wait()
        for fd in fds:
            os.close(fd)


def _import(module: str) -> None:
    with suppress(Exception):  # which the child will meet, too, and can say
        importlib.import_module(module)


def _fork_for_adoption(run: Callable[[], None]) -> NoReturn:
    """Ends at once, whereupon the parent of the forkserver adopts who is to run."""
    if os.fork() == 0:
        _leave_with(run)
    os._exit(0)


def _be_child(
    parent: int, middle: int, module: str, pid_fd: int, stderr_fd: int, *fds: int
) -> None:
    """What `python -m` does, once `parent` has adopted this process."""
    os.setsid()
    _until_ended(middle)
    if not bind_to(parent):
        return
    os.dup2(stderr_fd, 2)
    os.close(stderr_fd)
    sys.argv = [module, *map(str, fds)]
    setproctitle(" ".join([sys.executable, "-m", *sys.argv]))
    os.write(pid_fd, str(os.getpid()).encode())
    os.close(pid_fd)
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
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
