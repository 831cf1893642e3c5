"""A p2pd that relays whole bodies for peers behind NAT.

p2pd starts two relay services, one with go-libp2p's defaults (128 KiB per connection, 2 minutes)
and one with the limits of its flags (4 GiB, 30 minutes); which of the two answers is a race at its
start. So a second p2pd asks the first for a slot, reads the limit that it grants, and we start the
first again until it is the one we want. (Circuit relay v2 is specified in libp2p specs, relay.)
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from p2pdiloco_bootstrap import addresses as multiaddrs
from p2pdiloco_bootstrap.control import CONTROL_TIMEOUT_S, Control
from p2pdiloco_bootstrap.p2pd import NetworkDaemon, running_p2pd

log = logging.getLogger(__name__)

GRANTED_BYTES_MIN = 1 << 30
"""Of one relayed connection. Less is the default service, which cuts a body off in the middle."""

STARTS_MAX = 20
"""With one thread about every second start is right: one in a million is not after twenty."""

_HOP_PROTOCOL = "/libp2p/circuit/relay/0.2.0/hop"
_RESERVE = bytes((2, 0x08, 0))
"""A HopMessage of 2 bytes: field type = RESERVE."""
_LIMIT_FIELD, _LIMIT_DATA_FIELD = 4, 2
_ANSWER_BYTES_MAX = 4096


@asynccontextmanager
async def running_relay(
    arguments: Sequence[str], peer: str, sockets: str
) -> AsyncIterator[NetworkDaemon]:
    """As `running_p2pd`, for a public host `peer`; `sockets` is the prefix of control sockets."""
    probe_socket = f"{sockets}probe.sock"
    probe_arguments = [f"-listen=/unix{probe_socket}", "-noListenAddrs=1", "-idleTimeout=30s"]
    for attempt in range(STARTS_MAX):
        async with running_p2pd(arguments, one_thread=True) as daemon:
            async with running_p2pd(probe_arguments):
                granted = await _granted_bytes(Control(probe_socket), peer, f"{sockets}p2pd.sock")
            if granted >= GRANTED_BYTES_MIN or attempt == STARTS_MAX - 1:
                if granted < GRANTED_BYTES_MIN:
                    log.warning(
                        "this relay carries %d bytes per connection only (expected %d): peers "
                        "behind NAT will not exchange weights through it; start it again",
                        granted,
                        GRANTED_BYTES_MIN,
                    )
                yield daemon
                return


async def _granted_bytes(probe: Control, relay: str, relay_socket: str) -> int:
    """How much one connection through `relay` may carry; 0 when it grants no slot."""
    try:
        async with asyncio.timeout(CONTROL_TIMEOUT_S):
            transports = await Control(relay_socket).addresses()
            await probe.connect(relay, [multiaddrs.encode(address) for address in transports])
            reader, writer = await probe.open_stream(relay, _HOP_PROTOCOL)
            try:
                writer.write(_RESERVE)
                return granted_bytes_in(await _read_message(reader))
            finally:
                writer.transport.abort()
    except (OSError, EOFError) as error:
        log.debug("the relay did not answer the probe: %s", error)
        return 0


async def _read_message(reader: asyncio.StreamReader) -> bytes:
    size, shift = 0, 0
    while True:
        (byte,) = await reader.readexactly(1)
        size |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80 or size > _ANSWER_BYTES_MAX:
            break
    return await reader.readexactly(min(size, _ANSWER_BYTES_MAX))


def granted_bytes_in(answer: bytes) -> int:
    """The field limit.data of a HopMessage; 0 where there is none."""
    limit = _protobuf_fields(answer).get(_LIMIT_FIELD)
    data = _protobuf_fields(limit).get(_LIMIT_DATA_FIELD) if isinstance(limit, bytes) else None
    return data if isinstance(data, int) else 0


def _protobuf_fields(message: bytes) -> dict[int, int | bytes]:
    """Numbers and bytes by field number; reading ends at what is neither."""
    fields: dict[int, int | bytes] = {}
    place = 0
    while place < len(message):
        key, place = _varint(message, place)
        value, place = _varint(message, place)
        if key & 7 == 0:
            fields[key >> 3] = value
        elif key & 7 == 2:
            fields[key >> 3] = message[place : place + value]
            place += value
        else:
            break
    return fields


def _varint(message: bytes, place: int) -> tuple[int, int]:
    """-> (value, place after it)"""
    value, shift = 0, 0
    for byte in message[place:]:
        value |= (byte & 0x7F) << shift
        shift += 7
        place += 1
        if byte < 0x80:
            break
    return value, place
