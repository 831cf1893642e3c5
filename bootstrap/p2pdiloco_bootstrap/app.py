"""The first peer of a run: where newcomers start, and the first donor of the genesis weights.

It serves the signed spec and version 0 of each fragment, relays for peers behind NAT, takes part in
the DHT and announces itself there. It does not train, takes no messages, and the run goes on
without it once others have joined.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from p2pdiloco.signed_spec import SignedSpec
from p2pdiloco_bootstrap.discovery import Discovery
from p2pdiloco_bootstrap.host import Host, HostOptions, open_host
from p2pdiloco_bootstrap.identity import Identity, verify_with_key
from p2pdiloco_bootstrap.invite import BOOTSTRAPS_MAX, make_invite
from p2pdiloco_bootstrap.serving import Body, Traffic
from p2pdiloco_bootstrap.shelf import Contribution, RecordsPage, exchange_application

BOOTSTRAP_ROLE = "bootstrap"
PEER_KEY = "peer.key"
"""The peer's identity, in its directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BootstrapOptions:
    """What the first peer needs."""

    directory: Path
    """Its identity is kept there."""
    listen: str = "0.0.0.0"
    port: int = 0
    signed_spec: bytes
    """A packed `SignedSpec` with the digests of the genesis states."""
    genesis: Mapping[int, Body]
    """Version 0 of each fragment, as `pack_state` packs it, or a file of that."""
    announced: tuple[str, ...] = ()
    """See `HostOptions.announced`."""
    other_bootstraps: tuple[str, ...] = ()
    """First peers of the same run, to hold one DHT together with."""


@dataclass(frozen=True, slots=True)
class FirstPeer:
    """A running first peer."""

    host: Host
    discovery: Discovery
    traffic: Traffic
    run_id: str
    announcing: asyncio.Task[None]
    """Keeps it in the DHT, for ever."""

    async def invite(self, owner: Identity, expires_at: float) -> str:
        """An invite to this peer, signed with the key that signed the run's spec."""
        addresses = (await self.host.addresses())[:BOOTSTRAPS_MAX]
        return make_invite(owner, self.run_id, addresses, expires_at)

    async def watch(self) -> NoReturn:
        """Never returns; ConnectionError when the network process ends by itself, or when nothing
        announces this peer any more.
        """
        watching = asyncio.create_task(self.host.watch(), name="p2pd")
        try:
            await asyncio.wait((watching, self.announcing), return_when=asyncio.FIRST_COMPLETED)
        finally:
            watching.cancel()
        if watching.done():
            watching.result()
        error = self.announcing.exception()
        raise ConnectionError(
            f"this peer is not announced to others any more ({error!r})"
        ) from error


@asynccontextmanager
async def running_bootstrap(options: BootstrapOptions) -> AsyncIterator[FirstPeer]:
    """The first peer, serving; PeerError where the spec is not signed as it claims."""
    signed = SignedSpec.unpack(options.signed_spec, verify_with_key)
    traffic = Traffic()
    shelf = GenesisShelf(signed, options.genesis)
    host_options = HostOptions(
        identity_path=options.directory / PEER_KEY,
        listen=(options.listen, options.port),
        bootstraps=options.other_bootstraps,
        reachability="public",
        announced=options.announced,
    )
    async with AsyncExitStack() as stack:
        host = await stack.enter_async_context(open_host(host_options))
        await stack.enter_async_context(host.serving(exchange_application(shelf, traffic)))
        discovery = Discovery(host, signed.run_id)
        host.consult(discovery)
        announcing = asyncio.create_task(
            discovery.keep_announced((BOOTSTRAP_ROLE,)), name="announcing"
        )
        stack.push_async_callback(_cancelled, announcing)
        yield FirstPeer(host, discovery, traffic, signed.run_id, announcing)


class GenesisShelf:
    """Version 0 of everything, and nothing newer."""

    def __init__(self, signed: SignedSpec, genesis: Mapping[int, Body]) -> None:
        self._packed = signed.pack()
        spec = signed.spec
        self._digests = spec.genesis.state_digests if spec.genesis else ()
        self._genesis = genesis

    async def spec(self) -> bytes:
        return self._packed

    async def records(self, fragment: int, since: int) -> RecordsPage | None:
        if fragment >= len(self._digests) or fragment not in self._genesis:
            return None
        return RecordsPage((), ((0, self._digests[fragment]),))

    async def state(self, fragment: int, version: int, digest: str) -> Body | None:
        page = await self.records(fragment, 0)
        known = page is not None and (version, digest) in page.snapshots
        return self._genesis[fragment] if known else None

    async def merge(self, fragment: int, version: int, digest: str) -> None:
        return None

    async def contribution(
        self, peer: str, fragment: int, version: int, term: int, attempt: int
    ) -> Contribution | None:
        return None


async def _cancelled(task: asyncio.Task[None]) -> None:
    """Ends `task`; what it died of before is told by `FirstPeer.watch`."""
    task.cancel()
    await asyncio.wait((task,))
