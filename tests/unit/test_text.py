"""The split, the tokenizers and the nodes' streams."""

import sys
from pathlib import Path

import numpy as np
import pytest

from p2pdiloco.errors import UserError
from p2pdiloco.learn.text import (
    BLOCK_BYTES,
    HELD_OUT_EVERY,
    ByteTokenizer,
    Text,
    TextStream,
    open_text,
    split_text,
)
from p2pdiloco.spec import DataSpec

BLOCKS = 130
SEQUENCE = 64


def numbered_text(blocks: int = BLOCKS) -> bytes:
    """Each block is filled with its own byte, so that a window tells where it came from."""
    return b"".join(bytes([i]) * BLOCK_BYTES for i in range(blocks)) + bytes([blocks]) * 100


@pytest.fixture(scope="module")
def text() -> Text:
    return split_text(numbered_text(), ByteTokenizer())


def stream(text: Text, node: str = "a", seed: int = 0, cursor: int = 0) -> TextStream:
    return TextStream(text, SEQUENCE, seed, node, cursor)


def test_every_fiftieth_block_is_held_out(text: Text) -> None:
    assert [text.tokens[part.start] for part in text.held_out] == [49, 99]
    assert all(len(part) == BLOCK_BYTES for part in text.held_out)
    assert text.held_out_bytes_per_token == 1.0


def test_the_parts_cover_the_text_without_overlap(text: Text) -> None:
    parts = sorted([*text.training, *text.held_out], key=lambda part: part.start)
    assert [part.start for part in parts] == [0] + [part.stop for part in parts[:-1]]
    assert parts[-1].stop == len(numbered_text())


def test_training_windows_never_touch_held_out_blocks(text: Text) -> None:
    source = stream(text)
    epoch = source.next_batch(2 * source.windows_per_epoch)
    assert not set(np.unique(epoch)) & {49, 99}
    assert epoch.shape[1] == SEQUENCE + 1


def test_an_epoch_visits_every_window_once() -> None:
    counting = np.arange(60 * BLOCK_BYTES, dtype=np.uint32)
    text = Text(counting, (range(1000), range(5000, 60 * BLOCK_BYTES)), (range(1000, 5000),), 4000)
    source = TextStream(text, SEQUENCE, 7, "a")
    starts = source.next_batch(source.windows_per_epoch)[:, 0]
    assert len(np.unique(starts)) == source.windows_per_epoch
    assert set(np.unique(np.diff(np.sort(starts)))) > {SEQUENCE}
    assert list(starts) != sorted(starts)


def test_epochs_cut_the_text_at_other_places(text: Text) -> None:
    source = stream(text)
    first = source.next_batch(source.windows_per_epoch)
    second = source.next_batch(source.windows_per_epoch)
    assert not np.array_equal(first, second)


def test_a_stream_is_a_function_of_seed_node_and_cursor(text: Text) -> None:
    first = stream(text).next_batch(8)
    assert np.array_equal(first, stream(text).next_batch(8))
    assert not np.array_equal(first, stream(text, node="b").next_batch(8))
    assert not np.array_equal(first, stream(text, seed=1).next_batch(8))


def test_seeking_equals_drawing_up_to_the_place(text: Text) -> None:
    walked = stream(text)
    walked.next_batch(10_000)
    expected = walked.next_batch(4)
    sought = stream(text, cursor=10_000)
    assert np.array_equal(sought.next_batch(4), expected)
    assert sought.cursor == 10_004


def test_targets_follow_their_inputs() -> None:
    counting = np.arange(60 * BLOCK_BYTES, dtype=np.uint32)
    text = Text(counting, (range(60 * BLOCK_BYTES),), (range(1),), 1)
    batch = TextStream(text, SEQUENCE, 0, "a").next_batch(3)
    assert batch.dtype == np.int64
    assert np.array_equal(np.diff(batch, axis=1), np.ones((3, SEQUENCE)))


def test_too_long_sequences_are_refused(text: Text) -> None:
    with pytest.raises(UserError, match="shorter sequences"):
        TextStream(text, 49 * BLOCK_BYTES, 0, "a")


def test_a_text_without_a_held_out_block_is_refused() -> None:
    with pytest.raises(UserError, match=r"the text has 5 bytes; at least 204800"):
        split_text(b"short", ByteTokenizer())


class PairTokenizer:
    """Two bytes per token."""

    vocabulary_size = 1 << 16

    def encode(self, text: bytes) -> list[int]:
        return list(np.frombuffer(text, np.uint16))

    def decode(self, tokens: object) -> str:
        raise NotImplementedError


def test_bytes_per_token_are_counted_on_the_held_out_text() -> None:
    text = split_text(numbered_text(), PairTokenizer())
    assert text.held_out_bytes_per_token == 2.0
    assert text.tokens.dtype == np.uint16


def test_a_token_that_is_no_byte_is_shown_as_one_that_is_no_text() -> None:
    assert ByteTokenizer().decode([72, 256, 105]) == "H\N{REPLACEMENT CHARACTER}i"


class LetterTokenizer:
    """A token for each byte that is no space."""

    vocabulary_size = 256

    def encode(self, text: bytes) -> list[int]:
        return list(text.replace(b" ", b""))

    def decode(self, tokens: object) -> str:
        raise NotImplementedError


def test_a_held_out_block_without_tokens_is_left_out() -> None:
    content = bytearray(numbered_text(150))
    content[49 * BLOCK_BYTES : 50 * BLOCK_BYTES] = b" " * BLOCK_BYTES
    text = split_text(bytes(content), LetterTokenizer())
    assert [text.tokens[part.start] for part in text.held_out] == [99, 149]
    assert text.held_out_bytes_per_token == 1.0


def test_a_text_that_the_tokenizer_makes_nothing_of_is_refused() -> None:
    with pytest.raises(UserError, match="makes nothing of what is held out"):
        split_text(b" " * HELD_OUT_EVERY * BLOCK_BYTES, LetterTokenizer())


def test_files_and_directories_are_read_in_order(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "b.txt").write_bytes(b"b" * HELD_OUT_EVERY * BLOCK_BYTES)
    (tmp_path / "a.txt").write_bytes(b"a" * 10)
    text = open_text(DataSpec(source="files", paths=(str(tmp_path),)))
    assert bytes(text.tokens[:12].tolist()) == b"a" * 10 + b"\nb"


def test_a_missing_file_is_named() -> None:
    with pytest.raises(UserError, match=r"/no/such\.txt cannot be read"):
        open_text(DataSpec(source="files", paths=("/no/such.txt",)))


def test_a_tokenizer_that_is_not_there_is_named(tmp_path: Path) -> None:
    spec = DataSpec(tokenizer=str(tmp_path))
    with pytest.raises(UserError, match=r"data\.tokenizer .* cannot be loaded"):
        open_text(spec)


def test_datasets_is_asked_for_when_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match="pip install"):
        open_text(DataSpec(source="datasets", dataset="x"))


def test_the_king_james_text_has_no_brackets() -> None:
    text = open_text(DataSpec())
    assert len(text.tokens) > 4_000_000
    assert not np.isin(text.tokens, list(b"[]")).any()
    assert ByteTokenizer().decode(text.tokens[1:17].tolist()) == "In the beginning"
