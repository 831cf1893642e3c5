"""A node stays on the network although its p2pd ends, and gives up when it ends again and again."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import pytest
from virtual_clock import run_virtual

from p2pdiloco.errors import NetworkError, UserError
from p2pdiloco_bootstrap.host import Host, HostOptions
from p2pdiloco_bootstrap.p2pd import DaemonEnded
from p2pdiloco_daemon import network as networks
from p2pdiloco_daemon.network import DEATHS_MAX, HEALTHY_S, Network, running_network

OPTIONS = HostOptions(identity_path=Path("identity.key"))


class FakeHost:
    """Lives until it is killed."""

    def __init__(self) -> None:
        self.dead = asyncio.Event()
        self.is_closed = False

    async def watch(self) -> None:
        await self.dead.wait()
        raise DaemonEnded("p2pd ended with code -9")


class FakeHosts:
    """What stands for `open_host`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened: list[FakeHost] = []
        self.refusal: Exception | None = None
        monkeypatch.setattr(networks, "open_host", self._open)

    @asynccontextmanager
    async def _open(self, options: HostOptions) -> AsyncIterator[Host]:
        if self.refusal:
            raise self.refusal
        host = FakeHost()
        self.opened.append(host)
        try:
            yield cast(Host, host)
        finally:
            host.is_closed = True

    async def kill_newest(self, lived_s: float = 1.0) -> None:
        """And gives another one the time to come up."""
        await asyncio.sleep(lived_s)
        self.opened[-1].dead.set()
        await asyncio.sleep(networks.RESTART_DELAY_MAX_S + 1)


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> FakeHosts:
    return FakeHosts(monkeypatch)


def test_the_work_goes_on_on_the_host_that_takes_the_place_of_a_dead_one(hosts: FakeHosts) -> None:
    worked_on: list[FakeHost] = []

    async def work(host: Host) -> None:
        worked_on.append(cast(FakeHost, host))
        await asyncio.Event().wait()

    async def main() -> None:
        async with running_network(lambda: OPTIONS, lambda: None) as network:
            async with network.working(work):
                await hosts.kill_newest()
                assert hosts.opened[0].is_closed
                assert worked_on == hosts.opened and len(worked_on) == 2
                assert network.restarts == 1 and network.problem is None
                assert network.last_error == "p2pd ended with code -9"
            await hosts.kill_newest()
            assert len(hosts.opened) == 3 and len(worked_on) == 2
        assert hosts.opened[-1].is_closed

    run_virtual(main())


def test_a_network_that_fails_the_work_is_opened_anew(hosts: FakeHosts) -> None:
    tries: list[Host] = []

    async def work(host: Host) -> None:
        tries.append(host)
        if len(tries) == 1:
            raise TimeoutError("p2pd does not answer")
        await asyncio.Event().wait()

    async def main() -> None:
        async with running_network(lambda: OPTIONS, lambda: None) as network, network.working(work):
            await asyncio.sleep(1)
            assert len(hosts.opened) == len(tries) == 2
            assert network.last_error == "p2pd does not answer"

    run_virtual(main())


def test_while_there_is_no_host_a_request_fails_like_one_to_a_dead_peer(hosts: FakeHosts) -> None:
    async def main() -> None:
        async with running_network(lambda: OPTIONS, lambda: None) as network:
            hosts.refusal = UserError("no p2pd for now")
            await hosts.kill_newest()
            assert network.host is None
            assert network.problem == "no p2pd for now; it is started again"
            with pytest.raises(ConnectionError, match="started again"):
                await network._open_stream("peer")
            hosts.refusal = None
            await asyncio.sleep(networks.RESTART_DELAY_MAX_S)
            assert network.host is not None and network.problem is None

    run_virtual(main())


def test_a_p2pd_that_ends_again_and_again_ends_the_node_with_a_sentence(hosts: FakeHosts) -> None:
    async def main() -> None:
        ended = asyncio.Event()
        async with running_network(lambda: OPTIONS, ended.set):
            for _ in range(DEATHS_MAX):
                assert not ended.is_set()
                await hosts.kill_newest()
            await ended.wait()
            assert len(hosts.opened) == DEATHS_MAX

    with pytest.raises(NetworkError, match=f"code -9; that was {DEATHS_MAX} times in a row"):
        run_virtual(main())


def test_a_p2pd_that_dies_once_an_hour_is_started_for_ever(hosts: FakeHosts) -> None:
    async def main() -> None:
        async with running_network(lambda: OPTIONS, lambda: None) as network:
            for _ in range(3 * DEATHS_MAX):
                await hosts.kill_newest(lived_s=HEALTHY_S)
            assert network.restarts == 3 * DEATHS_MAX

    run_virtual(main())


def test_what_a_person_must_mend_is_told_at_the_first_start(hosts: FakeHosts) -> None:
    async def main() -> None:
        hosts.refusal = UserError("port 4001 is in use")
        async with running_network(lambda: OPTIONS, lambda: None):
            raise AssertionError("there is no network")

    with pytest.raises(UserError, match="port 4001 is in use"):
        run_virtual(main())


def test_a_p2pd_that_dies_while_it_starts_is_told_in_a_sentence(hosts: FakeHosts) -> None:
    async def main() -> None:
        hosts.refusal = ConnectionError("the network process p2pd is gone")
        async with running_network(lambda: OPTIONS, lambda: None):
            raise AssertionError("there is no network")

    with pytest.raises(NetworkError, match=r"did not come up \(.* is gone\); see whether"):
        run_virtual(main())


def test_a_bug_in_the_work_ends_the_node(hosts: FakeHosts) -> None:
    async def work(host: Host) -> None:
        raise ZeroDivisionError

    async def main() -> None:
        ended = asyncio.Event()
        async with running_network(lambda: OPTIONS, ended.set) as network, network.working(work):
            await ended.wait()

    with pytest.raises(ExceptionGroup) as raised:
        run_virtual(main())
    assert raised.group_contains(ZeroDivisionError)


def test_the_options_are_asked_anew_for_each_host(hosts: FakeHosts) -> None:
    """The port may have been taken in between."""
    asked: list[int] = []

    def options() -> HostOptions:
        asked.append(1)
        return OPTIONS

    async def main() -> None:
        async with running_network(options, lambda: None) as network:
            await hosts.kill_newest()
            assert isinstance(network, Network) and len(asked) == 2

    run_virtual(main())
