"""Two real daemons of a paced run: one learns what its merges do to a program that serves there."""

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from swarm_processes import NUM_FRAGMENTS, SPEC, BootstrapProcess, Daemon, NodeProcess, wait_until

from p2pdiloco.protocol.lineage import unpack_record
from p2pdiloco_daemon.status.app import ACTION_HEADER
from p2pdiloco_daemon.status.view import JsonObject
from p2pdiloco_daemon.storage.store import Store

pytestmark = [pytest.mark.loopback, pytest.mark.slow, pytest.mark.timeout(300)]

H, SLACK = 8, 4
PACED = SPEC + f'pacing = "calibrated"\nslack_steps = {SLACK}\n'
FIRST_MERGES = 2
"""Of each fragment, whose periods are staggered."""


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[list[NodeProcess]]:
    started: list[Daemon] = []
    try:
        boot = BootstrapProcess(tmp_path, spec=PACED)
        started.append(boot)
        nodes = [NodeProcess(tmp_path / name, boot.invite) for name in ("anna", "bert")]
        started += nodes
        yield nodes
    finally:
        for daemon in started:
            daemon.end()


def tell(node: NodeProcess) -> JsonObject | None:
    """Twenty answers of the last second, some of which took too long; the page's answer to them."""
    answers = [[n / 20, 0.05 if n % 4 else 0.3, 20.0] for n in range(20)]
    request = urllib.request.Request(
        f"http://127.0.0.1:{node.port}/api/served",
        data=json.dumps({"target_s": 0.2, "load": 20.0, "answers": answers}).encode(),
        method="POST",
        headers={ACTION_HEADER: "1"},
    )
    with urllib.request.urlopen(request, timeout=20) as response:
        assert response.status == 202
    status = node.status()
    return status["pacing"] if status else None


def has_learnt(node: NodeProcess) -> JsonObject | None:
    """Once it has measured answers with a merge in flight and without one, and knows a bound."""
    pacing = tell(node)
    known = pacing and pacing["syncing"] and pacing["syncing"]["coverage"] is not None
    return pacing if known and pacing and pacing["quiet"]["coverage"] is not None else None


def periods(directory: Path, fragment: int) -> list[int]:
    """Of the merges on disk."""
    with Store(directory, NUM_FRAGMENTS, read_only=True) as store:
        stored = store.load(fragment)
    assert stored
    records = [unpack_record(merge.record) for merge in stored.merges]
    return [r.period_steps for r in records if r.version > FIRST_MERGES]


def test_daemons_pace_their_merges_and_stay_identical(swarm: list[NodeProcess]) -> None:
    anna, bert = swarm
    wait_until("a swarm of two", lambda: anna.sees(2) and bert.sees(2))
    pacing = wait_until("answers are learnt from", lambda: has_learnt(anna))
    assert pacing["policy"] == "calibrated"
    assert pacing["sentence"].startswith("sync of fragment ")
    assert pacing["target_s"] == 0.2
    assert pacing["answers_total"] >= 40
    assert len(pacing["fragments"]) == NUM_FRAGMENTS
    assert all(f["closes"] - f["opens"] == SLACK for f in pacing["fragments"])
    wait_until("merges", lambda: tell(anna) and min(anna.versions(), default=0) >= 6)
    others = bert.get()["pacing"]
    assert others["target_s"] is None and others["quiet"] is None
    for node in swarm:
        node.settle()
    wait_until("all is settled", lambda: all(n.get()["state"] == "settled" for n in swarm))
    digests = [[f["digest"] for f in node.get()["fragments"]] for node in swarm]
    assert digests[0] == digests[1] and None not in digests[0]
    for node in swarm:
        node.leave()
    found = [n for p in range(NUM_FRAGMENTS) for n in periods(anna.directory, p)]
    assert found and min(found) >= H - SLACK
