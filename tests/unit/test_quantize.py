import numpy as np
import numpy.typing as npt
import pytest

from p2pdiloco.compress.quantize import QUANTIZERS, BlockInt, WireFormat
from p2pdiloco.errors import PayloadError

FORMATS: tuple[WireFormat, ...] = ("float32", "bf16", "int8", "int4")


def normal(size: int, scale: float = 1e-3) -> npt.NDArray[np.float32]:
    return (np.random.default_rng(size).standard_normal(size) * scale).astype(np.float32)


@pytest.mark.parametrize("wire", FORMATS)
@pytest.mark.parametrize("size", [1, 2, 63, 64, 65, 256, 1000])
def test_packed_bytes_says_the_size_and_unpack_the_length(wire: WireFormat, size: int) -> None:
    packed = QUANTIZERS[wire].pack(normal(size))
    assert packed.dtype == np.uint8
    assert packed.size == QUANTIZERS[wire].packed_bytes(size)
    assert QUANTIZERS[wire].unpack(packed, size).shape == (size,)


@pytest.mark.parametrize(("wire", "bound"), [("int8", 128), ("int4", 8)])
def test_integers_err_by_half_a_step_of_their_block(wire: WireFormat, bound: int) -> None:
    values = normal(512)
    got = QUANTIZERS[wire].unpack(QUANTIZERS[wire].pack(values), 512)
    quantizer = QUANTIZERS[wire]
    assert isinstance(quantizer, BlockInt)
    for block, restored in zip(
        values.reshape(-1, quantizer.block), got.reshape(-1, quantizer.block), strict=True
    ):
        step = np.abs(block).max() / quantizer.largest
        assert np.abs(block - restored).max() <= step * (0.5 + 1 / 128)


def test_every_int4_level_comes_back_exactly() -> None:
    values = np.arange(-7, 8, dtype=np.float32)
    assert (
        QUANTIZERS["int4"].unpack(QUANTIZERS["int4"].pack(values), 15).tolist() == values.tolist()
    )


def test_bf16_rounds_to_nearest_even() -> None:
    values = np.array([1, 1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-9, 0], np.float32)
    got = QUANTIZERS["bf16"].unpack(QUANTIZERS["bf16"].pack(values), 5)
    assert got.tolist() == [1, 1, 1 + 2**-6, -1, 0]


@pytest.mark.parametrize("wire", FORMATS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused(wire: WireFormat, bad: float) -> None:
    values = normal(300)
    values[299] = bad
    with pytest.raises(PayloadError, match="not finite"):
        QUANTIZERS[wire].pack(values)


@pytest.mark.parametrize("wire", ["bf16", "int8"])
def test_values_that_would_round_to_infinity_are_refused(wire: WireFormat) -> None:
    with pytest.raises(PayloadError):
        QUANTIZERS[wire].pack(np.full(4, np.finfo(np.float32).max, np.float32))


@pytest.mark.parametrize("wire", ["int8", "int4"])
@pytest.mark.parametrize("scale", [0x7F80, 0x7FC0, 0x7F7F, 0xBF80, 0x8000, 0x0001])
def test_scales_that_no_encoder_writes_are_refused(wire: WireFormat, scale: int) -> None:
    packed = QUANTIZERS[wire].pack(normal(64))
    packed[:2] = np.array([scale], "<u2").view(np.uint8)
    with pytest.raises(PayloadError, match="scales"):
        QUANTIZERS[wire].unpack(packed, 64)


@pytest.mark.parametrize("wire", ["int8", "int4"])
def test_vanishing_values_become_zero_without_warning(wire: WireFormat) -> None:
    values = np.array([1e-42, -1e-45, 0], np.float32)
    assert QUANTIZERS[wire].unpack(QUANTIZERS[wire].pack(values), 3).tolist() == [0, 0, 0]
