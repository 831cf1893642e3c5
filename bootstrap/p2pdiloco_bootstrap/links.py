"""Which connections are worth keeping.

When this machine loses an address, as when it changes its network, its connections send into the
void; by itself p2pd would find out after 40 seconds. And a peer that dialed us through a relay
stays connected through it, though we could dial it: p2pd dials nobody to whom it is connected.
"""

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence

import psutil

from p2pdiloco.protocol.naming import PeerId
from p2pdiloco.protocol.pauses import Pauses
from p2pdiloco_bootstrap import addresses as multiaddrs
from p2pdiloco_bootstrap.control import Control

log = logging.getLogger(__name__)

LOOK_S = 2.0
"""Between looks at interfaces and connections, which take a millisecond."""

DIRECT_AGAIN_S = (20.0, 600.0)
"""First and longest time until a peer that was not reached directly is tried again: one dial may
fail by chance, but each costs what goes through the relay just then."""


def addresses_here() -> frozenset[str]:
    """IP addresses of this machine under which others may know it; OSError if it does not tell."""
    found = (a for each in psutil.net_if_addrs().values() for a in each)
    texts = (a.address for a in found if a.family in (socket.AF_INET, socket.AF_INET6))
    return frozenset(text for text in texts if not _is_of_the_link(text))


async def close_dead_links(control: Control) -> None:
    """Goes on for ever."""
    before: frozenset[str] = frozenset()
    while True:
        try:
            now = addresses_here()
            lost, before = before - now, now
            if lost:
                log.info("this machine lost its address %s: dialing anew", ", ".join(sorted(lost)))
                for peer in await control.connections():
                    await control.disconnect(peer)
        except OSError as error:  # no file can be opened, or p2pd is gone, which `Host.watch` tells
            log.debug("cannot look after connections: %s", error)
        await asyncio.sleep(LOOK_S)


async def replace_relayed_links(
    control: Control,
    addresses_of: Callable[[str], Sequence[str]],
    connect: Callable[[str], Awaitable[None]],
) -> None:
    """Dials, for ever, who is connected through a relay and says that it can be dialed."""
    tries = Pauses(*DIRECT_AGAIN_S)
    while True:
        await asyncio.sleep(LOOK_S)
        now = asyncio.get_running_loop().time()
        try:
            for peer, found in (await control.connections()).items():
                relayed = all(multiaddrs.is_relayed(address) for address in found)
                is_due = relayed and tries.over(PeerId(peer), now)
                if is_due and _can_be_dialed(addresses_of(peer)):
                    tries.begin(PeerId(peer), now)
                    log.info("dialing %s, instead of its relay", peer[-8:])
                    await control.disconnect(peer)
                    await connect(peer)
        except OSError as error:
            log.debug("no direct connection: %s", error)


def _can_be_dialed(addresses: Sequence[str]) -> bool:
    """Whether these are those of a peer that needs no relay."""
    return any(multiaddrs.is_public(address) for address in addresses) and not any(
        multiaddrs.is_relayed(address) for address in addresses
    )


def _is_of_the_link(text: str) -> bool:
    """Loopback, and what comes and goes with containers."""
    address = ipaddress.ip_address(text.partition("%")[0])
    return address.is_loopback or address.is_link_local
