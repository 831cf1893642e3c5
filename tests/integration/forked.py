"""Daemons without their imports: forked from a process that has done them, as their children are.

All else is as where a person starts one: a process and a session of its own, its arguments and its
output. Not for daemons on hosts of `benchmarks.lab`: these are executed there.
"""

import atexit
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress

from p2pdiloco_daemon.children.forkserver import PRELOADED, adopt_orphans, order, order_sockets

_PRELOADED = [
    *PRELOADED,
    "forked_daemon",
    "p2pdiloco_daemon.app",
    "p2pdiloco_daemon.rollouts.process",
    "p2pdiloco_bootstrap.app",
]
_SERVER = f"""
import socket, sys
from p2pdiloco_daemon.children.forkserver import serve
serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), {_PRELOADED!r})
"""
FORK_S = 180.0
"""With the imports, the first time, on a busy machine."""


class ForkedDaemon:
    """With the face of a `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._pidfd = os.pidfd_open(pid)

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._pidfd], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"daemon {self.pid}", timeout or 0)
            _pid, status = os.waitpid(self.pid, 0)
            os.close(self._pidfd)
            self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def fork_daemon(
    arguments: Sequence[str], log_fd: int, environment: Mapping[str, str]
) -> ForkedDaemon:
    """`python -m p2pdiloco_daemon.cli.main ARGUMENTS`, both its outputs in the log."""
    told, pid_fd = os.pipe()
    with open(told, "rb") as answer, tempfile.TemporaryFile("w+") as asked:
        json.dump([arguments, dict(environment)], asked)
        asked.seek(0)
        order(_orders(), "forked_daemon", [pid_fd, log_fd, asked.fileno()])
        os.close(pid_fd)
        readable, _, _ = select.select([answer], [], [], FORK_S)
        assert readable, f"no daemon was forked within {FORK_S:.0f} s"
        return ForkedDaemon(int(answer.read()))


@functools.cache
def _orders() -> socket.socket:
    """To the forkserver of this process of tests."""
    adopt_orphans()
    ours, theirs = order_sockets()
    fd = theirs.fileno()
    command = [sys.executable, "-P", "-c", _SERVER, str(fd), str(os.getpid())]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with theirs:
        server = subprocess.Popen(command, pass_fds=(fd,), env=environment)
    atexit.register(_end, server)
    return ours


def _end(server: "subprocess.Popen[bytes]") -> None:
    server.kill()
    server.wait()
