"""Daemons at home and in town: behind NATs and a firewall, on slow links, with relays that die.

The tests share one swarm in one lab and run in this order; nothing of it is left at the end.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from required_lab import required_lab
from swarm_processes import (
    BootstrapProcess,
    Daemon,
    NodeProcess,
    settle_on_one_lineage,
    wait_until,
)

from benchmarks.lab import Host, Lab, Rate
from p2pdiloco_daemon.status.view import JsonObject

pytestmark = [pytest.mark.loopback, pytest.mark.slow, pytest.mark.timeout(3600)]

FIRST_PORT = 8600
HOME_LINK = Rate(up=10, down=50)
SLOW_LINK = Rate(up=5, down=5)
BYTES_PER_VALUE = 8
"""Anchor and momentum: 6.6 MB in all, 11 s of the slow link, or 5 of a home's uplink."""
STATE_SHARE_MAX = 3.0
"""Of the state's size, what a joiner may fetch of it, of four donors. Seen: 1.3 to 1.6. A chunk
that no byte of arrives for two seconds is asked of another donor too: on a busy machine any, and on
a link this slow eight chunks of 1 MiB share what one could fill; what a broken connection had
brought of its chunk is lost.
"""
SPEC = """
name = "networks"
[model.config]
model_type = "llama"
vocab_size = 256
hidden_size = 128
intermediate_size = 512
num_hidden_layers = 3
num_attention_heads = 2
tie_word_embeddings = true
[data]
sequence_length = 32
[inner]
batch_size = 2
[sync]
inner_steps = 24
num_fragments = 3
overlap_steps = 4
quorum = 2
term_merges = 2
"""


class Swarm:
    """The first peer and the nodes by name, each on a host of the same name."""

    def __init__(self, lab: Lab, root: Path) -> None:
        self.lab = lab
        self.nodes: dict[str, NodeProcess] = {}
        self._root = root
        self._first_host = lab.public("first")
        self._all: list[Daemon] = []
        self.first = self.start_first()

    def start_first(self) -> BootstrapProcess:
        """Again it is the same peer at the same address."""
        self.first = BootstrapProcess(self._root, self._first_host, FIRST_PORT, SPEC)
        self._all.append(self.first)
        return self.first

    def join(self, host: Host) -> NodeProcess:
        node = NodeProcess(self._root / host.name, self.first.invite, machine=host)
        self._all.append(node)
        self.nodes[host.name] = node
        return node

    def host(self, name: str) -> Host:
        return self.lab.hosts[name]

    def end(self) -> None:
        for daemon in self._all:
            daemon.end()


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    """Two nodes behind NATs of their own, and a first peer that both can dial."""
    with required_lab() as lab:
        running = Swarm(lab, tmp_path_factory.mktemp("networks"))
        try:
            for name in ("home-a", "home-b"):
                running.join(lab.behind_nat(name, HOME_LINK))
            yield running
        finally:
            running.end()
            wait_until("all processes of the lab to end", lambda: not lab.process_ids())


# ---------------------------------------------------------------- what a page tells


def peer_of(node: NodeProcess) -> str:
    peer: str = node.get()["peer_id"]
    return peer


def newest(node: NodeProcess) -> dict[int, int]:
    """Fragment -> the version that it holds."""
    return {f["index"]: f["version"] for f in node.get()["fragments"]}


def merged_by(status: JsonObject, after: dict[int, int]) -> list[set[str]]:
    """Who contributed to each merge beyond the versions `after`."""
    return [
        set(done["contributors"])
        for done in status["rounds"]
        if done["outcome"] == "merged" and done["version"] > after.get(done["fragment"], 0)
    ]


def wait_for_merge_of(*nodes: NodeProcess) -> None:
    """A new merge that has contributions of all of them, known to all of them."""
    peers, after = {peer_of(node) for node in nodes}, newest(nodes[0])

    def is_merged(node: NodeProcess) -> bool:
        status = node.status()
        return bool(status) and any(peers <= each for each in merged_by(status or {}, after))

    names = " and ".join(node.directory.name for node in nodes)
    for node in nodes:
        wait_until(f"a merge of {names}", partial(is_merged, node))


def wait_for_page(node: NodeProcess, what: str, condition: Callable[[JsonObject], object]) -> None:
    def holds() -> bool:
        status = node.status()
        return bool(status and condition(status))

    wait_until(f"{node.directory.name}: {what}", holds)


def wait_for_a_step(node: NodeProcess) -> None:
    before = node.get()["learner"]["step"]
    wait_for_page(node, "a step", lambda status: status["learner"]["step"] > before)


def reach(status: JsonObject) -> str:
    return str(status["network"]["reach"])


# ---------------------------------------------------------------- two at home, one relay


