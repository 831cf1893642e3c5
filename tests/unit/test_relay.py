"""Reading what a relay grants out of its answer."""

import pytest

from p2pdiloco_bootstrap import protobuf
from p2pdiloco_bootstrap.addresses import encode
from p2pdiloco_bootstrap.identity import Identity, base58_decode
from p2pdiloco_bootstrap.relay import ADDRESSES_MAX, slot_in

STATUS_AND_RESERVATION = bytes.fromhex("0802" + "1a04" + "08ffff01")
"""A HopMessage with type = STATUS and some reservation."""


@pytest.mark.parametrize(
    ("limit", "granted"),
    [
        ("22060878108080082864", 128 << 10),  # go-libp2p's defaults, as p2pd sent them
        ("220908880e1080808080102864", 4 << 30),  # those of p2pd's flags
        ("", 0),
        ("2200", 0),
        ("2202", 0),
        ("2864", 0),
        ("2205", 0),
    ],
)
def test_the_limit_is_read(limit: str, granted: int) -> None:
    slot = slot_in(STATUS_AND_RESERVATION + bytes.fromhex(limit))
    assert slot.bytes_max == granted
    assert slot.is_good == (granted >= 1 << 30)


@pytest.mark.parametrize("answer", [b"", b"\xff" * 40, b"\x22\xff\xff", b"garbage", bytes(50)])
def test_nonsense_grants_nothing(answer: bytes) -> None:
    slot = slot_in(answer)
    assert not slot.is_good and not slot.addresses


def of_relay(at: str, relay: str) -> bytes:
    """As a relay writes an address of its own."""
    multihash = base58_decode(relay) or b""
    return encode(at).encoded + b"\xa5\x03" + bytes([len(multihash)]) + multihash


def test_a_relay_fills_no_record_with_its_addresses() -> None:
    relay = Identity.generate().peer_id
    long = of_relay(f"/dns4/{'a' * 200}/tcp/1", relay)
    many = [of_relay(f"/ip4/44.128.1.2/tcp/{port}", relay) for port in range(1, 50)]
    reservation = protobuf.pack([(2, address) for address in (long, *many)])
    slot = slot_in(protobuf.pack([(1, 2), (3, reservation), (5, 100)]))
    assert len(slot.addresses) == ADDRESSES_MAX
    assert slot.addresses[0].startswith("/ip4/44.128.1.2/tcp/1/p2p/")


def test_the_addresses_through_the_relay_are_read() -> None:
    relay = Identity.generate().peer_id
    at = "/ip4/44.128.1.2/tcp/8600"
    address = of_relay(at, relay)
    reservation = protobuf.pack([(1, 2_000_000_000), (2, address), (2, b"nonsense"), (2, b"")])
    slot = slot_in(protobuf.pack([(1, 2), (3, reservation), (5, 100)]))
    assert slot.addresses == (f"{at}/p2p/{relay}/p2p-circuit",)
    assert not slot.is_good
