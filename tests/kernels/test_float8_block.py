"""128-block FP8 kernels: golden files, ragged shapes, scale rule at its edges, every kind of input on a GPU."""

from __future__ import annotations

import functools

import golden_vectors
import pytest
import torch
from reference.checks import assert_bitwise

from narrowcast import kernels
from narrowcast.formats import E4M3, E5M2
from narrowcast.reference import float8_block as reference

from .checks import DTYPES, SHAPES_2D, compare, grid, make

FORMATS = {"e4m3": E4M3, "e5m2": E5M2}
DIRECTIONS = [(True, True), (True, False), (False, True)]


def check(
    shape, kind, dtype, device, *, block_dim, fmt=E4M3, power_2=True, epsilon=0.0, directions=(True, True)
) -> None:
    options = dict(
        zip(("rowwise", "columnwise"), directions),
        fmt=fmt,
        block_dim=block_dim,
        power_2=power_2,
        epsilon=epsilon,
    )
    compare(
        functools.partial(kernels.float8_block.quantize, **options),
        functools.partial(reference.quantize, **options),
        make(kind, shape, dtype),
        device,
        f"{block_dim}-D blocks, power_2={power_2}, {kind}",
    )


@pytest.mark.parametrize("name", golden_vectors.names("fp8_block_"))
def test_golden(name: str, device: torch.device) -> None:
    golden = golden_vectors.load(name)
    buffers = kernels.float8_block.quantize(
        golden.input().to(device),
        FORMATS[golden.meta["format"]],
        rowwise=True,
        columnwise=True,
        block_dim=golden.meta["block_scaling_dim"],
        power_2=golden.meta["power_2_scale"],
        epsilon=golden.meta["amax_epsilon"],
    )
    for key, buffer in zip(
        ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv"), buffers, strict=True
    ):
        assert_bitwise(buffer, golden[key], key)


@pytest.mark.parametrize(
    "shape", [(1, 7), (7, 1), (33, 17), (3, 50, 7), (128, 128), (130, 136), (0, 8), (8, 0)], ids=str
)
@pytest.mark.parametrize("block_dim", [1, 2])
def test_ragged(shape: tuple[int, ...], block_dim: int, device: torch.device) -> None:
    for dtype, directions, kind in zip(DTYPES, DIRECTIONS, ("special", "wide", "tiny")):
        check(shape, kind, dtype, device, block_dim=block_dim, directions=directions)
    check(shape, "tiny", torch.bfloat16, device, block_dim=block_dim, fmt=E5M2, power_2=False)
    check(shape, "special", torch.float32, device, block_dim=block_dim, epsilon=0.5)
    check(shape, "special", torch.float16, device, block_dim=block_dim, power_2=False)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_power_of_two_scales_at_the_edges(fmt, device: torch.device) -> None:
    """Constant blocks at both sides of every significand that decides the exponent, for all exponents."""
    exponents = torch.arange(0, 255, dtype=torch.int32) << 23
    mantissas = torch.tensor([0, 1, 0x5FFFFF, 0x600000, 0x600001, 0x7FFFFF], dtype=torch.int32)
    amax = (exponents[:, None] + mantissas).view(torch.float32).flatten()
    x = amax[:, None].expand(-1, 2).contiguous()
    options = {"rowwise": True, "columnwise": False, "block_dim": 1, "power_2": True, "epsilon": 0.0}
    compare(
        functools.partial(kernels.float8_block.quantize, fmt=fmt, **options),
        functools.partial(reference.quantize, fmt=fmt, **options),
        x,
        device,
    )


def test_refuses(device: torch.device) -> None:
    options = {"rowwise": True, "columnwise": True, "power_2": True, "epsilon": 0.0}
    with pytest.raises(ValueError, match="block_dim is 3"):
        kernels.float8_block.quantize(torch.ones(4, 4, device=device), E4M3, block_dim=3, **options)
    with pytest.raises(ValueError, match="rank 2"):
        kernels.float8_block.quantize(torch.ones(4, device=device), E4M3, block_dim=1, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("block_dim", [1, 2])
def test_every_shape_and_kind(block_dim: int, device: torch.device) -> None:
    for i, (shape, kind, dtype) in enumerate(grid(SHAPES_2D)):
        fmt = (E4M3, E5M2)[i % 2]
        check(shape, kind, dtype, device, block_dim=block_dim, fmt=fmt)
        check(shape, kind, dtype, device, block_dim=block_dim, fmt=fmt, power_2=False)
        check(shape, kind, dtype, device, block_dim=block_dim, epsilon=0.25, directions=DIRECTIONS[i % 3])


@pytest.mark.gpu
def test_more_than_two_billion_elements(device: torch.device) -> None:
    if torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.skip("needs 12 GiB of free GPU memory")
    x = torch.empty(2**20 + 130, 2048, dtype=torch.bfloat16, device=device).normal_()
    options = {"rowwise": True, "columnwise": True, "block_dim": 1, "power_2": True, "epsilon": 0.0}
    actual = kernels.float8_block.quantize(x, E4M3, **options)
    tail = 2**20 - 128
    expected = reference.quantize(x[tail:].cpu(), E4M3, **options)
    assert_bitwise(actual[0][tail:], expected[0])
    assert_bitwise(actual[1][:, tail:], expected[1])
    assert_bitwise(actual[2][:, tail:], expected[2])
    assert_bitwise(actual[3][tail // 128 :], expected[3])
