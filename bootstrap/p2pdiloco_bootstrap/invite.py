"""Invites: one line of text that lets a stranger find and check a run.

`p2pdiloco:` + base64url(msgpack [body, signature] + checksum). The body names the run, addresses of
peers to start from, the owner's public key and an expiry; the owner signs it. The checksum adds
nothing to security: it tells "damaged on the way" (copy it again) from "not made by this owner".
"""

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import msgpack

from p2pdiloco.errors import UserError
from p2pdiloco_bootstrap.identity import Identity, verify_with_key

PREFIX = "p2pdiloco:"

INVITE_LENGTH_MAX = 8192
"""Characters. An invite with 16 bootstrap addresses has about 2,500."""

BOOTSTRAPS_MAX = 16
"""Addresses in an invite: a handful of peers with a LAN and a public address each."""

_VERSION = 1
_CHECKSUM_BYTES = 4
_SIGNED_PREFIX = b"p2pdiloco invite\0"
"""Prefix of what the owner signs, so that the signature fits nothing else the key ever signs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Invite:
    """What an invite says once it has been checked."""

    run_id: str
    owner: str
    """The owner's public key, 64 hex digits; the run spec must be signed with it."""
    bootstraps: tuple[str, ...]
    """Multiaddrs, each ending in `/p2p/PEER`."""
    expires_at: int
    """Seconds since 1970."""


def make_invite(owner: Identity, run_id: str, bootstraps: Sequence[str], expires_at: float) -> str:
    """The text of an invite to `run_id`, signed by its owner."""
    if not 1 <= len(bootstraps) <= BOOTSTRAPS_MAX:
        raise ValueError(f"an invite names 1 to {BOOTSTRAPS_MAX} addresses, got {len(bootstraps)}")
    body = msgpack.packb(
        {
            "version": _VERSION,
            "run": run_id,
            "owner": bytes.fromhex(owner.public_key),
            "bootstraps": list(bootstraps),
            "expires": int(expires_at),
        }
    )
    packed = msgpack.packb([body, owner.sign(_SIGNED_PREFIX + body)])
    return PREFIX + base64.urlsafe_b64encode(packed + _checksum(packed)).decode().rstrip("=")


def parse_invite(text: str, now: float) -> Invite:
    """Checks form, damage, signature and expiry; a UserError says what to do about each.

    `now` is in seconds since 1970. White space inside is ignored: chats and mails wrap lines.
    """
    body, signature = _unwrap("".join(text.split()))
    invite = _invite_of(body)
    if not verify_with_key(invite.owner, _SIGNED_PREFIX + body, signature):
        raise UserError(
            "this invite is not signed by the owner it names: somebody changed it; "
            "do not use it, ask the run's owner for a new one"
        )
    if invite.expires_at <= now:
        raise UserError(
            f"this invite expired {_in_words(now - invite.expires_at)} ago; ask the run's owner "
            "for a new one (if that cannot be, check this machine's clock)"
        )
    return invite


def _unwrap(text: str) -> tuple[bytes, bytes]:
    """-> (body, signature) of an undamaged invite."""
    if not text.startswith(PREFIX):
        raise UserError(
            f"an invite starts with {PREFIX!r}, got {text[:20]!r}; copy the whole line that the "
            "run's owner sent"
        )
    if len(text) > INVITE_LENGTH_MAX:
        raise UserError(
            f"an invite has at most {INVITE_LENGTH_MAX} characters, got {len(text)}; copy only the "
            "one line"
        )
    encoded = text.removeprefix(PREFIX)
    try:
        raw = base64.b64decode(encoded + "=" * (-len(encoded) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError) as error:
        raise _damaged() from error
    packed, checksum = raw[:-_CHECKSUM_BYTES], raw[-_CHECKSUM_BYTES:]
    # the second condition: the last character of base64 may carry bits that decode to nothing
    if checksum != _checksum(packed) or base64.urlsafe_b64encode(raw).decode().rstrip("=") != (
        encoded.rstrip("=")
    ):
        raise _damaged()
    match _unpack(packed):
        case [bytes(body), bytes(signature)]:
            return body, signature
    raise _from_another_version("is not a pair of body and signature")


def _invite_of(body: bytes) -> Invite:
    match _unpack(body):
        case {"version": int(version)} if version != _VERSION:
            raise _from_another_version(f"has version {version}, this program reads {_VERSION}")
        case {
            "run": str(run_id),
            "owner": bytes(owner),
            "bootstraps": [*bootstraps],
            "expires": int(expires_at),
        } if 1 <= len(bootstraps) <= BOOTSTRAPS_MAX and len(owner) == 32:
            return Invite(
                run_id=run_id,
                owner=owner.hex(),
                bootstraps=tuple(str(address) for address in bootstraps),
                expires_at=expires_at,
            )
    raise _from_another_version("lacks fields that this program needs")


def _unpack(buffer: bytes) -> Any:
    try:
        return msgpack.unpackb(buffer)
    except (ValueError, msgpack.UnpackException):
        return None


def _checksum(packed: bytes) -> bytes:
    return blake2b(packed, digest_size=_CHECKSUM_BYTES).digest()


def _damaged() -> UserError:
    return UserError(
        "this invite was damaged on the way: a character is missing, added or changed; copy the "
        "whole line again, or ask for it in another way (mail, file)"
    )


def _from_another_version(problem: str) -> UserError:
    return UserError(
        f"this invite was made by another version of p2pdiloco: it {problem}; "
        "update p2pdiloco here, or ask the run's owner to update and invite again"
    )


def _in_words(seconds: float) -> str:
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"
