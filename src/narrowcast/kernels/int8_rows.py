"""Int8 codes of rows: one pass over the values each way. A program has some whole rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats import cdiv
from .codecs import round_to_dtype, to_float32
from .launch import Launcher, check_device, check_input

ELEMENTS = 4096
LONGEST = 4096
"""Elements of the longest row that one program takes."""


@triton.jit
def _places(rows, K, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Return this program's rows, where their elements are, and which of these exist."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    return row, row[:, None] * K + column[None, :], (row < rows)[:, None] & (column < K)[None, :]


@triton.jit
def _int8_rows_encode_kernel(x_ptr, codes_ptr, scales_ptr, rows, K, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row, at, inside = _places(rows, K, ROWS, BLOCK)
    x = to_float32(tl.load(x_ptr + at, mask=inside, other=0.0))
    # as integers: a maximum of numbers ignores NaN
    bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1, keep_dims=True)
    top = bits.to(tl.float32, bitcast=True)
    scale = tl.div_rn(top, tl.full(top.shape, 127.0, tl.float32))
    usable = (scale > 0.0) & ((scale.to(tl.int32, bitcast=True) & 0x7F800000) != 0x7F800000)
    divisor = tl.where(usable, scale, 1.0)
    quotient = tl.div_rn(tl.where(usable, x, 0.0), divisor + tl.zeros(x.shape, tl.float32))
    quotient = tl.minimum(tl.maximum(quotient, -127.0), 127.0)
    whole = (quotient + 12582912.0) - 12582912.0  # 1.5 * 2**23: rounds to even
    tl.store(codes_ptr + at, whole.to(tl.int8), mask=inside)
    tl.store(scales_ptr + row[:, None], scale, mask=(row < rows)[:, None])


@triton.jit
def _int8_rows_decode_kernel(
    codes_ptr, scales_ptr, out_ptr, rows, K, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    row, at, inside = _places(rows, K, ROWS, BLOCK)
    codes = tl.load(codes_ptr + at, mask=inside, other=0).to(tl.float32)
    scale = tl.load(scales_ptr + row[:, None], mask=(row < rows)[:, None], other=0.0)
    tl.store(out_ptr + at, round_to_dtype(codes * scale, out_ptr.dtype.element_ty), mask=inside)


_encode = Launcher(_int8_rows_encode_kernel, num_warps=4)
_decode = Launcher(_int8_rows_decode_kernel, num_warps=4)


def encode(x: Tensor) -> list[Tensor]:
    """Compute ``reference.int8_rows.encode``.

    Raises:
        ValueError: a row is longer than ``LONGEST``, or ``check_input`` refuses.
    """
    check_input(x, 1)
    if x.shape[-1] > LONGEST:
        raise ValueError(f"rows of {x.shape[-1]} elements; use at most {LONGEST}")
    x = x.contiguous()
    codes = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    scales = torch.zeros((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
    if x.numel():
        grid, sizes, tile = _plan(x)
        _encode(grid, (x, codes, scales, *sizes), tile)
    return [codes, scales]


def decode(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute ``reference.int8_rows.decode``."""
    check_device(codes)
    codes = codes.contiguous()
    out = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    if codes.numel():
        grid, sizes, tile = _plan(codes)
        _decode(grid, (codes, scales.contiguous(), out, *sizes), tile)
    return out


def _plan(x: Tensor) -> tuple[tuple[int, int, int], tuple[int, int], tuple[int, int, bool]]:
    """Return grid, sizes and constants of a launch."""
    K = x.shape[-1]
    rows, block = x.numel() // K, triton.next_power_of_2(K)
    at_once = max(1, ELEMENTS // block)
    return (cdiv(rows, at_once), 1, 1), (rows, K), (at_once, block)
