"""Children that are forked live and die as those that are executed; the daemon here is a script."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from swarm_processes import is_running, wait_until

from p2pdiloco_daemon.children import forkserver

pytestmark = [
    pytest.mark.loopback,
    pytest.mark.skipif(sys.platform != "linux", reason="elsewhere children are executed"),
]
GONE_S = 60.0

CHILD = """
import os, sys, time
control = int(sys.argv[1])
said = f"{__name__} {os.getpid()} {os.getsid(0)} {os.fstat(int(sys.argv[2])).st_size}"
os.write(control, said.encode())
match os.read(control, 16):
    case b"wait":
        time.sleep(600)
    case b"leave":
        sys.exit("it was told to leave")
    case b"fail":
        raise RuntimeError("it was told to fail")
"""

DAEMON = """
import asyncio, os, sys
from p2pdiloco_daemon.children import forkserver
from p2pdiloco_daemon.children.child import start_child

forkserver.PRELOADED = ["child_module"]
memory_fd = os.memfd_create("test")
os.ftruncate(memory_fd, 7)

async def child_of(server):
    child = await start_child("the child", "child_module", 1, memory_fd, server)
    words = (await child.reader.read(100)).decode()
    return child, f"{words} {child.process.pid} {type(child.process).__name__}"

async def main(server):
    print(os.getpid(), server.pid, flush=True)
    for order in sys.stdin:
        child, words = await child_of(server)
        child.writer.write(order.strip().encode())
        print(words, flush=True)
        if order != "wait\\n":
            await child.keep_last_words()
            await child.process.wait()
            print(child.last_words(), flush=True)
            child.writer.close()

with forkserver.running_forkserver() as server:
    asyncio.run(main(server))
"""


class Daemon:
    """The script: told what a new child is told, it says what that said, and how it ended."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self.pid, self.server = map(int, self.hear().split())

    def hear(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline().strip()

    def ask(self, order: str) -> list[str]:
        assert self.process.stdin
        self.process.stdin.write(f"{order}\n")
        self.process.stdin.flush()
        return self.hear().split()


@contextmanager
def running(directory: Path) -> Iterator[Daemon]:
    (directory / "child_module.py").write_text(CHILD)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(directory), *sys.path])}
    with subprocess.Popen(
        [sys.executable, "-W", "error", "-c", DAEMON],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        try:
            yield Daemon(process)
        finally:
            process.kill()


def test_a_child_is_the_daemons_own_with_a_session_and_the_shared_memory(tmp_path: Path) -> None:
    with running(tmp_path) as daemon:
        name, pid, session, size, told_pid, kind = daemon.ask("wait")
        assert (name, size, kind) == ("__main__", "7", forkserver.ForkedProcess.__name__)
        assert pid == session == told_pid
        child = psutil.Process(int(pid))
        assert child.ppid() == daemon.pid
        assert "child_module" in " ".join(child.cmdline()).split()


@pytest.mark.parametrize(
    ("order", "how"),
    [
        ("leave", "exit code 1; it was told to leave"),
        ("fail", "exit code 1; "),
        ("go", "exit code 0"),
    ],
)
def test_it_ends_as_one_that_was_executed(tmp_path: Path, order: str, how: str) -> None:
    with running(tmp_path) as daemon:
        daemon.ask(order)
        words = daemon.hear()
        assert words.startswith(f"the child ended: {how}")
        assert words.endswith("RuntimeError: it was told to fail") == (order == "fail")


def test_none_outlives_the_daemon(tmp_path: Path) -> None:
    with running(tmp_path) as daemon:
        _name, pid, *_ = daemon.ask("wait")
        left = [psutil.Process(int(pid)), psutil.Process(daemon.server)]
        daemon.process.kill()
        wait_until("none lives on", lambda: not any(map(is_running, left)))


def test_a_daemon_that_ends_takes_the_forkserver_along(tmp_path: Path) -> None:
    with running(tmp_path) as daemon:
        server = psutil.Process(daemon.server)
        assert daemon.process.stdin
        daemon.process.stdin.close()
        assert daemon.process.wait(GONE_S) == 0
        assert not is_running(server)


def test_without_the_forkserver_children_are_executed(tmp_path: Path) -> None:
    with running(tmp_path) as daemon:
        _name, earlier, *_ = daemon.ask("wait")
        psutil.Process(daemon.server).kill()
        name, pid, session, size, told_pid, kind = daemon.ask("wait")
        assert (name, size, kind) == ("__main__", "7", "Process")
        assert pid == session == told_pid
        assert is_running(psutil.Process(int(earlier)))


def test_one_that_hangs_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forkserver, "FORK_S", 0.01)
    ours, theirs = forkserver.order_sockets()

    async def main() -> None:
        with ours, theirs:
            server = forkserver.Forkserver(ours, os.getpid())
            with pytest.raises(TimeoutError, match="not done within"):
                await server.fork("child_module", 2, ())
            with pytest.raises(OSError, match="Bad file descriptor"):
                await server.fork("child_module", 2, ())

    asyncio.run(main())
