"""Real daemons that mix: below their quorum for a while, and with an outer step by quorum."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from swarm_processes import (
    SPEC,
    BootstrapProcess,
    Daemon,
    NodeProcess,
    settle_on_one_lineage,
    wait_until,
)

from p2pdiloco_daemon.status.view import JsonObject

pytestmark = [pytest.mark.loopback, pytest.mark.slow, pytest.mark.timeout(300)]

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


def tokens(node: NodeProcess) -> JsonObject:
    told: JsonObject = node.get()["tokens"]
    return told


def says(node: NodeProcess, words: str) -> bool:
    status = node.status()
    return status is not None and words in status["sentence"]


def test_too_few_for_a_merge_mix_until_the_third_is_back_and_lose_nothing(swarm: Swarm) -> None:
    anna, bert, cleo = swarm.begin(BELOW_QUORUM, "anna", "bert", "cleo")
    both = (anna, bert)
    wait_until("merges of three", lambda: min(anna.versions(), default=0) >= 2)
    cleo.kill()
    for node in both:
        wait_until("they notice", lambda node=node: says(node, "fewer than the quorum of 3"))  # type: ignore[misc]
    versions, steps = anna.versions(), [node.get()["learner"]["step"] for node in both]
    wait_until("they swap values", lambda: all(_swapped(node) > SEVERAL_BYTES for node in both))
    assert anna.versions() == versions
    assert all(n.get()["learner"]["step"] > s for n, s in zip(both, steps, strict=True))
    before = [tokens(node) for node in both]
    cleo = swarm.start("cleo")
    wait_until("merges again", lambda: min(anna.versions(), default=0) >= max(versions) + 2)
    for node, then in zip(both, before, strict=True):
        assert tokens(node)["merged"] - then["merged"] > then["pending"] / 2 > 0
    settle_on_one_lineage([anna, bert, cleo])
    assert all(tokens(node)["adds_up"] for node in (anna, bert, cleo))


def _swapped(node: NodeProcess) -> int:
    """Bytes of others' values that it received."""
    status = node.status()
    kinds = status["traffic"]["by_kind"] if status else {}
    return int(kinds["mix"]["received_bytes"]) if "mix" in kinds else 0


def test_nodes_that_wait_for_a_quorum_tell_how_far_their_predictions_are_apart(
    swarm: Swarm,
) -> None:
    anna, bert = nodes = swarm.begin(FACTORED, "anna", "bert")
    wait_until("rounds", lambda: all(min(n.versions(), default=0) >= 4 for n in nodes))
    apart = [wait_until("a comparison", lambda node=node: _apart(node)) for node in nodes]  # type: ignore[misc]
    assert all(0 < each["outputs"] < 0.3 for each in apart)
    assert all(each["curve"][-1][1] == each["outputs"] for each in apart)
    rounds = [r for node in nodes for r in node.get()["rounds"]]
    assert any("then 1 of 1" in r["reason"] for r in rounds), rounds
    for node in nodes:
        node.settle()
    wait_until("all is settled", lambda: all(n.get()["state"] == "settled" for n in nodes))
    assert all(tokens(node)["adds_up"] and tokens(node)["merged"] for node in nodes)
    assert abs(max(anna.versions()) - max(bert.versions())) <= 1


def _apart(node: NodeProcess) -> JsonObject | None:
    status = node.status()
    told: JsonObject | None = status["disagreement"] if status else None
    return told if told and told["outputs"] is not None else None
