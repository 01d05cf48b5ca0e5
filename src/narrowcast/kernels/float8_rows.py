"""FP8 with one scale per row, or per group of a row's elements: each is read once, or twice if it is long."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats import ElementFormat, cdiv, round_up
from .codecs import fp8_code, magnitude, product, reciprocal, round_to_dtype, to_float32
from .launch import INTERPRETING, Launcher, check_input

TILE = 4096
"""Elements of a program's tile."""
LONGEST = 2048
"""Of a row's elements, at most as many in one tile."""
TRANSPOSED = 64
"""The same where adjacent rows lie beside each other in memory."""


@triton.jit
def _scales(
    amax, epsilon, smallest, RULE: tl.constexpr, FP8_MAX: tl.constexpr, RECIPROCAL: tl.constexpr, EMULATE: tl.constexpr
):  # fmt: skip
    """Return decoding scales, and what elements are multiplied with, or divided by where the rule divides."""
    epsilon = tl.cast(epsilon, tl.float32)  # a graph passes floats in double
    smallest = tl.cast(smallest, tl.float32)
    largest = tl.full(amax.shape, FP8_MAX, tl.float32)
    amax = tl.maximum(tl.maximum(amax, 0.0), epsilon)
    if RULE == "factors" or RULE == "product":
        scale_inv = product(amax, tl.full(amax.shape, RECIPROCAL, tl.float32), EMULATE)
    elif RULE == "triton":
        scale_inv = amax / FP8_MAX
    else:
        scale_inv = tl.div_rn(amax, largest)
    if RULE == "bfloat16":
        scale_inv = to_float32(round_to_dtype(scale_inv, tl.bfloat16, EMULATE), EMULATE)
    scale_inv = tl.maximum(scale_inv, smallest)
    scale_inv = tl.where(amax == 0.0, tl.where(smallest == 0.0, 1.0, smallest), scale_inv)
    if RULE == "reciprocal":
        return scale_inv, reciprocal(scale_inv, EMULATE)
    if RULE == "factors":
        return scale_inv, tl.where(amax == 0.0, 1.0, tl.div_rn(largest, amax))
    return scale_inv, scale_inv


@triton.jit
def _codes(x, factor, RULE: tl.constexpr, E5M2: tl.constexpr, EMULATE: tl.constexpr):
    wide = to_float32(x, EMULATE)
    factors = tl.broadcast_to(factor[:, None], wide.shape)
    if RULE == "reciprocal" or RULE == "factors":
        scaled = wide * factors
    elif RULE == "triton":
        scaled = wide / factors
    else:
        scaled = tl.div_rn(wide, factors)
    if RULE == "bfloat16":
        scaled = to_float32(round_to_dtype(scaled, tl.bfloat16, EMULATE), EMULATE)
    return fp8_code(scaled, E5M2, EMULATE)


@triton.jit(do_not_specialize=["M"])
def _float8_rows_kernel(
    x_ptr,
    codes_ptr,
    scale_ptr,
    M,
    K,
    x_row,
    x_column,
    padded_rows,
    size,
    epsilon,
    smallest,
    RULE: tl.constexpr,
    E5M2: tl.constexpr,
    FP8_MAX: tl.constexpr,
    RECIPROCAL: tl.constexpr,
    ONCE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EMULATE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    group = tl.program_id(1)
    start = group * size
    left = tl.minimum(K - start, size)
    index = tl.arange(0, COLUMNS)
    offsets = row[:, None] * K + (start + index)[None, :]
    x_ptr += start.to(tl.int64) * x_column
    x_offsets = row[:, None] * x_row + index.to(tl.int64)[None, :] * x_column
    largest = tl.zeros([ROWS], tl.float32)
    if ONCE:
        inside = (row < M)[:, None] & (index < left)[None, :]
        x = tl.load(x_ptr + x_offsets, mask=inside, other=0.0)
        largest = tl.max(magnitude(x, EMULATE), axis=1)
    else:
        for at in tl.range(0, size, COLUMNS):  # long groups are whole rows
            inside = (row < M)[:, None] & (index < left - at)[None, :]
            part = tl.load(x_ptr + x_offsets + at * x_column, mask=inside, other=0.0)
            largest = tl.maximum(largest, tl.max(magnitude(part, EMULATE), axis=1))
    scale_inv, factor = _scales(largest, epsilon, smallest, RULE, FP8_MAX, RECIPROCAL, EMULATE)
    # the scales of rows that are not there are the padding of the buffer
    target = scale_ptr + group.to(tl.int64) * padded_rows + row
    tl.store(target, tl.where(row < M, scale_inv, 0.0), mask=row < padded_rows)
    if ONCE:
        inside = (row < M)[:, None] & (index < left)[None, :]
        tl.store(codes_ptr + offsets, _codes(x, factor, RULE, E5M2, EMULATE), mask=inside)
    else:
        for at in tl.range(0, size, COLUMNS):  # long groups are whole rows
            inside = (row < M)[:, None] & (index < left - at)[None, :]
            part = tl.load(x_ptr + x_offsets + at * x_column, mask=inside, other=0.0)
            tl.store(codes_ptr + offsets + at, _codes(part, factor, RULE, E5M2, EMULATE), mask=inside)


_quantize = Launcher(_float8_rows_kernel, num_warps=4)


def quantize(
    x: Tensor,
    fmt: ElementFormat,
    *,
    rule: str,
    epsilon: float = 0.0,
    smallest: float = 0.0,
    group: int = 0,
    alignment: int = 1,
) -> list[Tensor]:
    """Compute ``reference.float8_rows.quantize``.

    Raises:
        TypeError: another dtype.
        ValueError: a tensor the kernel cannot reach, or rank below 2.
    """
    check_input(x, 2)
    M, K = math.prod(x.shape[:-1]), x.shape[-1]
    transposed = x.dim() == 2 and x.stride(0) == 1 and not x.is_contiguous()
    x = x if transposed else x.contiguous()
    strides = (1, x.stride(1)) if transposed else (K, 1)
    size = group or max(K, 1)
    groups, padded_rows = cdiv(K, size) if group else 1, round_up(M, alignment)
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    scale_inv = torch.empty((groups, padded_rows), dtype=torch.float32, device=x.device)
    if scale_inv.numel():
        columns = min(triton.next_power_of_2(size), TRANSPOSED if transposed else LONGEST)
        rows = TILE // columns
        _quantize(
            (cdiv(padded_rows, rows), groups, 1),
            (x, codes, scale_inv, M, K, *strides, padded_rows, size, epsilon, smallest),
            (
                rule, fmt.name == "e5m2", fmt.max, fmt.max_reciprocal, size <= columns, rows, columns, INTERPRETING,
            ),
        )  # fmt: skip
    return [codes, scale_inv]
