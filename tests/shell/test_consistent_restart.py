"""All nodes are killed at once in the middle of whatever their disks do; any of them come back.

What a node has told others of must be in its directory: a merge is lost only with every disk that
had it. The kill comes at a drawn operation of the disks, so also within a file, between its syncing
and its renaming, and between the steps in which a log begins anew after a partition.
"""

import asyncio
import errno
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import pytest
from memory_swarm import BOOT, RUN, A, B, C, MemoryExchange, Swarm, play_swarm

from p2pdiloco.protocol import wire
from p2pdiloco.protocol.lineage import Chain, check_record, unpack_record
from p2pdiloco.protocol.naming import PeerId
from p2pdiloco.simulation.machine import KeyedSigner
from p2pdiloco_bootstrap.shelf import RecordsPage

SEEDS = 50
ALL = (A, B, C)
LONGEST_S = 120.0


@dataclass
class Fuse:
    """Burns at the `allowed`-th disk operation: nothing is written, renamed or removed any more,
    and nobody hears from anybody.
    """

    allowed: float = float("inf")
    burnt: bool = False

    def touch(self) -> bool:
        """Before each operation; whether it may happen."""
        self.allowed -= 1
        self.burnt = self.burnt or self.allowed < 0
        return not self.burnt


class _File:
    """A file being written, of which the kill leaves a part."""

    def __init__(self, file: IO[bytes], fuse: Fuse) -> None:
        self._file = file
        self._fuse = fuse

    def __enter__(self) -> "_File":
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def write(self, part: bytes) -> int:
        if self._fuse.touch():
            return self._file.write(part)
        self._file.write(memoryview(part)[: len(part) // 2])
        raise _killed()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _killed() -> OSError:
    return OSError(errno.EIO, "killed")


@pytest.fixture
def fuse(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fuse]:
    fuse, open_path = Fuse(), Path.open

    def fragile(name: str, owner: Any) -> None:
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if not fuse.touch():
                raise _killed()
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    def open_fragile(path: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if mode != "wb":
            return open_path(path, mode, *args, **kwargs)
        if not fuse.touch():
            raise _killed()
        return _File(open_path(path, mode, *args, **kwargs), fuse)

    fragile("replace", Path)
    fragile("unlink", Path)
    fragile("fsync", os)
    monkeypatch.setattr(Path, "open", open_fragile)
    yield fuse


@dataclass
class Told:
    """The newest head that each node has told anybody of, by (node, fragment)."""

    fuse: Fuse
    heads: dict[tuple[str, int], wire.Head] = field(default_factory=dict)

    def message(self, sender: str, body: bytes) -> None:
        match wire.unpack(body):
            case wire.Heartbeat(heads=heads):
                for p, head in enumerate(heads):
                    self._head(sender, p, head)
            case wire.Committed(record) if record.synchronizer == sender:
                head = wire.Head(record.version, record.digest, record.tokens_total)
                self._head(sender, record.fragment, head)
            case _:
                pass

    def page(self, donor: str, fragment: int, page: RecordsPage) -> None:
        if page.records and donor != BOOT:
            record = unpack_record(page.records[-1])
            check_record(record, RUN, KeyedSigner(A))
            head = wire.Head(record.version, record.digest, record.tokens_total)
            self._head(donor, fragment, head)

    def _head(self, node: str, fragment: int, head: wire.Head) -> None:
        before = self.heads.get((node, fragment))
        newer = head.version >= 0 and (before is None or head.weight > before.weight)
        if newer and not self.fuse.burnt:
            self.heads[node, fragment] = head


@pytest.fixture
def told(fuse: Fuse, monkeypatch: pytest.MonkeyPatch) -> Told:
    told = Told(fuse)
    send, records = MemoryExchange.send, MemoryExchange.records

    async def send_and_note(exchange: MemoryExchange, peer: str, message: bytes) -> None:
        told.message(exchange._me, message)
        await send(exchange, peer, message)

    async def records_noted(
        exchange: MemoryExchange, peer: str, fragment: int, since: int
    ) -> RecordsPage:
        page = await records(exchange, peer, fragment, since)
        told.page(peer, fragment, page)
        return page

    monkeypatch.setattr(MemoryExchange, "send", send_and_note)
    monkeypatch.setattr(MemoryExchange, "records", records_noted)
    return told


def keeps(chain: Chain | None, head: wire.Head) -> bool:
    """Whether the chain has what was told, or is of a lineage that beats it."""
    found = chain and chain.digest_at(head.version) == head.digest
    return bool(found or (chain and chain.weight > head.weight))


@pytest.mark.parametrize("seed", range(SEEDS))
def test_what_a_node_told_others_of_is_on_its_disk(
    tmp_path: Path, fuse: Fuse, told: Told, seed: int
) -> None:
    rng = random.Random(seed)
    back = rng.sample(ALL, rng.randint(1, 3))

    async def live_and_die(swarm: Swarm) -> None:
        swarm.start(*ALL)
        await swarm.train(rng.uniform(3, 8))
        alone = rng.choice(ALL)
        if rng.random() < 0.5:  # its lineage forks, and loses or wins
            swarm.network.hung.add(alone)
        fuse.allowed = rng.randint(50, 400)
        while not fuse.burnt and asyncio.get_running_loop().time() < LONGEST_S:
            await swarm.train(rng.uniform(0, 1))
            if rng.random() < 0.1:
                swarm.network.hung.clear()
        assert fuse.burnt

    async def return_and_go_on(swarm: Swarm) -> None:
        swarm.start(*back)
        await swarm.train(swarm.network.latency_s / 2)  # before they hear of each other
        for node, p, head in heads:
            chain = swarm.nodes[node].node.state.registers[p].chain
            assert keeps(chain, head), (node, p, head, chain)
        await swarm.train(30)
        await swarm.settle()
        digests = [living.digests for living in swarm.nodes.values()]
        assert all(other == digests[0] for other in digests)
        for living in swarm.nodes.values():
            for _, p, head in heads:
                assert keeps(living.node.state.registers[p].chain, head)

    play_swarm(tmp_path, live_and_die)
    heads = [(PeerId(node), p, head) for (node, p), head in told.heads.items() if node in back]
    fuse.allowed, fuse.burnt = float("inf"), False
    play_swarm(tmp_path, return_and_go_on)
