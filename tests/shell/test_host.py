"""What a host does by itself is watched as its p2pd is."""

import asyncio
import errno
import gc
import warnings
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import cast

import pytest

from p2pdiloco_bootstrap import host as host_module
from p2pdiloco_bootstrap.control import Control
from p2pdiloco_bootstrap.host import Host, HostOptions, note_lost_connection
from p2pdiloco_bootstrap.identity import Identity
from p2pdiloco_bootstrap.p2pd import DaemonEnded, NetworkDaemon

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # importing hivemind runs deprecated parts of torch
    from hivemind.dht.node import DHTNode
    from hivemind.p2p import P2PDaemonError


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


def test_a_p2pd_that_is_killed_while_the_dht_starts_is_a_lost_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def create(*_: object, **__: object) -> None:
        raise P2PDaemonError("the connection is closed")

    async def main() -> None:
        async with host_module._dht_node(None, Identity.generate()):
            raise AssertionError("there is no DHT")

    monkeypatch.setattr(DHTNode, "create", create)
    with pytest.raises(ConnectionError, match="the connection is closed"):
        asyncio.run(main())


def test_that_a_killed_p2pd_resets_its_connection_is_no_forgotten_error() -> None:
    complaints: list[dict[str, object]] = []

    async def break_off() -> None:
        raise ConnectionResetError(errno.ECONNRESET, "reset by peer")

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, told: complaints.append(told))
        task = asyncio.create_task(break_off())
        task.add_done_callback(note_lost_connection)
        await asyncio.wait((task,))
        del task
        gc.collect()

    asyncio.run(main())
    assert not complaints
