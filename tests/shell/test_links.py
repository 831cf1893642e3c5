"""Connections are closed when an address of ours is gone, or when there is a better way."""

import asyncio
import errno

import pytest
from virtual_clock import run_virtual

from p2pdiloco_bootstrap import links
from p2pdiloco_bootstrap.control import Control

DIRECT = "/ip4/44.128.1.2/tcp/8600"
RELAYED = f"{DIRECT}/p2p/relay/p2p-circuit"


class FakeControl(Control):
    def __init__(self) -> None:
        self.closed: list[str] = []
        self.found_at: dict[str, tuple[str, ...]] = {"ann": (DIRECT,), "bob": (RELAYED,)}

    async def connections(self) -> dict[str, tuple[str, ...]]:
        return self.found_at

    async def disconnect(self, peer: str) -> None:
        self.closed.append(peer)


@pytest.mark.parametrize(
    ("then", "closed"),
    [
        (("44.128.1.2",), []),
        (("44.128.1.2", "44.128.7.7"), []),
        (("44.128.7.7",), ["ann", "bob"]),
        ((), ["ann", "bob"]),
    ],
)
def test_connections_end_with_an_address(
    monkeypatch: pytest.MonkeyPatch, then: tuple[str, ...], closed: list[str]
) -> None:
    control, here = FakeControl(), frozenset({"44.128.1.2"})

    async def main() -> None:
        nonlocal here
        monkeypatch.setattr(links, "addresses_here", lambda: here)
        watching = asyncio.create_task(links.close_dead_links(control))
        await asyncio.sleep(5)
        here = frozenset(then)
        await asyncio.sleep(20)
        watching.cancel()
        await asyncio.wait((watching,))

    run_virtual(main())
    assert control.closed == closed


def test_a_machine_that_does_not_tell_its_addresses_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    control, told = FakeControl(), iter(["44.128.1.2", None, None, "44.128.7.7"])

    def here() -> frozenset[str]:
        match next(told, "44.128.7.7"):
            case None:
                raise OSError(errno.EMFILE, "Too many open files")
            case address:
                return frozenset({address})

    async def main() -> None:
        monkeypatch.setattr(links, "addresses_here", here)
        watching = asyncio.create_task(links.close_dead_links(control))
        await asyncio.sleep(20)
        assert not watching.done()
        watching.cancel()
        await asyncio.wait((watching,))

    run_virtual(main())
    assert control.closed == ["ann", "bob"]


def test_loopback_and_addresses_of_the_link_do_not_count() -> None:
    assert not {"127.0.0.1", "::1"} & links.addresses_here()
    assert not [text for text in links.addresses_here() if text.startswith("fe80")]


@pytest.mark.parametrize(
    ("known", "dialed_after_s"),
    [
        ((DIRECT,), [2, 22, 62, 142, 302]),
        ((), []),
        ((DIRECT, RELAYED), []),
        (("/ip4/192.168.1.2/tcp/8600",), []),
        (("/ip4/me/tcp/8600", "garbage"), []),
    ],
)
def test_who_is_relayed_and_can_be_dialed_is_dialed_less_and_less_often(
    known: tuple[str, ...], dialed_after_s: list[float]
) -> None:
    control, calls = FakeControl(), list[float]()

    async def connect(peer: str) -> None:
        assert peer == "bob"
        calls.append(asyncio.get_running_loop().time())
        raise ConnectionError("no answer")

    async def main() -> None:
        work = links.replace_relayed_links(control, lambda peer: known, connect)
        replacing = asyncio.create_task(work)
        await asyncio.sleep(600)
        replacing.cancel()
        await asyncio.wait((replacing,))

    run_virtual(main())
    assert [call - calls[0] + 2 for call in calls] == pytest.approx(dialed_after_s)
    assert control.closed == ["bob"] * len(calls)
