"""The node's directory: per fragment a log of merges with a snapshot now and then.

    DIR/lock                           the daemon that owns the directory (flock; holds its pid)
    DIR/NAME.json                      small things of the node: the ledger, ...
    DIR/fragments/P/VERSION.snapshot   a packed state and the merge record that made it
    DIR/fragments/P/VERSION.merge      a merge payload and its record
    DIR/fragments/P/records            the newest records whose merges are gone
    DIR/fragments/P/VERSION.part, VERSION.chunks   a state of which not all has arrived

Restart and join are the same thing: take the newest snapshot that reads, apply the merges after it.
A file appears whole or not at all (written beside its place, synced, renamed). A file that was
damaged later is noticed by its digests and skipped with a warning: the next older snapshot and a
longer replay give the same state. Only merges after the oldest kept snapshot are kept, so the disk
stays bounded: 2 snapshots and the merges since, beside what `leased` readers still want.

The exception is a state being fetched, which must survive a crash but is of no use half: each chunk
is written into its place, then its digest is noted; what was noted and does not read is fetched
again.

All calls block; the shell makes them in a thread. Records are opaque bytes here.
"""

import fcntl
import hashlib
import json
import logging
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from errno import EDQUOT, ENOSPC
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import BinaryIO, Self, TypeAlias

from p2pdiloco.errors import P2PDilocoError, StoreError, UserError
from p2pdiloco.protocol.lineage import RECORDS_KEPT
from p2pdiloco_bootstrap.serving import FilePart
from p2pdiloco_daemon.replica import (
    Buffer,
    FragmentState,
    packed_state_bytes,
    payload_digest,
    state_parts,
    unpack_state,
)

logger = logging.getLogger(__name__)

Json: TypeAlias = "dict[str, Json] | list[Json] | str | int | float | bool | None"

LEASED_MAX = 2
"""Old snapshots of a fragment kept for readers: 8 bytes per parameter each, as the other two."""

RECORD_BYTES_MAX = 1 << 20
"""A merge record is a few kilobytes; a header that announces more is damaged."""

_MAGIC = b"PDF1"
_HEADER = struct.Struct("<4sIQIQ32s")
"""Magic, fragment, version, bytes of the record, bytes of the body, digest of the body (for a
snapshot the state digest). A blake2b-256 over header and record follows, then the record, then the
body.
"""
_CHECKSUM_BYTES = 32
_RECORD_HEAD = struct.Struct("<QI")
"""In the body of `records`: version and bytes of the record that follows."""
_PART_HEAD = struct.Struct("<4sQ32s")
"""Begins VERSION.chunks: magic, bytes of the whole, digest of the state."""
_PART_MAGIC = b"PDP1"
_CHUNK_NOTE = struct.Struct("<QI16s")
"""Follows for each chunk: its offset, its bytes, its digest."""


@dataclass(frozen=True, slots=True)
class StoredMerge:
    """One merge as it was committed."""

    version: int
    record: bytes
    payload: bytes


@dataclass(frozen=True, slots=True)
class StoredFragment:
    """What a restart begins with: apply `merges`, in order and without gap, to `state`."""

    state: FragmentState
    record: bytes | None
    """Of the merge that made `state`; None at genesis."""
    merges: tuple[StoredMerge, ...]
    earlier: tuple[bytes, ...] = ()
    """Records below `record`, oldest first, one for each version; not `record`. The caller checks
    that they lead to it."""


@dataclass(frozen=True, slots=True)
class SnapshotInfo:
    """The newest snapshot, as a donor offers it."""

    version: int
    state_digest: str
    record: bytes | None


@dataclass(frozen=True, slots=True)
class PartInfo:
    """A state of which something has arrived."""

    version: int
    state_digest: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _Entry:
    """The readable head of a file, and where its body lies."""

    path: Path
    version: int
    record: bytes
    digest: str
    body_bytes: int

    @property
    def body_offset(self) -> int:
        return _HEADER.size + _CHECKSUM_BYTES + len(self.record)


