"""Real nodes learn from what they roll out; who is killed, the dispatcher too, stops nobody."""

import json
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import filterfalse
from pathlib import Path

import pytest
from swarm_processes import (
    SPEC,
    BootstrapProcess,
    NodeProcess,
    settle_on_one_lineage,
    wait_until,
)

from p2pdiloco_daemon.status.view import JsonObject

pytestmark = [pytest.mark.loopback, pytest.mark.slow, pytest.mark.timeout(3600)]

RL_SPEC = (
    SPEC.replace("inner_steps = 8", "inner_steps = 3")
    .replace("num_fragments = 3", "num_fragments = 1")
    .replace("sequence_length = 32", "sequence_length = 64")
    + """
[rl]
num_groups = 6
group_size = 4
replayed_share = 0.2
"""
)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[NodeProcess]]:
    boot = BootstrapProcess(tmp_path, spec=RL_SPEC)
    started = [NodeProcess(tmp_path / f"node-{i}", boot.invite) for i in range(3)]
    try:
        yield started
    finally:
        for daemon in (*started, boot):
            daemon.end()


def version(nodes: Sequence[NodeProcess]) -> int:
    """The newest that any of them holds."""
    return max((v for node in nodes for v in node.versions()), default=-1)


def go_on(nodes: Sequence[NodeProcess], num_steps: int) -> None:
    """Until so many more steps have been rolled out, learnt from and merged."""
    wanted = version(nodes) + num_steps
    wait_until(f"version {wanted}", lambda: version(nodes) >= wanted)


def dispatches(node: NodeProcess) -> bool:
    status = node.status()
    return bool(status and status["synchronizer"] and status["synchronizer"]["is_self"])


def lesson(node: NodeProcess) -> JsonObject | None:
    """Its page, once it has learnt from a step."""
    status = node.status()
    learning = status["learning"] if status else None
    return status if learning and learning["step"] is not None else None


def serves(node: NodeProcess) -> bool:
    status = node.status()
    return bool(status and status["rollouts"] and status["rollouts"]["state"] == "serving")


def test_a_swarm_learns_from_rollouts_whoever_is_killed(nodes: list[NodeProcess]) -> None:
    wait_until("all learn", lambda: all(node.sees(3) for node in nodes))
    go_on(nodes, 2)
    for node in nodes:
        learnt = wait_until("all have learnt", partial(lesson, node))
        assert 0 <= learnt["learning"]["reward"] <= 1
        assert learnt["reward_curve"]
        wait_until("all to generate, which nobody asked for", partial(serves, node))

    dispatcher = wait_until("a dispatcher", lambda: next(filter(dispatches, nodes), None))
    dispatcher.kill()
    living = [node for node in nodes if node is not dispatcher]
    go_on(living, 3)

    nodes[nodes.index(dispatcher)] = again = NodeProcess(dispatcher.directory)
    wait_until("it learns again", lambda: again.trains() and lesson(again))
    other = wait_until("another", lambda: next(filterfalse(dispatches, living), None))
    other.kill()
    left = [node for node in nodes if node is not other]
    go_on(left, 3)

    settle_on_one_lineage(left)
    for node in left:
        status = node.get()
        assert status["tokens"]["adds_up"], json.dumps(status["tokens"])
        said = [event["text"] for event in status["events"]]
        assert not [text for text in said if "not true" in text]
