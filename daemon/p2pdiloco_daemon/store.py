"""The node's directory: per fragment a log of merges with a snapshot now and then.

    DIR/lock                           the daemon that owns the directory (flock; holds its pid)
    DIR/NAME.json                      small things of the node: the ledger, ...
    DIR/fragments/P/VERSION.snapshot   a packed state and the merge record that made it
    DIR/fragments/P/VERSION.merge      a merge payload and its record

Restart and join are the same thing: take the newest snapshot that reads, apply the merges after it.
A file appears whole or not at all (written beside its place, synced, renamed). A file that was
damaged later is noticed by its digests and skipped with a warning: the next older snapshot and a
longer replay give the same state. Only merges after the oldest kept snapshot are kept, so the disk
stays bounded.

All calls block; the shell makes them in a thread. Records are opaque bytes here.
"""

import fcntl
import hashlib
import json
import logging
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from errno import EDQUOT, ENOSPC
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self, TypeAlias

from p2pdiloco.errors import P2PDilocoError, StoreError, UserError
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

RECORD_BYTES_MAX = 1 << 20
"""A merge record is a few kilobytes; a header that announces more is damaged."""

_MAGIC = b"PDF1"
_HEADER = struct.Struct("<4sIQIQ32s")
"""Magic, fragment, version, bytes of the record, bytes of the body, digest of the body (for a
snapshot the state digest). A blake2b-256 over header and record follows, then the record, then the
body.
"""
_CHECKSUM_BYTES = 32


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
    """Records of the kept merges that led to `record`, oldest first, without gap; not `record`."""


@dataclass(frozen=True, slots=True)
class SnapshotInfo:
    """The newest snapshot, as a donor offers it."""

    version: int
    state_digest: str
    record: bytes | None


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

    def save_snapshot(self, state: FragmentState, record: bytes | None) -> None:
        """Keep a state and the record that made it; then drop what is older than needed."""
        path = self._path(state.fragment, state.version, "snapshot")
        parts = state_parts(state)
        _write(
            path, _head(state.fragment, state.version, record or b"", parts, state.digest), parts
        )
        self._drop_old(state.fragment)

    def save_merge(self, fragment: int, version: int, payload: Buffer, record: bytes) -> None:
        """Keep a committed merge."""
        path = self._path(fragment, version, "merge")
        head = _head(fragment, version, record, [payload], payload_digest(payload))
        _write(path, head, [payload])

    def wants_snapshot(self, fragment: int, version: int) -> bool:
        """Whether `snapshot_every` merges have passed since the newest snapshot, or there is
        none.
        """
        newest = self._versions(fragment, "snapshot")[-1:]
        return not newest or version - newest[0] >= self._snapshot_every

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

    def snapshot_info(self, fragment: int) -> SnapshotInfo | None:
        """The newest snapshot whose head reads."""
        for version in reversed(self._versions(fragment, "snapshot")):
            if entry := self._entry(fragment, version, "snapshot"):
                return SnapshotInfo(version, entry.digest, entry.record or None)
        return None

    def records_since(self, fragment: int, version: int) -> list[bytes]:
        """The records of the kept merges from `version` + 1 on, without gap; none if that one is
        not kept."""
        return [entry.record for entry in self._merge_entries(fragment, version)]

    def read_state(self, fragment: int, version: int, digest: str) -> bytes | None:
        """A kept state, packed; None if that one is not here or is damaged."""
        entry = self._entry(fragment, version, "snapshot")
        if entry is None or entry.digest != digest:
            return None
        body = _read_body(entry)
        return body if body and self._unpack(fragment, entry, body) else None

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

    def rewind(self, fragment: int, version: int) -> None:
        """Forget snapshots and merges above `version`: another lineage has won. Its state follows
        by `save_snapshot`; after a crash in between it must be fetched again.
        """
        with _disk(self._fragments[fragment]):
            for kind in ("merge", "snapshot"):
                for kept in self._versions(fragment, kind):
                    if kept > version:
                        self._path(fragment, kept, kind).unlink()

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

    def _drop_old(self, fragment: int) -> None:
        snapshots = self._versions(fragment, "snapshot")
        kept = snapshots[-self._max_snapshots :]
        with _disk(self._fragments[fragment]):
            for version in snapshots[: -self._max_snapshots]:
                self._path(fragment, version, "snapshot").unlink()
            for version in self._versions(fragment, "merge"):
                if version <= kept[0]:
                    self._path(fragment, version, "merge").unlink()

    def _entry(self, fragment: int, version: int, kind: str) -> _Entry | None:
        """The head of a file; None, with a warning if it is there, when it cannot be used."""
        path = self._path(fragment, version, kind)
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
        """Of the merges below `version`, down to the first that is missing or damaged."""
        records: list[bytes] = []
        while entry := self._entry(fragment, version - len(records) - 1, "merge"):
            records.append(entry.record)
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


def _warn(path: Path, what: str) -> None:
    logger.warning("%s", StoreError(f"{path} {what}; it is skipped"))
