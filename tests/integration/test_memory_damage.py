"""A bit of a running daemon's memory is flipped: the daemon stands still, somebody writes to
`/proc/PID/mem`, and it goes on. The synchronizer is the first to whom it happens.
"""

import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from swarm_processes import (
    BootstrapProcess,
    Daemon,
    NodeProcess,
    all_reached,
    settle_on_one_lineage,
    wait_until,
)

from p2pdiloco.optim.fragments import fragments_of
from p2pdiloco_daemon.status.view import JsonObject
from p2pdiloco_daemon.storage.place import open_place
from p2pdiloco_daemon.storage.replica import FragmentState
from p2pdiloco_daemon.storage.store import Store
from p2pdiloco_daemon.waking import replica_of

pytestmark = [
    pytest.mark.loopback,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        not os.access("/proc/self/mem", os.W_OK), reason="needs a /proc/PID/mem that can be written"
    ),
]

NUM_NODES = 3
NEEDLE_BYTES = 256


class Swarm:
    def __init__(self, root: Path) -> None:
        self.boot = BootstrapProcess(root)
        self.nodes = [
            NodeProcess(root / f"node-{number}", self.boot.invite) for number in range(NUM_NODES)
        ]

    @property
    def all(self) -> list[Daemon]:
        return [*self.nodes, self.boot]

    def synchronizer(self) -> NodeProcess | None:
        """Of the next round of fragment 0."""
        for node in self.nodes:
            status = node.status()
            if status and status["synchronizer"] and status["synchronizer"]["is_self"]:
                return node
        return None

    def wait_for_merges(self, count: int) -> None:
        first = self.nodes[0]
        wanted = [version + count for version in wait_until("versions", first.versions)]
        wait_until(f"each fragment at {wanted}", lambda: all_reached(first.versions(), wanted))


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    running = Swarm(tmp_path_factory.mktemp("damage"))
    try:
        for node in running.nodes:
            wait_until(f"{node.directory.name} to train among all", partial(node.sees, NUM_NODES))
        running.wait_for_merges(2)
        yield running
    finally:
        for daemon in running.all:
            daemon.end()


def newest_on_disk(directory: Path, fragment: int) -> FragmentState:
    signed = open_place(directory, None).spec()
    assert signed
    fragments = fragments_of(signed.spec)
    replica = replica_of(signed.spec, fragments)
    stored = Store(directory, len(fragments), read_only=True).load(fragment)
    assert stored
    replica.put(stored.state)
    for merge in stored.merges:
        replica.put(replica.apply(fragment, merge.version, merge.payload))
    state = replica.state(fragment)
    assert state
    return state


def flip_a_bit(node: NodeProcess, fragment: int, which: str) -> tuple[int, int]:
    """In the anchor or momentum of the newest state, wherever it lies in the daemon's own memory;
    returns the version, and in how many places.
    """
    pid = node.process.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        state = newest_on_disk(node.directory, fragment)
        values = getattr(state, which)
        middle = values.nbytes // 2
        needle = values.tobytes()[middle : middle + NEEDLE_BYTES]
        places = [_flip_in(pid, start, stop, needle) for start, stop in _own_memory(pid)]
        return state.version, sum(places)
    finally:
        os.kill(pid, signal.SIGCONT)


def _own_memory(pid: int) -> list[tuple[int, int]]:
    """Private memory that can be written: not what is shared with the learner."""
    regions = []
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        addresses, permissions, *_ = line.split()
        if permissions == "rw-p":
            start, stop = (int(address, 16) for address in addresses.split("-"))
            regions.append((start, stop))
    return regions


def _flip_in(pid: int, start: int, stop: int, needle: bytes) -> int:
    with Path(f"/proc/{pid}/mem").open("r+b", buffering=0) as memory:
        try:
            memory.seek(start)
            content = memory.read(stop - start)
        except OSError:  # a guard page, or one of the kernel's
            return 0
        found, place = 0, content.find(needle)
        while place >= 0:
            memory.seek(start + place)
            memory.write(bytes([content[place] ^ 0x10]))
            found, place = found + 1, content.find(needle, place + 1)
        return found


def damage(node: NodeProcess, fragment: int, which: str) -> JsonObject:
    """Until a flip meets the state that is in use, since what is on disk may be one merge behind;
    returns what the page says of the fragment then.
    """
    while True:
        version, places = flip_a_bit(node, fragment, which)

        def outcome(version: int = version) -> JsonObject | None:
            """The damage was found, or what was hit is in use no more."""
            status = node.status()
            held: JsonObject | None = status and status["fragments"][fragment]
            decided = held and (held["damaged_times"] or held["version"] > version + 1)
            return held if decided else None

        found = wait_until("the damage to be found", outcome)
        if places and found["damaged_times"]:
            return found


def test_a_synchronizer_whose_anchor_is_damaged_tells_and_is_healed(swarm: Swarm) -> None:
    victim = wait_until("a synchronizer", swarm.synchronizer)
    damage(victim, 0, "anchor")

    def is_mended() -> bool:
        status = victim.get()
        mended = status["fragments"][0]["mended_s_ago"] is not None
        return mended and status["fragments"][0]["state"] != "diverged"

    wait_until("the damage to be mended", is_mended)
    assert any("was damaged in memory" in event["text"] for event in victim.get()["events"])
    assert "was damaged in memory" in victim.words()
    swarm.wait_for_merges(2)


def test_a_damaged_momentum_is_found_as_well(swarm: Swarm) -> None:
    leader = wait_until("a synchronizer", swarm.synchronizer)
    victim = next(node for node in swarm.nodes if node is not leader)
    damage(victim, 1, "momentum")
    swarm.wait_for_merges(2)


def test_nobody_built_on_what_was_damaged_and_in_the_end_all_agree(swarm: Swarm) -> None:
    settle_on_one_lineage(swarm.nodes)
    for node in swarm.nodes:
        status = node.get()
        assert not [reason for reason in status["refusals"] if "diverged" in reason]
        assert status["tokens"]["adds_up"]
        assert node.is_alive and "Traceback" not in node.words()
