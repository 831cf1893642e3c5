"""What a host does by itself is watched as its p2pd is."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import cast

import pytest

from p2pdiloco_bootstrap.control import Control
from p2pdiloco_bootstrap.host import Host, HostOptions
from p2pdiloco_bootstrap.identity import Identity
from p2pdiloco_bootstrap.p2pd import DaemonEnded, NetworkDaemon


class FakeDaemon:
    """Ends when it is told to."""

    def __init__(self) -> None:
        self.dead = asyncio.Event()

    async def wait_ended(self) -> DaemonEnded:
        await self.dead.wait()
        return DaemonEnded("p2pd ended")


async def fail() -> None:
    raise RuntimeError("a bug")


async def go_on() -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("tend", "dies", "error"),
    [(fail, False, RuntimeError), (go_on, True, DaemonEnded), (fail, True, DaemonEnded)],
)
def test_whoever_watches_hears_of_the_end_of_p2pd_and_of_a_bug_in_the_tending(
    tmp_path: Path,
    tend: Callable[[], Coroutine[None, None, None]],
    dies: bool,
    error: type[Exception],
) -> None:
    async def main() -> None:
        identity = Identity.load_or_create(tmp_path / "key")
        options = HostOptions(identity_path=tmp_path / "key")
        daemon = FakeDaemon()
        host = Host(
            identity, options, cast(NetworkDaemon, daemon), Control("none"), p2p=None, dht=None
        )
        async with host.session():
            host._tending = asyncio.create_task(tend())
            if dies:
                daemon.dead.set()
            with pytest.raises(error):
                await host.watch()
            host._tending.cancel()
            await asyncio.wait((host._tending,))

    asyncio.run(main())
