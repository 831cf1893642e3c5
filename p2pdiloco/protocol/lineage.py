"""Merge records, their chain, and which of two chains wins.

A merge record is the signed statement that one version of a fragment was made. Each names the
digest of the record before it, so the records of a fragment form a chain down to the genesis
weights, whose digest is part of the run spec. After a partition there can be two chains; everybody
adopts the one with more merged tokens, then the one with the smaller digest (DESIGN 4). Nothing
here fetches or applies anything.
"""

import enum
import hashlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import median_low
from typing import Annotated, Protocol

import msgpack
from pydantic import Field, TypeAdapter, ValidationError

from p2pdiloco.errors import PeerError
from p2pdiloco.protocol.naming import Count, Digest, FragmentIndex, PeerId, PeerText, Sentence

RECORDS_KEPT = 256
"""Records of a fragment that stay in memory: a node that slept through fewer merges sees what
became of its tokens.
"""
CONTRIBUTORS_MAX = 64
"""Contributors of one merge; the synchronizer pulls from each, so its downlink bounds them."""
RECORD_BYTES_MAX = 32 * 1024
REFUSAL_BYTES_MAX = 320
"""Of a reason in a record: one that names as many as it may is still no longer than is read."""
TOKENS_MAX = 2**50
"""More tokens than this in one contribution are a lie or a bug."""


class Signer(Protocol):
    """Signs with this node's key; verifies with the key inside a peer id."""

    def sign(self, data: bytes) -> bytes: ...
    def verify(self, peer: PeerId, data: bytes, signature: bytes) -> bool: ...


@dataclass(frozen=True, slots=True)
class Contributor:
    """Who was merged, with what: inner steps and tokens since it last received the fragment."""

    peer: PeerText
    tokens: Annotated[int, Field(ge=1, le=TOKENS_MAX)]
    steps: Annotated[int, Field(ge=1, lt=2**40)]


@dataclass(frozen=True, slots=True)
class Refused:
    """Who had something ready and was not merged, and why."""

    peer: PeerText
    reason: Sentence


def refusal(peer: PeerId, reason: str) -> Refused:
    """With as much of the reason as fits into a record."""
    return Refused(peer, reason.encode()[:REFUSAL_BYTES_MAX].decode(errors="ignore"))


def period_of(contributors: Iterable[Contributor]) -> int:
    """Inner steps of the median contributor since it received the version before."""
    return median_low(contributor.steps for contributor in contributors)


@dataclass(frozen=True)
class Record:
    """A commit: `version` of `fragment`, made from the record `parent` by one merge.

    `tokens_total` counts the tokens of all merges of this chain. `state_digest` is that of anchor
    and momentum after the merge, which every replica reaches bit for bit.
    """

    run_id: Annotated[str, Field(max_length=64)]
    fragment: FragmentIndex
    version: Annotated[int, Field(ge=1, lt=2**53)]
    parent: Digest
    payload_digest: Digest
    payload_bytes: Annotated[int, Field(ge=1, lt=2**40)]
    state_digest: Digest
    contributors: Annotated[
        tuple[Contributor, ...], Field(min_length=1, max_length=CONTRIBUTORS_MAX)
    ]
    refused: Annotated[tuple[Refused, ...], Field(max_length=CONTRIBUTORS_MAX)]
    term: Count
    attempt: Count
    tokens_total: Count
    reason: Sentence
    synchronizer: PeerText
    signature: Annotated[bytes, Field(max_length=128)] = b""

    @cached_property
    def signed_part(self) -> bytes:
        return _packed(replace(self, signature=b""))

    @cached_property
    def digest(self) -> str:
        return hashlib.blake2b(self.signed_part, digest_size=32).hexdigest()

    @property
    def tokens(self) -> int:
        return sum(contributor.tokens for contributor in self.contributors)

    @property
    def period_steps(self) -> int:
        """How long the period of this merge was."""
        return period_of(self.contributors)

    @property
    def weight(self) -> tuple[int, int]:
        """The heavier of two heads wins."""
        return self.tokens_total, -int(self.digest, 16)

    def tokens_of(self, peer: PeerId) -> int:
        return sum(c.tokens for c in self.contributors if c.peer == peer)

    def refusal_of(self, peer: PeerId) -> str | None:
        return next((r.reason for r in self.refused if r.peer == peer), None)

    def signed(self, signer: Signer) -> "Record":
        return replace(self, signature=signer.sign(self.signed_part))

    def pack(self) -> bytes:
        return _packed(self)


_RECORD = TypeAdapter(Record)


