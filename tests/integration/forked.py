"""Daemons without their imports: forked from a process that has done them, as their children are.

All else is as where a person starts one: a process and a session of its own, its arguments and its
output.
"""

import atexit
import functools
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from p2pdiloco_daemon.children.forkserver import Forkserver, adopt_orphans, order, order_sockets
from p2pdiloco_daemon.demo.forked_command import written_order
from p2pdiloco_daemon.demo.processes import supervisor_pipe

_SERVER = """
import socket, sys
from p2pdiloco_daemon.children.forkserver import COMMANDS, serve
serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), COMMANDS)
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
    arguments: Sequence[str],
    log_fd: int,
    environment: Mapping[str, str],
    network: Path | None = None,
) -> ForkedDaemon:
    """`python -m p2pdiloco_daemon.cli.main ARGUMENTS`, both its outputs in the log."""
    told, pid_fd = os.pipe()
    with open(told, "rb") as answer:
        with written_order(arguments, network, {**os.environ, **environment}) as asked:
            fds = [pid_fd, log_fd, asked.fileno(), log_fd, supervisor_pipe()]
            order(_server()[1], "p2pdiloco_daemon.demo.forked_command", fds)
        os.close(pid_fd)
        readable, _, _ = select.select([answer], [], [], FORK_S)
        assert readable, f"no daemon was forked within {FORK_S:.0f} s"
        return ForkedDaemon(int(answer.read()))


def shared_forkserver() -> Forkserver | None:
    """The same one, for a swarm that starts its nodes itself; None where nothing is forked."""
    if sys.platform != "linux":
        return None
    server, orders = _server()
    return Forkserver(orders, server.pid)


@functools.cache
def _server() -> tuple["subprocess.Popen[bytes]", socket.socket]:
    """Of this process of tests; it lives as long as the thread that first asks for it."""
    assert threading.current_thread() is threading.main_thread()
    adopt_orphans()
    ours, theirs = order_sockets()
    fd = theirs.fileno()
    command = [sys.executable, "-P", "-c", _SERVER, str(fd), str(os.getpid())]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with theirs:
        server = subprocess.Popen(command, pass_fds=(fd,), env=environment)
    atexit.register(_end, server)
    return server, ours


def _end(server: "subprocess.Popen[bytes]") -> None:
    server.kill()
    server.wait()
