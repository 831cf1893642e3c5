"""Who takes part in a run: signed, expiring records in the DHT.

One record per member, under one of `NUM_SHARDS` keys of the run, renewed by the member itself at
half of its lifetime. Liveness is not read from here (heartbeats between peers are for that): a
record says how to reach a peer, and that it meant to be there until it expires.

A record is msgpack followed by a signature over domain, DHT key, peer id, content and expiry with
the key inside the peer id; every DHT node checks that before it stores or believes a record.
"""

import asyncio
import logging
import math
import statistics
import struct
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import msgpack
from google.protobuf.message import DecodeError

from p2pdiloco_bootstrap.identity import Identity, verify

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # importing hivemind runs deprecated parts of torch
    from hivemind.dht.crypto import DHTRecord, RecordValidatorBase
    from hivemind.p2p import P2PDaemonError, P2PHandlerError
    from hivemind.proto import dht_pb2

if TYPE_CHECKING:
    from p2pdiloco_bootstrap.host import Host

log = logging.getLogger(__name__)

NUM_SHARDS = 16
"""Keys per run. A thousand members are then 62 records or 25 KB per key, one small answer each."""

RECORD_LIFETIME_S = 600.0
"""Long beside the half hour a DHT may be without a reader, short beside a night: a node that left
without goodbye is forgotten in ten minutes."""

RECORD_LIFETIME_S_MAX = 7200.0
"""Nobody stores a record that expires later: memory of strangers must end."""

ANNOUNCE_RETRY_S = 5.0

RECORD_BYTES_MAX = 4096
"""Content and signature. Sixteen addresses and some roles have about 1,500."""

SUBKEY_BYTES_MAX = 64
"""A peer id in msgpack: 54 bytes."""

ADDRESSES_MAX = 16
ROLES_MAX = 8

DHT_TIMEOUT_S = 10.0
"""For one store or look-up of all shards; 30 ms is usual, a hung peer costs half a second."""

CLOCK_TOLERANCE_S = 5.0
"""Ping and drift explain less; records with ten minutes to live bear much more."""

_DOMAIN = b"p2pdiloco member\0"
_SIGNATURE_BYTES = 64
_PEERS_ASKED_FOR_TIME = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """What a member says about itself; checked to be said by the key of `peer`."""

    peer: str
    addresses: tuple[str, ...]
    roles: tuple[str, ...]
    announced_at: float
    """Seconds since 1970 by the member's own clock."""
    expires_at: float


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """How far the peers' clocks are ahead of ours: the median of `num_peers`."""

    offset_s: float
    num_peers: int

    def problem(self) -> str | None:
        """The sentence for log and page, or None where the clock is right enough."""
        if abs(self.offset_s) <= CLOCK_TOLERANCE_S:
            return None
        direction = "behind" if self.offset_s > 0 else "ahead of"
        return (
            f"this machine's clock is {abs(self.offset_s):.0f} s {direction} that of "
            f"{self.num_peers} peers (expected within {CLOCK_TOLERANCE_S:.0f} s): set it, for "
            "example by switching on NTP; else peers may not find this node"
        )


class Discovery:
    """The members of one run, as one host reads and writes them."""

    def __init__(self, host: "Host", run_id: str) -> None:
        self._host = host
        self._run_id = run_id
        self._roles: Sequence[str] | None = None
        """As last announced."""

    async def announce(
        self, roles: Sequence[str] = (), lifetime_s: float = RECORD_LIFETIME_S
    ) -> bool:
        """Writes or renews our record; False when no node (not even ours) took it."""
        self._roles = roles
        now = time.time()
        addresses = (await self._host.addresses())[:ADDRESSES_MAX]
        content = msgpack.packb({"addresses": addresses, "roles": list(roles), "at": now})
        peer = self._host.peer_id
        async with asyncio.timeout(DHT_TIMEOUT_S):
            return bool(
                await self._host.dht.store(
                    self._key(_shard_of(peer)), content, now + lifetime_s, subkey=peer
                )
            )

    async def announce_again(self) -> None:
        """Renews our record, if there is one: our addresses have changed."""
        if self._roles is not None:
            await self.announce(self._roles)

    async def keep_announced(self, roles: Sequence[str] = ()) -> None:
        """Renews our record for ever, and says when our clock is not that of the others."""
        said = None
        while True:
            stored = False
            try:
                stored = await self.announce(roles)
                offset = await self.clock_offset()
            except OSError as error:  # the DHT is slow, or p2pd is gone, which `Host.watch` tells
                log.warning("cannot renew our record in the DHT: %s", error or "no answer in time")
            else:
                problem = offset and offset.problem()
                if problem and problem != said:
                    log.warning("%s", problem)
                said = problem
            await asyncio.sleep(RECORD_LIFETIME_S / 2 if stored else ANNOUNCE_RETRY_S)

    async def members(self) -> tuple[Member, ...]:
        """Everyone with an unexpired record, ourselves included, in order of peer id.

        Their addresses are remembered by the host, so that they can be dialed from now on.
        """
        keys = [self._key(shard) for shard in range(NUM_SHARDS)]
        async with asyncio.timeout(DHT_TIMEOUT_S):
            found = await self._host.dht.get_many(keys, sufficient_expiration_time=float("inf"))
        members = tuple(sorted(_members_in(found.values()), key=lambda member: member.peer))
        for member in members:
            self._host.remember(member.peer, member.addresses)
        return members

    async def look_up(self, peer: str) -> None:
        """Reads the newest record of one member, whose addresses the host remembers from now on."""
        key = self._key(_shard_of(peer))
        async with asyncio.timeout(DHT_TIMEOUT_S):
            found = await self._host.dht.get_many([key], sufficient_expiration_time=float("inf"))
        for member in _members_in(found.values()):
            self._host.remember(member.peer, member.addresses)

    async def clock_offset(self) -> ClockOffset | None:
        """Asks a few neighbours in the DHT for the time; None when nobody answers."""
        protocol = self._host.dht.protocol
        peers = list(protocol.routing_table.uid_to_peer_id.values())[:_PEERS_ASKED_FOR_TIME]
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(_time_ahead(protocol, peer)) for peer in peers]
        offsets = [offset for task in asked if (offset := task.result()) is not None]
        return ClockOffset(statistics.median(offsets), len(offsets)) if offsets else None

    def _key(self, shard: int) -> str:
        return f"p2pdiloco/{self._run_id}/members/{shard}"


