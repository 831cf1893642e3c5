"""Closes connections at once when this machine loses an address, as when it changes its network.

What is left of them sends into the void; by itself p2pd would find out after 40 seconds. Not here:
who is dialed again (`neighbours.py` and the next requests do that).
"""

import asyncio
import ipaddress
import logging
import socket

import psutil

from p2pdiloco_bootstrap.control import Control

log = logging.getLogger(__name__)

LOOK_S = 2.0
"""Between looks at the interfaces, which take a third of a millisecond."""


def addresses_here() -> frozenset[str]:
    """IP addresses of this machine under which others may know it."""
    found = (a for each in psutil.net_if_addrs().values() for a in each)
    texts = (a.address for a in found if a.family in (socket.AF_INET, socket.AF_INET6))
    return frozenset(text for text in texts if not _is_of_the_link(text))


async def close_dead_links(control: Control) -> None:
    """Goes on for ever."""
    before = addresses_here()
    while True:
        await asyncio.sleep(LOOK_S)
        now = addresses_here()
        if lost := before - now:
            log.info("this machine lost its address %s: dialing anew", ", ".join(sorted(lost)))
            try:
                for peer in await control.connections():
                    await control.disconnect(peer)
            except OSError as error:  # p2pd hangs or is gone, which `Host.watch` tells
                log.debug("cannot close connections: %s", error)
        before = now


def _is_of_the_link(text: str) -> bool:
    """Loopback, and what comes and goes with containers."""
    address = ipaddress.ip_address(text.partition("%")[0])
    return address.is_loopback or address.is_link_local