def _packed(record: Record) -> bytes:
    fields = _RECORD.dump_python(record)
    return bytes(msgpack.packb(fields))


def unpack_record(data: bytes) -> Record:
    """Shape and bounds only; `check_record` looks at the rest. Raises PeerError."""
    if len(data) > RECORD_BYTES_MAX:
        raise PeerError(f"a merge record of {len(data)} bytes; at most {RECORD_BYTES_MAX} are read")
    try:
        return _RECORD.validate_python(msgpack.unpackb(data, use_list=True))
    except (ValidationError, ValueError, TypeError, msgpack.UnpackException) as error:
        raise PeerError(f"not a merge record: {type(error).__name__}") from error


def check_record(record: Record, run_id: str, signer: Signer) -> None:
    """Raises PeerError unless the record is of this run, signed by the synchronizer that it names,
    and short enough for those who are to read it from a disk or a donor.
    """
    num_bytes = len(record.signed_part) + len(record.signature)
    if num_bytes > RECORD_BYTES_MAX:
        raise PeerError(f"a merge record of {num_bytes} bytes; at most {RECORD_BYTES_MAX} are read")
    if record.run_id != run_id:
        raise PeerError(f"a merge record of another run; this is run {run_id[:12]}")
    if not signer.verify(record.synchronizer, record.signed_part, record.signature):
        raise PeerError("the signature on a merge record is not that of its synchronizer")


def describe(record: Record) -> str:
    return f"fragment {record.fragment} v{record.version} ({record.digest[:8]})"


class Verdict(enum.Enum):
    """What a record is to a chain."""

    KNOWN = "known"
    EXTENDS = "extends the head"
    AHEAD = "ahead: records in between are missing"
    HEAVIER = "another lineage, heavier"
    LIGHTER = "another lineage, lighter, or old"


@dataclass
class Chain:
    """The newest records of one fragment on the lineage that this node follows.

    `base` is the version below the first kept record, `base_digest` its digest: the genesis state
    digest at version 0.
    """

    base: int
    base_digest: str
    records: list[Record] = field(default_factory=list)

    @property
    def version(self) -> int:
        return self.base + len(self.records)

    @property
    def digest(self) -> str:
        return self.records[-1].digest if self.records else self.base_digest

    @property
    def head(self) -> Record | None:
        return self.records[-1] if self.records else None

    @property
    def tokens_total(self) -> int:
        return self.records[-1].tokens_total if self.records else 0

    @property
    def weight(self) -> tuple[int, int]:
        return self.records[-1].weight if self.records else (0, 0)

    def record(self, version: int) -> Record | None:
        index = version - self.base - 1
        return self.records[index] if 0 <= index < len(self.records) else None

    def digest_at(self, version: int) -> str | None:
        if version == self.base:
            return self.base_digest
        record = self.record(version)
        return record.digest if record else None

    def judge(self, record: Record) -> Verdict:
        if self.digest_at(record.version) == record.digest:
            return Verdict.KNOWN
        if record.version == self.version + 1 and record.parent == self.digest:
            return Verdict.EXTENDS
        if record.weight < self.weight:
            return Verdict.LIGHTER
        return Verdict.AHEAD if record.version > self.version + 1 else Verdict.HEAVIER

    def append(self, record: Record) -> None:
        assert record.version == self.version + 1 and record.parent == self.digest, describe(record)
        self.records.append(record)
        if len(self.records) > RECORDS_KEPT:
            first = self.records.pop(0)
            self.base, self.base_digest = first.version, first.digest

    def common_version(self, records: Sequence[Record]) -> int | None:
        """The newest version on which this chain and `records` (contiguous, ascending) agree."""
        for record in reversed(records):
            if self.digest_at(record.version) == record.digest:
                return record.version
        if records and self.digest_at(records[0].version - 1) == records[0].parent:
            return records[0].version - 1
        return None


def check_links(records: Sequence[Record], fragment: int, check: Callable[[Record], None]) -> None:
    """Raises PeerError unless `records` are one fragment's, contiguous, each naming the one
    before.
    """
    for record in records:
        check(record)
        if record.fragment != fragment:
            raise PeerError(f"asked for fragment {fragment}, got a record of {describe(record)}")
        if record.version == 1 and record.tokens_total != record.tokens:
            raise PeerError(f"tokens_total of {describe(record)} does not add up")
    for before, after in itertools.pairwise(records):
        linked = after.version == before.version + 1 and after.parent == before.digest
        if not linked or after.tokens_total != before.tokens_total + after.tokens:
            raise PeerError(f"{describe(after)} does not follow {describe(before)}")