class MemberRecords(RecordValidatorBase):  # type: ignore[misc]  # hivemind has no types
    """Signs our records, and refuses others' that are not what this module writes."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity

    def sign_value(self, record: DHTRecord) -> bytes:
        content = bytes(record.value)
        return content + self._identity.sign(_signed_bytes(record, content))

    def strip_value(self, record: DHTRecord) -> bytes:
        return bytes(record.value[:-_SIGNATURE_BYTES])

    def validate(self, record: DHTRecord) -> bool:
        peer = _unpack(record.subkey)
        content, signature = record.value[:-_SIGNATURE_BYTES], record.value[-_SIGNATURE_BYTES:]
        return (
            isinstance(peer, str)
            and len(record.subkey) <= SUBKEY_BYTES_MAX
            and len(record.value) <= RECORD_BYTES_MAX
            and record.expiration_time <= time.time() + RECORD_LIFETIME_S_MAX
            and len(signature) == _SIGNATURE_BYTES
            and isinstance(_unpack(content), bytes)  # what does not unpack would end each look-up
            and verify(peer, _signed_bytes(record, content), signature)
        )


def _signed_bytes(record: DHTRecord, content: bytes) -> bytes:
    expiry = struct.pack(">d", record.expiration_time)
    key: bytes = record.key + bytes((len(record.subkey) % 256,)) + record.subkey
    return _DOMAIN + key + expiry + content


def _shard_of(peer: str) -> int:
    return blake2b(peer.encode(), digest_size=1).digest()[0] % NUM_SHARDS


def _members_in(found: Iterable[Any]) -> Iterable[Member]:
    for shard in found:
        if shard is None or not isinstance(shard.value, dict):
            continue
        for peer, (content, expires_at) in shard.value.items():
            member = _member_of(peer, content, expires_at)
            if member is not None:
                yield member


def _member_of(peer: str, content: object, expires_at: float) -> Member | None:
    match _unpack(content):
        case {"addresses": [*addresses], "roles": [*roles], "at": float(announced_at)} if (
            len(addresses) <= ADDRESSES_MAX
            and len(roles) <= ROLES_MAX
            and all(isinstance(text, str) for text in (*addresses, *roles))
        ):
            return Member(
                peer=peer,
                addresses=tuple(addresses),
                roles=tuple(roles),
                announced_at=announced_at,
                expires_at=expires_at,
            )
    return None


def _unpack(content: object) -> Any:
    try:
        return msgpack.unpackb(content) if isinstance(content, bytes) else None
    except (ValueError, msgpack.UnpackException):
        return None


async def _time_ahead(protocol: Any, peer: Any) -> float | None:
    """Seconds by which the peer's clock is ahead of ours, good to half a round trip."""
    request = dht_pb2.PingRequest(peer=protocol.node_info, validate=False)
    asked_at = time.time()
    try:
        async with asyncio.timeout(protocol.wait_timeout):
            answer = await protocol.get_stub(peer).rpc_ping(request)
    except (P2PDaemonError, P2PHandlerError, OSError, DecodeError):  # gone, hangs, or is no friend
        return None
    ahead_s = float(answer.dht_time) - (asked_at + time.time()) / 2
    return ahead_s if math.isfinite(ahead_s) else None
