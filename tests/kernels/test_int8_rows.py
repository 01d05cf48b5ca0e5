"""Int8 codes of rows: kernel and reference are equal to the bit, and what a row loses."""

from __future__ import annotations

import pytest
import torch

from narrowcast.reference import int8_rows as reference
from narrowcast.testing import relative_error

from .conftest import HAS_TRITON

if HAS_TRITON:
    from narrowcast.kernels import int8_rows as kernel

needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="needs triton")


def values(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Rows of many sizes, with a zero row, ties, values that are not finite and a tiny row."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))
    x = x * torch.logspace(-6, 4, x[..., 0].numel()).view(*shape[:-1], 1)
    rows = x.view(-1, shape[-1])
    rows[0] = 0.0
    rows[1] = torch.arange(shape[-1]) % 64 + 0.5
    rows[1, 0] = 127.0
    rows[2, 1], rows[3, 0], rows[4, 0] = float("nan"), float("inf"), -float("inf")
    if dtype != torch.float16:
        rows[5] = rows[5].sign() * 2.0**-126
    return x.to(dtype)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(7, 80), (3, 5, 3, 128), (9, 257)], ids=str)
def test_kernel_and_reference_are_equal(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    x = values(shape, dtype)
    expected, made = reference.encode(x), kernel.encode(x.to(device))
    for ours, theirs in zip(made, expected, strict=True):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
        assert torch.equal(ours.cpu().nan_to_num(7.0), theirs.nan_to_num(7.0))
    decoded = reference.decode(expected[0], expected[1], dtype)
    assert torch.equal(kernel.decode(made[0], made[1], dtype).cpu().nan_to_num(7.0), decoded.nan_to_num(7.0))


def test_a_row_loses_a_fourth_of_what_e4m3_loses() -> None:
    x = values((64, 128), torch.float32)
    codes, scales = reference.encode(x)
    decoded = reference.decode(codes, scales, torch.float32)
    assert torch.equal(decoded[0], x[0])
    assert decoded[2:5].isnan().all()  # not silently finite
    finite = x[6:]
    assert relative_error(decoded[6:], finite) < 0.01
    step = finite.abs().amax(1, keepdim=True) / 127
    assert bool(((decoded[6:] - finite).abs() <= step * 0.5001).all())
    of_e4m3 = finite.abs().amax(1, keepdim=True) / 448
    e4m3 = (finite / of_e4m3).to(torch.float8_e4m3fn).float() * of_e4m3
    assert relative_error(decoded[6:], finite) < relative_error(e4m3, finite) / 3


@needs_triton
def test_rows_that_are_too_long_are_refused(device: torch.device) -> None:
    x = torch.zeros(1, kernel.LONGEST + 1, device=device)
    with pytest.raises(ValueError, match="rows of 4097 elements; use at most 4096"):
        kernel.encode(x)
    codes, scales = kernel.encode(x[:0, :9])
    assert codes.shape == (0, 9) and scales.shape == (0, 1)
    assert kernel.decode(codes, scales, torch.bfloat16).shape == (0, 9)
