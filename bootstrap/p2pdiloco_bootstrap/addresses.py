"""Multiaddrs as text and as the bytes that p2pd takes.

hivemind's own Multiaddr writes the peer id inside an address as a CID, which p2pd refuses in
`/p2p/RELAY/p2p-circuit` ("length greater than remaining number of bytes"); here it is the raw
multihash that go-libp2p expects.
"""

import ipaddress
import warnings
from dataclasses import dataclass

from p2pdiloco.errors import UserError
from p2pdiloco_bootstrap.identity import base58_decode, base58_encode, public_key_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # importing hivemind runs deprecated parts of torch
    from hivemind.utils.multiaddr import Multiaddr

_P2P_CODE = bytes((0xA5, 0x03))
_CIRCUIT_CODE = bytes((0xA2, 0x02))
_CIRCUIT = "/p2p-circuit"


@dataclass(frozen=True, slots=True)
class RawMultiaddr:
    """An address in the binary form of multiaddr."""

    encoded: bytes


def split_peer(address: str) -> tuple[str, str]:
    """`/ip4/.../tcp/.../p2p/PEER` -> (transport part, PEER); UserError for anything else."""
    transport, found, peer = address.rpartition("/p2p/")
    if not found or public_key_of(peer) is None:
        raise UserError(
            f"expected the address of a peer like /ip4/192.0.2.7/tcp/7441/p2p/12D3KooW..., "
            f"got {address!r}; copy it again from `p2pdiloco status` on that peer"
        )
    encode(transport)
    return transport, peer


def encode(transport: str) -> RawMultiaddr:
    """The transport part of an address in binary; UserError where it is malformed."""
    direct, circuit, rest = transport.partition(_CIRCUIT)
    if circuit and not rest:
        relay_transport, relay = split_peer(direct)
        multihash = base58_decode(relay) or b""
        peer_part = _P2P_CODE + bytes((len(multihash),)) + multihash
        return RawMultiaddr(encode(relay_transport).encoded + peer_part + _CIRCUIT_CODE)
    try:
        return RawMultiaddr(bytes(Multiaddr(transport).to_bytes()))
    except ValueError as error:
        raise UserError(
            f"not an address: {transport!r} ({error}); expected a form like /ip4/192.0.2.7/tcp/7441"
        ) from error


def decode(encoded: bytes) -> str | None:
    """The text of what p2pd or a relay reports; None for transports that we do not speak (QUIC,
    WebRTC...), and for what is no address.
    """
    relay = encoded.removesuffix(_CIRCUIT_CODE)
    if relay != encoded:
        return decode_circuit(relay)
    try:
        return str(Multiaddr(encoded))
    except (ValueError, LookupError, TypeError, OverflowError):  # all that garbage can bring about
        return None


def decode_circuit(relay: bytes) -> str | None:
    """The address that leads through a relay, whose own address with `/p2p/RELAY` is given."""
    transport, _, multihash = relay.partition(_P2P_CODE)
    text = decode(transport) if multihash else None
    return text and f"{text}/p2p/{base58_encode(multihash[1:])}{_CIRCUIT}"


def through(relay_address: str, relay: str) -> str:
    """The address of whoever has a slot at `relay`, which is dialed at `relay_address`."""
    return f"{relay_address}/p2p/{relay}{_CIRCUIT}"


def is_relayed(address: str) -> bool:
    """Whether an address leads through a relay."""
    return _CIRCUIT in address


def is_public(address: str) -> bool:
    """Whether an address can be dialed from anywhere, if nothing is in between."""
    ip = _ip_of(address)
    return ip is not None and ip.is_global and not is_relayed(address)


def is_loopback(address: str) -> bool:
    """Whether an address leads to the machine itself, wherever one stands."""
    ip = _ip_of(address)
    return ip is not None and ip.is_loopback


def listen_address(host: str, port: int) -> str:
    """The multiaddr to listen on; UserError where `host` is no IP address."""
    try:
        version = ipaddress.ip_address(host).version
    except ValueError:
        raise UserError(
            f"cannot listen on {host!r}: expected an IP address of this machine, or 0.0.0.0 for all"
        ) from None
    return f"/ip{version}/{host}/tcp/{port}"


def _ip_of(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Where it begins; None where that is no IP address, or none that can be read."""
    _, protocol, host, *_ = [*address.split("/"), "", ""]
    try:
        return ipaddress.ip_address(host) if protocol in ("ip4", "ip6") else None
    except ValueError:  # others write what they like into their records
        return None
