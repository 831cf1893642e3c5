import errno
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from p2pdiloco.errors import StoreError, UserError
from p2pdiloco_daemon.replica import (
    FragmentState,
    make_state,
    pack_state,
    payload_digest,
    unpack_state,
)
from p2pdiloco_daemon.store import SnapshotInfo, Store, lock_directory

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
    assert store.snapshot_info(0) is None
    assert store.records_since(0, 0) == []
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
    assert store.snapshot_info(0) == SnapshotInfo(1, state_at(1).digest, record_at(1))


def test_the_disk_stays_bounded(store: Store, tmp_path: Path) -> None:
    fill(store, 43)
    assert files(tmp_path) == sorted(
        [f"{version:010d}.merge" for version in range(37, 44)]
        + ["0000000036.snapshot", "0000000040.snapshot"]
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


def test_rewind_forgets_what_is_above(store: Store) -> None:
    fill(store, 10)
    store.rewind(0, 6)
    assert loaded(store) == (4, [5, 6])
    store.rewind(0, 3)
    assert store.load(0) is None


def test_records_follow_without_gap(store: Store) -> None:
    fill(store, 10)
    assert store.records_since(0, 8) == [record_at(9), record_at(10)]
    assert store.records_since(0, 10) == []
    assert store.records_since(0, 2) == []  # merge 3 went with its snapshot
    store.rewind(0, 8)
    store.save_merge(0, 10, payload_at(10), record_at(10))
    assert store.records_since(0, 8) == []


def test_a_donor_reads_states_and_merges_by_digest(store: Store) -> None:
    fill(store, 9)
    state = state_at(8)
    packed = store.read_state(0, 8, state.digest)
    assert packed == pack_state(state)
    assert unpack_state(packed, 0, SIZE, state.digest).version == 8
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
    (tmp_path / "ledger.json").write_bytes(b"{half")
    assert store.load_json("ledger") is None
    assert "is not JSON" in caplog.text


def test_nothing_is_logged_when_all_is_well(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        fill(store, 10)
        loaded(store)
    assert caplog.text == ""
