"""The node's directory: per fragment a log of merges with a snapshot now and then.

    DIR/lock                           the daemon that owns the directory (flock; holds its pid)
    DIR/NAME.json                      small things of the node: the ledger, ...
    DIR/fragments/P/VERSION.snapshot   a packed state and the merge record that made it
    DIR/fragments/P/VERSION.merge      a merge payload and its record
    DIR/fragments/P/records            the newest records whose merges are gone
    DIR/fragments/P/VERSION.part, VERSION.chunks   a state that is arriving, see `part_files`

Restart and join are the same thing: take the newest snapshot that reads, apply the merges after it.
A file appears whole or not at all (written beside its place, synced, renamed). A file that was
damaged later is noticed by its digests and skipped with a warning: the next older snapshot and a
longer replay give the same state. Only merges after the oldest kept snapshot are kept, so the disk
stays bounded: 2 snapshots and the merges since, beside what `leased` readers still want.

All calls block; the shell makes them in a thread. Records are opaque bytes here.
"""

import json
import logging
import struct
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import BinaryIO, Self, TypeAlias

from p2pdiloco.errors import P2PDilocoError, StoreError
from p2pdiloco.protocol.lineage import RECORDS_KEPT
from p2pdiloco_bootstrap.serving import FilePart
from p2pdiloco_daemon.storage.files import (
    Entry,
    disk_access,
    lock_directory,
    read_body,
    read_head,
    seal,
    versioned,
    versions_in,
    warn_skipped,
    write_whole,
)
from p2pdiloco_daemon.storage.part_files import PartFiles
from p2pdiloco_daemon.storage.replica import (
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

_RECORD_HEAD = struct.Struct("<QI")
"""In the body of `records`: version and bytes of the record that follows."""


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
        self.parts = PartFiles(self._fragments)
        self._lock: BinaryIO | None = None
        if read_only:
            return
        kept = max_snapshots + LEASED_MAX
        self._sound: list[deque[str]] = [deque(maxlen=kept) for _ in range(num_fragments)]
        """Digests of the states that were read and found whole last."""
        with disk_access(directory):
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
        missed: Mapping[int, bytes] = MappingProxyType({}),
    ) -> None:
        """Begin the log anew at this state: another lineage has won, or the own state was damaged.

        Of what is here and was `missed`, what lies on the lineage stays: records below those of
        `earlier`, and merges that `following` has the records of, by version. A crash leaves the
        log as it was, or this state.
        """
        p = state.fragment
        known = self._records(p) | dict(missed)
        older = {v: r for v, r in known.items() if v < min(earlier, default=0)}
        self._save_records(p, older | dict(earlier))
        kept = self._entry(p, state.version, "snapshot")
        if kept is None or kept.digest != state.digest or kept.record != (record or b""):
            self._write_snapshot(state, record)
        with disk_access(self._fragments[p]):
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
        head = seal(state.fragment, state.version, record or b"", parts, state.digest)
        write_whole(path, head, parts)

    def save_merge(self, fragment: int, version: int, payload: Buffer, record: bytes) -> None:
        """Keep a committed merge."""
        path = self._path(fragment, version, "merge")
        head = seal(fragment, version, record, [payload], payload_digest(payload))
        write_whole(path, head, [payload])

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
        if digest not in self._sound[fragment]:
            if self._state(fragment, entry) is None:
                return None
            self._sound[fragment].append(digest)
        return FilePart(entry.path, entry.body_offset, entry.body_bytes)

    def read_merge(self, fragment: int, version: int, digest: str) -> bytes | None:
        """A kept merge payload; None if that one is not here or is damaged."""
        entry = self._entry(fragment, version, "merge")
        return self._payload(entry) if entry and entry.digest == digest else None

    # ---------------------------------------------------------------- small things

    def save_json(self, name: str, value: Json) -> None:
        """Keep a small thing under a name."""
        write_whole(self._json_path(name), json.dumps(value, indent=1).encode(), [])

    def load_json(self, name: str) -> Json:
        """What was kept under the name; None if nothing was or it is damaged."""
        path = self._json_path(name)
        try:
            with disk_access(path):
                loaded: Json = json.loads(path.read_bytes()) if path.exists() else None
                return loaded
        except (ValueError, RecursionError) as error:
            warn_skipped(path, f"is not JSON ({error})")
        except StoreError as error:
            logger.warning("%s", error)
        return None

    def _json_path(self, name: str) -> Path:
        assert name.isidentifier(), name
        return self._directory / f"{name}.json"

    def _path(self, fragment: int, version: int, kind: str) -> Path:
        return versioned(self._fragments[fragment], version, kind)

    def _versions(self, fragment: int, kind: str) -> list[int]:
        return versions_in(self._fragments[fragment], kind)

    def _drop_old(self, fragment: int, leased: Sequence[int]) -> None:
        snapshots = self._versions(fragment, "snapshot")
        older, newest = snapshots[: -self._max_snapshots], snapshots[-self._max_snapshots :]
        kept = [*[v for v in leased if v in older][:LEASED_MAX], *newest]
        oldest = min([*kept, *leased])
        gone = [v for v in self._versions(fragment, "merge") if v <= oldest]
        if gone:
            self._save_records(fragment, self._records(fragment))
        with disk_access(self._fragments[fragment]):
            for version in snapshots:
                if version not in kept:
                    self._path(fragment, version, "snapshot").unlink()
            for version in gone:
                self._path(fragment, version, "merge").unlink()

    def _records(self, fragment: int) -> dict[int, bytes]:
        """By version, of merges that are here or were."""
        entry = self._read_entry(self._fragments[fragment] / "records", fragment, 0)
        body = entry and read_body(entry)
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
        head = seal(fragment, 0, b"", [body], payload_digest(body))
        write_whole(self._fragments[fragment] / "records", head, [body])

    def _entry(self, fragment: int, version: int, kind: str) -> Entry | None:
        """The head of a file; None, with a warning if it is there, when it cannot be used."""
        return self._read_entry(self._path(fragment, version, kind), fragment, version)

    def _read_entry(self, path: Path, fragment: int, version: int) -> Entry | None:
        if not path.exists():
            return None
        try:
            return read_head(path, fragment, version)
        except StoreError as error:
            logger.warning("%s", error)
            return None

    def _merge_entries(self, fragment: int, version: int) -> Iterator[Entry]:
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

    def _payload(self, entry: Entry) -> bytes | None:
        payload = read_body(entry)
        if payload is not None and payload_digest(payload) != entry.digest:
            warn_skipped(entry.path, "is damaged: its digest does not match")
            return None
        return payload

    def _state(self, fragment: int, entry: Entry) -> FragmentState | None:
        body = read_body(entry)
        return self._unpack(fragment, entry, body) if body else None

    def _unpack(self, fragment: int, entry: Entry, body: bytes) -> FragmentState | None:
        num_values = max(0, len(body) - packed_state_bytes(0)) // 8
        try:
            return unpack_state(body, fragment, num_values, entry.digest)
        except P2PDilocoError as error:
            warn_skipped(entry.path, f"is damaged: {error}")
            return None
