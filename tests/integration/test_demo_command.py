"""The demo, as a newcomer runs it: three nodes train, one is killed, the others agree."""

import http.client
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from functools import partial
from pathlib import Path

import pytest
from swarm_processes import PATIENCE_S, wait_until

from p2pdiloco_daemon.status.view import JsonObject

pytestmark = [pytest.mark.loopback, pytest.mark.slow, pytest.mark.timeout(1800)]


def free_ports(count: int) -> int:
    """The first of `count` neighbouring free ports."""
    for first in random.sample(range(18700, 28700, count), 100):
        probes = [socket.socket() for _ in range(count)]
        try:
            for offset, probe in enumerate(probes):
                probe.bind(("127.0.0.1", first + offset))
            return first
        except OSError:
            continue
        finally:
            for probe in probes:
                probe.close()
    raise AssertionError("no free ports")


def status_of(port: int) -> JsonObject | None:
    try:
        url = f"http://127.0.0.1:{port}/api/status"
        with urllib.request.urlopen(url, timeout=2) as response:
            status: JsonObject = json.load(response)
            return status
    except (OSError, ValueError, http.client.HTTPException):
        return None


def pid_of(directory: Path) -> int:
    """Of the daemon that holds the node's directory."""
    return int((directory / "lock").read_text())


def has_merged(demo: "subprocess.Popen[str]", port: int, merges: int) -> bool:
    assert demo.poll() is None, f"the demo ended early, with {demo.returncode}"
    status = status_of(port)
    return status is not None and status["merges_total"] >= merges


def says_that_node_2_merges(said: Path) -> bool:
    """Else a demo that has not looked at it yet could not tell what came of it."""
    return bool(re.search(r"node-2 [^;]* merges [1-9]", said.read_text()))


def outcome_with_a_kill(tmp_path: Path, *arguments: str, merges: int = 6) -> JsonObject:
    """Of a demo in which the second of three nodes is killed after some merges, and which goes on
    for twice as many."""
    port = free_ports(3)
    where = ["--dir", str(tmp_path / "demo"), "--port", str(port)]
    with (tmp_path / "said").open("w") as said:
        demo = subprocess.Popen(
            [
                sys.executable,
                *("-m", "p2pdiloco_daemon.cli.main", "demo"),
                "--json",
                *where,
                *arguments,
            ],
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
        )
    try:
        for offset in range(3):
            wait_until("all to merge", partial(has_merged, demo, port + offset, merges))
        wait_until("the demo to tell so", partial(says_that_node_2_merges, tmp_path / "said"))
        os.kill(pid_of(tmp_path / "demo" / "node-2"), signal.SIGKILL)
        before = wait_until("a status", lambda: status_of(port))["merges_total"]
        wait_until("more merges", partial(has_merged, demo, port, before + 2 * merges))
        demo.send_signal(signal.SIGINT)
        output, _ = demo.communicate(timeout=PATIENCE_S)
    finally:
        if demo.poll() is None:
            demo.terminate()
            demo.communicate()

    assert demo.returncode == 0
    for offset in range(3):
        assert f"http://127.0.0.1:{port + offset}/" in (tmp_path / "said").read_text()
    assert [status_of(port + offset) for offset in range(3)] == [None, None, None]
    outcome: JsonObject = json.loads(output.splitlines()[-1])
    assert [node["end"] for node in outcome["nodes"]] == [None, "killed by SIGKILL", None]
    tokens = outcome["tokens"]
    assert tokens["merged"] > 0
    assert tokens["processed"] == sum(
        tokens[fate] for fate in ("merged", "pending", "rejected", "lost")
    )
    assert outcome["loss_before"] > 5
    assert outcome["loss_after"] < outcome["loss_before"] - 1
    assert (Path(outcome["checkpoint"]) / "model.safetensors").exists()
    return outcome


def test_a_node_is_killed_and_the_others_agree(tmp_path: Path) -> None:
    outcome = outcome_with_a_kill(tmp_path)
    assert outcome["anchors_identical"] is True
    # the killed node's last status may be older than its last merge
    assert outcome["tokens"]["merged"] <= outcome["tokens_in_records"]
    assert outcome["merges"] >= 18


@pytest.mark.parametrize(("strategy", "merges"), [("gossip", 6), ("factored", 2)])
def test_nodes_that_gossip_go_on_without_one_and_stay_near_each_other(
    tmp_path: Path, strategy: str, merges: int
) -> None:
    """A merge of factored is of the whole model, one of gossip of a sixth of it."""
    outcome = outcome_with_a_kill(tmp_path, "--strategy", strategy, merges=merges)
    assert outcome["gossips"] is True
    assert outcome["disagreement"] < 0.2
    if strategy == "gossip":  # factored brings all to the same where all are in time
        assert outcome["anchors_identical"] is False
    living = [node for node in outcome["nodes"] if node["end"] is None]
    assert all(not node["lost"] and not node["rejected"] for node in living)
