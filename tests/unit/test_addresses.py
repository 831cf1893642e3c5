"""Multiaddrs, and the URLs of peers."""

import pytest
from yarl import URL

from p2pdiloco.errors import UserError
from p2pdiloco_bootstrap.addresses import (
    decode,
    decode_circuit,
    encode,
    is_loopback,
    is_public,
    is_relayed,
    listen_address,
    split_peer,
    through,
)
from p2pdiloco_bootstrap.identity import base58_decode
from p2pdiloco_bootstrap.streams import peer_of, peer_url

PEER = "12D3KooWQGrfajRwWADw7TWVtezpVpNFhkJN4wpatCMGw9hKLmbo"
DIRECT = "/ip4/192.0.2.7/tcp/7441"
RELAYED = f"{DIRECT}/p2p/{PEER}/p2p-circuit"


@pytest.mark.parametrize(
    "text", [DIRECT, "/ip6/2001:db8::1/tcp/1", "/dns4/a.example/tcp/2", RELAYED]
)
def test_an_address_survives_its_binary_form(text: str) -> None:
    assert decode(encode(text).encoded) == text


def test_a_relay_is_named_by_its_raw_multihash() -> None:
    multihash = base58_decode(PEER)
    assert multihash is not None
    assert encode(RELAYED).encoded.endswith(b"\xa5\x03\x26" + multihash + b"\xa2\x02")


def test_the_peer_is_split_off() -> None:
    assert split_peer(f"{DIRECT}/p2p/{PEER}") == (DIRECT, PEER)
    assert split_peer(f"{RELAYED}/p2p/{PEER}") == (RELAYED, PEER)


@pytest.mark.parametrize(
    "text", ["", DIRECT, f"/p2p/{PEER[:-1]}", f"/ip4/nonsense/tcp/1/p2p/{PEER}", "192.0.2.7:7441"]
)
def test_other_text_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UserError, match=r"/ip4/192\.0\.2\.7/tcp/7441"):
        split_peer(text)


def test_unknown_transports_are_left_out() -> None:
    assert decode(b"\xff\xff\xff\x7f") is None


@pytest.mark.parametrize(
    "garbage", ["", "e4caa5", "9003f9f99ca1b1d9d68bca1aeb69866b256ed61619f9a65a", "06ff"]
)
def test_garbage_in_binary_form_is_no_address(garbage: str) -> None:
    encoded = bytes.fromhex(garbage)
    assert not decode(encoded)
    assert not decode_circuit(
        encoded + encode(RELAYED).encoded.partition(encode(DIRECT).encoded)[2]
    )


def test_loopback_is_told_from_elsewhere() -> None:
    assert is_loopback("/ip4/127.0.0.1/tcp/1")
    assert is_loopback("/ip6/::1/tcp/1")
    assert not is_loopback(DIRECT)
    assert not is_loopback("/dns4/localhost/tcp/1")


def test_what_can_be_dialed_from_anywhere() -> None:
    assert is_public("/ip4/44.128.1.2/tcp/1")
    assert not is_public("/ip4/192.168.1.2/tcp/1")
    assert not is_public("/dns4/somewhere.example/tcp/1")


@pytest.mark.parametrize("text", ["", "/ip4", "/ip4/", "/ip4/300.1.2.3/tcp/1", "/ip6/me/tcp/1"])
def test_garbage_leads_nowhere(text: str) -> None:
    assert not is_public(text) and not is_loopback(text)


def test_what_leads_through_a_relay() -> None:
    assert through(DIRECT, PEER) == RELAYED
    assert is_relayed(RELAYED) and not is_relayed(DIRECT)
    assert decode_circuit(b"") is None
    assert decode_circuit(encode(DIRECT).encoded) is None


def test_what_to_listen_on_is_an_ip_address() -> None:
    assert listen_address("0.0.0.0", 7441) == "/ip4/0.0.0.0/tcp/7441"
    assert listen_address("::", 7441) == "/ip6/::/tcp/7441"
    with pytest.raises(UserError, match="expected an IP address"):
        listen_address("localhost", 7441)


def test_a_url_keeps_the_case_of_the_peer_id() -> None:
    url = peer_url(PEER, "/v1/spec")
    assert url.path == "/v1/spec"
    assert peer_of(URL(str(url).lower())) == PEER
    with pytest.raises(ValueError, match="not a peer id"):
        peer_url("0OIl", "/")
