"""The first peer stays up although its p2pd ends, says what it cannot mend, and leaves at once."""

import argparse
import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import pytest
from virtual_clock import run_virtual

from p2pdiloco.errors import NetworkError, UserError
from p2pdiloco.signed_spec import SignedSpec, bytes_to_sign, canonical_bytes
from p2pdiloco.spec import GenesisSpec, RunSpec, TensorLayout
from p2pdiloco_bootstrap import app
from p2pdiloco_bootstrap.app import BootstrapOptions, FirstPeer
from p2pdiloco_bootstrap.discovery import Discovery
from p2pdiloco_bootstrap.host import Host
from p2pdiloco_bootstrap.identity import Identity
from p2pdiloco_bootstrap.p2pd import DaemonEnded
from p2pdiloco_bootstrap.serving import Traffic
from p2pdiloco_daemon.cli import bootstrap
from p2pdiloco_daemon.network import DEATHS_MAX

OWNER = Identity.generate()
ARGUMENTS = argparse.Namespace(listen="127.0.0.1", port=0, supervisor_fd=None)


def signed_spec() -> SignedSpec:
    draft = RunSpec(name="a")
    digests = ("ab" * 32,) * draft.sync.num_fragments
    tensors = (TensorLayout(name="w", shape=(8,)),)
    genesis = GenesisSpec(num_parameters=8, tensors=tensors, state_digests=digests)
    spec = canonical_bytes(draft.with_genesis(genesis))
    return SignedSpec(spec, OWNER.public_key, OWNER.sign(bytes_to_sign(spec)))


class FakeHost:
    """Lives until it is killed."""

    def __init__(self) -> None:
        self.dead = asyncio.Event()

    async def addresses(self) -> list[str]:
        return [f"/ip4/127.0.0.1/tcp/8600/p2p/{OWNER.peer_id}"]

    async def watch(self) -> None:
        await self.dead.wait()
        raise DaemonEnded("p2pd ended with code -9")


class FakePeers:
    """What stands for `running_bootstrap`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hosts: list[FakeHost] = []
        self.ports: list[int] = []
        self.refusal: Exception | None = None
        self.takes_s = 0.0
        monkeypatch.setattr(app, "running_bootstrap", self._open)

    @asynccontextmanager
    async def _open(self, options: BootstrapOptions) -> AsyncIterator[FirstPeer]:
        self.ports.append(options.port)
        await asyncio.sleep(self.takes_s)
        if self.refusal:
            raise self.refusal
        self.hosts.append(FakeHost())
        announcing = asyncio.create_task(asyncio.Event().wait())
        try:
            yield first_peer(self.hosts[-1], cast("asyncio.Task[None]", announcing))
        finally:
            announcing.cancel()


def first_peer(host: FakeHost, announcing: "asyncio.Task[None]") -> FirstPeer:
    return FirstPeer(cast(Host, host), cast(Discovery, None), Traffic(), "ab" * 16, announcing)


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> FakePeers:
    return FakePeers(monkeypatch)


async def serve(directory: Path) -> None:
    await bootstrap.serve(ARGUMENTS, OWNER, signed_spec(), directory)


def press_ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def test_a_first_peer_whose_p2pd_dies_comes_back_on_its_port(
    peers: FakePeers, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(1, lambda: peers.hosts[0].dead.set())
        loop.call_later(5, press_ctrl_c)
        await serve(tmp_path)

    run_virtual(main())
    assert peers.ports == [0, 8600]
    printed = capsys.readouterr()
    assert printed.err == "p2pd ended with code -9; it is started again\n"
    assert printed.out.count("\np2pdiloco:") == 2


@pytest.mark.parametrize("refusal", [ConnectionError("p2pd is gone"), TimeoutError()])
def test_a_first_peer_that_does_not_come_up_says_so(
    refusal: OSError, peers: FakePeers, tmp_path: Path
) -> None:
    peers.refusal = refusal
    with pytest.raises(NetworkError, match=r"did not come up \((p2pd is gone|TimeoutError)\); see"):
        run_virtual(serve(tmp_path))
    assert len(peers.ports) == 1


def test_what_a_person_must_mend_before_the_first_peer_is_told(
    peers: FakePeers, tmp_path: Path
) -> None:
    peers.refusal = UserError("port 8600 is in use")
    with pytest.raises(UserError, match="port 8600 is in use"):
        run_virtual(serve(tmp_path))


@pytest.mark.parametrize("refusal", [ConnectionError("no answer"), UserError("port in use")])
def test_a_first_peer_that_does_not_come_up_again_is_tried_for_a_while(
    refusal: Exception, peers: FakePeers, tmp_path: Path
) -> None:
    async def main() -> None:
        serving = asyncio.create_task(serve(tmp_path))
        await asyncio.sleep(1)
        peers.refusal = refusal
        peers.hosts[0].dead.set()
        await serving

    with pytest.raises(NetworkError, match=f"{refusal}; that was {DEATHS_MAX} times in a row"):
        run_virtual(main())
    assert len(peers.ports) == DEATHS_MAX


def test_ctrl_c_is_heard_in_the_pause_before_a_restart(peers: FakePeers, tmp_path: Path) -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        serving = asyncio.create_task(serve(tmp_path))
        await asyncio.sleep(1)
        peers.refusal = ConnectionError("no answer")
        peers.hosts[0].dead.set()
        await asyncio.sleep(20)  # in one of the long pauses
        pressed = loop.time()
        press_ctrl_c()
        await serving
        return loop.time() - pressed

    assert run_virtual(main()) < 0.1


def test_ctrl_c_is_heard_while_the_first_peer_opens(peers: FakePeers, tmp_path: Path) -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        peers.takes_s = 20.0
        loop.call_later(1, press_ctrl_c)
        await serve(tmp_path)
        return loop.time()

    assert run_virtual(main()) < 1.1
    assert not peers.hosts


def test_output_that_nobody_reads_is_not_taken_for_the_network(
    peers: FakePeers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(*lines: object) -> list[str]:
        raise BrokenPipeError

    monkeypatch.setattr(bootstrap, "_welcome", closed)
    with pytest.raises(BrokenPipeError):
        run_virtual(serve(tmp_path))


def test_a_first_peer_that_is_no_longer_announced_ends() -> None:
    async def forget() -> None:
        raise KeyError("shard")

    async def main() -> None:
        await first_peer(FakeHost(), asyncio.create_task(forget())).watch()

    with pytest.raises(
        ConnectionError, match=r"not announced to others any more \(KeyError\('shard"
    ):
        run_virtual(main())


def test_a_first_peer_ends_with_its_p2pd() -> None:
    async def main() -> None:
        host, announcing = FakeHost(), asyncio.create_task(asyncio.Event().wait())
        host.dead.set()
        await first_peer(host, cast("asyncio.Task[None]", announcing)).watch()

    with pytest.raises(DaemonEnded):
        run_virtual(main())
