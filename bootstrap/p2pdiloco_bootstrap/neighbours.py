"""Keeps a host from being alone: reaches its bootstrap peers, and knows neighbours in the DHT.

A connection between two p2pd does not yet make the hosts know each other in the DHT, and a DHT node
forgets whoever is late once. Two halves of a swarm that forget each other stay apart for ever
(islands), so every peer that we are connected to is greeted again while the DHT does not know it.
"""

import asyncio
import logging
import re
import warnings
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # importing hivemind runs deprecated parts of torch
    from hivemind.p2p import PeerID

from p2pdiloco_bootstrap.control import Control

log = logging.getLogger(__name__)

RETRY_S = (2.0, 60.0)
"""First and longest pause between rounds; it doubles until all is well, then it is the longest, or
until a bootstrap peer is lost.
"""

ALONE_RETRY_S_MAX = 10.0
"""Longest pause while nobody at all is connected."""

LOOK_S = 2.0
"""Between looks whether a bootstrap peer is lost: one question to our own p2pd, 1 ms."""

GREETINGS_PER_ROUND = 16
"""Pings to connected peers that the DHT does not know, as peers of other runs never will be."""

LOOK_ROUND_TIMEOUT_S = 5.0
"""For the look-up that fills the routing table after a greeting."""


@dataclass(frozen=True, slots=True)
class BootstrapStatus:
    """Whether a bootstrap peer was reached, and if not, why each address failed."""

    peer: str
    connected: bool
    reasons: tuple[tuple[str, str], ...]
    """(address, why) of the last attempt; empty when connected."""

    def sentence(self) -> str:
        if self.connected:
            return f"connected to bootstrap peer {self.peer}"
        tried = ", ".join(f"{address}: {why}" for address, why in self.reasons) or "not tried yet"
        return f"cannot reach bootstrap peer {self.peer} ({tried}); trying again"


class Neighbours:
    """The bootstrap peers and DHT neighbours of one host."""

    def __init__(
        self,
        bootstraps: Mapping[str, Sequence[str]],
        control: Control,
        connect: Callable[[str, Sequence[str]], Awaitable[None]],
        dht: Any,
    ) -> None:
        self._bootstraps = bootstraps
        self._control = control
        self._connect = connect
        self._dht = dht
        self._statuses = {peer: BootstrapStatus(peer, False, ()) for peer in bootstraps}
        self._alone = True

    def statuses(self) -> tuple[BootstrapStatus, ...]:
        return tuple(self._statuses.values())

    async def tend(self) -> None:
        """Goes round for ever."""
        pause, longest = RETRY_S
        while True:
            lost = await self._lost_one(pause)
            well = await self.go_round()
            pause = longest if well else RETRY_S[0] if lost else min(2 * pause, longest)
            if self._alone:
                pause = min(pause, ALONE_RETRY_S_MAX)

    async def _lost_one(self, timeout_s: float) -> bool:
        """Waits; whether a bootstrap peer that was connected ceased to be, which ends the wait."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while (left := deadline - asyncio.get_running_loop().time()) > 0:
            await asyncio.sleep(min(LOOK_S, left))
            try:
                connected = await self._control.connections()
            except OSError:  # as in `go_round`
                continue
            if any(s.connected and s.peer not in connected for s in self._statuses.values()):
                return True
        return False

    async def go_round(self) -> bool:
        """Reaches and greets who is missing; whether all is well now."""
        try:
            connected = await self._control.connections()
            async with asyncio.TaskGroup() as group:
                for peer in self._bootstraps:
                    if peer in connected:
                        self._set(BootstrapStatus(peer, True, ()))
                    else:
                        group.create_task(self._reach(peer))
            connected = await self._control.connections()
            self._alone = not connected
            await self._greet(connected)
        except OSError as error:  # p2pd hangs or is gone, which `Host.watch` tells
            log.debug("cannot look after neighbours: %s", error)
            return False
        reached = [status for status in self._statuses.values() if status.connected]
        return len(reached) == len(self._statuses) and all(self._knows(s.peer) for s in reached)

    async def _reach(self, peer: str) -> None:
        addresses = self._bootstraps[peer]
        try:
            await self._connect(peer, addresses)
        except ConnectionError as error:
            before = dict(self._statuses[peer].reasons)
            reasons = tuple(_reasons(str(error), addresses, before).items())
            self._set(BootstrapStatus(peer, False, reasons))
        else:
            self._set(BootstrapStatus(peer, True, ()))

    def _set(self, status: BootstrapStatus) -> None:
        before = self._statuses[status.peer]
        self._statuses[status.peer] = status
        first_failure = not status.connected and not before.reasons
        if status.connected != before.connected or first_failure:
            log.log(logging.INFO if status.connected else logging.WARNING, status.sentence())

    async def _greet(self, connected: Iterable[str]) -> None:
        strangers = [peer for peer in connected if not self._knows(peer)]
        strangers.sort(key=lambda peer: peer not in self._bootstraps)  # those first
        if not strangers:
            return
        async with asyncio.TaskGroup() as group:
            for peer in islice(strangers, GREETINGS_PER_ROUND):
                group.create_task(self._dht.protocol.call_ping(PeerID.from_base58(peer)))
        async with asyncio.timeout(LOOK_ROUND_TIMEOUT_S):
            await self._dht.find_nearest_nodes([self._dht.node_id])

    def _knows(self, peer: str) -> bool:
        return PeerID.from_base58(peer) in self._dht.protocol.routing_table.peer_id_to_uid


def _reasons(error: str, addresses: Iterable[str], before: Mapping[str, str]) -> dict[str, str]:
    """Why each address failed, by p2pd's report; "dial backoff" stands for an older reason."""
    reported = dict(re.findall(r"\* \[([^\]]+)\] (.+)", error))
    reasons = {}
    for address in addresses:
        why = reported.get(address) or error.splitlines()[0]
        if why == "dial backoff":
            why = before.get(address, why)
        reasons[address] = why.rpartition("connect: ")[2]
    return reasons
