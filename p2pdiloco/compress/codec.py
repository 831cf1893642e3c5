"""Tensor bytes on the wire: a small header, then independent zstd frames of quantized pieces.

    header   magic "PDG1", format u8, 3 zero bytes, number of values u64          (little-endian)
    piece    length of its frame u32, zstd frame of `PIECE_VALUES` packed values (last: the rest)

Pieces keep the work in the cache (2 to 5 times faster than whole tensors) and bound the memory of a
decoder: a frame must announce exactly the size that its piece has, so nothing from a peer decides
an allocation. Decoding is the same to the last bit on every machine; encoding need not be.
"""

import struct
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import zstandard

from p2pdiloco.compress.quantize import QUANTIZERS, Quantizer, WireFormat
from p2pdiloco.errors import PayloadError

Vector: TypeAlias = npt.NDArray[np.float32]
"""A flat float32 vector."""

PIECE_VALUES = 1 << 17
"""Values in a piece, a multiple of every block: 512 KiB of float32 (measured:
benchmarks/codec.py).
"""

_MAGIC = b"PDG1"
_HEADER = struct.Struct("<4sB3xQ")
_LENGTH = struct.Struct("<I")
_FORMAT_CODES: dict[WireFormat, int] = {"float32": 0, "bf16": 1, "int8": 2, "int4": 3}
_ZSTD_LEVEL = 1
"""Higher levels find no more in quantized gradients."""


def encode(values: Vector, wire: WireFormat) -> bytes:
    """A flat float32 vector as wire bytes; PayloadError if a value is not finite."""
    assert values.dtype == np.float32 and values.ndim == 1
    quantizer = QUANTIZERS[wire]
    compressor = zstandard.ZstdCompressor(level=_ZSTD_LEVEL, write_content_size=True)
    chunks = [_HEADER.pack(_MAGIC, _FORMAT_CODES[wire], values.size)]
    for start in range(0, values.size, PIECE_VALUES):
        frame = compressor.compress(quantizer.pack(values[start : start + PIECE_VALUES]).data)
        chunks += [_LENGTH.pack(len(frame)), frame]
    return b"".join(chunks)


def decode(payload: bytes | bytearray | memoryview, num_values: int, wire: WireFormat) -> Vector:
    """The float32[num_values] that `payload` holds in the format `wire`.

    PayloadError if it holds anything else: another format or number of values, a damaged or
    oversized frame, bytes left over, numbers that are not finite.
    """
    view = memoryview(payload).cast("B")
    _check_header(view, num_values, wire)
    quantizer = QUANTIZERS[wire]
    decompressor = zstandard.ZstdDecompressor(max_window_size=4 * PIECE_VALUES)
    values = np.empty(num_values, np.float32)
    position = _HEADER.size
    for start in range(0, num_values, PIECE_VALUES):
        piece = values[start : start + PIECE_VALUES]
        frame = _frame_at(view, position)
        packed = _decompress(decompressor, frame, quantizer.packed_bytes(piece.size))
        piece[:] = quantizer.unpack(np.frombuffer(packed, np.uint8), piece.size)
        position += _LENGTH.size + len(frame)
    if position != len(view):
        raise PayloadError(f"{len(view) - position} bytes follow the last piece; expected none")
    return values


def max_encoded_bytes(num_values: int, wire: WireFormat) -> int:
    """No payload of that many values is longer."""
    quantizer = QUANTIZERS[wire]
    whole, rest = divmod(num_values, PIECE_VALUES)
    pieces = whole * _max_piece_bytes(quantizer, PIECE_VALUES)
    return _HEADER.size + pieces + (_max_piece_bytes(quantizer, rest) if rest else 0)


def _max_piece_bytes(quantizer: Quantizer, num_values: int) -> int:
    """ZSTD_COMPRESSBOUND of the packed piece, and its length field."""
    packed = quantizer.packed_bytes(num_values)
    margin = max(0, ((128 << 10) - packed) >> 11)
    return _LENGTH.size + packed + (packed >> 8) + margin


def _check_header(view: memoryview, num_values: int, wire: WireFormat) -> None:
    if not _HEADER.size <= len(view) <= max_encoded_bytes(num_values, wire):
        raise PayloadError(
            f"a payload of {len(view)} bytes; {num_values} {wire} values take "
            f"{_HEADER.size} to {max_encoded_bytes(num_values, wire)}"
        )
    magic, code, count = _HEADER.unpack_from(view)
    if (magic, code, count) != (_MAGIC, _FORMAT_CODES[wire], num_values):
        raise PayloadError(
            f"a payload with header {magic!r}, format {code}, {count} values; expected "
            f"{_MAGIC!r}, format {_FORMAT_CODES[wire]} ({wire}), {num_values} values"
        )


def _frame_at(view: memoryview, position: int) -> memoryview:
    if position + _LENGTH.size > len(view):
        raise PayloadError(f"the payload ends at byte {len(view)}, before its last piece")
    (length,) = _LENGTH.unpack_from(view, position)
    frame = view[position + _LENGTH.size :][:length]
    if len(frame) != length:
        raise PayloadError(f"the payload ends at byte {len(view)}, inside a piece of {length}")
    return frame


def _decompress(
    decompressor: zstandard.ZstdDecompressor, frame: memoryview, num_bytes: int
) -> bytes:
    """The frame's content, which must announce `num_bytes` before anything is allocated."""
    try:
        announced = zstandard.frame_content_size(frame)
        if announced != num_bytes:
            raise PayloadError(f"a piece that unpacks to {announced} bytes; expected {num_bytes}")
        content: bytes = decompressor.decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise PayloadError(f"a piece that zstd cannot read: {error}") from error
    if len(content) != num_bytes:
        raise PayloadError(f"a piece of {len(content)} bytes; expected {num_bytes}")
    return content
