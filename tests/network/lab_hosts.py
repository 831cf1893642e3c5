"""Network hosts of this one process, each with its p2pd in a namespace of a lab.

Control sockets are files, so a host can be asked from outside its namespace.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Literal

import pytest
from aiohttp import ClientError, web

from benchmarks import lab
from p2pdiloco_bootstrap import host as host_module
from p2pdiloco_bootstrap import links as links_module
from p2pdiloco_bootstrap import p2pd as p2pd_module
from p2pdiloco_bootstrap.discovery import Discovery
from p2pdiloco_bootstrap.host import Host, HostOptions, open_host
from p2pdiloco_bootstrap.serving import new_application
from p2pdiloco_bootstrap.streams import peer_url

PATIENCE_S = 300.0
POLL_S = 0.2
SOON_S = 10.0
"""For one request, which takes milliseconds; the machine may be slow and busy."""
PORT = 8600

_machine: ContextVar[lab.Host] = ContextVar("machine")


def put_p2pd_into_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on hosts of this process are those of `opened`."""
    spawn = p2pd_module._spawn

    async def spawn_there(
        binary: Path, arguments: Sequence[str], one_thread: bool
    ) -> asyncio.subprocess.Process:
        ip, *rest = _machine.get().prefix
        return await spawn(Path(ip), [*rest, str(binary), *arguments], one_thread)

    monkeypatch.setattr(p2pd_module, "_spawn", spawn_there)
    look = links_module.addresses_here
    monkeypatch.setattr(links_module, "addresses_here", lambda: _machine.get().call(look))
    monkeypatch.setattr(host_module, "_check_port_is_free", lambda host, port: None)


@asynccontextmanager
async def opened(
    machine: lab.Host,
    directory: Path,
    first: Host | None = None,
    reachability: Literal["auto", "public"] = "auto",
) -> AsyncIterator[Host]:
    """A host that says "hello", announces itself, and looks others up; `first` is its bootstrap."""
    _machine.set(machine)
    options = HostOptions(
        identity_path=directory / f"{machine.name}.key",
        listen=("0.0.0.0", PORT),
        bootstraps=tuple(await first.addresses()) if first else (),
        reachability=reachability,
    )
    app = new_application(1000)
    app.router.add_get("/hello", _hello)
    async with AsyncExitStack() as stack:
        host = await stack.enter_async_context(open_host(options))
        await stack.enter_async_context(host.serving(app))
        discovery = Discovery(host, "run")
        host.consult(discovery)
        announcing = asyncio.create_task(discovery.keep_announced())
        stack.callback(announcing.cancel)
        yield host


async def _hello(request: web.Request) -> web.Response:
    return web.Response(text="hello")


async def reaches(host: Host, other: Host) -> bool:
    """Whether a request from one to the other is answered soon."""
    try:
        async with (
            asyncio.timeout(SOON_S),
            host.session().get(peer_url(other.peer_id, "/hello")) as it,
        ):
            return await it.text() == "hello"
    except (ClientError, TimeoutError):
        return False


async def until_both_reach(one: Host, other: Host) -> None:
    """Both go on asking, as nodes do with their heartbeats."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            async with asyncio.TaskGroup() as tasks:
                there = tasks.create_task(reaches(one, other))
                back = tasks.create_task(reaches(other, one))
            if there.result() and back.result():
                return
            await asyncio.sleep(POLL_S)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            if condition():
                return
            await asyncio.sleep(POLL_S)


async def is_direct(host: Host, other: Host) -> bool:
    """Whether they are connected without a relay; just now they may not be connected at all."""
    found = (await host.connections()).get(other.peer_id, ())
    return any("/p2p-circuit" not in address for address in found)
