"""Hosts behind NATs and firewalls reach each other, whatever relay dies and whoever moves.

Real p2pd in network namespaces; no training.
"""

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack
from itertools import product
from pathlib import Path

import pytest
from lab_hosts import (
    POLL_S,
    is_direct,
    opened,
    put_p2pd_into_namespaces,
    reaches,
    until,
    until_both_reach,
)
from required_lab import required_lab

from benchmarks.lab import Lab
from p2pdiloco_bootstrap import reachability
from p2pdiloco_bootstrap.host import Host

pytestmark = [pytest.mark.loopback, pytest.mark.slow, pytest.mark.timeout(1800)]

NO_RELAY = "it has found no relay"
PUNCH_PAUSE_S = 25.0
"""p2pd takes up to 15 s for a try."""
PUNCH_TRIES = 30
"""Most come to something at once; on a busy machine both sides seldom dial in the same moment."""


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    put_p2pd_into_namespaces(monkeypatch)
    with required_lab() as lab:
        yield lab


def says(host: Host, words: str) -> bool:
    return words in (host.reach() or "")


def relays_of(host: Host) -> str:
    return (host.reach() or "").partition("reached through ")[2]


def test_a_relay_that_comes_back_serves_two_hosts_behind_nats_again(
    lab: Lab, tmp_path: Path
) -> None:
    town, homes = lab.public("town"), [lab.behind_nat(name) for name in ("home-a", "home-b")]

    async def main() -> None:
        async with AsyncExitStack() as stack, AsyncExitStack() as mortal:
            first = await mortal.enter_async_context(opened(town, tmp_path, reachability="public"))
            a, b = [await stack.enter_async_context(opened(h, tmp_path, first)) for h in homes]
            await until_both_reach(a, b)
            assert not (await is_direct(a, b) or await is_direct(b, a))
            await until(lambda: relays_of(a) == relays_of(b) == first.peer_id[-8:])
            await mortal.aclose()
            await until(lambda: says(a, NO_RELAY) and says(b, NO_RELAY))
            assert not await reaches(a, b)
            await mortal.enter_async_context(opened(town, tmp_path, reachability="public"))
            await until_both_reach(a, b)

    asyncio.run(main())


def test_a_member_that_can_be_dialed_relays_on_when_the_first_peer_dies(
    lab: Lab, tmp_path: Path
) -> None:
    """Though it may be that it dialed those for whom it relays, through the first peer."""
    town, member = lab.public("town"), lab.public("member")
    hidden = [lab.behind_nat("home", symmetric=True), lab.firewalled("office")]

    async def main() -> None:
        async with AsyncExitStack() as stack, AsyncExitStack() as mortal:
            first = await mortal.enter_async_context(opened(town, tmp_path, reachability="public"))
            other = await stack.enter_async_context(opened(member, tmp_path, first))
            a, b = [await stack.enter_async_context(opened(h, tmp_path, first)) for h in hidden]
            await until(lambda: says(other, "other nodes can dial this one"))
            await until(lambda: says(a, "nobody can dial") and says(b, "nobody can dial"))
            both = {first.peer_id[-8:], other.peer_id[-8:]}
            for host in (a, b):
                host.remember(other.peer_id, await other.addresses())
                await other.connect(host.peer_id, await host.addresses())
            await until(lambda: {*relays_of(a).split(" and ")} == both)
            await until(lambda: {*relays_of(b).split(" and ")} == both)
            await until_both_reach(a, b)
            await mortal.aclose()
            await until(lambda: relays_of(a) == relays_of(b) == other.peer_id[-8:])
            await until_both_reach(a, b)

    asyncio.run(main())


def test_two_hosts_behind_nats_become_connected_directly(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once four peers that they dial have told them their addresses, and in one of some tries."""
    monkeypatch.setattr(reachability, "PUNCH_PAUSE_S", (PUNCH_PAUSE_S, PUNCH_PAUSE_S))
    town, members = lab.public("town"), [lab.public(f"member-{number}") for number in range(3)]
    homes = [lab.behind_nat(name) for name in ("home-a", "home-b")]

    async def main() -> None:
        async with AsyncExitStack() as stack:
            first = await stack.enter_async_context(opened(town, tmp_path, reachability="public"))
            others = [await stack.enter_async_context(opened(h, tmp_path, first)) for h in members]
            a, b = [await stack.enter_async_context(opened(h, tmp_path, first)) for h in homes]
            for home, other in product((a, b), others):
                await home.connect(other.peer_id, await other.addresses())
            async with asyncio.timeout(reachability.PUNCHES_AFTER_S + PUNCH_TRIES * PUNCH_PAUSE_S):
                while True:
                    await until_both_reach(a, b)
                    if await is_direct(a, b):
                        break
                    await asyncio.sleep(POLL_S)

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["public", "behind_nat"])
def test_a_host_that_moves_is_found_again(lab: Lab, tmp_path: Path, kind: str) -> None:
    town, still = lab.public("town"), lab.behind_nat("still")
    moving = lab.public("moving") if kind == "public" else lab.behind_nat("moving")

    async def main() -> None:
        async with (
            opened(town, tmp_path, reachability="public") as first,
            opened(still, tmp_path, first) as a,
            opened(moving, tmp_path, first) as b,
        ):
            await until_both_reach(a, b)
            lab.move(moving)
            await until_both_reach(a, b)

    asyncio.run(main())