def test_two_nodes_behind_nats_merge_through_the_first_peer(swarm: Swarm) -> None:
    a, b = swarm.nodes["home-a"], swarm.nodes["home-b"]
    wait_until("the first to train", a.trains)
    wait_until("the second to train", b.trains)
    wait_for_merge_of(a, b)
    for node in (a, b):
        wait_for_page(node, "a relay", lambda status: "reached through" in reach(status))


def test_when_their_only_relay_dies_they_say_that_they_are_alone_and_train_on(swarm: Swarm) -> None:
    swarm.first.kill()
    for node in swarm.nodes.values():
        wait_for_page(node, "alone", lambda status: status["state"] == "isolated")
        wait_for_page(node, "no relay", lambda status: "no relay" in reach(status))
        wait_for_page(
            node, "why", lambda status: "annot reach bootstrap peer" in status["sentence"]
        )
        wait_for_a_step(node)


def test_when_it_comes_back_they_find_each_other(swarm: Swarm) -> None:
    swarm.start_first()
    wait_for_merge_of(swarm.nodes["home-a"], swarm.nodes["home-b"])


# ---------------------------------------------------------------- all sorts


def test_a_node_that_can_only_dial_and_one_in_town_take_part(swarm: Swarm) -> None:
    office = swarm.join(swarm.lab.firewalled("office", HOME_LINK))
    town = swarm.join(swarm.lab.public("town", HOME_LINK))
    for node in (office, town):
        wait_until(f"{node.directory.name} to train", node.trains)
    wait_for_merge_of(office, town)
    wait_for_merge_of(office, swarm.nodes["home-a"])
    wait_for_page(town, "dialed", lambda status: reach(status) == "other nodes can dial this one")


def test_a_joiner_on_a_slow_link_reaches_the_head_and_fetches_little_more_than_the_state(
    swarm: Swarm,
) -> None:
    joiner = swarm.join(swarm.lab.behind_nat("slow", SLOW_LINK))
    wait_for_page(joiner, "all fragments", lambda s: s["state"] == "training")
    status = joiner.get()
    state_bytes = BYTES_PER_VALUE * sum(f["num_values"] for f in status["fragments"])
    received = status["traffic"]["by_kind"]["state"]["received_bytes"]
    assert state_bytes <= received < STATE_SHARE_MAX * state_bytes
    wait_for_page(joiner, "a merge of its tokens", lambda s: s["tokens"]["merged"])
    joiner.leave()
    assert joiner.left_nothing()
    del swarm.nodes["slow"]


def test_a_member_relays_on_when_the_first_peer_dies(swarm: Swarm) -> None:
    a, b, town = (swarm.nodes[name] for name in ("home-a", "home-b", "town"))
    relay = peer_of(town)[-8:]
    for node in (a, b):
        wait_for_page(node, "two relays", lambda status: relay in reach(status))
    swarm.first.kill()
    for node in (a, b):
        wait_for_page(node, "one relay", lambda status: reach(status).endswith(f" {relay}"))
    wait_for_merge_of(a, b)
    wait_for_merge_of(*swarm.nodes.values())


def test_nodes_whose_addresses_change_are_found_again(swarm: Swarm) -> None:
    """The one in town, which relayed, and one behind a NAT."""
    swarm.start_first()
    relay = peer_of(swarm.nodes["town"])[-8:]
    for name in ("home-a", "home-b"):
        wait_for_page(swarm.nodes[name], "two relays", lambda status: " and " in reach(status))
    swarm.lab.move(swarm.host("town"))
    swarm.lab.move(swarm.host("home-b"))
    wait_for_merge_of(*swarm.nodes.values())
    wait_for_page(swarm.nodes["home-a"], "it relays again", lambda s: relay in reach(s))


def test_both_sides_of_a_cut_merge_and_one_lineage_is_left(swarm: Swarm) -> None:
    a, b, office, town = (swarm.nodes[name] for name in ("home-a", "home-b", "office", "town"))
    there = [swarm.host(name) for name in ("first", "home-a", "office")]
    here = [swarm.host(name) for name in ("town", "home-b")]
    swarm.lab.cut(there, here)
    wait_for_merge_of(a, office)
    wait_for_merge_of(town, b)
    swarm.lab.mend()
    wait_for_merge_of(a, b, office, town)


def test_in_the_end_all_agree_to_the_last_bit_and_nothing_is_left(swarm: Swarm) -> None:
    nodes = list(swarm.nodes.values())
    settle_on_one_lineage(nodes)
    for node in nodes:
        assert node.get()["tokens"]["adds_up"]
        assert "Traceback" not in node.words()
    for node in nodes:
        node.leave()
        assert node.left_nothing() and not node.sockets()
