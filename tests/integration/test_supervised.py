"""Daemons that somebody else started: they do not outlive their supervisor, however it ends."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from swarm_processes import PATIENCE_S, is_running, wait_until

from p2pdiloco.spec import RunSpec
from p2pdiloco_daemon.cli.new import write_draft

pytestmark = [pytest.mark.loopback, pytest.mark.slow, pytest.mark.timeout(1800)]

SUPERVISOR = """
import asyncio, sys
from pathlib import Path
from p2pdiloco_daemon.children.forkserver import COMMANDS, running_forkserver
from p2pdiloco_daemon.demo.processes import Home, bootstrap_peer

async def main(home):
    root = Path(sys.argv[1])
    first = bootstrap_peer(root / "run.toml", root / "first", root / "first.log", home)
    async with first as invite:
        print(invite, flush=True)
        await asyncio.Event().wait()

with running_forkserver(COMMANDS) as forkserver:
    asyncio.run(main(Home(forkserver=forkserver if sys.argv[2] == "forked" else None)))
"""


@pytest.fixture(scope="module", params=["forked", "executed"])
def start(request: pytest.FixtureRequest) -> str:
    """How it starts what it starts."""
    how: str = request.param
    return how


@pytest.fixture(scope="module")
def root(start: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("supervised")
    write_draft(path / "run.toml", RunSpec(name="supervised"))
    return path


@pytest.fixture(scope="module")
def supervisor(start: str, root: Path) -> Iterator[psutil.Popen]:
    """A process like the demo's, with a first peer."""
    command = [sys.executable, "-c", SUPERVISOR, str(root), start]
    process = psutil.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline().startswith("p2pdiloco:"), (root / "first.log").read_text()
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_second_first_peer_on_one_directory_is_refused(
    root: Path, supervisor: psutil.Popen
) -> None:
    where = ["--dir", str(root / "first"), "--listen", "127.0.0.1", "--port", "0"]
    command = ["-m", "p2pdiloco_daemon.cli.main", "bootstrap", str(root / "run.toml")]
    second = subprocess.run(
        [sys.executable, *command, *where],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    (first,) = (
        child for child in supervisor.children() if "bootstrap" in " ".join(child.cmdline())
    )
    assert second.returncode == 2
    assert f"in use by another p2pdiloco daemon (process {first.pid})" in second.stderr
    assert first.is_running()


def test_a_killed_supervisor_is_followed_in_good_order(
    root: Path, supervisor: psutil.Popen
) -> None:
    family = supervisor.children(recursive=True)
    assert {process.name() for process in family} >= {"p2pd"}
    supervisor.kill()
    wait_until("all to leave", lambda: not any(is_running(process) for process in family))
    assert not [path for path in (root / "first").iterdir() if path.is_socket()]
    words = (root / "first.log").read_text()
    assert "the process that started this one is gone" in words
    assert "Traceback" not in words
