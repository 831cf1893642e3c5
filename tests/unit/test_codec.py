import struct
import tracemalloc

import numpy as np
import numpy.typing as npt
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pdiloco.compress.codec import PIECE_VALUES, decode, encode, max_encoded_bytes
from p2pdiloco.compress.quantize import WireFormat
from p2pdiloco.errors import PayloadError

FORMATS: tuple[WireFormat, ...] = ("float32", "bf16", "int8", "int4")
HEADER_BYTES = 16
LENGTH_BYTES = 4

wires = st.sampled_from(FORMATS)


def gradient(size: int) -> npt.NDArray[np.float32]:
    return (np.random.default_rng(size).standard_t(5, size) * 1e-3).astype(np.float32)


def relative_error(got: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]) -> float:
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize(
    ("wire", "error"), [("float32", 0), ("bf16", 0.002), ("int8", 0.015), ("int4", 0.17)]
)
@pytest.mark.parametrize("size", [1000, PIECE_VALUES, 2 * PIECE_VALUES + 77])
def test_a_round_trip_errs_no_more_than_the_format(
    wire: WireFormat, error: float, size: int
) -> None:
    values = gradient(size)
    assert relative_error(decode(encode(values, wire), size, wire), values) <= error


@pytest.mark.parametrize(
    ("wire", "bits"), [("float32", 32), ("bf16", 13), ("int8", 8), ("int4", 4)]
)
def test_the_wire_is_as_small_as_the_format_says(wire: WireFormat, bits: float) -> None:
    size = 300_000
    assert len(encode(gradient(size), wire)) * 8 / size < bits


@pytest.mark.parametrize("wire", FORMATS)
def test_nothing_and_zeros_survive(wire: WireFormat) -> None:
    assert decode(encode(np.zeros(0, np.float32), wire), 0, wire).size == 0
    assert not decode(encode(np.zeros(99, np.float32), wire), 99, wire).any()


@pytest.mark.parametrize("wire", FORMATS)
def test_incompressible_values_stay_under_the_bound(wire: WireFormat) -> None:
    size = PIECE_VALUES + 1000
    raw = np.random.default_rng(0).integers(0, 1 << 32, size, np.uint32).view(np.float32)
    values = np.where(np.abs(raw) < 1e30, raw, np.float32(0))  # also drops nan and infinities
    assert len(encode(values, wire)) <= max_encoded_bytes(size, wire)


@pytest.mark.parametrize("container", [bytes, bytearray, memoryview])
def test_any_buffer_decodes(container: type[bytes] | type[bytearray]) -> None:
    assert decode(container(encode(gradient(10), "int8")), 10, "int8").size == 10


def test_decoding_what_was_decoded_changes_nothing() -> None:
    """So a merge quantized once means the same on every node that passes it on."""
    for wire in ("float32", "bf16"):
        values = decode(encode(gradient(1000), "bf16"), 1000, "bf16")
        assert decode(encode(values, wire), 1000, wire).tobytes() == values.tobytes()


@pytest.mark.parametrize("wire", FORMATS)
def test_a_payload_cut_anywhere_is_refused(wire: WireFormat) -> None:
    payload = encode(gradient(200), wire)
    for length in range(len(payload)):
        with pytest.raises(PayloadError):
            decode(payload[:length], 200, wire)


def test_bytes_after_the_end_are_refused() -> None:
    with pytest.raises(PayloadError, match="1 bytes follow"):
        decode(encode(gradient(200), "int8") + b"\0", 200, "int8")


def test_another_number_of_values_is_refused() -> None:
    with pytest.raises(PayloadError, match=r"200 values; expected.*201 values"):
        decode(encode(gradient(200), "int8"), 201, "int8")


def test_another_format_is_refused() -> None:
    with pytest.raises(PayloadError, match=r"expected.*int4"):
        decode(encode(np.zeros(200, np.float32), "int8"), 200, "int4")


def with_frame(frame: bytes, num_values: int) -> bytes:
    """An int8 payload of one piece with a frame of our choice."""
    header = encode(np.zeros(num_values, np.float32), "int8")[:HEADER_BYTES]
    return header + struct.pack("<I", len(frame)) + frame


def test_a_bomb_is_refused_before_it_unpacks() -> None:
    bomb = zstandard.ZstdCompressor(level=19).compress(bytes(200 << 20))
    tracemalloc.start()
    with pytest.raises(PayloadError, match=f"unpacks to {200 << 20} bytes; expected"):
        decode(with_frame(bomb, 100_000), 100_000, "int8")
    assert tracemalloc.get_traced_memory()[1] < 2 << 20
    tracemalloc.stop()


def test_a_bomb_that_hides_its_size_is_refused() -> None:
    bomb = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(200 << 20))
    with pytest.raises(PayloadError, match="unpacks to -1 bytes"):
        decode(with_frame(bomb, 100_000), 100_000, "int8")


def test_two_frames_in_one_piece_are_refused() -> None:
    frame = zstandard.ZstdCompressor().compress(bytes(258))
    with pytest.raises(PayloadError, match="zstd"):
        decode(with_frame(frame + frame, 256), 256, "int8")


def test_a_length_beyond_the_end_is_refused() -> None:
    payload = bytearray(encode(gradient(200), "int8"))
    payload[HEADER_BYTES : HEADER_BYTES + LENGTH_BYTES] = b"\xff\xff\xff\xff"
    with pytest.raises(PayloadError, match="inside a piece of 4294967295"):
        decode(payload, 200, "int8")


def test_nan_in_float32_is_refused() -> None:
    frame = zstandard.ZstdCompressor().compress(b"\xff" * 400)
    header = encode(np.zeros(100, np.float32), "float32")[:HEADER_BYTES]
    with pytest.raises(PayloadError, match="not finite"):
        decode(header + struct.pack("<I", len(frame)) + frame, 100, "float32")


@given(st.binary(max_size=600), wires)
@settings(max_examples=60, deadline=None)
def test_garbage_is_refused(garbage: bytes, wire: WireFormat) -> None:
    with pytest.raises(PayloadError):
        decode(garbage, 100, wire)


@given(st.binary(max_size=400), wires)
@settings(max_examples=60, deadline=None)
def test_garbage_in_a_sound_frame_is_finite_or_refused(content: bytes, wire: WireFormat) -> None:
    frame = zstandard.ZstdCompressor().compress(content)
    header = encode(np.zeros(100, np.float32), wire)[:HEADER_BYTES]
    decodes_to_numbers_or_is_refused(header + struct.pack("<I", len(frame)) + frame, wire)


@given(st.integers(0, 10_000), st.integers(1, 255), wires)
@settings(max_examples=150, deadline=None)
def test_a_flipped_byte_is_finite_or_refused(place: int, change: int, wire: WireFormat) -> None:
    payload = bytearray(encode(gradient(100), wire))
    payload[place % len(payload)] ^= change
    decodes_to_numbers_or_is_refused(bytes(payload), wire)


def decodes_to_numbers_or_is_refused(payload: bytes, wire: WireFormat) -> None:
    try:
        values = decode(payload, 100, wire)
    except PayloadError:
        return
    assert np.isfinite(values).all()
