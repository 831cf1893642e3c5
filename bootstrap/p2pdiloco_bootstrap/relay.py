"""Relaying for peers that nobody can dial: a p2pd that carries whole bodies, and slots at others'.

p2pd has two relay services, one with go-libp2p's defaults (128 KiB per connection, 2 minutes) and
one with the limits of its flags (4 GiB, 30 minutes). Every p2pd runs the first; the second comes up
when it is told or finds out that it can be dialed. Which of the two answers is in the answer, so
whoever wants a slot reads the limit that it is granted. A host that is public from the start runs
into a race between both, so a second p2pd asks the first for a slot, and we start the first again
until it is the right one. (Circuit relay v2 is specified in libp2p specs, relay.)
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import islice

from p2pdiloco_bootstrap import addresses as multiaddrs
from p2pdiloco_bootstrap import protobuf
from p2pdiloco_bootstrap.control import CONTROL_TIMEOUT_S, Control
from p2pdiloco_bootstrap.p2pd import NetworkDaemon, running_p2pd

log = logging.getLogger(__name__)

GRANTED_BYTES_MIN = 1 << 30
"""Of one relayed connection. Less is the default service, which cuts a body off in the middle."""

STARTS_MAX = 20
"""With one thread about every second start is right: one in a million is not after twenty."""

ADDRESSES_MAX = 6
"""Of one relay that we pass on: more would leave no room in our record for those of another."""

ADDRESS_BYTES_MAX = 160
"""In binary. With IPv6 and both names it has a hundred."""

HOP_PROTOCOL = "/libp2p/circuit/relay/0.2.0/hop"
_RESERVE = protobuf.delimited(protobuf.pack([(1, 0)]))
"""A HopMessage: field type = RESERVE."""
_RESERVATION_FIELD, _LIMIT_FIELD = 3, 4
_RESERVATION_ADDRESSES_FIELD, _LIMIT_BYTES_FIELD = 2, 2


@dataclass(frozen=True, slots=True)
class Slot:
    """What a relay grants to who asked for a slot."""

    bytes_max: int
    """Per relayed connection, each way; 0 when it refuses."""
    addresses: tuple[str, ...]
    """Where others dial us through it: `.../p2p/RELAY/p2p-circuit`, without our peer id."""

    @property
    def is_good(self) -> bool:
        return self.bytes_max >= GRANTED_BYTES_MIN


async def reserve(control: Control, relay: str) -> Slot:
    """Asks a relay to which our p2pd can open a stream; ConnectionError when it does not answer.

    The slot is ours for an hour, and as long as we stay connected.
    """
    try:
        async with asyncio.timeout(CONTROL_TIMEOUT_S):
            reader, writer = await control.open_stream(relay, HOP_PROTOCOL)
            try:
                writer.write(_RESERVE)
                return slot_in(await protobuf.read_delimited(reader))
            finally:
                writer.transport.abort()
    except (TimeoutError, EOFError) as error:
        raise ConnectionError(f"the relay {relay} does not answer") from error


def slot_in(answer: bytes) -> Slot:
    """Out of a HopMessage."""
    fields = protobuf.unpack(answer)
    limit = protobuf.unpack(protobuf.bytes_in(fields, _LIMIT_FIELD))
    reservation = protobuf.unpack(protobuf.bytes_in(fields, _RESERVATION_FIELD))
    encoded = reservation.get(_RESERVATION_ADDRESSES_FIELD, [])
    found = (
        multiaddrs.decode_circuit(each)
        for each in encoded
        if isinstance(each, bytes) and len(each) <= ADDRESS_BYTES_MAX
    )
    addresses = islice((text for text in found if text), ADDRESSES_MAX)
    return Slot(protobuf.number_in(limit, _LIMIT_BYTES_FIELD), tuple(addresses))


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
        return (await reserve(probe, relay)).bytes_max
    except OSError as error:
        log.debug("the relay did not answer the probe: %s", error)
        return 0
