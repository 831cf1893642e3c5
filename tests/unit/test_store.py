import errno
import fcntl
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from p2pdiloco.errors import StoreError, UserError
from p2pdiloco.protocol.lineage import RECORDS_KEPT
from p2pdiloco_daemon.storage.files import Entry, lock_directory
from p2pdiloco_daemon.storage.replica import (
    FragmentState,
    make_state,
    pack_state,
    payload_digest,
)
from p2pdiloco_daemon.storage.store import SnapshotInfo, Store

SIZE = 50


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path, 2) as opened:
        yield opened


def state_at(version: int, fragment: int = 0) -> FragmentState:
    values = np.random.default_rng(version).standard_normal((2, SIZE)).astype(np.float32)
    return make_state(fragment, version, values[0], values[1])


def record_at(version: int) -> bytes:
    return b"record %d" % version


def payload_at(version: int) -> bytes:
    return b"payload %d" % version * 10


def fill(store: Store, last: int) -> None:
    """What a node leaves behind after `last` merges of fragment 0."""
    store.save_snapshot(state_at(0), None)
    for version in range(1, last + 1):
        store.save_merge(0, version, payload_at(version), record_at(version))
        if store.wants_snapshot(0, version):
            store.save_snapshot(state_at(version), record_at(version))


def files(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "fragments" / "0000").iterdir())


def loaded(store: Store) -> tuple[int, list[int]]:
    found = store.load(0)
    assert found is not None
    assert found.state.digest == state_at(found.state.version).digest
    assert all(merge.payload == payload_at(merge.version) for merge in found.merges)
    assert all(merge.record == record_at(merge.version) for merge in found.merges)
    return found.state.version, [merge.version for merge in found.merges]


def test_an_empty_directory_holds_nothing(store: Store) -> None:
    assert store.load(0) is None
    assert store.snapshots(0) == []
    assert store.wants_snapshot(0, 0)


def test_a_restart_finds_the_newest_snapshot_and_the_merges_after_it(tmp_path: Path) -> None:
    with Store(tmp_path, 2) as store:
        fill(store, 10)
    with Store(tmp_path, 2) as store:
        assert loaded(store) == (8, [9, 10])
        assert store.load(1) is None


def test_the_record_of_the_snapshot_comes_back(store: Store) -> None:
    fill(store, 0)
    found = store.load(0)
    assert found is not None and found.record is None
    store.save_snapshot(state_at(1), record_at(1))
    found = store.load(0)
    assert found is not None and found.record == record_at(1)
    assert store.snapshots(0)[0] == SnapshotInfo(1, state_at(1).digest, record_at(1))


def test_the_disk_stays_bounded(store: Store, tmp_path: Path) -> None:
    fill(store, 43)
    assert files(tmp_path) == sorted(
        [f"{version:010d}.merge" for version in range(37, 44)]
        + ["0000000036.snapshot", "0000000040.snapshot", "records"]
    )


@pytest.mark.parametrize("length", [0, 5, 60, 100, 400])
def test_a_truncated_snapshot_falls_back_to_the_older_and_a_longer_replay(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture, length: int
) -> None:
    fill(store, 10)
    path = tmp_path / "fragments" / "0000" / "0000000008.snapshot"
    path.write_bytes(path.read_bytes()[:length])
    assert loaded(store) == (4, [5, 6, 7, 8, 9, 10])
    assert str(path) in caplog.text and "skipped" in caplog.text


@pytest.mark.parametrize("place", [0, 9, 20, 45, 70, 100, 300, -1])
def test_a_flipped_byte_in_a_snapshot_is_noticed(store: Store, tmp_path: Path, place: int) -> None:
    fill(store, 10)
    flip(tmp_path / "fragments" / "0000" / "0000000008.snapshot", place)
    assert loaded(store) == (4, [5, 6, 7, 8, 9, 10])
    assert store.read_state(0, 8, state_at(8).digest) is None


@pytest.mark.parametrize("place", [0, 9, 20, 45, 70, 90, 105, -1])
def test_a_damaged_merge_ends_the_replay_before_it(
    store: Store, tmp_path: Path, place: int
) -> None:
    fill(store, 11)
    flip(tmp_path / "fragments" / "0000" / "0000000010.merge", place)
    assert loaded(store) == (8, [9])
    assert store.read_merge(0, 10, payload_digest(payload_at(10))) is None


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 0x55
    path.write_bytes(content)


def test_a_file_under_another_name_is_noticed(store: Store, tmp_path: Path) -> None:
    fill(store, 10)
    folder = tmp_path / "fragments" / "0000"
    (folder / "0000000008.snapshot").rename(folder / "0000000009.snapshot")
    assert loaded(store) == (4, [5, 6, 7, 8, 9, 10])


