"""The number formats of the wire: float32 values to packed bytes and back, one piece at a time.

    format   bits/value   values
    float32  32           as they are
    bf16     16           the upper half, rounded to nearest even
    int8     8 1/16       per block of 256: q * scale, q in -127..127
    int4     4 1/4        per block of 64:  q * scale, q in -7..7, two in a byte

A scale is max|x| of its block over 127 or 7, stored as bf16 rounded up: the range of float32
(float16 would underflow on outer gradients of 1e-5) at half the bytes; quantizing against the
stored scale leaves no error from its rounding. Floats are stored byte plane by byte plane (all
first bytes, then all second bytes), which is what makes them compressible.

Unpacking uses single-element IEEE float32 operations only, so every machine gets the same bits.
What comes from a peer is checked: a format never yields a value that is not finite.
"""

import sys
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from p2pdiloco.errors import PayloadError

assert sys.byteorder == "little", "the wire is little-endian, and so is memory on x86 and Arm"

WireFormat: TypeAlias = Literal["float32", "bf16", "int8", "int4"]

Vector: TypeAlias = npt.NDArray[np.float32]
Bytes: TypeAlias = npt.NDArray[np.uint8]

_SMALLEST_SCALE = 0x0080
"""2**-126, the smallest normal bf16, as its bits: a smaller scale becomes zero, so that no product
is subnormal and machines that flush those to zero agree.
"""

_SCALE_LIMIT = 0x7B80
"""2**120 as bf16 bits: below it no product with an integer overflows. Signs and nan lie above
it.
"""


class Quantizer(Protocol):
    """One number format; stateless."""

    def packed_bytes(self, num_values: int) -> int:
        """Size of that many packed values."""

    def pack(self, values: Vector) -> Bytes:
        """uint8[packed_bytes]; PayloadError if a value is not finite."""

    def unpack(self, packed: Bytes, num_values: int) -> Vector:
        """float32[num_values]; PayloadError if one would not be finite."""


@dataclass(frozen=True, slots=True)
class Float32:
    def packed_bytes(self, num_values: int) -> int:
        return 4 * num_values

    def pack(self, values: Vector) -> Bytes:
        _check_finite(values)
        return _to_planes(values.view(np.uint8), 4)

    def unpack(self, packed: Bytes, num_values: int) -> Vector:
        values = _from_planes(packed, 4).view(np.float32)
        _check_finite(values)
        return values


@dataclass(frozen=True, slots=True)
class Bf16:
    def packed_bytes(self, num_values: int) -> int:
        return 2 * num_values

    def pack(self, values: Vector) -> Bytes:
        bits = values.view(np.uint32)
        halves = (bits + (0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
        _check_finite(values)
        _check_finite_halves(halves)
        return _to_planes(halves.view(np.uint8), 2)

    def unpack(self, packed: Bytes, num_values: int) -> Vector:
        halves = _from_planes(packed, 2).view(np.uint16)
        _check_finite_halves(halves)
        return _widen(halves)


@dataclass(frozen=True, slots=True)
class BlockInt:
    """Symmetric integers with one scale per block; the last block is padded with zeros."""

    block: int
    largest: int
    """127 takes one byte per value; 7 takes half a byte, as q + 8, the first value in the low
    half.
    """

    def packed_bytes(self, num_values: int) -> int:
        num_blocks = -(-num_values // self.block)
        return 2 * num_blocks + self._integer_bytes(num_blocks)

    def _integer_bytes(self, num_blocks: int) -> int:
        return num_blocks * self.block // (1 if self.largest == 127 else 2)

    def pack(self, values: Vector) -> Bytes:
        blocks = _pad(values, self.block).reshape(-1, self.block)
        halves = _scales(blocks, self.largest)
        scales = _widen(halves)
        factors = np.divide(1, scales, out=np.zeros_like(scales), where=scales > 0)
        scaled = blocks * factors[:, None]
        integers = np.rint(scaled, out=scaled).astype(np.int8).reshape(-1)
        packed = _join_nibbles(integers) if self.largest == 7 else integers.view(np.uint8)
        return np.concatenate([halves.view(np.uint8), packed])

    def unpack(self, packed: Bytes, num_values: int) -> Vector:
        num_blocks = -(-num_values // self.block)
        halves = packed[: 2 * num_blocks].view(np.uint16)
        _check_scales(halves)
        integers = packed[2 * num_blocks :]
        if self.largest == 7:
            values = _NIBBLE_PAIRS[integers].view(np.float32)
        else:
            values = integers.view(np.int8).astype(np.float32)
        blocks = values.reshape(num_blocks, self.block)
        np.multiply(blocks, _widen(halves)[:, None], out=blocks)
        return blocks.reshape(-1)[:num_values]


def _nibble_pairs() -> npt.NDArray[np.uint64]:
    """For each byte its two integers as two float32 in one 64-bit element."""
    byte = np.arange(256)
    pairs = np.stack([(byte & 15) - 8, (byte >> 4) - 8], axis=1).astype(np.float32)
    return pairs.reshape(-1).view(np.uint64)


_NIBBLE_PAIRS = _nibble_pairs()

QUANTIZERS: dict[WireFormat, Quantizer] = {
    "float32": Float32(),
    "bf16": Bf16(),
    "int8": BlockInt(block=256, largest=127),
    "int4": BlockInt(block=64, largest=7),
}


def _join_nibbles(integers: npt.NDArray[np.int8]) -> Bytes:
    pairs = (integers + np.int8(8)).view(np.uint16)  # 0x0b0a for the values a, b
    return (pairs | pairs >> np.uint16(4)).astype(np.uint8)


def _scales(blocks: Vector, largest: int) -> npt.NDArray[np.uint16]:
    """max|x| / largest per block, as bf16 rounded up."""
    extremes = np.maximum(blocks.max(axis=1), -blocks.min(axis=1))
    _check_finite(extremes)
    scales = np.abs(extremes) / np.float32(largest)  # abs turns -0 into 0
    bits = scales.view(np.uint32) + np.uint32(0xFFFF)
    halves: npt.NDArray[np.uint16] = (bits >> np.uint32(16)).astype(np.uint16)
    halves[halves < _SMALLEST_SCALE] = 0
    _check_scales(halves)
    return halves


def _widen(halves: npt.NDArray[np.uint16]) -> Vector:
    """bf16 to float32, exact."""
    return (halves.astype(np.uint32) << 16).view(np.float32)


def _pad(values: Vector, block: int) -> Vector:
    missing = -values.size % block
    return np.pad(values, (0, missing)) if missing else values


def _to_planes(raw: Bytes, width: int) -> Bytes:
    return np.ascontiguousarray(raw.reshape(-1, width).T).reshape(-1)


def _from_planes(planes: Bytes, width: int) -> Bytes:
    return np.ascontiguousarray(planes.reshape(width, -1).T).reshape(-1)


def _check_finite(values: Vector) -> None:
    if not np.isfinite(values).all():
        raise PayloadError("tensor values that are not finite; expected numbers")


def _check_scales(halves: npt.NDArray[np.uint16]) -> None:
    if ((halves >= _SCALE_LIMIT) | ((halves < _SMALLEST_SCALE) & (halves > 0))).any():
        raise PayloadError("block scales that are negative, out of range or not finite")


def _check_finite_halves(halves: npt.NDArray[np.uint16]) -> None:
    if ((halves & 0x7F80) == 0x7F80).any():
        raise PayloadError("bf16 numbers that are not finite; expected numbers")
