"""A swarm of real daemons loses its synchronizers, a learner, its first peer, and all at once.

The tests share one swarm and run in this order; at the end all that is left must agree.
"""

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from swarm_processes import (
    NUM_FRAGMENTS,
    PATIENCE_S,
    BootstrapProcess,
    Daemon,
    NodeProcess,
    all_reached,
    settle_on_one_lineage,
    wait_until,
)

from benchmarks.chaos_watch import WAITING_S_MAX, WAITING_SHARE_MAX
from p2pdiloco_bootstrap.identity import Identity
from p2pdiloco_bootstrap.invite import make_invite
from p2pdiloco_daemon.storage.store import Store

pytestmark = [pytest.mark.loopback, pytest.mark.slow, pytest.mark.timeout(1800)]

NUM_NODES = 4
KILLS = 10


class Swarm:
    """The bootstrap peer and the nodes by name; a node that is started again keeps its name."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.nodes: dict[str, NodeProcess] = {}
        self._all: list[Daemon] = []
        self.boot = BootstrapProcess(root)
        self._all.append(self.boot)

    def start(self, name: str, invite: str | None = None) -> NodeProcess:
        node = NodeProcess(self.root / name, invite)
        self._all.append(node)
        self.nodes[name] = node
        return node

    def living(self) -> list[NodeProcess]:
        return [node for node in self.nodes.values() if node.is_alive]

    def head(self) -> list[int]:
        """The newest version of each fragment that a living node holds."""
        held = [versions for node in self.living() if (versions := node.versions())]
        return [max(each) for each in zip(*held, strict=True)]

    def name_of(self, peer: str) -> str | None:
        """Which living node has this peer id."""
        for name, node in self.nodes.items():
            if node.is_alive and (status := node.status()) and status["peer_id"] == peer:
                return name
        return None

    def wait_for_merges(self, count: int) -> None:
        wanted = [version + count for version in wait_until("versions", self.head)]
        wait_until(f"each fragment at {wanted}", lambda: all_reached(self.head(), wanted))

    def end(self) -> None:
        for daemon in self._all:
            daemon.end()


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    """Four nodes that train together."""
    running = Swarm(tmp_path_factory.mktemp("swarm"))
    try:
        for number in range(NUM_NODES):
            running.start(f"node-{number}", running.boot.invite)
        for node in running.nodes.values():
            wait_until(f"{node.directory.name} to train", node.trains)
        running.wait_for_merges(1)
        yield running
    finally:
        running.end()


class Watch:
    """Knows since when learners train, and of how much of that they account for: steps, what is
    between them and evaluations. What they lack for a core is part of these, so that nobody waits
    because the machine is busy.
    """

    def __init__(self) -> None:
        self._first: dict[NodeProcess, tuple[float, float]] = {}

    def look(self, nodes: list[NodeProcess]) -> bool:
        """Whether all of them have been seen to train."""
        for node in nodes:
            if node not in self._first and (told := _accounted(node)):
                self._first[node] = told
        return all(node in self._first for node in nodes)

    def waits_at_most(self, node: NodeProcess) -> float:
        """Seconds that may be missing by now."""
        return WAITING_S_MAX + WAITING_SHARE_MAX * (time.monotonic() - self._first[node][0])

    def goes_on(self, node: NodeProcess, waited_s_max: float) -> bool:
        """Having waited no longer, as far as is known: what a page tells may be late."""
        told = _accounted(node)
        if told is None:
            return False
        passed_s, accounted_s = (b - a for a, b in zip(self._first[node], told, strict=True))
        return passed_s - accounted_s <= waited_s_max


def _accounted(node: NodeProcess) -> tuple[float, float] | None:
    """When, and how many seconds its learner accounts for, while it trains."""
    now, status = time.monotonic(), node.status()
    learner = status["learner"] if status else {"state": "unknown"}
    if learner["state"] != "training":
        return None
    return now, sum(float(learner[f"{part}_s"]) for part in ("compute", "stall", "evaluation"))


# -------------------------------------------------------------------- what is refused


def port_of(node: NodeProcess) -> int:
    return int(node.page.rpartition(":")[2])


def start_refused(swarm: Swarm) -> dict[str, NodeProcess]:
    """Three starts that cannot be, at once, since each first imports for seconds."""
    first = swarm.nodes["node-0"]
    once = swarm.root / "joined-once"
    once.mkdir()
    (once / "join.json").write_bytes((first.directory / "join.json").read_bytes())
    stranger = Identity.generate()
    address = f"/ip4/127.0.0.1/tcp/1/p2p/{stranger.peer_id}"
    invite = make_invite(stranger, "0" * 32, (address,), int(time.time()) + 3600)
    return {
        "directory": NodeProcess(first.directory),
        "port": NodeProcess(swarm.root / "nobody", swarm.boot.invite, port_of(first)),
        "invite": NodeProcess(once, invite),
    }


def test_what_cannot_be_is_refused_with_a_sentence_and_harms_nobody(swarm: Swarm) -> None:
    first, refused = swarm.nodes["node-0"], start_refused(swarm)
    for node in refused.values():
        assert node.process.wait(PATIENCE_S) == 2
    assert all("Traceback" not in node.words() for node in refused.values())
    owner = f"in use by another p2pdiloco daemon (process {first.process.pid})"
    assert owner in refused["directory"].words()
    assert f"{port_of(first)}" in refused["port"].words() and "--port" in refused["port"].words()
    ours = first.get()["run"]["id"]
    assert f"belongs to run {ours}, the invite is to run {'0' * 32}" in refused["invite"].words()
    assert "choose another directory with --dir" in refused["invite"].words()
    assert first.sockets()
    swarm.wait_for_merges(1)


# -------------------------------------------------------------------- what is survived


def test_a_killed_learner_is_restarted_and_the_others_never_notice(swarm: Swarm) -> None:
    node = swarm.nodes["node-1"]
    learner = wait_until("a learner", node.learner)
    learner.kill()

    def told() -> bool:
        status = node.status()
        return bool(status and status["learner"]["restarts"] == 1)

    wait_until("the page to say so", told)
    assert "SIGKILL" in node.get()["learner"]["last_error"]
    swarm.wait_for_merges(1)
    wait_until("the learner to step again", lambda: node.learner() and node.trains())
    others = [other for other in swarm.living() if other is not node]
    assert all(other.get()["learner"]["restarts"] == 0 for other in others)
    assert node.get()["tokens"]["adds_up"]


def test_a_killed_network_process_is_started_again_and_the_learner_trains_on(swarm: Swarm) -> None:
    node = swarm.nodes["node-2"]
    before = node.get()["learner"]
    wait_until("a network process", node.network_process).kill()

    def is_back() -> bool:
        status = node.status()
        return bool(status and status["network"]["connected"] and status["network"]["restarts"])

    wait_until("the network to be there again", is_back)
    assert "ended with code -9" in node.words()
    for living in swarm.living():
        wait_until("all to see each other", partial(living.sees, NUM_NODES))
    wait_until("a step", lambda: node.get()["learner"]["step"] > before["step"])
    status = node.get()
    assert status["learner"]["restarts"] == before["restarts"]
    merged = status["tokens"]["merged"]
    wait_until("tokens of it to be merged", lambda: node.get()["tokens"]["merged"] > merged)
    assert "Traceback" not in node.words()


def test_a_joiner_ends_at_the_head_and_leaves_without_a_trace(swarm: Swarm) -> None:
    joiner, head = swarm.start("joiner", swarm.boot.invite), wait_until("versions", swarm.head)
    wait_until("the joiner at the head", lambda: all_reached(joiner.versions(), head))

    def is_merged() -> bool:
        status = joiner.status()
        return bool(status and status["tokens"]["merged"])

    wait_until("tokens of the joiner to be merged", is_merged)
    assert len(joiner.children()) >= 2
    joiner.leave()
    assert joiner.process.returncode == 0
    assert joiner.left_nothing()
    assert not joiner.sockets()
    assert "Traceback" not in joiner.words()
    del swarm.nodes["joiner"]
    swarm.wait_for_merges(1)


def test_the_first_peer_may_die(swarm: Swarm) -> None:
    """From here on it is gone: all who restart find the others without it."""
    swarm.boot.kill()
    wait_until("its network process to end", swarm.boot.left_nothing)
    swarm.wait_for_merges(1)


def test_the_synchronizer_is_killed_once_a_term(swarm: Swarm) -> None:
    watch, terms = Watch(), set[int]()

    def next_victim() -> tuple[int, str] | None:
        """A synchronizer of a term in which none was killed, while three train."""
        watch.look(swarm.living())
        training = [node for node in swarm.living() if node.trains()]
        status = training[0].status() if len(training) >= 3 else None
        if not status or status["term"] in terms or not status["synchronizer"]:
            return None
        name = swarm.name_of(status["synchronizer"]["peer"])
        return (status["term"], name) if name else None

    for _ in range(KILLS):
        term, name = wait_until("a synchronizer of a new term", next_victim)
        terms.add(term)
        swarm.nodes[name].kill()
        swarm.start(name)
    assert len(terms) == KILLS
    for node in swarm.living():
        wait_until(f"{node.directory.name} to train among all", partial(node.sees, NUM_NODES))
    swarm.wait_for_merges(2)
    wait_until("all to be seen to train", lambda: watch.look(swarm.living()))
    for node in swarm.living():
        most_s = watch.waits_at_most(node)
        goes_on = partial(watch.goes_on, node, most_s)
        wait_until(f"{node.directory.name} not to wait {most_s:.0f} s", goes_on)


def test_all_are_killed_at_once_and_two_go_on_from_the_newest_anchors(swarm: Swarm) -> None:
    killed = swarm.living()
    for node in killed:
        node.kill()
    for node in killed:
        wait_until("learner and network process to end", node.left_nothing)
    names = ["node-0", "node-3"]
    on_disk = [_versions_on_disk(swarm.nodes[name].directory) for name in names]
    newest = [max(each) for each in zip(*on_disk, strict=True)]
    assert min(newest) > 0
    for name in names:
        swarm.start(name)
    for node, held in zip(swarm.living(), on_disk, strict=True):
        first = wait_until("versions", node.versions)
        assert all(a >= b for a, b in zip(first, held, strict=True)), (first, held)
    beyond = [version + 1 for version in newest]
    wait_until("training beyond the newest anchors", lambda: all_reached(swarm.head(), beyond))
    for node in swarm.living():
        wait_until("training together", partial(node.sees, len(names)))


def _versions_on_disk(directory: Path) -> list[int]:
    store = Store(directory, NUM_FRAGMENTS, read_only=True)
    stored = [store.load(p) for p in range(NUM_FRAGMENTS)]
    return [s.state.version + len(s.merges) if s else -1 for s in stored]


def test_in_the_end_all_agree_to_the_last_bit(swarm: Swarm) -> None:
    swarm.start("node-1")
    nodes = swarm.living()
    for node in nodes:
        wait_until(f"{node.directory.name} to train", node.trains)
    settle_on_one_lineage(nodes)
    for node in nodes:
        status = node.get()
        assert status["tokens"]["adds_up"] and status["tokens"]["merged"] > 0
    for node in nodes:
        node.leave()
        assert node.process.returncode == 0
        assert node.left_nothing() and not node.sockets()
    for name in swarm.nodes:
        assert "Traceback" not in swarm.nodes[name].words(), name
