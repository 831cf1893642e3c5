"""When a host dials its bootstrap peers again."""

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from virtual_clock import run_virtual

from p2pdiloco_bootstrap.control import Control
from p2pdiloco_bootstrap.identity import Identity
from p2pdiloco_bootstrap.neighbours import ALONE_RETRY_S_MAX, LOOK_S, RETRY_S, Neighbours

FIRST, OTHER = Identity.generate().peer_id, Identity.generate().peer_id
AT = ("/ip4/44.128.1.2/tcp/8600",)


class KnowsAll:
    def __contains__(self, peer: object) -> bool:
        return True


class Hosted(Control):
    """A p2pd that is connected to `peers`; a dial reaches whoever is `up`."""

    def __init__(self) -> None:
        self.peers: set[str] = set()
        self.up: set[str] = set()
        self.dialed_at: list[float] = []
        table = SimpleNamespace(peer_id_to_uid=KnowsAll())
        dht: Any = SimpleNamespace(protocol=SimpleNamespace(routing_table=table))
        self.neighbours = Neighbours({FIRST: AT}, self, self.dial, dht)

    async def connections(self) -> dict[str, tuple[str, ...]]:
        return dict.fromkeys(self.peers, AT)

    async def dial(self, peer: str, addresses: Sequence[str]) -> None:
        self.dialed_at.append(asyncio.get_running_loop().time())
        if peer not in self.up:
            raise ConnectionError("no answer")
        self.peers.add(peer)

    async def tend(self, seconds: float) -> None:
        tending = asyncio.create_task(self.neighbours.tend())
        await asyncio.sleep(seconds)
        tending.cancel()
        await asyncio.wait((tending,))

    def pauses(self) -> list[int]:
        return [round(b - a) for a, b in zip(self.dialed_at, self.dialed_at[1:], strict=False)]


def test_a_bootstrap_peer_that_is_down_is_dialed_less_and_less_often() -> None:
    host = Hosted()
    host.peers = {OTHER}
    run_virtual(host.tend(300))
    assert host.pauses() == [4, 8, 16, 32, 60, 60, 60]


def test_a_host_that_is_alone_keeps_dialing() -> None:
    host = Hosted()
    run_virtual(host.tend(60))
    assert max(host.pauses()) == ALONE_RETRY_S_MAX
    assert len(host.pauses()) >= 5


def test_a_bootstrap_peer_that_is_lost_is_dialed_at_once_and_soon_again() -> None:
    host = Hosted()
    host.peers, host.up = {OTHER}, {FIRST}

    async def script() -> None:
        tending = asyncio.create_task(host.tend(100))
        await asyncio.sleep(50)
        host.dialed_at.clear()
        host.peers, host.up = {OTHER}, set()
        await tending

    run_virtual(script())
    assert host.dialed_at[0] <= 50 + LOOK_S + 0.1
    assert host.pauses()[:2] == [RETRY_S[0], 2 * RETRY_S[0]]
    assert not host.neighbours.statuses()[0].connected
