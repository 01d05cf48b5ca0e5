"""The accumulating FP8 GEMMs against fp64 products of the same codes."""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata

import pytest
import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from narrowcast.formats import cdiv, round_up
from narrowcast.testing import assert_within_magnitude

from .conftest import HAS_TRITON, INTERPRETING

if HAS_TRITON:
    from narrowcast.kernels import gemm

pytestmark = pytest.mark.skipif(
    INTERPRETING and TorchVersion(metadata.version("triton")) < "3.7",
    reason="the interpreter of triton before 3.7 cannot loop over a run-time range under numpy 2.4 and newer",
)

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# several tiles per program, ragged in every dimension, fewer than one tile
SIZES = [(1, 1, 1), (5, 7, 9), (130, 140, 300), (257, 300, 128), (128, 128, 256)]
SUM_ORDER = 2.0**-20 if INTERPRETING else 2.0**-9


def codes(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(rows, columns).to(dtype).to(device)


def block_scales(rows: int, depth: int, device: torch.device) -> Tensor:
    """As the quantizer stores them, transposed."""
    return torch.rand(cdiv(depth, 128), round_up(rows, 4), device=device).t()


def scaled(data: Tensor, scale: Tensor) -> Tensor:
    """What the codes stand for, in fp64."""
    if scale.numel() > 1 or scale.dim() == 2:
        scale = scale[: data.shape[0]].repeat_interleave(128, dim=1)[:, : data.shape[1]]
    return data.double() * scale.double()


def check(
    run: Callable[..., None], out: Tensor, operands: tuple[Tensor, Tensor, Tensor, Tensor], fast: bool
) -> None:
    left, right = scaled(*operands[:2])[: out.shape[0]], scaled(*operands[2:])[: out.shape[1]]
    expected = out.double() + left @ right.t()
    magnitude = out.double().abs() + left.abs() @ right.abs().t()
    run(out, *operands, fast_accumulation=fast)
    assert_within_magnitude(out, expected, magnitude, 4 * SUM_ORDER if fast else SUM_ORDER)


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("elements", [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)], ids=str)
@pytest.mark.parametrize(("m", "n", "k"), SIZES)
def test_per_tensor(
    m: int, n: int, k: int, elements: tuple[torch.dtype, torch.dtype], dtype: torch.dtype, fast: bool,
    device: torch.device,
) -> None:  # fmt: skip
    scales = torch.tensor([0.37], device=device), torch.tensor([1.7], device=device)
    operands = (codes(m, k, elements[0], device), scales[0], codes(n, k, elements[1], device), scales[1])
    check(gemm.accumulate_, torch.randn(m, n, device=device).to(dtype), operands, fast)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("elements", [(E4M3, E4M3), (E5M2, E4M3)], ids=str)
@pytest.mark.parametrize(("m", "n", "k"), SIZES)
def test_block(
    m: int, n: int, k: int, elements: tuple[torch.dtype, torch.dtype], dtype: torch.dtype,
    device: torch.device,
) -> None:  # fmt: skip
    operands = (
        codes(m, k, elements[0], device),
        block_scales(m, k, device),
        codes(n, k, elements[1], device),
        block_scales(n, k, device),
    )
    check(gemm.accumulate_block_, torch.randn(m, n, device=device).to(dtype), operands, False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_part_of_a_buffer_and_longer_operands(dtype: torch.dtype, device: torch.device) -> None:
    one = torch.ones(1, device=device)
    operands = (codes(40, 64, E4M3, device), one, codes(50, 64, E4M3, device), one)
    buffer = torch.full((45, 60), 3.0, device=device, dtype=dtype)
    part = buffer[3:41, 5:53]
    check(gemm.accumulate_, part, operands, False)
    part.fill_(3.0)
    assert bool((buffer == 3.0).all())


@pytest.mark.parametrize(("m", "n", "k"), [(0, 8, 16), (8, 0, 16), (8, 8, 0)])
def test_nothing_to_add(m: int, n: int, k: int, device: torch.device) -> None:
    one, out = torch.ones(1, device=device), torch.ones(m, n, device=device)
    left, right = codes(m, k, E4M3, device), codes(n, k, E4M3, device)
    gemm.accumulate_(out, left, one, right, one, fast_accumulation=False)
    gemm.accumulate_block_(out, left, block_scales(m, k, device), right, block_scales(n, k, device))
    assert bool((out == 1.0).all())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda out, a, b: (out.half(), a, b), "out is torch.float16"),
        (lambda out, a, b: (out.t(), a, b), "out has shape .* contiguous rows"),
        (lambda out, a, b: (out, a.view(torch.uint8), b), "left is torch.uint8"),
        (lambda out, a, b: (out, a, b[:5]), r"right has shape \(5, 16\) .* at least 12 rows"),
        (lambda out, a, b: (out, a[:, ::2], b), "left has shape .* contiguous matrix"),
        (lambda out, a, b: (out, a, b[:, :8].contiguous()), "over 16 and 8 elements"),
    ],
)
def test_refused(
    change: Callable[..., tuple[Tensor, Tensor, Tensor]], named: str, device: torch.device
) -> None:
    one = torch.ones(1, device=device)
    out, left, right = change(
        torch.zeros(10, 12, device=device), codes(10, 16, E4M3, device), codes(12, 16, E4M3, device)
    )
    with pytest.raises(ValueError, match=named):
        gemm.accumulate_(out, left, one, right, one, fast_accumulation=False)


def test_block_scales_in_another_layout_are_refused(device: torch.device) -> None:
    out, data = torch.zeros(8, 8, device=device), codes(8, 256, E4M3, device)
    good = block_scales(8, 256, device)
    for bad in (good.contiguous(), good[:, :1], good[0]):
        with pytest.raises(ValueError, match="right_scale has shape .* 2 blocks"):
            gemm.accumulate_block_(out, data, good, data, bad)
