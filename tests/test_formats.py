"""The published values of the formats, against the arithmetic of their bits and against ml_dtypes and torch."""

import ast
import dataclasses
import math
import struct
from pathlib import Path

import pytest
import torch

from narrowcast import formats
from narrowcast.formats import (
    E2M1,
    E2M3,
    E3M2,
    E4M3,
    E5M2,
    E8M0,
    DType,
    ElementFormat,
    Layout,
    cdiv,
    round_to_float32,
    round_up,
)

ELEMENTS = [E4M3, E5M2, E2M1, E2M3, E3M2]
LAYOUTS = {name: record for name, record in vars(formats).items() if isinstance(record, Layout)}


def min_normal(fmt: ElementFormat) -> float:
    return math.ldexp(1.0, 1 - fmt.bias)


def min_subnormal(fmt: ElementFormat) -> float:
    return math.ldexp(1.0, 1 - fmt.bias - fmt.mantissa_bits)


def _bits(value: float) -> int:
    return struct.unpack("<I", struct.pack("<f", value))[0]


def _decode(code: int, fmt: ElementFormat) -> float:
    """The value of a code, from the definition of a binary floating-point format."""
    mantissa = code & ((1 << fmt.mantissa_bits) - 1)
    exponent = (code >> fmt.mantissa_bits) & ((1 << fmt.exponent_bits) - 1)
    sign = -1.0 if code >> (fmt.bits - 1) else 1.0
    if code in fmt.nan_codes:
        return math.nan
    if fmt.has_infinity and exponent == (1 << fmt.exponent_bits) - 1:
        return sign * math.inf
    fraction = mantissa / (1 << fmt.mantissa_bits)
    if exponent == 0:
        return sign * math.ldexp(fraction, 1 - fmt.bias)
    return sign * math.ldexp(1.0 + fraction, exponent - fmt.bias)


@pytest.mark.parametrize("fmt", ELEMENTS, ids=lambda fmt: fmt.name)
def test_fields_agree_with_the_codes(fmt: ElementFormat) -> None:
    assert fmt.bits == 1 + fmt.exponent_bits + fmt.mantissa_bits
    finite = sorted({v for v in (_decode(c, fmt) for c in range(1 << fmt.bits)) if math.isfinite(v)})
    assert finite[-1] == fmt.max
    assert finite[0] == -fmt.max
    positive = [v for v in finite if v > 0]
    assert positive[0] == min_subnormal(fmt)
    assert min_normal(fmt) in positive
    assert all(v < min_normal(fmt) for v in positive[: (1 << fmt.mantissa_bits) - 1])