class Store:
    """An open directory, locked against other daemons until `close`."""

    def __init__(
        self,
        directory: Path,
        num_fragments: int,
        *,
        snapshot_every: int = 4,
        max_snapshots: int = 2,
        read_only: bool = False,
        is_locked: bool = False,
    ) -> None:
        """Create what is missing and remove what a crash left half-written.

        Read-only it does neither, and may be opened beside the daemon that has the directory.
        `is_locked`: the caller has the directory already, by `lock_directory`.

        UserError if another daemon has the directory, StoreError if it cannot be written.
        """
        assert snapshot_every >= 1 and max_snapshots >= 1
        self._directory = directory
        self._snapshot_every = snapshot_every
        self._max_snapshots = max_snapshots
        self._fragments = [directory / "fragments" / f"{p:04d}" for p in range(num_fragments)]
        self._lock: BinaryIO | None = None
        if read_only:
            return
        self._sound: list[str | None] = [None] * num_fragments
        with _disk(directory):
            for folder in self._fragments:
                folder.mkdir(parents=True, exist_ok=True)
            self._lock = None if is_locked else lock_directory(directory)
            for folder in (directory, *self._fragments):
                for leftover in folder.glob("*.tmp"):
                    leftover.unlink()

    def close(self) -> None:
        """Let another daemon have the directory."""
        if self._lock:
            self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def save_snapshot(
        self,
        state: FragmentState,
        record: bytes | None,
        leased: Sequence[int] = (),
        missed: Mapping[int, bytes] = MappingProxyType({}),
    ) -> None:
        """Keep a state and the record that made it; then drop what is older than needed.

        Of `leased` versions the merges after them stay, and of the first ones the snapshots.
        `missed` are records of merges that could not be written, by version.
        """
        self._write_snapshot(state, record)
        if missed:
            self._save_records(state.fragment, self._records(state.fragment) | dict(missed))
        self._drop_old(state.fragment, leased)

    def restart_log(
        self,
        state: FragmentState,
        record: bytes | None,
        earlier: Mapping[int, bytes],
        following: Mapping[int, bytes],
    ) -> None:
        """Begin the log anew at this state: another lineage has won, or the own state was damaged.

        Of what is here, what lies on the lineage stays: records below those of `earlier`, and
        merges that `following` has the records of, by version. A crash leaves the log as it was, or
        this state.
        """
        p = state.fragment
        older = {v: r for v, r in self._records(p).items() if v < min(earlier, default=0)}
        self._save_records(p, older | dict(earlier))
        kept = self._entry(p, state.version, "snapshot")
        if kept is None or kept.digest != state.digest or kept.record != (record or b""):
            self._write_snapshot(state, record)
        with _disk(self._fragments[p]):
            for version in reversed(self._versions(p, "snapshot")):
                if version != state.version:
                    self._path(p, version, "snapshot").unlink()
            for version in self._versions(p, "merge"):
                merge = self._entry(p, version, "merge")
                wanted = following.get(version)
                if merge is None or version <= state.version or merge.record != wanted:
                    self._path(p, version, "merge").unlink()

    def _write_snapshot(self, state: FragmentState, record: bytes | None) -> None:
        path, parts = self._path(state.fragment, state.version, "snapshot"), state_parts(state)
        head = _head(state.fragment, state.version, record or b"", parts, state.digest)
        _write(path, head, parts)

    def save_merge(self, fragment: int, version: int, payload: Buffer, record: bytes) -> None:
        """Keep a committed merge."""
        path = self._path(fragment, version, "merge")
        head = _head(fragment, version, record, [payload], payload_digest(payload))
        _write(path, head, [payload])

    def wants_snapshot(self, fragment: int, version: int) -> bool:
        """At every `snapshot_every`-th version, which are then the same ones at all donors; or when
        the newest snapshot is older than that, or a merge after it is missing.
        """
        newest = self._versions(fragment, "snapshot")[-1:]
        if not newest or version % self._snapshot_every == 0:
            return True
        since = version - newest[0]
        merges = [v for v in self._versions(fragment, "merge") if newest[0] < v <= version]
        return since >= self._snapshot_every or len(merges) < since

    def load(self, fragment: int) -> StoredFragment | None:
        """The newest snapshot that reads and the merges after it; None if there is none.

        Damaged files are named in the log. The caller checks records and the resulting digests.
        """
        for version in reversed(self._versions(fragment, "snapshot")):
            entry = self._entry(fragment, version, "snapshot")
            state = self._state(fragment, entry) if entry else None
            if entry and state:
                merges = tuple(self._merges_after(fragment, version))
                earlier = self._records_before(fragment, version)
                return StoredFragment(state, entry.record or None, merges, earlier)
        return None

    def snapshots(self, fragment: int) -> list[SnapshotInfo]:
        """The snapshots whose heads read, newest first."""
        return [
            SnapshotInfo(version, entry.digest, entry.record or None)
            for version in reversed(self._versions(fragment, "snapshot"))
            if (entry := self._entry(fragment, version, "snapshot"))
        ]

    def read_state(self, fragment: int, version: int, digest: str) -> FragmentState | None:
        """A kept state; None if that one is not here or is damaged."""
        entry = self._entry(fragment, version, "snapshot")
        if entry is None or entry.digest != digest:
            return None
        return self._state(fragment, entry)

    def state_part(self, fragment: int, version: int, digest: str) -> FilePart | None:
        """Where a kept state lies, packed; None if that one is not here or is damaged. Reads all of
        it the first time only: a large state is asked for in a thousand pieces.
        """
        entry = self._entry(fragment, version, "snapshot")
        if entry is None or entry.digest != digest:
            return None
        if self._sound[fragment] != digest:
            if self._state(fragment, entry) is None:
                return None
            self._sound[fragment] = digest
        return FilePart(entry.path, entry.body_offset, entry.body_bytes)

    def read_merge(self, fragment: int, version: int, digest: str) -> bytes | None:
        """A kept merge payload; None if that one is not here or is damaged."""
        entry = self._entry(fragment, version, "merge")
        return self._payload(entry) if entry and entry.digest == digest else None

    # ---------------------------------------------------------------- a state that is arriving

    def begin_part(self, fragment: int, part: PartInfo) -> None:
        """Keep chunks of this state from now on, and of no other state of the fragment."""
        self.drop_part(fragment)
        notes = self._path(fragment, part.version, "chunks")
        digest = bytes.fromhex(part.state_digest)
        with _disk(notes):
            self._path(fragment, part.version, "part").touch()
            notes.write_bytes(_PART_HEAD.pack(_PART_MAGIC, part.num_bytes, digest))

    def save_chunk(self, fragment: int, version: int, offset: int, chunk: Buffer) -> None:
        """Keep a chunk of the state that was begun. Not synced: a power cut costs a second fetch
        of what did not get there.
        """
        body = self._path(fragment, version, "part")
        note = _CHUNK_NOTE.pack(offset, len(chunk), _chunk_digest(chunk))
        with _disk(body):
            with body.open("r+b") as file:
                file.seek(offset)
                file.write(chunk)
            with self._path(fragment, version, "chunks").open("ab") as file:
                file.write(note)

    def part_info(self, fragment: int) -> PartInfo | None:
        """Of which state something is kept."""
        for version in reversed(self._versions(fragment, "chunks")):
            notes = _read_file(self._path(fragment, version, "chunks"))
            if notes and len(notes) >= _PART_HEAD.size:
                magic, num_bytes, digest = _PART_HEAD.unpack_from(notes)
                if magic == _PART_MAGIC:
                    return PartInfo(version, digest.hex(), num_bytes)
        return None

    def read_part(self, fragment: int, part: PartInfo, place: memoryview) -> list[tuple[int, int]]:
        """Put what is kept of the state into its place; returns (offset, bytes) of each chunk that
        is as it was noted.
        """
        notes = _read_file(self._path(fragment, part.version, "chunks")) or b""
        body = self._path(fragment, part.version, "part")
        found: dict[int, int] = {}
        whole = (len(notes) - _PART_HEAD.size) // _CHUNK_NOTE.size * _CHUNK_NOTE.size
        try:
            with _disk(body), body.open("rb", buffering=0) as file:
                for note in _CHUNK_NOTE.iter_unpack(notes[_PART_HEAD.size :][: max(0, whole)]):
                    offset, size, digest = note
                    if offset + size > len(place):
                        continue
                    chunk = place[offset : offset + size]
                    file.seek(offset)
                    if file.readinto(chunk) == size and _chunk_digest(chunk) == digest:
                        found[offset] = size
        except StoreError as error:
            logger.warning("%s", error)
        return sorted(found.items())

    def drop_part(self, fragment: int) -> None:
        """Forget a state that was begun; the one who reads it has it open still."""
        with _disk(self._fragments[fragment]):
            for kind in ("part", "chunks"):
                for version in self._versions(fragment, kind):
                    self._path(fragment, version, kind).unlink()

    # ---------------------------------------------------------------- small things

    def save_json(self, name: str, value: Json) -> None:
        """Keep a small thing under a name."""
        _write(self._json_path(name), json.dumps(value, indent=1).encode(), [])

    def load_json(self, name: str) -> Json:
        """What was kept under the name; None if nothing was or it is damaged."""
        path = self._json_path(name)
        try:
            with _disk(path):
                loaded: Json = json.loads(path.read_bytes()) if path.exists() else None
                return loaded
        except ValueError as error:
            _warn(path, f"is not JSON ({error})")
        except StoreError as error:
            logger.warning("%s", error)
        return None

    def _json_path(self, name: str) -> Path:
        assert name.isidentifier(), name
        return self._directory / f"{name}.json"

    def _path(self, fragment: int, version: int, kind: str) -> Path:
        return self._fragments[fragment] / f"{version:010d}.{kind}"

    def _versions(self, fragment: int, kind: str) -> list[int]:
        """Of the files of a kind, ascending, readable or not."""
        names = [path.stem for path in self._fragments[fragment].glob(f"*.{kind}")]
        return sorted(int(name) for name in names if name.isdecimal())

    def _drop_old(self, fragment: int, leased: Sequence[int]) -> None:
        snapshots = self._versions(fragment, "snapshot")
        older, newest = snapshots[: -self._max_snapshots], snapshots[-self._max_snapshots :]
        kept = [*[v for v in leased if v in older][:LEASED_MAX], *newest]
        oldest = min([*kept, *leased])
        gone = [v for v in self._versions(fragment, "merge") if v <= oldest]
        if gone:
            self._save_records(fragment, self._records(fragment))
        with _disk(self._fragments[fragment]):
            for version in snapshots:
                if version not in kept:
                    self._path(fragment, version, "snapshot").unlink()
            for version in gone:
                self._path(fragment, version, "merge").unlink()

    def _records(self, fragment: int) -> dict[int, bytes]:
        """By version, of merges that are here or were."""
        entry = self._read_entry(self._fragments[fragment] / "records", fragment, 0)
        body = entry and _read_body(entry)
        records: dict[int, bytes] = {}
        if entry and body and payload_digest(body) == entry.digest:
            place = 0
            while place < len(body):
                version, size = _RECORD_HEAD.unpack_from(body, place)
                place += _RECORD_HEAD.size + size
                records[version] = body[place - size : place]
        for version in self._versions(fragment, "merge"):
            if merge := self._entry(fragment, version, "merge"):
                records[version] = merge.record
        return records

    def _save_records(self, fragment: int, records: Mapping[int, bytes]) -> None:
        newest = sorted(records.items())[-RECORDS_KEPT:]
        parts = [part for v, r in newest for part in (_RECORD_HEAD.pack(v, len(r)), r)]
        body = b"".join(parts)
        head = _head(fragment, 0, b"", [body], payload_digest(body))
        _write(self._fragments[fragment] / "records", head, [body])

    def _entry(self, fragment: int, version: int, kind: str) -> _Entry | None:
        """The head of a file; None, with a warning if it is there, when it cannot be used."""
        return self._read_entry(self._path(fragment, version, kind), fragment, version)

    def _read_entry(self, path: Path, fragment: int, version: int) -> _Entry | None:
        if not path.exists():
            return None
        try:
            return _read_head(path, fragment, version)
        except StoreError as error:
            logger.warning("%s", error)
            return None

    def _merge_entries(self, fragment: int, version: int) -> Iterator[_Entry]:
        """The merges from `version` + 1 on, until one is missing."""
        while entry := self._entry(fragment, version + 1, "merge"):
            yield entry
            version += 1

    def _records_before(self, fragment: int, version: int) -> tuple[bytes, ...]:
        """Of the versions below, down to the first that is missing or damaged."""
        known, records = self._records(fragment), list[bytes]()
        while record := known.get(version - len(records) - 1):
            records.append(record)
        return tuple(reversed(records))

    def _merges_after(self, fragment: int, version: int) -> Iterator[StoredMerge]:
        for entry in self._merge_entries(fragment, version):
            payload = self._payload(entry)
            if payload is None:
                return
            yield StoredMerge(entry.version, entry.record, payload)

    def _payload(self, entry: _Entry) -> bytes | None:
        payload = _read_body(entry)
        if payload is not None and payload_digest(payload) != entry.digest:
            _warn(entry.path, "is damaged: its digest does not match")
            return None
        return payload

    def _state(self, fragment: int, entry: _Entry) -> FragmentState | None:
        body = _read_body(entry)
        return self._unpack(fragment, entry, body) if body else None

    def _unpack(self, fragment: int, entry: _Entry, body: bytes) -> FragmentState | None:
        num_values = max(0, len(body) - packed_state_bytes(0)) // 8
        try:
            return unpack_state(body, fragment, num_values, entry.digest)
        except P2PDilocoError as error:
            _warn(entry.path, f"is damaged: {error}")
            return None


