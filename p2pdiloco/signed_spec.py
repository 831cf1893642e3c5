"""A run's spec as its owner signed it: the bytes that travel, and what a node checks of them.

`p2pdiloco bootstrap` completes a draft with the genesis weights' digests and signs its canonical
bytes (`canonical_bytes`); their digest with the owner's key is the run id. A node takes part only
in a run whose signed spec it has verified (`SignedSpec.unpack`).

Nothing here signs: the caller passes a `Verify` function, the keys live in the bootstrap package.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Self

import msgpack
from pydantic import JsonValue, ValidationError

from p2pdiloco.errors import PeerError
from p2pdiloco.spec import RunSpec
from p2pdiloco.spec_file import describe_errors, flatten, protocol_problem

MAX_SPEC_BYTES = 256 * 1024
"""A spec with the digests of 400 fragments has about 30 KB; a transformers config a few KB."""

_SIGNED_DOMAIN = b"p2pdiloco run spec\0"
"""Prefix of what the owner signs, so that the signature fits nothing else the key ever signs."""

Verify = Callable[[str, bytes, bytes], bool]
"""(owner's public key in hex, signed bytes, signature) -> whether the signature is the owner's."""


@dataclass(frozen=True, slots=True)
class SignedSpec:
    """A run's spec as it travels and is kept: the signed bytes, never re-encoded."""

    spec_bytes: bytes
    owner: str
    """The owner's public key in hex."""
    signature: bytes

    @property
    def run_id(self) -> str:
        """32 hex digits: blake2b-128 over the spec's bytes and the owner's public key."""
        return run_id(self.spec_bytes, self.owner)

    @property
    def spec(self) -> RunSpec:
        """The parsed spec; PeerError if the bytes are not a canonical, complete spec."""
        return spec_from_bytes(self.spec_bytes)

    def pack(self) -> bytes:
        """msgpack of the three fields."""
        fields = {"spec": self.spec_bytes, "owner": self.owner, "signature": self.signature}
        return bytes(msgpack.packb(fields))

    @classmethod
    def unpack(cls, buffer: bytes, verify: Verify, expected_run_id: str | None = None) -> Self:
        """Verifies size, form, signature, content and, where given, the run id; else PeerError."""
        signed = cls._parse(buffer)
        if expected_run_id is not None and signed.run_id != expected_run_id:
            raise PeerError(
                f"this is the spec of another run: expected run {expected_run_id}, "
                f"got run {signed.run_id}; ask the run's owner for a new invite"
            )
        if not verify(signed.owner, bytes_to_sign(signed.spec_bytes), signed.signature):
            raise PeerError(f"the spec is not signed by its owner {signed.owner}; do not use it")
        spec_from_bytes(signed.spec_bytes)
        return signed

    @classmethod
    def _parse(cls, buffer: bytes) -> Self:
        if len(buffer) > 2 * MAX_SPEC_BYTES:
            raise PeerError(
                f"a signed spec has at most {2 * MAX_SPEC_BYTES} bytes, got {len(buffer)}"
            )
        try:
            fields = msgpack.unpackb(buffer)
        except (ValueError, msgpack.UnpackException) as error:
            raise PeerError(
                f"expected a signed spec in msgpack, got {len(buffer)} bytes of something else"
            ) from error
        match fields:
            case {"spec": bytes(spec_bytes), "owner": str(owner), "signature": bytes(signature)}:
                if not re.fullmatch(r"[0-9a-f]{64}", owner):
                    raise PeerError(
                        f"an owner is a public key of 64 hex digits, got {owner[:70]!r}"
                    )
                return cls(spec_bytes, owner, signature)
        raise PeerError(
            "a signed spec has the fields spec, owner and signature; these bytes do not"
        )


def canonical_bytes(spec: RunSpec) -> bytes:
    """Compact JSON with sorted keys and every default written out: the bytes that are signed."""
    values = spec.model_dump(mode="json")
    return json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def spec_from_bytes(spec_bytes: bytes) -> RunSpec:
    """The complete spec whose `canonical_bytes` these are; else PeerError."""
    if len(spec_bytes) > MAX_SPEC_BYTES:
        raise PeerError(f"a spec has at most {MAX_SPEC_BYTES} bytes, got {len(spec_bytes)}")
    try:
        values = json.loads(spec_bytes)
    except (ValueError, RecursionError) as error:
        raise PeerError(
            f"expected a spec in JSON, got {len(spec_bytes)} bytes of something else"
        ) from error
    version = values.get("protocol_version") if isinstance(values, dict) else None
    if isinstance(version, int) and (problem := protocol_problem(version)):
        raise PeerError(problem)
    try:
        spec = RunSpec.model_validate_json(spec_bytes)
    except ValidationError as error:
        raise PeerError(describe_errors(error, "the run's spec")) from error
    if canonical_bytes(spec) != spec_bytes:
        raise PeerError(_why_not_canonical(values, spec))
    if spec.genesis is None:
        raise PeerError("the run's spec names no genesis weights: a draft, not a run")
    return spec


def _why_not_canonical(values: dict[str, JsonValue], spec: RunSpec) -> str:
    if lacking := sorted(flatten(spec.model_dump(mode="json")).keys() - flatten(values).keys()):
        return (
            f"the run's spec lacks {', '.join(lacking)}: it was written by another version of "
            "p2pdiloco; install the one that the run's owner has, or start a new run"
        )
    return "the run's spec is not in canonical form: not written by this software"


def bytes_to_sign(spec_bytes: bytes) -> bytes:
    """What the owner's key signs."""
    return _SIGNED_DOMAIN + spec_bytes


def run_id(spec_bytes: bytes, owner: str) -> str:
    """32 hex digits: blake2b-128 over the spec's bytes and the owner's public key (hex)."""
    return blake2b(spec_bytes + bytes.fromhex(owner), digest_size=16).hexdigest()
