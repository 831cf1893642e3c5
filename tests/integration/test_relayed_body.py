"""A peer that nobody can dial hands over a whole body through a relay, real p2pd on loopback."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from p2pdiloco_bootstrap import host as host_module
from p2pdiloco_bootstrap.host import Host, HostOptions, open_host
from p2pdiloco_bootstrap.serving import Traffic, new_application, send_body
from p2pdiloco_bootstrap.streams import peer_url

pytestmark = [pytest.mark.loopback, pytest.mark.timeout(600)]

BODY = bytes(range(256)) * (4 << 12)
"""4 MiB: thirty times what go-libp2p's default relay carries."""


@pytest.fixture
def hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts named "hidden" listen nowhere, as behind a NAT."""
    original = host_module._p2pd_arguments

    def arguments(options: HostOptions, listen: str, control: str) -> list[str]:
        found = original(options, listen, control)
        if options.identity_path.stem != "hidden":
            return found
        kept = [argument for argument in found if not argument.startswith("-hostAddrs")]
        return [*kept, "-noListenAddrs=1"]

    monkeypatch.setattr(host_module, "_p2pd_arguments", arguments)


@asynccontextmanager
async def opened(
    directory: Path, name: str, bootstraps: Sequence[str] = (), **options: str
) -> AsyncIterator[Host]:
    async with open_host(
        HostOptions(
            identity_path=directory / f"{name}.key",
            listen=("127.0.0.1", 0),
            bootstraps=tuple(bootstraps),
            **options,  # type: ignore[arg-type]
        )
    ) as host:
        yield host


async def relayed_address(host: Host) -> str:
    """Once a relay has a slot for it."""
    async with asyncio.timeout(300):
        while True:
            for address in await host.addresses():
                return address
            await asyncio.sleep(0.05)


@pytest.mark.usefixtures("hidden")
def test_a_whole_body_passes_through_the_relay(tmp_path: Path) -> None:
    app = new_application(1000)

    async def body(request: web.Request) -> web.StreamResponse:
        return await send_body(request, BODY, "body", Traffic())

    app.router.add_get("/body", body)

    async def main() -> None:
        async with opened(tmp_path, "relay", reachability="public") as relay:
            [address] = await relay.addresses()
            async with (
                opened(tmp_path, "hidden", [address], reachability="private") as hidden,
                opened(tmp_path, "reader", [address]) as reader,
                hidden.serving(app),
            ):
                peer = hidden.peer_id
                await reader.connect(peer, [await relayed_address(hidden)])
                async with reader.session().get(peer_url(peer, "/body")) as response:
                    assert await response.read() == BODY
                assert "/p2p-circuit" in str((await reader.connections())[peer])

    asyncio.run(main())
