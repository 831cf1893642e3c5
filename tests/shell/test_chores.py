"""What a node does beside its events."""

import asyncio
from typing import NoReturn, cast

from virtual_clock import run_virtual

from p2pdiloco_bootstrap.host import Host
from p2pdiloco_bootstrap.p2pd import DaemonEnded
from p2pdiloco_daemon.chores import watch_network


class DyingNetwork:
    async def watch(self) -> NoReturn:
        await asyncio.sleep(5)
        raise DaemonEnded("p2pd ended with code -9")


def test_a_node_stops_and_says_why_when_its_network_process_ends() -> None:
    async def main() -> None:
        stop = asyncio.Event()
        reason = await watch_network(cast(Host, DyingNetwork()), stop)
        assert stop.is_set()
        assert reason == "p2pd ended with code -9"

    run_virtual(main())
