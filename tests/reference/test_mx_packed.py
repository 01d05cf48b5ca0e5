"""MXFP6 and MXFP4: every code, packing, the scale rule, NaN and infinity, and the exactness of decoded values."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from narrowcast.formats import E2M1, E2M3, E3M2, E4M3, ElementFormat, cdiv, round_up
from narrowcast.reference import codecs, mx

from .checks import (
    DTYPES,
    EMPTY_SHAPES,
    RAGGED_SHAPES,
    assert_bitwise,
    assert_fresh,
    awkward_layouts,
    encode_subbyte,
    normal,
    pad_to,
)

FORMATS = {"e2m3": E2M3, "e3m2": E3M2, "e2m1": E2M1}
each_format = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)


def values_of(fmt: ElementFormat) -> Tensor:
    """The non-negative values in the order of their codes, from the definition of a binary format."""
    values = []
    for code in range(1 << fmt.bits - 1):
        exponent, mantissa = code >> fmt.mantissa_bits, code % (1 << fmt.mantissa_bits)
        fraction = mantissa / (1 << fmt.mantissa_bits)
        scale = 2.0 ** (max(exponent, 1) - fmt.bias)
        values.append(scale * (fraction + (exponent > 0)))
    return torch.tensor(values)


def quantize(x: Tensor, fmt: ElementFormat, two_d: bool = False) -> list[Tensor]:
    return mx.quantize(x, fmt, rowwise=True, columnwise=True, two_d=two_d)


def decode(buffers: list[Tensor], fmt: ElementFormat, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [
        mx.dequantize_packed_rowwise(buffers[0], buffers[1], fmt, dtype),
        mx.dequantize_packed_columnwise(buffers[2], buffers[3], fmt, dtype),
    ]


@each_format
def test_every_code(fmt: ElementFormat) -> None:
    values, sign = values_of(fmt), 1 << fmt.bits - 1
    codes = torch.arange(2 * sign, dtype=torch.uint8)
    assert_bitwise(codecs.decode_subbyte(codes, fmt), torch.cat([values, -values]))
    assert torch.equal(encode_subbyte(torch.cat([values, -values]), fmt), codes)


@each_format
def test_rounding_between_neighbours(fmt: ElementFormat) -> None:
    values = values_of(fmt)
    middle = (values[1:] + values[:-1]) / 2
    even = torch.arange(1, len(values)).div(2, rounding_mode="floor").mul(2).to(torch.uint8)
    lower = torch.arange(len(middle), dtype=torch.uint8)
    inf = torch.full_like(middle, math.inf)
    for sign, offset in ((1, 0), (-1, len(values))):
        assert torch.equal(encode_subbyte(sign * middle, fmt), even + offset)
        below = encode_subbyte(sign * middle.nextafter(-inf), fmt)
        above = encode_subbyte(sign * middle.nextafter(inf), fmt)
        assert torch.equal(below, lower + offset) and torch.equal(above, lower + 1 + offset)


@each_format
def test_encoding_agrees_with_ml_dtypes(fmt: ElementFormat) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    kind = getattr(
        ml_dtypes, {"e2m3": "float6_e2m3fn", "e3m2": "float6_e3m2fn", "e2m1": "float4_e2m1fn"}[fmt.name]
    )
    x = torch.cat([normal((4096,), torch.float32, std=std) for std in (0.01, 1.0, 10.0)])
    expected = torch.from_numpy(x.clamp(-fmt.max, fmt.max).numpy().astype(kind).astype("float32"))
    assert_bitwise(codecs.decode_subbyte(encode_subbyte(x, fmt), fmt), expected)


@each_format
def test_specials(fmt: ElementFormat) -> None:
    top, sign = (1 << fmt.bits - 1) - 1, 1 << fmt.bits - 1
    x = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e30, -1e30, 1e-30, -1e-45])
    assert encode_subbyte(x, fmt).tolist() == [0, sign, top, top | sign, top, top, top | sign, 0, sign]
    x = -torch.full((1,), math.nan)
    assert encode_subbyte(x, fmt).item() == top


@pytest.mark.parametrize("bits", [4, 6])
def test_packing_is_a_little_endian_stream_of_bits(bits: int) -> None:
    codes = torch.randint(0, 1 << bits, (5, 3, 32), dtype=torch.uint8)
    data = codecs.pack_codes(codes, bits)
    assert data.shape == (5, 3, 32 * bits // 8) and data.dtype == torch.uint8
    for row, packed in zip(codes.view(-1, 32).tolist(), data.view(15, -1).tolist(), strict=True):
        stream = sum(code << (bits * i) for i, code in enumerate(row))
        assert packed == list(stream.to_bytes(len(packed), "little"))
    assert torch.equal(codecs.unpack_codes(data, bits), codes)
    assert torch.equal(codecs.unpack_codes(data.transpose(0, 1), bits), codes.transpose(0, 1))
    assert codecs.unpack_codes(codecs.pack_codes(codes[:0], bits), bits).shape == (0, 3, 32)


def test_packing_refuses() -> None:
    codes = torch.zeros(2, 6, dtype=torch.uint8)
    with pytest.raises(ValueError, match="cannot pack 6 codes of 6 bits.*a multiple of 4"):
        codecs.pack_codes(codes, 6)
    with pytest.raises(ValueError, match="cannot unpack 4 bytes of 6-bit codes"):
        codecs.unpack_codes(codes[:, :4], 6)
    for call in (codecs.pack_codes, codecs.unpack_codes):
        with pytest.raises(ValueError, match="codes of 5 bits; use 4 or 6"):
            call(codes, 5)
    for call in (encode_subbyte, codecs.decode_subbyte):
        with pytest.raises(ValueError, match="e4m3 fills a byte; use E2M3, E3M2 or E2M1"):
            call(torch.zeros(4), E4M3)


@each_format
def test_the_scale_is_the_smallest_power_that_clips_nothing(fmt: ElementFormat) -> None:
    mantissas = torch.arange(0, 2**23, 127, dtype=torch.int32)
    amax = torch.cat([mantissas.add(e << 23).view(torch.float32) for e in (20, 126, 127, 130, 250)])
    x = torch.cat([amax, torch.tensor([fmt.max, fmt.max / 2**20])])[:, None].contiguous()
    exponent = mx.quantize(x, fmt, rowwise=True, columnwise=False)[1][: len(x), 0].double() - 127
    expected = (x.flatten().double() / fmt.max).log2().ceil()
    exact = (x.flatten().double() / fmt.max).frexp()[0] == 0.5  # a power of two: log2 may err by a rounding
    assert torch.equal(exponent[~exact], expected[~exact])
    assert (x.flatten().double() <= fmt.max * exponent.exp2()).all()
    assert (x.flatten().double() > fmt.max * (exponent - 1).exp2()).all()


def by_hand(x: Tensor, fmt: ElementFormat) -> Tensor:
    """The values of row-wise quantization, group by group in double precision."""
    values = values_of(fmt).double()
    out = torch.empty(x.shape, dtype=torch.float64)
    for row in range(x.shape[0]):
        for start in range(0, x.shape[1], 32):
            group = x[row, start : start + 32].double()
            amax = group.abs().max()
            scale = 2.0 ** math.ceil(math.log2(amax / fmt.max)) if amax > 0 else 1.0
            distance = (group.abs() / scale)[:, None] - values
            nearest = distance.abs().min(1).values
            tied = distance.abs() == nearest[:, None]
            even = torch.arange(len(values)) % 2 == 0
            index = torch.where((tied & even).any(1), (tied & even).int().argmax(1), tied.int().argmax(1))
            out[row, start : start + 32] = values[index] * scale * group.sign()
    return out


@each_format
def test_values_by_hand(fmt: ElementFormat) -> None:
    x = normal((33, 100), torch.bfloat16).float()
    rows, columns = decode(quantize(x, fmt), fmt)
    assert torch.equal(rows[:, :100].double(), by_hand(x, fmt))
    assert torch.equal(columns[:33].double(), by_hand(x.t(), fmt).t())


@pytest.mark.parametrize("two_d", [False, True])
@pytest.mark.parametrize("shape", RAGGED_SHAPES)
@each_format
def test_ragged_equals_zero_padded(fmt: ElementFormat, shape: tuple[int, ...], two_d: bool) -> None:
    m, k = math.prod(shape[:-1]), shape[-1]
    for dtype in DTYPES:
        x = normal(shape, dtype)
        outputs, padded = quantize(x, fmt, two_d), quantize(pad_to(x, 32), fmt, two_d)
        assert outputs[0].shape == (*shape[:-1], round_up(k, 32) * fmt.bits // 8)
        assert outputs[2].shape == (k, round_up(m, 32) * fmt.bits // 8)
        assert outputs[1].shape == (round_up(m, 128), round_up(cdiv(k, 32), 4))
        assert outputs[3].shape == (round_up(k, 128), round_up(cdiv(m, 32), 4))
        assert torch.equal(outputs[0].view(m, -1), padded[0][:m])
        assert torch.equal(outputs[2], padded[2][:k])
        for scales, expected, (rows, columns) in (
            (outputs[1], padded[1], (m, cdiv(k, 32))),
            (outputs[3], padded[3], (k, cdiv(m, 32))),
        ):
            assert torch.equal(scales[:rows, :columns], expected[:rows, :columns])
            assert scales.sum() == scales[:rows, :columns].sum(), "the padding is not zero"
        for values in decode(outputs, fmt, dtype):
            assert values.is_contiguous() and values.dtype == dtype


@pytest.mark.parametrize("two_d", [False, True])
@each_format
def test_usages_strides_and_aliasing(fmt: ElementFormat, two_d: bool) -> None:
    x = normal((2, 17, 40), torch.bfloat16)
    everything = quantize(x, fmt, two_d)
    for rowwise, columnwise in ((True, False), (False, True), (True, True), (False, False)):
        outputs = mx.quantize(x, fmt, rowwise=rowwise, columnwise=columnwise, two_d=two_d)
        for actual, expected in zip(
            outputs, everything[:2] * rowwise + everything[2:] * columnwise, strict=True
        ):
            assert_bitwise(actual, expected)
        assert_fresh(outputs, [x])
    for layout, y in awkward_layouts(x).items():
        for actual, expected in zip(quantize(y, fmt, two_d), everything, strict=True):
            assert_bitwise(actual, expected, layout)


@each_format
def test_both_directions_of_a_tile_hold_the_same_codes(fmt: ElementFormat) -> None:
    rows, columns = decode(quantize(normal((64, 96), torch.float32), fmt, two_d=True), fmt)
    assert_bitwise(rows, columns)


@pytest.mark.parametrize("shape", EMPTY_SHAPES)
@each_format
def test_empty(fmt: ElementFormat, shape: tuple[int, ...]) -> None:
    outputs = quantize(torch.empty(shape), fmt)
    assert sum(int(buffer.sum()) for buffer in outputs) == 0
    assert all(values.numel() == 0 or not values.any() for values in decode(outputs, fmt))


@each_format
def test_a_nan_poisons_its_group_and_infinity_saturates(fmt: ElementFormat) -> None:
    x = torch.ones(33, 70)
    x[3, 5], x[7, 65] = math.nan, -math.inf
    outputs = quantize(x, fmt)
    rows, columns = decode(outputs, fmt)
    assert outputs[1][3, 0] == outputs[3][5, 0] == 255
    assert rows.isnan().sum() == 32 and rows[3, :32].isnan().all()
    assert columns.isnan().sum() == 32 and columns[:32, 5].isnan().all()
    top = (1 << fmt.bits - 1) - 1
    assert (codecs.unpack_codes(outputs[0], fmt.bits)[3, :32] == top).all()
    assert outputs[1][7, 2] == outputs[3][65, 0] == 254
    assert rows[7, 65] == -math.inf  # the largest value times 2**127 leaves fp32
    assert (rows[7, 64] == 0) and (rows[7, 66] == 0)
    x[3, 5] = -math.nan
    assert torch.equal(quantize(x, fmt)[0], outputs[0])
    short = torch.full((1, 7), math.nan)  # the padding of a poisoned group stays zero
    assert codecs.unpack_codes(quantize(short, fmt)[0], fmt.bits)[0].tolist() == [top] * 7 + [0] * 25


@each_format
def test_decoded_values_are_exact_in_bf16(fmt: ElementFormat) -> None:
    """What an emulated GEMM multiplies: every code under every scale, down to the subnormals of bf16."""
    codes = torch.arange(1 << fmt.bits, dtype=torch.uint8).repeat(255, 64 // (1 << fmt.bits))
    scales = torch.zeros(256, 4, dtype=torch.uint8)
    scales[:255] = torch.arange(255, dtype=torch.uint8)[:, None]
    data = codecs.pack_codes(codes, fmt.bits)
    wide = mx.dequantize_packed_rowwise(data, scales, fmt, torch.float32)
    narrow = mx.dequantize_packed_rowwise(data, scales, fmt, torch.bfloat16)
    assert_bitwise(narrow.float(), wide)
    exact = codecs.decode_subbyte(codes, fmt).double() * (torch.arange(255).double() - 127).exp2()[:, None]
    inside = exact.abs() < 2.0**128
    assert torch.equal(wide.double()[inside], exact[inside]) and wide[~inside].isinf().all()


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="rank 2 or more"):
        quantize(torch.ones(32), E2M3)
    with pytest.raises(TypeError, match=r"torch\.int32; use float32, bfloat16 or float16"):
        quantize(torch.ones(32, 32, dtype=torch.int32), E2M1)
