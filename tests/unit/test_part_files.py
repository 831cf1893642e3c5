from pathlib import Path

import pytest

from p2pdiloco_daemon.storage.part_files import PartFiles, PartInfo

PART = PartInfo(8, "8" * 64, 10)


@pytest.fixture
def parts(tmp_path: Path) -> PartFiles:
    return PartFiles([tmp_path])


def kept_of(parts: PartFiles, part: PartInfo = PART) -> tuple[list[tuple[int, int]], bytes]:
    place = bytearray(part.num_bytes)
    return parts.read(0, part, memoryview(place)), bytes(place)


def test_chunks_of_a_state_come_back_after_a_crash(tmp_path: Path) -> None:
    before = PartFiles([tmp_path])
    assert before.info(0) is None
    before.begin(0, PART)
    before.save_chunk(0, 8, 4, b"efgh")
    before.save_chunk(0, 8, 8, b"ij")
    parts = PartFiles([tmp_path])
    assert parts.info(0) == PART
    assert kept_of(parts) == ([(4, 4), (8, 2)], b"\0\0\0\0efghij")
    parts.drop(0)
    assert parts.info(0) is None
    assert kept_of(parts)[0] == []
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["part", "chunks"])
@pytest.mark.parametrize("length", [0, 3, 44, 50, 75])
def test_a_chunk_that_was_half_written_is_fetched_again(
    parts: PartFiles, tmp_path: Path, kind: str, length: int
) -> None:
    parts.begin(0, PART)
    parts.save_chunk(0, 8, 0, b"abcd")
    parts.save_chunk(0, 8, 4, b"efgh")
    path = tmp_path / f"0000000008.{kind}"
    path.write_bytes(path.read_bytes()[:length])
    found, place = kept_of(parts)
    assert {(0, 4): b"abcd", (4, 4): b"efgh"}.keys() >= set(found)
    assert all(place[offset : offset + size] in b"abcdefgh" for offset, size in found)


def test_another_state_takes_the_place_of_the_one_that_was_begun(parts: PartFiles) -> None:
    parts.begin(0, PART)
    parts.save_chunk(0, 8, 0, b"abcd")
    other = PartInfo(12, "c" * 64, 10)
    parts.begin(0, other)
    assert parts.info(0) == other
    assert kept_of(parts, other)[0] == []
