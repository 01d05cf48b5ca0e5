"""The MX formats: golden files of MXFP8, ragged shapes against the zero-padded tensor, the NumPy oracle, specials."""

import math

import golden_vectors
import pytest
import torch
from torch import Tensor

from narrowcast.formats import E4M3, E5M2, ElementFormat, cdiv, round_up
from narrowcast.reference import mx

from .checks import (
    DTYPES,
    EMPTY_SHAPES,
    RAGGED_SHAPES,
    assert_bitwise,
    assert_fresh,
    awkward_layouts,
    normal,
    pad_to,
)

FORMATS = {"e4m3": E4M3, "e5m2": E5M2}


def both(x: Tensor, fmt: ElementFormat = E4M3, two_d: bool = False) -> list[Tensor]:
    return mx.quantize(x, fmt, rowwise=True, columnwise=True, two_d=two_d)


def decode(
    buffers: list[Tensor], fmt: ElementFormat = E4M3, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    return [
        mx.dequantize_rowwise(buffers[0], buffers[1], fmt, dtype),
        mx.dequantize_columnwise(buffers[2], buffers[3], fmt, dtype),
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", golden_vectors.names("mxfp8"))
def test_golden(name: str, dtype: torch.dtype, device: torch.device) -> None:
    golden = golden_vectors.load(name)
    fmt = FORMATS[golden.meta["format"]]
    outputs = both(golden["x"].to(device, dtype), fmt, golden.meta["two_d"])
    values = decode(outputs, fmt)
    for index, side in enumerate(("rowwise", "columnwise")):
        assert_bitwise(outputs[2 * index].cpu(), golden[f"{side}_data"])
        assert_bitwise(outputs[2 * index + 1].cpu(), golden[f"{side}_scale_inv"])
        assert_bitwise(values[index].cpu(), golden[f"dequant_{side}"])


@pytest.mark.parametrize("two_d", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", RAGGED_SHAPES)
def test_ragged_equals_zero_padded(shape: tuple[int, ...], dtype: torch.dtype, two_d: bool) -> None:
    x = normal(shape, dtype)
    m, k = math.prod(shape[:-1]), shape[-1]
    outputs, padded = both(x, two_d=two_d), both(pad_to(x, 32), two_d=two_d)
    assert outputs[0].shape == outputs[2].shape == shape
    for data, expected in ((outputs[0], padded[0]), (outputs[2], padded[2])):
        assert torch.equal(data.view(m, k), expected[:m, :k])
    valid = [(m, cdiv(k, 32)), (cdiv(m, 32), k)]
    full = [(round_up(m, 128), round_up(cdiv(k, 32), 4)), (round_up(cdiv(m, 32), 4), round_up(k, 128))]
    for scales, expected, (rows, columns), shape_of_buffer in zip(
        (outputs[1], outputs[3]), (padded[1], padded[3]), valid, full, strict=True
    ):
        assert scales.shape == shape_of_buffer
        assert torch.equal(scales[:rows, :columns], expected[:rows, :columns])
        assert scales.sum() == scales[:rows, :columns].sum(), "the padding is not zero"
    for values, expected in zip(decode(outputs, dtype=dtype), decode(padded, dtype=dtype), strict=True):
        assert values.is_contiguous()
        assert_bitwise(values.view(m, k), expected[:m, :k].contiguous())


@pytest.mark.parametrize("two_d", [False, True])
@pytest.mark.parametrize("std", [1e-30, 1.0, 1e30])
def test_random_data_as_the_oracle(std: float, two_d: bool) -> None:
    oracle = golden_vectors.oracle()
    x = normal((96, 160), torch.float32, std=std)
    for fmt in (E4M3, E5M2):
        expected = oracle.mxfp8(x.numpy(), fmt.name, two_d)
        outputs = both(x, fmt, two_d)
        for index, side in enumerate(("rowwise", "columnwise")):
            assert_bitwise(outputs[2 * index], torch.from_numpy(expected[f"{side}_data"]))
            assert_bitwise(outputs[2 * index + 1], torch.from_numpy(expected[f"{side}_scale_inv"]))


@pytest.mark.parametrize("two_d", [False, True])
@pytest.mark.parametrize("shape", [(16, 32), (33, 7), (1, 32), (2, 3, 5), (128, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_usages_strides_and_aliasing(shape: tuple[int, ...], dtype: torch.dtype, two_d: bool) -> None:
    x = normal(shape, dtype)
    kept = x.clone()
    everything = both(x, two_d=two_d)
    for rowwise, columnwise in ((True, False), (False, True), (True, True), (False, False)):
        outputs = mx.quantize(x, E4M3, rowwise=rowwise, columnwise=columnwise, two_d=two_d)
        expected = everything[:2] * rowwise + everything[2:] * columnwise
        assert len(outputs) == len(expected)
        for actual, reference in zip(outputs, expected, strict=True):
            assert_bitwise(actual, reference)
        assert_fresh(outputs, [x])
    for layout, y in awkward_layouts(x).items():
        for actual, reference in zip(both(y, two_d=two_d), everything, strict=True):
            assert_bitwise(actual, reference, layout)
    assert_bitwise(x, kept)


def test_both_directions_of_a_tile_hold_the_same_codes() -> None:
    row, row_scale, column, column_scale = both(normal((64, 96), torch.float32), two_d=True)
    assert torch.equal(row, column)
    assert torch.equal(row_scale[:64:32, :3], column_scale[:2, :96:32])
    assert torch.equal(row_scale[:32, :3], row_scale[:1, :3].expand(32, 3))


@pytest.mark.parametrize("two_d", [False, True])
@pytest.mark.parametrize("shape", EMPTY_SHAPES)
def test_empty(shape: tuple[int, ...], two_d: bool) -> None:
    m, k = math.prod(shape[:-1]), shape[-1]
    outputs = both(torch.empty(shape, dtype=torch.bfloat16), two_d=two_d)
    assert outputs[0].shape == outputs[2].shape == shape
    assert outputs[1].shape == (round_up(m, 128), round_up(cdiv(k, 32), 4))
    assert outputs[3].shape == (round_up(cdiv(m, 32), 4), round_up(k, 128))
    assert outputs[1].sum() == outputs[3].sum() == 0
    assert [values.shape for values in decode(outputs)] == [shape, shape]


def test_nan_stays_one_nan_and_infinity_saturates(device: torch.device) -> None:
    x = torch.ones(32, 64, device=device)
    x[3, 5], x[7, 40] = math.nan, -math.inf
    outputs = both(x)
    assert outputs[0][3, 5] == outputs[2][3, 5] == 0x7F
    rowwise, columnwise = decode(outputs)
    assert rowwise.isnan().sum() == columnwise.isnan().sum() == 1
    assert rowwise[3, :5].eq(1).all()
    assert outputs[1][7, 1] == outputs[3][0, 40] == 254
    assert rowwise[7, 40] == -math.inf  # 448 * 2**127 leaves fp32
    assert outputs[0][7, 40] == outputs[2][7, 40] == 0xFE


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="rank 2 or more"):
        both(torch.ones(32))
    with pytest.raises(TypeError, match=r"torch\.int32; use float32, bfloat16 or float16"):
        both(torch.ones(32, 32, dtype=torch.int32))
