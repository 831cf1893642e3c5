"""A state of which not all has arrived yet, on disk.

    VERSION.part     its bytes, each chunk in its place
    VERSION.chunks   which chunks those are, with their digests

Unlike the files of the log it must survive a crash but is of no use half: each chunk is written
into its place, then its digest is noted; what was noted and does not read is fetched again.

All calls block.
"""

import hashlib
import logging
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from p2pdiloco.errors import StoreError
from p2pdiloco_daemon.storage.files import disk_access, read_small, versioned, versions_in
from p2pdiloco_daemon.storage.replica import Buffer

logger = logging.getLogger(__name__)

_HEAD = struct.Struct("<4sQ32s")
"""Begins VERSION.chunks: magic, bytes of the whole, digest of the state."""
_MAGIC = b"PDP1"
_NOTE = struct.Struct("<QI16s")
"""Follows for each chunk: its offset, its bytes, its digest."""


@dataclass(frozen=True, slots=True)
class PartInfo:
    """A state of which something has arrived."""

    version: int
    state_digest: str
    num_bytes: int


class PartFiles:
    """At most one arriving state in each fragment's folder."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders

    def begin(self, fragment: int, part: PartInfo) -> None:
        """Keep chunks of this state from now on, and of no other state of the fragment."""
        self.drop(fragment)
        notes = self._notes(fragment, part.version)
        digest = bytes.fromhex(part.state_digest)
        with disk_access(notes):
            self._body(fragment, part.version).touch()
            notes.write_bytes(_HEAD.pack(_MAGIC, part.num_bytes, digest))

    def save_chunk(self, fragment: int, version: int, offset: int, chunk: Buffer) -> None:
        """Keep a chunk of the state that was begun. Not synced: a power cut costs a second fetch
        of what did not get there.
        """
        body = self._body(fragment, version)
        note = _NOTE.pack(offset, len(chunk), _chunk_digest(chunk))
        with disk_access(body):
            with body.open("r+b") as file:
                file.seek(offset)
                file.write(chunk)
            with self._notes(fragment, version).open("ab") as file:
                file.write(note)

    def info(self, fragment: int) -> PartInfo | None:
        """Of which state something is kept."""
        for version in reversed(versions_in(self._folders[fragment], "chunks")):
            notes = read_small(self._notes(fragment, version))
            if notes and len(notes) >= _HEAD.size:
                magic, num_bytes, digest = _HEAD.unpack_from(notes)
                if magic == _MAGIC:
                    return PartInfo(version, digest.hex(), num_bytes)
        return None

    def read(self, fragment: int, part: PartInfo, place: memoryview) -> list[tuple[int, int]]:
        """Put what is kept of the state into its place; returns (offset, bytes) of each chunk that
        is as it was noted.
        """
        notes = read_small(self._notes(fragment, part.version)) or b""
        body = self._body(fragment, part.version)
        found: dict[int, int] = {}
        whole = (len(notes) - _HEAD.size) // _NOTE.size * _NOTE.size
        try:
            with disk_access(body), body.open("rb", buffering=0) as file:
                for note in _NOTE.iter_unpack(notes[_HEAD.size :][: max(0, whole)]):
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

    def drop(self, fragment: int) -> None:
        """Forget a state that was begun; the one who reads it has it open still."""
        folder = self._folders[fragment]
        with disk_access(folder):
            for kind in ("part", "chunks"):
                for version in versions_in(folder, kind):
                    versioned(folder, version, kind).unlink()

    def _body(self, fragment: int, version: int) -> Path:
        return versioned(self._folders[fragment], version, "part")

    def _notes(self, fragment: int, version: int) -> Path:
        return versioned(self._folders[fragment], version, "chunks")


def _chunk_digest(chunk: Buffer) -> bytes:
    return hashlib.blake2b(chunk, digest_size=16).digest()
