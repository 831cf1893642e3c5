"""Real daemons that mix: below their quorum for a while, and with an outer step by quorum."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from swarm_processes import (
    SPEC,
    BootstrapProcess,
    Daemon,
    NodeProcess,
    all_reached,
    settle_on_one_lineage,
    wait_until,
)

from p2pdiloco_daemon.status.view import JsonObject

pytestmark = [pytest.mark.loopback, pytest.mark.slow, pytest.mark.timeout(1800)]

BELOW_QUORUM = SPEC + "quorum = 3\ngossip_below_quorum = true\n"
SEVERAL_BYTES = 40_000
"""Of values: a fragment has 10,000 parameters, in int8."""
FACTORED = SPEC + 'strategy = "factored"\nquorum = 2\n'


class Swarm:
    """Nodes by name, in one directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._all: list[Daemon] = []
        self.invite = ""

    def begin(self, spec: str, *names: str) -> list[NodeProcess]:
        boot = BootstrapProcess(self.root, spec=spec)
        self._all.append(boot)
        self.invite = boot.invite
        return [self.start(name) for name in names]

    def start(self, name: str) -> NodeProcess:
        node = NodeProcess(self.root / name, self.invite)
        self._all.append(node)
        return node

    def end(self) -> None:
        for daemon in self._all:
            daemon.end()


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Swarm]:
    running = Swarm(tmp_path)
    try:
        yield running
    finally:
        running.end()


def says(node: NodeProcess, words: str) -> bool:
    status = node.status()
    return status is not None and words in status["sentence"]


def test_too_few_for_a_merge_mix_until_the_third_is_back_and_lose_nothing(swarm: Swarm) -> None:
    anna, bert, cleo = swarm.begin(BELOW_QUORUM, "anna", "bert", "cleo")
    both = (anna, bert)
    wait_until("merges of three", lambda: all_reached(anna.versions(), [2, 2, 2]))
    cleo.kill()
    for node in both:
        wait_until("they notice", partial(says, node, "fewer than the quorum of 3"))
    wait_until("they swap values", lambda: all(_swapped(node) > SEVERAL_BYTES for node in both))
    steps = [node.get()["learner"]["step"] for node in both]
    wait_until("they train on", lambda: all(map(_has_stepped, both, steps)))
    alone = [node.get() for node in both]
    newest = [max(each) for each in zip(*map(_versions, alone), strict=True)]
    cleo = swarm.start("cleo")
    wanted = [version + 2 for version in newest]
    wait_until("merges again", lambda: all(all_reached(n.versions(), wanted) for n in both))
    for node, then in zip(both, alone, strict=True):
        before, now = then["tokens"], node.get()["tokens"]
        assert now["merged"] - before["merged"] > before["pending"] / 2 > 0
    settle_on_one_lineage([anna, bert, cleo])
    for node in (anna, bert, cleo):
        status = node.get()
        assert status["tokens"]["adds_up"]
        merged = [r["contributors"] for r in status["rounds"] if r["outcome"] == "merged"]
        assert all(len(contributors) == 3 for contributors in merged)


def _versions(status: JsonObject) -> list[int]:
    return [fragment["version"] for fragment in status["fragments"]]


def _has_stepped(node: NodeProcess, since: int) -> bool:
    status = node.status()
    return status is not None and status["learner"]["step"] > since


def _swapped(node: NodeProcess) -> int:
    """Bytes of others' values that it received."""
    status = node.status()
    kinds = status["traffic"]["by_kind"] if status else {}
    return int(kinds["mix"]["received_bytes"]) if "mix" in kinds else 0


def test_nodes_that_wait_for_a_quorum_tell_how_far_their_predictions_are_apart(
    swarm: Swarm,
) -> None:
    nodes = swarm.begin(FACTORED, "anna", "bert")
    wait_until("rounds", lambda: all(all_reached(n.versions(), [4, 4, 4]) for n in nodes))
    apart = [wait_until("they are near", partial(_apart, node)) for node in nodes]
    assert all(each["curve"][-1][1] == each["outputs"] for each in apart)
    for node in nodes:
        wait_until("a mix of both", partial(_has_mixed, node))
    for node in nodes:
        node.settle()
    settled = [wait_until("all is settled", partial(_settled, node)) for node in nodes]
    assert all(status["tokens"]["adds_up"] and status["tokens"]["merged"] for status in settled)


def _apart(node: NodeProcess) -> JsonObject | None:
    """Once both were evaluated after some training."""
    status = node.status()
    told: JsonObject | None = status["disagreement"] if status else None
    return told if told and told["outputs"] and 0 < told["outputs"] < 0.3 else None


def _has_mixed(node: NodeProcess) -> bool:
    """One round at least in which the other's outer gradient came in time."""
    status = node.status()
    rounds = status["rounds"] if status else []
    return any("then 1 of 1" in ended["reason"] for ended in rounds)


def _settled(node: NodeProcess) -> JsonObject | None:
    status = node.status()
    return status if status and status["state"] == "settled" else None