@contextmanager
def _disk(path: Path) -> Iterator[None]:
    """Turn what the operating system refuses into a StoreError."""
    try:
        yield
    except OSError as error:
        advice = "free some space" if error.errno in (ENOSPC, EDQUOT) else "see to the disk"
        raise StoreError(
            f"Cannot use {path}: {error.strerror or error}. "
            f"What was there before is kept; {advice}."
        ) from error


def lock_directory(directory: Path) -> BinaryIO:
    """The lock file: the directory is this process's as long as it is open. UserError if it is
    another's.
    """
    with _disk(directory):
        directory.mkdir(parents=True, exist_ok=True)
        file = (directory / "lock").open("a+b", buffering=0)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        owner = file.read().decode(errors="replace").strip()
        file.close()
        raise UserError(
            f"{directory} is in use by another p2pdiloco daemon (process {owner or 'unknown'}). "
            "Stop that one, or start this one with another directory."
        ) from None
    file.truncate(0)
    file.write(f"{os.getpid()}\n".encode())
    return file


def _head(fragment: int, version: int, record: bytes, body: Sequence[Buffer], digest: str) -> bytes:
    assert len(record) <= RECORD_BYTES_MAX
    body_bytes = sum(len(part) for part in body)
    header = _HEADER.pack(_MAGIC, fragment, version, len(record), body_bytes, bytes.fromhex(digest))
    return header + _checksum(header, record) + record


