"""Identities: the key file, peer ids, signatures."""

import errno
import os
import stat
from pathlib import Path

import pytest

from p2pdiloco.errors import UserError
from p2pdiloco_bootstrap.identity import (
    Identity,
    base58_decode,
    base58_encode,
    peer_id_of,
    public_key_of,
    verify,
    verify_with_key,
)

ZERO_KEY_PEER = "12D3KooW9pNAk8aiBuGVQtWRdbkLmo5qVL3e2h5UxbN2Nz9ttwiw"
"""The peer id of the all-zero public key, as go-libp2p prints it."""


def test_a_peer_id_contains_its_public_key() -> None:
    identity = Identity.generate()
    public = public_key_of(identity.peer_id)
    assert public is not None
    assert public.hex() == identity.public_key
    assert peer_id_of(public) == identity.peer_id
    assert identity.peer_id.startswith("12D3KooW")


def test_peer_ids_are_those_of_libp2p() -> None:
    assert peer_id_of(bytes(32)) == ZERO_KEY_PEER


@pytest.mark.parametrize("text", ["", "1", "0OIl", "Qm" + "a" * 44, "12D3KooW", "1" * 10_000])
def test_other_text_holds_no_public_key(text: str) -> None:
    assert public_key_of(text) is None
    assert not verify(text, b"data", bytes(64))


def test_base58_keeps_leading_zeros() -> None:
    for data in (b"", b"\0", b"\0\0\x01", bytes(range(50))):
        assert base58_decode(base58_encode(data)) == data


def test_a_signature_fits_one_key_and_one_text() -> None:
    alice, bob = Identity.generate(), Identity.generate()
    signature = alice.sign(b"data")
    assert verify(alice.peer_id, b"data", signature)
    assert verify_with_key(alice.public_key, b"data", signature)
    assert not verify(bob.peer_id, b"data", signature)
    assert not verify(alice.peer_id, b"Data", signature)
    assert not verify(alice.peer_id, b"data", signature[:-1])
    assert not verify_with_key("not hex", b"data", signature)


def test_an_identity_is_created_once_and_private(tmp_path: Path) -> None:
    path = tmp_path / "new" / "identity.key"
    first = Identity.load_or_create(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert Identity.load_or_create(path).peer_id == first.peer_id


@pytest.mark.parametrize("content", [b"", b"\x08\x01\x12\x40" + bytes(64), b"x" * 68])
def test_a_damaged_key_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "identity.key"
    path.write_bytes(content)
    with pytest.raises(UserError, match="restore it from a backup, or move it away"):
        Identity.load_or_create(path)
    assert path.read_bytes() == content


def test_a_full_disk_leaves_no_half_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "identity.key"
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", no_space)
        with pytest.raises(UserError, match=r"No space left on device; make room"):
            Identity.load_or_create(path)
    assert Identity.load_or_create(path).peer_id == Identity.load_or_create(path).peer_id


def test_an_unreadable_key_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read the identity file"):
        Identity.load_or_create(tmp_path)
