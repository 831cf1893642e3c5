"""Who is sought, how often, and what becomes of it."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from virtual_clock import run_virtual

from p2pdiloco_bootstrap.seeking import FORGET_S, SOUGHT_MAX, Seeker


class Found(dict[str, list[float]]):
    """When each peer was looked for; `gone` peers are not found."""

    def __init__(self, *gone: str) -> None:
        self.gone = set(gone)
        self.seeker = Seeker(self.find)

    async def find(self, peer: str) -> None:
        self.setdefault(peer, []).append(asyncio.get_running_loop().time())
        if peer in self.gone:
            raise ConnectionError("no route")


def seek(found: Found, script: Callable[[Found], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        searching = asyncio.create_task(found.seeker.run())
        await script(found)
        searching.cancel()
        await asyncio.wait((searching,))
        assert searching.cancelled()

    run_virtual(main())


async def _ask_each_second(found: Found, seconds: int) -> None:
    for _ in range(seconds):
        found.seeker.seek("ann")
        await asyncio.sleep(1)


def test_a_peer_that_is_gone_is_sought_less_and_less_often() -> None:
    async def script(found: Found) -> None:
        await _ask_each_second(found, 200)

    found = Found("ann")
    seek(found, script)
    pauses = [b - a for a, b in zip(found["ann"], found["ann"][1:], strict=False)]
    assert [round(pause) for pause in pauses] == [2, 4, 8, 16, 32, 60, 60]


def test_a_peer_that_was_found_is_sought_at_once_when_it_is_lost_again() -> None:
    async def script(found: Found) -> None:
        await _ask_each_second(found, 100)
        found.gone.clear()
        await _ask_each_second(found, 100)
        found["ann"].clear()
        found.seeker.seek("ann")
        await asyncio.sleep(1)

    found = Found("ann")
    seek(found, script)
    assert len(found["ann"]) == 1


def test_a_peer_that_nobody_asked_for_is_forgotten() -> None:
    async def script(found: Found) -> None:
        await _ask_each_second(found, 100)
        await asyncio.sleep(FORGET_S)
        found["ann"].clear()
        await _ask_each_second(found, 4)

    found = Found("ann")
    seek(found, script)
    assert len(found["ann"]) == 2


def test_no_more_peers_are_sought_than_are_remembered() -> None:
    async def script(found: Found) -> None:
        for number in range(2 * SOUGHT_MAX):
            found.seeker.seek(f"peer {number}")
        await asyncio.sleep(1)

    found = Found(*(f"peer {number}" for number in range(2 * SOUGHT_MAX)))
    seek(found, script)
    assert len(found) == SOUGHT_MAX
