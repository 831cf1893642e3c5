"""The files of a node's directory: whole or not at all, and damage to them is noticed.

A file is written beside its place, synced, then renamed. A sealed one begins with what it is: a
checksum vouches for header and record, a digest for the body, its length for the whole.

All calls block. Records are opaque bytes here.
"""

import fcntl
import hashlib
import logging
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from errno import EDQUOT, ENOSPC
from pathlib import Path
from typing import BinaryIO

from p2pdiloco.errors import StoreError, UserError
from p2pdiloco_daemon.storage.replica import Buffer

logger = logging.getLogger(__name__)

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
class Entry:
    """The readable head of a sealed file, and where its body lies."""

    path: Path
    version: int
    record: bytes
    digest: str
    body_bytes: int

    @property
    def body_offset(self) -> int:
        return _HEADER.size + _CHECKSUM_BYTES + len(self.record)


@contextmanager
def disk_access(path: Path) -> Iterator[None]:
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
    another's, StoreError if the disk refuses.
    """
    with disk_access(directory):
        directory.mkdir(parents=True, exist_ok=True)
        file = (directory / "lock").open("a+b", buffering=0)
        try:
            _take_lock(file, directory)
        except (OSError, UserError):
            file.close()
            raise
    return file


def _take_lock(file: BinaryIO, directory: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        owner = file.read().decode(errors="replace").strip()
        raise UserError(
            f"{directory} is in use by another p2pdiloco daemon (process {owner or 'unknown'}). "
            "Stop that one, or start this one with another directory."
        ) from None
    file.truncate(0)
    file.write(f"{os.getpid()}\n".encode())


def require_free_directory(directory: Path) -> None:
    """UserError unless there is nothing at `directory`, or an empty one, and it has a name."""
    if not directory.name:
        raise UserError(
            f"{directory} would be replaced under your feet; name a new directory, for example "
            f"{directory / 'model'}"
        )
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UserError(f"{directory} exists and is not empty; choose another place for the export")


def versioned(folder: Path, version: int, kind: str) -> Path:
    """Where the file of a kind lies that is about a version."""
    return folder / f"{version:010d}.{kind}"


def versions_in(folder: Path, kind: str) -> list[int]:
    """Of the files of a kind, ascending, readable or not."""
    names = [path.stem for path in folder.glob(f"*.{kind}")]
    return sorted(int(name) for name in names if name.isdecimal())


def seal(fragment: int, version: int, record: bytes, body: Sequence[Buffer], digest: str) -> bytes:
    """What a sealed file begins with, before `body`."""
    assert len(record) <= RECORD_BYTES_MAX
    body_bytes = sum(len(part) for part in body)
    header = _HEADER.pack(_MAGIC, fragment, version, len(record), body_bytes, bytes.fromhex(digest))
    return header + _checksum(header, record) + record


def _checksum(header: bytes, record: bytes) -> bytes:
    return hashlib.blake2b(header + record, digest_size=_CHECKSUM_BYTES).digest()


def write_whole(path: Path, head: bytes, body: Sequence[Buffer]) -> None:
    """Put a file in its place, whole or not at all; StoreError if the disk refuses."""
    temporary = path.with_suffix(path.suffix + ".tmp")
    with disk_access(path):
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


def read_head(path: Path, fragment: int, version: int) -> Entry:
    """StoreError unless header, record and length are as they were written."""
    with disk_access(path), path.open("rb") as file:
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
    entry = Entry(path, version, record, digest.hex(), body_bytes)
    if total != entry.body_offset + body_bytes:
        raise StoreError(
            f"{path} has {total} bytes, expected {entry.body_offset + body_bytes}; it is skipped"
        )
    return entry


def read_body(entry: Entry) -> bytes | None:
    """The body, unchecked; None, with a warning, if the disk refuses."""
    try:
        with disk_access(entry.path), entry.path.open("rb") as file:
            file.seek(entry.body_offset)
            return file.read(entry.body_bytes)
    except StoreError as error:
        logger.warning("%s", error)
        return None


def read_small(path: Path) -> bytes | None:
    """A small file; None, with a warning, if the disk refuses."""
    try:
        with disk_access(path):
            return path.read_bytes()
    except StoreError as error:
        logger.warning("%s", error)
        return None


def warn_skipped(path: Path, what: str) -> None:
    """In the log: what is wrong with a file."""
    logger.warning("%s", StoreError(f"{path} {what}; it is skipped"))