def test_all_snapshots_damaged_is_as_if_there_were_none(store: Store, tmp_path: Path) -> None:
    fill(store, 10)
    for path in (tmp_path / "fragments" / "0000").glob("*.snapshot"):
        flip(path, 200)
    assert store.load(0) is None


def test_what_a_crash_left_half_written_is_removed_at_start(tmp_path: Path) -> None:
    with Store(tmp_path, 2) as store:
        fill(store, 2)
    before = files(tmp_path)
    (tmp_path / "fragments" / "0000" / "0000000003.merge.tmp").write_bytes(b"half")
    (tmp_path / "ledger.json.tmp").write_bytes(b"{")
    with Store(tmp_path, 2) as store:
        assert loaded(store) == (0, [1, 2])
    assert files(tmp_path) == before
    assert not (tmp_path / "ledger.json.tmp").exists()


def test_a_full_disk_is_a_store_error_and_nothing_is_lost(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store, 7)
    store.save_json("ledger", {"tokens": 1})
    before = files(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", no_space)
        with pytest.raises(StoreError, match=r"No space left on device.*free some space"):
            store.save_merge(0, 8, payload_at(8), record_at(8))
        with pytest.raises(StoreError, match=r"0000000008\.snapshot"):
            store.save_snapshot(state_at(8), record_at(8))
        with pytest.raises(StoreError, match=r"ledger\.json"):
            store.save_json("ledger", {"tokens": 2})
    assert files(tmp_path) == before
    assert loaded(store) == (4, [5, 6, 7])
    assert store.load_json("ledger") == {"tokens": 1}
    store.save_merge(0, 8, payload_at(8), record_at(8))
    assert loaded(store) == (4, [5, 6, 7, 8])


def no_space(descriptor: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_directory_that_cannot_be_made_is_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match="Not a directory"):
        Store(tmp_path / "file", 1)


def test_two_daemons_in_one_directory_are_told_apart(store: Store, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"process {os.getpid()}"):
        Store(tmp_path, 2)
    store.close()
    Store(tmp_path, 2).close()


def test_a_disk_that_gives_no_lock_is_a_store_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: object, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", refuse)
        with pytest.raises(StoreError, match="No locks available"):
            lock_directory(tmp_path)
    lock_directory(tmp_path).close()


def test_a_directory_is_had_before_anything_is_known_of_the_run(tmp_path: Path) -> None:
    with lock_directory(tmp_path / "new"):
        with pytest.raises(UserError, match=f"process {os.getpid()}"):
            lock_directory(tmp_path / "new")
        Store(tmp_path / "new", 2, is_locked=True).close()
        with pytest.raises(UserError):
            lock_directory(tmp_path / "new")
    lock_directory(tmp_path / "new").close()


def test_a_second_daemon_leaves_the_firsts_temporary_files_alone(
    store: Store, tmp_path: Path
) -> None:
    half = tmp_path / "fragments" / "0000" / "0000000003.merge.tmp"
    half.write_bytes(b"being written")
    with pytest.raises(UserError):
        Store(tmp_path, 2)
    assert half.exists()


# -------------------------------------------------------------------- another lineage


def restart(store: Store, version: int, *following: int) -> None:
    records = {v: record_at(v) for v in range(1, version)}
    wanted = {v: record_at(v) for v in following}
    store.restart_log(state_at(version), record_at(version), records, wanted)


@pytest.mark.parametrize("version", [3, 8, 10, 30])
def test_a_restarted_log_holds_one_state_and_the_records_below_it(
    store: Store, tmp_path: Path, version: int
) -> None:
    fill(store, 10)
    restart(store, version)
    assert loaded(store) == (version, [])
    assert files(tmp_path) == [f"{version:010d}.snapshot", "records"]
    found = store.load(0)
    assert found and found.earlier == tuple(record_at(v) for v in range(1, version))


def test_merges_of_the_same_lineage_outlive_a_restart_of_the_log(store: Store) -> None:
    fill(store, 11)
    store.save_merge(0, 11, payload_at(11), b"of another lineage")
    restart(store, 8, 9, 10, 11)
    assert loaded(store) == (8, [9, 10])


def test_a_restarted_log_has_the_records_that_a_full_disk_refused(store: Store) -> None:
    fill(store, 3)
    missed = {4: record_at(4), 5: record_at(5), 6: b"of another lineage", 8: b"of another lineage"}
    known = {6: record_at(6), 7: record_at(7)}
    store.restart_log(state_at(8), record_at(8), known, {}, missed)
    found = store.load(0)
    assert found and found.earlier == tuple(record_at(v) for v in range(1, 8))


def test_a_crash_while_the_log_restarts_leaves_the_old_or_the_new_state(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlink, allowed = Path.unlink, 0

    def unlink_some(path: Path, missing_ok: bool = False) -> None:
        nonlocal allowed
        if allowed == 0:
            raise OSError(errno.EIO, "killed")
        allowed -= 1
        unlink(path, missing_ok)

    fill(store, 10)
    monkeypatch.setattr(Path, "unlink", unlink_some)
    for number in range(9):
        allowed = number
        try:
            restart(store, 6)
        except StoreError:
            found = store.load(0)
            assert found and found.state.version in (8, 6)
    assert loaded(store) == (6, [])


# -------------------------------------------------------------------- records and readers


def test_records_outlive_their_merges(store: Store, tmp_path: Path) -> None:
    fill(store, 43)
    found = store.load(0)
    assert found and found.earlier == tuple(record_at(v) for v in range(1, 40))


def test_as_many_records_are_kept_as_in_memory(store: Store) -> None:
    fill(store, RECORDS_KEPT + 60)
    found = store.load(0)
    assert found and found.earlier[0] > record_at(1)
    assert RECORDS_KEPT <= len(found.earlier) + len(found.merges) + 1 <= RECORDS_KEPT + 8


@pytest.mark.parametrize("place", [0, 45, 120, -1])
def test_damaged_records_are_missed_by_nobody_but_the_past(
    store: Store, tmp_path: Path, place: int
) -> None:
    fill(store, 10)
    flip(tmp_path / "fragments" / "0000" / "records", place)
    assert loaded(store) == (8, [9, 10])
    found = store.load(0)
    assert found and found.earlier == tuple(record_at(v) for v in (5, 6, 7))


def test_what_is_being_read_stays_with_the_merges_after_it(store: Store, tmp_path: Path) -> None:
    fill(store, 8)
    for version in range(9, 30):
        store.save_merge(0, version, payload_at(version), record_at(version))
        if store.wants_snapshot(0, version):
            store.save_snapshot(state_at(version), record_at(version), leased=(4,))
    assert [s.version for s in store.snapshots(0)] == [28, 24, 4]
    assert store.read_merge(0, 5, payload_digest(payload_at(5))) == payload_at(5)
    store.save_snapshot(state_at(32), record_at(32))
    assert [s.version for s in store.snapshots(0)] == [32, 28]
    assert store.read_merge(0, 5, payload_digest(payload_at(5))) is None


def test_old_snapshots_are_kept_for_few_readers(store: Store) -> None:
    store.save_snapshot(state_at(0), None)
    for version in range(4, 40, 4):
        store.save_snapshot(state_at(version), record_at(version), leased=(0, 4, 8, 12))
    assert [s.version for s in store.snapshots(0)] == [36, 32, 4, 0]


# -------------------------------------------------------------------- donors


def test_a_donor_reads_states_and_merges_by_digest(store: Store) -> None:
    fill(store, 9)
    state = state_at(8)
    found = store.read_state(0, 8, state.digest)
    assert found and found.digest == state.digest
    assert store.read_state(0, 8, state_at(4).digest) is None
    assert store.read_state(0, 7, state.digest) is None
    assert store.read_merge(0, 9, payload_digest(payload_at(9))) == payload_at(9)
    assert store.read_merge(0, 9, payload_digest(b"")) is None
    assert store.read_merge(0, 99, payload_digest(b"")) is None


def test_a_donor_finds_the_bytes_of_a_state_in_its_file(store: Store) -> None:
    fill(store, 9)
    state = state_at(8)
    for _ in range(2):
        part = store.state_part(0, 8, state.digest)
        assert part
        inside = part.path.read_bytes()[part.offset :]
        assert inside == pack_state(state) and len(inside) == part.num_bytes
    assert store.state_part(0, 8, state_at(4).digest) is None
    assert store.state_part(0, 7, state.digest) is None


def test_readers_of_two_states_have_each_read_whole_once(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store, 9)
    read = list[int]()
    unpack = store._unpack

    def count(fragment: int, entry: Entry, body: bytes) -> FragmentState | None:
        read.append(entry.version)
        return unpack(fragment, entry, body)

    monkeypatch.setattr(store, "_unpack", count)
    for _ in range(3):
        for version in (4, 8):
            assert store.state_part(0, version, state_at(version).digest)
    assert read == [4, 8]


def test_a_damaged_state_is_not_offered(store: Store, tmp_path: Path) -> None:
    fill(store, 9)
    flip(tmp_path / "fragments" / "0000" / "0000000008.snapshot", 200)
    assert store.state_part(0, 8, state_at(8).digest) is None


def test_json_comes_back_or_is_skipped(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert store.load_json("ledger") is None
    store.save_json("ledger", {"a": [1, "b", None]})
    assert store.load_json("ledger") == {"a": [1, "b", None]}
    for damage in (b"{half", b"[" * 200_000, b"\xff"):
        caplog.clear()
        (tmp_path / "ledger.json").write_bytes(damage)
        assert store.load_json("ledger") is None
        assert "is not JSON" in caplog.text


def test_nothing_is_logged_when_all_is_well(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        fill(store, 10)
        loaded(store)
    assert caplog.text == ""