def test_published_values() -> None:
    assert (E4M3.max, min_normal(E4M3), min_subnormal(E4M3)) == (448.0, 2.0**-6, 2.0**-9)
    assert (E5M2.max, min_normal(E5M2), min_subnormal(E5M2)) == (57344.0, 2.0**-14, 2.0**-16)
    assert (E2M1.max, min_normal(E2M1), min_subnormal(E2M1)) == (6.0, 1.0, 0.5)
    assert (E2M3.max, min_normal(E2M3), min_subnormal(E2M3)) == (7.5, 1.0, 0.125)
    assert (E3M2.max, min_normal(E3M2), min_subnormal(E3M2)) == (28.0, 0.25, 0.0625)
    assert [_decode(code, E2M1) for code in range(8)] == [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert (E8M0.bias, E8M0.max_code, E8M0.nan_code) == (127, 254, 255)


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
def test_torch_dtype_has_the_same_codes(fmt: ElementFormat) -> None:
    dtype = getattr(torch, fmt.torch_dtype)
    assert torch.finfo(dtype).max == fmt.max
    values = torch.arange(256, dtype=torch.uint8).view(dtype).float().tolist()
    for code, value in enumerate(values):
        expected = _decode(code, fmt)
        assert value == expected or (math.isnan(value) and math.isnan(expected)), code


@pytest.mark.parametrize(
    ("fmt", "name"),
    [
        (E4M3, "float8_e4m3fn"),
        (E5M2, "float8_e5m2"),
        (E2M1, "float4_e2m1fn"),
        (E2M3, "float6_e2m3fn"),
        (E3M2, "float6_e3m2fn"),
    ],
)
def test_ml_dtypes_agrees(fmt: ElementFormat, name: str) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    info = ml_dtypes.finfo(getattr(ml_dtypes, name))
    assert float(info.max) == fmt.max
    assert float(info.smallest_normal) == min_normal(fmt)
    assert float(info.smallest_subnormal) == min_subnormal(fmt)


def test_reciprocals_are_the_fp32_constants() -> None:
    assert _bits(E4M3.max_reciprocal) == 0x3B124925
    assert _bits(E5M2.max_reciprocal) == 0x37924925
    assert _bits(E2M1.max_reciprocal) == 0x3E2AAAAB


def test_constants() -> None:
    assert _bits(formats.FLT_MAX) == 0x7F7FFFFF
    assert torch.finfo(torch.float32).max == formats.FLT_MAX
    assert torch.finfo(torch.bfloat16).max == formats.BF16_MAX
    assert torch.finfo(torch.float16).max == formats.FP16_MAX
    assert formats.RHT_SIGN_MASK == 0xD7E8


def test_dtype_names_map_to_formats() -> None:
    assert {
        DType.kFloat8E4M3: E4M3,
        DType.kFloat8E5M2: E5M2,
        DType.kFloat4E2M1: E2M1,
        DType.kFloat6E2M3: E2M3,
        DType.kFloat6E3M2: E3M2,
    } == formats.ELEMENT_FORMATS
    assert [member.name for member in DType] == [
        "kByte", "kInt32", "kFloat32", "kFloat16", "kBFloat16", "kFloat8E4M3", "kFloat8E5M2", "kFloat4E2M1",
        "kFloat6E2M3", "kFloat6E3M2",
    ]  # fmt: skip
    assert DType(int(DType.kFloat8E5M2)) is DType.kFloat8E5M2


def test_records_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        E4M3.max = 240.0  # type: ignore[misc]
    assert hash(E4M3) != hash(E5M2)


def test_round_to_float32() -> None:
    assert round_to_float32(1.0 + 2.0**-24) == 1.0
    assert round_to_float32(1.0 + 3 * 2.0**-24) == 1.0 + 2.0**-22
    with pytest.raises(OverflowError):
        round_to_float32(1e39)


@pytest.mark.parametrize(("a", "b"), [(0, 16), (1, 16), (15, 16), (16, 16), (17, 16), (1000, 128)])
def test_sizes(a: int, b: int) -> None:
    assert cdiv(a, b) == math.ceil(a / b)
    assert round_up(a, b) == math.ceil(a / b) * b


def test_the_module_imports_no_torch() -> None:
    tree = ast.parse(Path(formats.__file__).read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported == {"enum", "struct", "dataclasses", "typing"}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_tells_its_shapes_both_ways(name: str) -> None:
    layout = LAYOUTS[name]
    assert layout.attributes(False) and layout.attributes(True)
    if name == "HYBRID":
        assert not any(buffer.shape for buffer in layout.buffers)
        return
    for shape in ((256, 128), (2, 128, 384)):
        described = layout.describe(shape, True, True)
        assert list(described) == [buffer.attribute for buffer in layout.buffers]
        flat = (math.prod(shape[:-1]), shape[-1])
        for columnwise in (False, True):
            one = layout.describe(shape, not columnwise, columnwise)
            assert tuple(one) == layout.attributes(columnwise)
            data = next(buffer for buffer in layout.buffers if buffer.attribute == next(iter(one)))
            assert data.logical_shape(one[data.attribute][0]) in (shape, flat)


@pytest.mark.parametrize("name", [name for name, layout in LAYOUTS.items() if layout.scale_group != (0, 0)])
def test_scales_cover_their_groups(name: str) -> None:
    """Of a shape that needs no padding, there is one scale per group of elements and of rows that share none."""
    layout, shape = LAYOUTS[name], (512, 1024)
    rows, columns = layout.scale_group
    described = layout.describe(shape, True, False)
    scale = list(described.values())[1][0]
    assert math.prod(scale) == shape[0] * shape[1] // (rows * (columns or shape[1]))  # 0: of a whole row
