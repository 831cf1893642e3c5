"""Two real daemons of a paced run: one learns what its merges do to a program that serves there."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from swarm_processes import (
    NUM_FRAGMENTS,
    SPEC,
    BootstrapProcess,
    Daemon,
    NodeProcess,
    all_reached,
    settle_on_one_lineage,
    wait_until,
)

from p2pdiloco.protocol.lineage import unpack_record
from p2pdiloco_daemon.status.view import JsonObject
from p2pdiloco_daemon.storage.store import Store

pytestmark = [pytest.mark.loopback, pytest.mark.slow, pytest.mark.timeout(1800)]

H, SLACK = 8, 4
PACED = SPEC + f'quorum = 2\npacing = "calibrated"\nslack_steps = {SLACK}\n'
"""Nobody merges alone, so that a period is one of both learners."""
NUM_MERGES = 6
ANSWERS = 20
"""In a report."""


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
    """Answers of the last second, some of which took too long; what the page says of them."""
    answers = [[n / ANSWERS, 0.05 if n % 4 else 0.3, 20.0] for n in range(ANSWERS)]
    report = {"target_s": 0.2, "load": 20.0, "answers": answers}
    node.post("served", json.dumps(report).encode())
    status = node.status()
    return status["pacing"] if status else None


def has_learnt(node: NodeProcess) -> JsonObject | None:
    """Once it has measured answers with a merge in flight and without one, and knows a bound."""
    pacing = tell(node)
    known = pacing and pacing["syncing"] and pacing["syncing"]["coverage"] is not None
    return pacing if known and pacing and pacing["quiet"]["coverage"] is not None else None


def periods(directory: Path, fragment: int, after: int) -> list[int]:
    """Of the merges beyond this version, by the records on disk."""
    with Store(directory, NUM_FRAGMENTS, read_only=True) as store:
        stored = store.load(fragment)
    assert stored and stored.record
    packed = [*stored.earlier, stored.record, *(merge.record for merge in stored.merges)]
    return [r.period_steps for r in map(unpack_record, packed) if r.version > after]


def test_daemons_pace_their_merges_and_stay_identical(swarm: list[NodeProcess]) -> None:
    anna, bert = swarm
    wait_until("a swarm of two", lambda: anna.sees(2) and bert.sees(2))
    begun = [fragment["head_version"] + 1 for fragment in anna.get()["fragments"]]
    pacing = wait_until("answers are learnt from", lambda: has_learnt(anna))
    assert pacing["policy"] == "calibrated"
    assert pacing["sentence"].startswith("sync of fragment ")
    assert pacing["target_s"] == 0.2
    assert pacing["answers_total"] and pacing["answers_total"] % ANSWERS == 0
    assert len(pacing["fragments"]) == NUM_FRAGMENTS
    assert all(f["closes"] - f["opens"] == SLACK for f in pacing["fragments"])
    wanted = [version + NUM_MERGES for version in begun]
    wait_until("merges", lambda: tell(anna) and all_reached(anna.versions(), wanted))
    others = bert.get()["pacing"]
    assert others["target_s"] is None and others["quiet"] is None
    settle_on_one_lineage(swarm)
    for node in swarm:
        node.leave()
    for fragment, version in enumerate(begun):
        found = periods(anna.directory, fragment, version)
        assert found and min(found) >= H - SLACK
