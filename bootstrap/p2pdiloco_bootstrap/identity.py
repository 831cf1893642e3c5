"""A node's identity: an Ed25519 key in a file, its libp2p peer id, and signatures with it.

The file holds the key as libp2p's protobuf `PrivateKey(Type=Ed25519, Data=private 32 B + public
32 B)`, which p2pd reads as it is. A peer id of an Ed25519 key is the base58 text of an "identity"
multihash over the `PublicKey` protobuf (libp2p specs, peer-ids), so it *contains* the public key:
whoever knows a peer id can check that peer's signatures, without any exchange of keys.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from p2pdiloco.errors import UserError

_BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"

_PRIVATE_KEY_PREFIX = bytes((0x08, 0x01, 0x12, 0x40))
"""Protobuf fields Type = 1 (Ed25519) and Data of 64 bytes."""

_PEER_ID_PREFIX = bytes((0x00, 0x24, 0x08, 0x01, 0x12, 0x20))
"""Multihash "identity" of 36 bytes, then the PublicKey protobuf: Type = 1, Data of 32 bytes."""

PEER_ID_LENGTH_MAX = 60
"""Ed25519 peer ids have 52 characters; longer text is refused before it is decoded."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A private key, and the names that follow from it."""

    private_key: Ed25519PrivateKey
    peer_id: str
    public_key: str
    """64 hex digits; how a run spec names its owner."""

    @classmethod
    def generate(cls) -> "Identity":
        return cls._of(Ed25519PrivateKey.generate())

    @classmethod
    def load_or_create(cls, path: Path) -> "Identity":
        """The identity in `path`; a new one (mode 0600) is written there when there is none."""
        try:
            return cls._of(_parse_key_file(path.read_bytes(), path))
        except FileNotFoundError:
            identity = cls.generate()
            _write_key_file(path, identity.private_key)
            return identity
        except OSError as error:
            raise UserError(
                f"cannot read the identity file {path}: {error.strerror}; "
                "make it readable for this user, or name another directory"
            ) from error

    @classmethod
    def _of(cls, private_key: Ed25519PrivateKey) -> "Identity":
        public = private_key.public_key().public_bytes_raw()
        return cls(private_key, peer_id_of(public), public.hex())

    def sign(self, data: bytes) -> bytes:
        """64 bytes; the same data gives the same signature."""
        return self.private_key.sign(data)


def verify(peer_id: str, data: bytes, signature: bytes) -> bool:
    """Whether `signature` over `data` was made with the key of `peer_id`; malformed is False."""
    public = public_key_of(peer_id)
    return public is not None and verify_with_key(public.hex(), data, signature)


def verify_with_key(public_key: str, data: bytes, signature: bytes) -> bool:
    """As `verify`, for a public key in hex, as a run spec names its owner."""
    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(public_key)).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True


def peer_id_of(public_key: bytes) -> str:
    """The peer id text of a raw Ed25519 public key of 32 bytes."""
    return base58_encode(_PEER_ID_PREFIX + public_key)


def public_key_of(peer_id: str) -> bytes | None:
    """The raw Ed25519 public key inside a peer id, or None where it is no such peer id."""
    decoded = base58_decode(peer_id) if len(peer_id) <= PEER_ID_LENGTH_MAX else None
    if decoded is None or not decoded.startswith(_PEER_ID_PREFIX):
        return None
    public = decoded[len(_PEER_ID_PREFIX) :]
    return public if len(public) == 32 else None


def base58_encode(data: bytes) -> str:
    """Bitcoin's base58, as libp2p writes peer ids."""
    number = int.from_bytes(data)
    digits = ""
    while number:
        number, digit = divmod(number, 58)
        digits = _BASE58[digit] + digits
    leading_zeros = len(data) - len(data.lstrip(b"\0"))
    return _BASE58[0] * leading_zeros + digits


def base58_decode(text: str) -> bytes | None:
    """The bytes that `base58_encode` gives `text` for; None for characters outside the alphabet."""
    number = 0
    for character in text:
        digit = _BASE58.find(character)
        if digit < 0:
            return None
        number = number * 58 + digit
    leading_zeros = len(text) - len(text.lstrip(_BASE58[0]))
    return bytes(leading_zeros) + number.to_bytes((number.bit_length() + 7) // 8)


def _parse_key_file(content: bytes, path: Path) -> Ed25519PrivateKey:
    body = content[len(_PRIVATE_KEY_PREFIX) :]
    if content.startswith(_PRIVATE_KEY_PREFIX) and len(body) == 64:
        private_key = Ed25519PrivateKey.from_private_bytes(body[:32])
        if private_key.public_key().public_bytes_raw() == body[32:]:
            return private_key
    raise UserError(
        f"{path} is not an identity file: expected an Ed25519 key of 68 bytes, got {len(content)} "
        "bytes of something else; restore it from a backup, or move it away to get a new identity"
    )


def _write_key_file(path: Path, private_key: Ed25519PrivateKey) -> None:
    public = private_key.public_key().public_bytes_raw()
    content = _PRIVATE_KEY_PREFIX + private_key.private_bytes_raw() + public
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # O_EXCL: of two processes that start at once, one gets an error instead of a lost key
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            path.unlink()  # half a key would be refused for ever
            raise
    except OSError as error:
        raise UserError(
            f"cannot write a new identity to {path}: {error.strerror}; "
            "make room and the directory writable for this user, or name another one"
        ) from error
