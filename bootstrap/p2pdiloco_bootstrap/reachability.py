"""How others reach a host: whether they can dial it, and else through whom.

A host that nobody can dial keeps slots at relays: bootstrap peers first, then any peer that it is
connected to and that relays whole bodies, which is every member that can be dialed. A relay that
dies is replaced by another one within seconds. p2pd could do this only with relays that are named
when it starts. Whether we can be dialed we ask peers, who try (AutoNAT, libp2p specs).

Two hosts behind NATs that give all connections of a host the same port become connected directly:
p2pd punches a hole for each *new* relayed connection (DCUtR, libp2p specs), once it knows its own
address, for which it wants to hear it from four peers that it has dialed, and that nobody can dial
it there. Relayed connections that are older than that knowledge are closed here, and again at
growing intervals while that comes to nothing: of two hosts one may know itself later than the
other, and a punch is a matter of luck.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice

from p2pdiloco.protocol.naming import PeerId
from p2pdiloco.protocol.pauses import Pauses
from p2pdiloco_bootstrap import addresses as multiaddrs
from p2pdiloco_bootstrap import protobuf
from p2pdiloco_bootstrap.control import Control
from p2pdiloco_bootstrap.identity import base58_decode
from p2pdiloco_bootstrap.relay import reserve

log = logging.getLogger(__name__)

RELAYS = 2
"""Slots kept: one may die, and the other is known to everybody by then."""

LOOK_S = 2.0
"""Between looks at what changed; a look is two questions to our own p2pd, 2 ms."""

RENEW_S = 30.0
"""A slot lasts an hour, but not over a restart of its relay, which nobody tells us of."""

REFUSAL_S = (20.0, 640.0)
"""First and longest time until a relay that refused is asked again. A member finds out some 15 s
after its start that it can be one; most never can.
"""

RELAYS_ASKED = 4
"""Per look."""

ASK_S = (10.0, 300.0)
"""First and longest pause between questions whether we can be dialed; it doubles."""

ASK_TIMEOUT_S = 30.0
"""For the peer to dial; it gives up after 15 s."""

PEERS_ASKED = 3
"""Per question, until one knows."""

PUNCHES_AFTER_S = 45.0
"""Of p2pd's life, before it may know that it cannot be dialed: it asks after 15 s, and a dial that
nobody answers takes another 15 s.
"""

PUNCH_PAUSE_S = (45.0, 6 * 3600.0)
"""First and longest time until a relayed connection makes room for another try."""

AUTONAT_PROTOCOL = "/libp2p/autonat/1.0.0"
_DIALED, _NOT_DIALED = 0, 100


@dataclass(frozen=True, slots=True)
class HeldSlot:
    """A slot that a relay keeps for us."""

    addresses: tuple[str, ...]
    """Without our peer id."""
    renewed_at: float


class Reachability:
    """Of one host that does not know from the start that it can be dialed."""

    def __init__(
        self,
        control: Control,
        peer: str,
        bootstraps: Iterable[str],
        asks: bool,
        on_change: Callable[[], object],
    ) -> None:
        self.dialable: bool | None = None
        """None while nobody could tell."""
        self._control = control
        self._peer = peer
        self._bootstraps = tuple(bootstraps)
        self._asks = asks
        self._on_change = on_change
        self._slots: dict[str, HeldSlot] = {}
        self._refusals = Pauses(*REFUSAL_S)
        self._own_addresses: tuple[str, ...] = ()
        self._punches: Pauses | None = None
        """None while no hole can be punched."""
        self._started_at = asyncio.get_running_loop().time()
        self._in_doubt = asyncio.Event()

    def relayed_addresses(self) -> list[str]:
        """Where others dial us through relays, without our peer id."""
        return [address for slot in self._slots.values() for address in slot.addresses]

    def sentence(self) -> str:
        """For log and page."""
        if self.dialable:
            return "other nodes can dial this one"
        if self._slots:
            relays = " and ".join(relay[-8:] for relay in self._slots)
            known = "nobody can dial this node" if self.dialable is False else "if nobody can dial"
            return f"{known}, it is reached through {relays}"
        tried = "nobody can dial" if self.dialable is False else "nobody has tried to dial"
        return f"{tried} this node, and it has found no relay yet: it can only dial others"

    async def tend(self) -> None:
        """Keeps what is said here true, for ever."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._keep_slots(), name="relay slots")
            if self._asks:
                tasks.create_task(self._keep_asking(), name="can we be dialed")

    async def look(self) -> None:
        """One look at what changed; gets what slots are missing."""
        connected = await self._control.connections()
        direct = {peer: found for peer, found in connected.items() if _direct(found)}
        before = (self._own_addresses, self.relayed_addresses())
        self._own_addresses = tuple(await self._control.addresses())
        if self._own_addresses != before[0]:
            self._in_doubt.set()
        for relay in [relay for relay in self._slots if relay not in direct]:
            log.info("the relay %s is gone", relay[-8:])
            del self._slots[relay]
        if self.dialable:
            self._slots.clear()
        else:
            await self._renew(direct)
            await self._fill(direct)
            await self._have_holes_punched([peer for peer in connected if peer not in direct])
        if (self._own_addresses, self.relayed_addresses()) != before:
            log.info("%s", self.sentence())
            self._on_change()

    async def _have_holes_punched(self, relayed: Iterable[str]) -> None:
        now = asyncio.get_running_loop().time()
        known = any(multiaddrs.is_public(address) for address in self._own_addresses)
        if not known or self.dialable is None or now < self._started_at + PUNCHES_AFTER_S:
            self._punches = None
            return
        is_first = self._punches is None
        self._punches = self._punches or Pauses(*PUNCH_PAUSE_S)
        for peer in map(PeerId, relayed):
            is_due = self._punches.over(peer, now)
            is_new = not self._punches.count(peer)  # p2pd tries by itself
            self._punches.begin(peer, now)
            if is_due and (is_first or not is_new):
                log.info("closing the relayed connection to %s for a direct one", peer[-8:])
                await self._control.disconnect(peer)

    async def _keep_slots(self) -> None:
        while True:
            try:
                await self.look()
            except OSError as error:  # p2pd hangs or is gone, which `Host.watch` tells
                log.debug("cannot look after relays: %s", error)
            await asyncio.sleep(LOOK_S)

    async def _renew(self, direct: Mapping[str, tuple[str, ...]]) -> None:
        now = asyncio.get_running_loop().time()
        for relay, slot in list(self._slots.items()):
            if now >= slot.renewed_at + RENEW_S and not await self._reserve(relay, direct[relay]):
                log.info("the relay %s has no slot for this node any more", relay[-8:])
                del self._slots[relay]

    async def _fill(self, direct: Mapping[str, tuple[str, ...]]) -> None:
        now = asyncio.get_running_loop().time()
        others = sorted(direct.keys() - set(self._bootstraps), key=self._place)
        candidates = (
            peer
            for peer in (*self._bootstraps, *others)
            if peer in direct and peer not in self._slots and self._refusals.over(PeerId(peer), now)
        )
        for relay in islice(candidates, RELAYS_ASKED):
            if len(self._slots) >= RELAYS:
                break
            if await self._reserve(relay, direct[relay]):
                self._refusals.forgive(PeerId(relay))
            else:
                self._refusals.begin(PeerId(relay), now)

    def _place(self, peer: str) -> bytes:
        """Another order of relays for each host, so that not all ask the same one."""
        return blake2b(f"{self._peer}{peer}".encode(), digest_size=8).digest()

    async def _reserve(self, relay: str, found_at: tuple[str, ...]) -> bool:
        """Asks for a slot, also one that we have; whether the relay grants a good one."""
        try:
            slot = await reserve(self._control, relay)
        except ConnectionError as error:
            log.debug("no slot at %s: %s", relay, error)
            return False
        dialed_at = tuple(multiaddrs.through(address, relay) for address in _direct(found_at))
        if slot.is_good:
            now = asyncio.get_running_loop().time()
            self._slots[relay] = HeldSlot(slot.addresses or dialed_at, now)
        return slot.is_good

    async def _keep_asking(self) -> None:
        pause, longest = ASK_S
        while True:
            self._in_doubt.clear()
            try:
                dialable = await self._ask_peers()
            except OSError as error:
                log.debug("cannot ask whether this node can be dialed: %s", error)
                dialable = None
            if dialable is not None and dialable != self.dialable:
                self.dialable = dialable
                log.info("%s", self.sentence())
            try:
                async with asyncio.timeout(pause):
                    await self._in_doubt.wait()
                pause = ASK_S[0]
            except TimeoutError:
                pause = min(2 * pause, longest)

    async def _ask_peers(self) -> bool | None:
        """Whether a peer could dial us; None when none could tell."""
        connected = await self._control.connections()
        direct = [peer for peer, found in connected.items() if _direct(found)]
        direct.sort(key=lambda peer: (peer not in self._bootstraps, self._place(peer)))
        for peer in direct[:PEERS_ASKED]:
            status = await self._dial_back(peer)
            if status in (_DIALED, _NOT_DIALED):
                return status == _DIALED
        return None

    async def _dial_back(self, peer: str) -> int | None:
        """AutoNAT's status of the peer's try to dial us; None when it does not answer."""
        encoded = [multiaddrs.encode(address).encoded for address in self._own_addresses]
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                reader, writer = await self._control.open_stream(peer, AUTONAT_PROTOCOL)
                try:
                    writer.write(dial_request(self._peer, encoded))
                    return dial_status(await protobuf.read_delimited(reader))
                finally:
                    writer.transport.abort()
        except (OSError, EOFError) as error:
            log.debug("%s does not tell whether it can dial this node: %s", peer, error)
            return None


def dial_request(peer: str, encoded_addresses: Iterable[bytes]) -> bytes:
    """An AutoNAT message of type DIAL."""
    info = [(1, base58_decode(peer) or b""), *((2, address) for address in encoded_addresses)]
    return protobuf.delimited(
        protobuf.pack([(1, 0), (2, protobuf.pack([(1, protobuf.pack(info))]))])
    )


def dial_status(answer: bytes) -> int | None:
    """The status in an AutoNAT message; None where it is no answer."""
    response = protobuf.unpack(answer).get(3)
    if not response or not isinstance(response[-1], bytes):
        return None
    return protobuf.number_in(protobuf.unpack(response[-1]), 1)


def _direct(addresses: Iterable[str]) -> tuple[str, ...]:
    return tuple(address for address in addresses if not multiaddrs.is_relayed(address))
