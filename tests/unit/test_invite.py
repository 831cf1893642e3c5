"""Invites: what they carry, and what a wrong one says."""

import base64
from hashlib import blake2b

import msgpack
import pytest

from p2pdiloco.errors import UserError
from p2pdiloco_bootstrap.identity import Identity
from p2pdiloco_bootstrap.invite import PREFIX, make_invite, parse_invite

OWNER = Identity.generate()
ADDRESSES = (f"/ip4/192.0.2.7/tcp/7441/p2p/{OWNER.peer_id}", "/ip4/10.0.0.2/tcp/7441/p2p/12D3Koo")
RUN = "0123456789abcdef0123456789abcdef"
EXPIRES = 2_000_000_000
NOW = EXPIRES - 3600.0
TEXT = make_invite(OWNER, RUN, ADDRESSES, EXPIRES)


def packed_text(value: object) -> str:
    packed = msgpack.packb(value)
    checksum = blake2b(packed, digest_size=4).digest()
    return PREFIX + base64.urlsafe_b64encode(packed + checksum).decode().rstrip("=")


def test_an_invite_carries_run_owner_addresses_and_expiry() -> None:
    invite = parse_invite(TEXT, NOW)
    assert invite.run_id == RUN
    assert invite.owner == OWNER.public_key
    assert invite.bootstraps == ADDRESSES
    assert invite.expires_at == EXPIRES


def test_white_space_from_a_mail_does_no_harm() -> None:
    wrapped = "\n  ".join(TEXT[i : i + 60] for i in range(0, len(TEXT), 60))
    assert parse_invite(f"  {wrapped}\r\n", NOW) == parse_invite(TEXT, NOW)


def test_one_changed_character_anywhere_is_noticed() -> None:
    for place in range(len(PREFIX), len(TEXT)):
        for other in "AZ_!":
            if TEXT[place] == other:
                continue
            with pytest.raises(UserError, match=r"damaged on the way.*copy the whole line again"):
                parse_invite(TEXT[:place] + other + TEXT[place + 1 :], NOW)


@pytest.mark.parametrize("length", [len(PREFIX), len(PREFIX) + 1, 60, len(TEXT) - 1])
def test_a_truncated_invite_is_noticed(length: int) -> None:
    with pytest.raises(UserError, match="damaged on the way"):
        parse_invite(TEXT[:length], NOW)


@pytest.mark.parametrize("text", ["", "hello", "https://example.org/join", TEXT[1:]])
def test_other_text_is_no_invite(text: str) -> None:
    with pytest.raises(UserError, match="an invite starts with 'p2pdiloco:'"):
        parse_invite(text, NOW)


def test_an_expired_invite_says_since_when() -> None:
    with pytest.raises(UserError, match=r"expired 3 hours ago; ask the run's owner.*clock"):
        parse_invite(TEXT, EXPIRES + 3 * 3600.0)


def test_an_invite_of_somebody_else_in_the_owners_name_is_refused() -> None:
    raw = base64.urlsafe_b64decode(TEXT.removeprefix(PREFIX) + "==")
    body, _ = msgpack.unpackb(raw[:-4])
    forged = packed_text([body, Identity.generate().sign(b"p2pdiloco invite\0" + body)])
    with pytest.raises(UserError, match="not signed by the owner it names"):
        parse_invite(forged, NOW)


@pytest.mark.parametrize("value", [1, [], [b"", b""], [b"\xc1", b""], [msgpack.packb({}), b""]])
def test_well_formed_nonsense_is_from_another_version(value: object) -> None:
    with pytest.raises(UserError, match="made by another version"):
        parse_invite(packed_text(value), NOW)


def test_a_newer_invite_asks_for_an_update() -> None:
    with pytest.raises(UserError, match="has version 2, this program reads 1; update p2pdiloco"):
        parse_invite(packed_text([msgpack.packb({"version": 2}), b""]), NOW)


def test_a_giant_is_refused_unread() -> None:
    with pytest.raises(UserError, match="at most 8192 characters"):
        parse_invite(PREFIX + "A" * 10_000, NOW)


def test_an_invite_without_addresses_cannot_be_made() -> None:
    with pytest.raises(ValueError, match="1 to 16 addresses"):
        make_invite(OWNER, RUN, (), EXPIRES)