def _checksum(header: bytes, record: bytes) -> bytes:
    return hashlib.blake2b(header + record, digest_size=_CHECKSUM_BYTES).digest()


def _write(path: Path, head: bytes, body: Sequence[Buffer]) -> None:
    """Put a file in its place, whole or not at all; StoreError if the disk refuses."""
    temporary = path.with_suffix(path.suffix + ".tmp")
    with _disk(path):
        try:
            with temporary.open("wb") as file:
                for part in (head, *body):
                    file.write(part)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Make the renaming itself survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_head(path: Path, fragment: int, version: int) -> _Entry:
    """StoreError unless header, record and length are as they were written."""
    with _disk(path), path.open("rb") as file:
        header = file.read(_HEADER.size)
        checksum = file.read(_CHECKSUM_BYTES)
        if len(header) + len(checksum) < _HEADER.size + _CHECKSUM_BYTES:
            raise StoreError(f"{path} is cut short; it is skipped")
        magic, got_fragment, got_version, record_bytes, body_bytes, digest = _HEADER.unpack(header)
        record = file.read(min(record_bytes, RECORD_BYTES_MAX))
        total = os.fstat(file.fileno()).st_size
    if magic != _MAGIC or checksum != _checksum(header, record):
        raise StoreError(f"{path} is damaged: its head does not match its checksum; it is skipped")
    if (got_fragment, got_version) != (fragment, version):
        raise StoreError(
            f"{path} holds fragment {got_fragment} version {got_version}; it is skipped"
        )
    entry = _Entry(path, version, record, digest.hex(), body_bytes)
    if total != entry.body_offset + body_bytes:
        raise StoreError(
            f"{path} has {total} bytes, expected {entry.body_offset + body_bytes}; it is skipped"
        )
    return entry


def _read_body(entry: _Entry) -> bytes | None:
    """The body, unchecked; None, with a warning, if the disk refuses."""
    try:
        with _disk(entry.path), entry.path.open("rb") as file:
            file.seek(entry.body_offset)
            return file.read(entry.body_bytes)
    except StoreError as error:
        logger.warning("%s", error)
        return None


def _read_file(path: Path) -> bytes | None:
    """A small file; None, with a warning, if the disk refuses."""
    try:
        with _disk(path):
            return path.read_bytes()
    except StoreError as error:
        logger.warning("%s", error)
        return None


def _chunk_digest(chunk: Buffer) -> bytes:
    return hashlib.blake2b(chunk, digest_size=16).digest()


def _warn(path: Path, what: str) -> None:
    logger.warning("%s", StoreError(f"{path} {what}; it is skipped"))
