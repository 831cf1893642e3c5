"""A child that is bound to its parent ends with it, even while it is only importing."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from swarm_processes import is_running, wait_until

from p2pdiloco_daemon.children.bound import bound_command

pytestmark = [pytest.mark.loopback, pytest.mark.timeout(600)]
GONE_S = 300.0

MODULE = """
import os, sys, time
print(os.getpid(), __name__, *sys.argv[1:], flush=True)
time.sleep(600)  # as an import on a busy machine
"""

PARENT = """
import subprocess, sys
from p2pdiloco_daemon.children.bound import bound_command
subprocess.run(bound_command("slow_to_import", "one", "two"))
"""


@pytest.fixture(autouse=True)
def slow_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow_to_import.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of this")
def test_it_ends_when_its_parent_is_killed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout
        pid, *words = parent.stdout.readline().split()
        assert words == ["__main__", "one", "two"]
        child = psutil.Process(int(pid))
        parent.kill()
        wait_until("the child is gone", lambda: not is_running(child))


def test_it_does_nothing_when_its_parent_is_gone_already() -> None:
    command = bound_command("slow_to_import")
    command[command.index(str(os.getpid()))] = str(os.getpid() + 1)
    done = subprocess.run(command, capture_output=True, timeout=GONE_S, check=True)
    assert done.stdout == b""
