"""FP8 block scaling: golden files, ragged shapes against the zero-padded tensor, the NumPy oracle, specials."""

import math

import golden_vectors
import pytest
import torch
from torch import Tensor

from narrowcast.formats import BF16_MAX, E2M1, E4M3, E5M2, ElementFormat, cdiv, round_up
from narrowcast.reference import float8_block

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
ORACLE_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def both(
    x: Tensor,
    fmt: ElementFormat = E4M3,
    *,
    block_dim: int = 1,
    power_2: bool = True,
    epsilon: float = 0.0,
    rowwise: bool = True,
    columnwise: bool = True,
) -> list[Tensor]:
    return float8_block.quantize(
        x,
        fmt,
        rowwise=rowwise,
        columnwise=columnwise,
        block_dim=block_dim,
        power_2=power_2,
        epsilon=epsilon,
    )


def decode(
    buffers: list[Tensor], block_dim: int, dtype: torch.dtype, fmt: ElementFormat = E4M3
) -> list[Tensor]:
    return [
        float8_block.dequantize_rowwise(buffers[0], buffers[1], fmt, dtype, two_d=block_dim == 2),
        float8_block.dequantize_columnwise(buffers[2], buffers[3], fmt, dtype, two_d=block_dim == 2),
    ]


def scale_shapes(m: int, k: int, block_dim: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Valid and full shapes of the two scale buffers."""
    mb, kb = cdiv(m, 128), cdiv(k, 128)
    if block_dim == 2:
        return [(mb, kb), (kb, mb)], [(mb, round_up(kb, 4)), (kb, round_up(mb, 4))]
    return [(kb, m), (mb, k)], [(kb, round_up(m, 4)), (mb, round_up(k, 4))]


@pytest.mark.parametrize("name", golden_vectors.names("fp8_block"))
def test_golden(name: str, device: torch.device) -> None:
    golden = golden_vectors.load(name)
    meta, fmt = golden.meta, FORMATS[golden.meta["format"]]
    outputs = both(
        golden.input().to(device),
        fmt,
        block_dim=meta["block_scaling_dim"],
        power_2=meta["power_2_scale"],
        epsilon=meta["amax_epsilon"],
    )
    values = decode(outputs, meta["block_scaling_dim"], torch.float32, fmt)
    for index, side in enumerate(("rowwise", "columnwise")):
        assert_bitwise(outputs[2 * index].cpu(), golden[f"{side}_data"])
        assert_bitwise(outputs[2 * index + 1].cpu(), golden[f"{side}_scale_inv"])
        assert_bitwise(values[index].cpu(), golden[f"dequant_{side}"])


@pytest.mark.parametrize("block_dim", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [*RAGGED_SHAPES, (3, 43, 257)])
def test_ragged_equals_zero_padded(shape: tuple[int, ...], dtype: torch.dtype, block_dim: int) -> None:
    x = normal(shape, dtype)
    m, k = math.prod(shape[:-1]), shape[-1]
    outputs = both(x, block_dim=block_dim, power_2=False)
    padded = both(pad_to(x, 128), block_dim=block_dim, power_2=False)
    assert outputs[0].shape == shape
    assert outputs[2].shape == (k, *shape[:-1])
    assert torch.equal(outputs[0].view(m, k), padded[0][:m, :k])
    assert torch.equal(outputs[2].view(k, m), padded[2][:k, :m])
    valid, full = scale_shapes(m, k, block_dim)
    for scales, expected, (rows, columns), whole in zip(
        outputs[1::2], padded[1::2], valid, full, strict=True
    ):
        assert scales.shape == whole
        assert torch.equal(scales[:rows, :columns], expected[:rows, :columns])
        assert scales[:, columns:].eq(0).all()
    expected_values = decode(padded, block_dim, dtype)
    for values, expected in zip(decode(outputs, block_dim, dtype), expected_values, strict=True):
        assert values.shape == shape
        assert values.is_contiguous()
        assert_bitwise(values.view(m, k), expected[:m, :k].contiguous())


@pytest.mark.parametrize("power_2", [True, False])
@pytest.mark.parametrize("block_dim", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_random_data_as_the_oracle(dtype: torch.dtype, block_dim: int, power_2: bool) -> None:
    oracle = golden_vectors.oracle()
    x = normal((137, 203), dtype, std=0.01)
    for fmt, epsilon in ((E4M3, 0.0), (E5M2, 0.03)):
        expected = oracle.fp8_block(
            x.float().numpy(), fmt.name, block_dim, power_2, epsilon, ORACLE_DTYPES[dtype]
        )
        outputs = both(x, fmt, block_dim=block_dim, power_2=power_2, epsilon=epsilon)
        for index, side in enumerate(("rowwise", "columnwise")):
            assert_bitwise(outputs[2 * index], torch.from_numpy(expected[f"{side}_data"]))
            assert_bitwise(outputs[2 * index + 1], torch.from_numpy(expected[f"{side}_scale_inv"]))


@pytest.mark.parametrize("block_dim", [1, 2])
@pytest.mark.parametrize("shape", [(16, 32), (1, 128), (128, 1), (2, 3, 5), (128, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_usages_strides_and_aliasing(shape: tuple[int, ...], dtype: torch.dtype, block_dim: int) -> None:
    x = normal(shape, dtype)
    kept = x.clone()
    everything = both(x, block_dim=block_dim)
    for rowwise, columnwise in ((True, False), (False, True), (True, True), (False, False)):
        outputs = both(x, block_dim=block_dim, rowwise=rowwise, columnwise=columnwise)
        expected = everything[:2] * rowwise + everything[2:] * columnwise
        assert len(outputs) == len(expected)
        for actual, reference in zip(outputs, expected, strict=True):
            assert_bitwise(actual, reference)
        assert_fresh(outputs, [x])
    for layout, y in awkward_layouts(x).items():
        for actual, reference in zip(both(y, block_dim=block_dim), everything, strict=True):
            assert_bitwise(actual, reference, layout)
    assert_bitwise(x, kept)


@pytest.mark.parametrize("block_dim", [1, 2])
@pytest.mark.parametrize("shape", EMPTY_SHAPES)
def test_empty(shape: tuple[int, ...], block_dim: int) -> None:
    m, k = math.prod(shape[:-1]), shape[-1]
    outputs = both(torch.empty(shape, dtype=torch.bfloat16), block_dim=block_dim)
    assert outputs[0].shape == shape
    assert outputs[2].shape == (k, *shape[:-1])
    assert [scales.shape for scales in outputs[1::2]] == scale_shapes(m, k, block_dim)[1]
    assert [values.shape for values in decode(outputs, block_dim, torch.bfloat16)] == [shape, shape]


def test_both_directions_of_a_tile_hold_the_same_codes() -> None:
    row, row_scale, column, column_scale = both(normal((200, 300), torch.float32), block_dim=2)
    assert torch.equal(row.t(), column)
    assert torch.equal(row_scale[:, :3], column_scale[:, :2].t())


def test_overflow_takes_the_maximum_of_the_input_dtype() -> None:
    x = torch.full((1, 8), 2.0**-130)
    assert both(x.bfloat16(), power_2=False)[1][0, 0].item() == torch.tensor(1.0) / torch.tensor(BF16_MAX)
    assert both(x, power_2=False)[1][0, 0].item() == torch.tensor(1.0) / torch.finfo(torch.float32).max


@pytest.mark.parametrize("block_dim", [1, 2])
@pytest.mark.parametrize("power_2", [True, False])
def test_nan_stays_one_nan_and_infinity_poisons_its_block(
    block_dim: int, power_2: bool, device: torch.device
) -> None:
    x = torch.ones(128, 256, device=device)
    x[3, 5], x[7, 200] = math.nan, -math.inf
    outputs = both(x, block_dim=block_dim, power_2=power_2)
    rowwise, columnwise = decode(outputs, block_dim, torch.float32)
    assert outputs[0][3, 5] == outputs[2][5, 3] == 0x7F
    assert rowwise[:, :128].isnan().sum() == columnwise[:, :128].isnan().sum() == 1
    lost = torch.zeros(128, 256, dtype=torch.bool, device=device)
    lost[3, 5] = True
    lost[7 if block_dim == 1 else slice(None), 128:] = True
    assert torch.equal(rowwise.isnan(), lost)
    lost[:, 128:] = block_dim == 2
    lost[:, 200] = True
    assert torch.equal(columnwise.isnan(), lost)


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="rank 2 or more"):
        both(torch.ones(32))
    with pytest.raises(ValueError, match="block_dim is 3; use 1"):
        both(torch.ones(32, 32), block_dim=3)
    with pytest.raises(TypeError, match=r"torch\.float64; use float32, bfloat16 or float16"):
        both(torch.ones(32, 32, dtype=torch.float64))
    with pytest.raises(ValueError, match="e2m1 has no one-byte torch dtype"):
        both(torch.ones(32, 32), E2M1)
