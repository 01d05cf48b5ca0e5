"""A few rows, quantized on their way into the product with an FP8 weight.

Such a GEMM reads the weight once and little else, so its time is that of the weight's bytes, and that of launches.
Every program quantizes the rows that it reads itself. The scale of a whole tensor needs the amax of all rows: up to
``SMALL`` elements every program finds it, out of L2; more get a launch that leaves partial maxima.

``_one_row_kernel`` multiplies without tensor cores, which would compute 15 rows of zeros: a thread sums the products
of 16 codes at a time. ``_few_rows_kernel`` has rows of the weight as the tall side of the tensor cores' tile and rows
of the input as the narrow one. Where a weight has too few rows for all multiprocessors, the contraction is split, and
``_sum_kernel`` adds the parts in order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats import FLOAT8_BLOCK, FLT_MAX, cdiv
from .codecs import EMULATE, decode_fp8, fp8_code, magnitude, round_to_dtype, scaled_float32, to_float32
from .float8 import amax_parts, largest_magnitude
from .float8_block import block_scales
from .launch import TENSOR, Launch, Launcher, beside, check_device, check_input, contiguous, remembered
from .scaling import OVERFLOW_BY_DTYPE, scale_from_amax, scale_or_first

SMALL = 1 << 16
"""Elements up to which every program finds the amax of all rows itself."""
AMAX_BLOCK = 8192  # at most, at once
_BLOCK = tl.constexpr(FLOAT8_BLOCK)


@triton.jit
def _scale_of_all(
    scale_ptr,
    x_ptr,
    n,
    partials,
    epsilon,
    unseen,
    slot,
    SCALING: tl.constexpr,
    POWER_2: tl.constexpr,
    OVERFLOW: tl.constexpr,
    PARTIALS: tl.constexpr,
    AMAX_BLOCK: tl.constexpr,
):
    """Return the encoding scale of the whole tensor: given, or from its amax; 1 if each block has its own.

    "first": given, or from the amax if it is 0.
    """
    if SCALING == "given":
        scale = tl.load(scale_ptr + slot)
        return tl.where(scale == 0.0, tl.cast(unseen, tl.float32), scale)
    elif SCALING == "first":
        scale = tl.load(scale_ptr + slot)
        if scale == 0.0:
            start = tl.full([], 0, tl.int32)
            largest = largest_magnitude(x_ptr, start, AMAX_BLOCK, n, AMAX_BLOCK)
            scale = scale_or_first(scale, unseen, tl.maximum(largest, 0.0))
        return scale
    elif SCALING == "current":
        if PARTIALS == 0:
            start = tl.full([], 0, tl.int32)
            largest = largest_magnitude(x_ptr, start, AMAX_BLOCK, n, AMAX_BLOCK)
        else:
            index = tl.arange(0, PARTIALS)
            largest = tl.max(tl.load(scale_ptr + index, mask=index < partials, other=0.0), axis=0)
        return scale_from_amax(tl.maximum(largest, 0.0), epsilon, 448.0, OVERFLOW, POWER_2)
    else:
        return 1.0


@triton.jit
def _store(out_ptr, place, total, bias_ptr, n, inside, BIAS: tl.constexpr):
    """Round fp32 sums and a bias of the output's dtype to it, and store them."""
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    if BIAS:
        bias = to_float32(tl.load(bias_ptr + n, mask=inside, other=0.0))
        total = total + to_float32(round_to_dtype(bias, DTYPE))
    tl.store(out_ptr + place, round_to_dtype(total, DTYPE), mask=inside)


@triton.jit(
    do_not_specialize=["partials", "slot"], do_not_specialize_on_alignment=["scale_ptr", "weight_scale_ptr"]
)
def _one_row_kernel(
    x_ptr,
    scale_ptr,
    codes_ptr,
    weight_scale_ptr,
    bias_ptr,
    out_ptr,
    N,
    K,
    row_stride,
    block_stride,
    partials,
    epsilon,
    unseen,
    slot,
    SCALING: tl.constexpr,
    POWER_2: tl.constexpr,
    EPSILON: tl.constexpr,
    OVERFLOW: tl.constexpr,
    PARTIALS: tl.constexpr,
    AMAX_BLOCK: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE_K: tl.constexpr,
):
    first = tl.program_id(0) * ROWS  # of the rows of the weight, which lie in one block of its scales
    n = first + tl.arange(0, ROWS)
    inner = tl.arange(0, TILE_K)
    scale = _scale_of_all(
        scale_ptr,
        x_ptr,
        K,
        partials,
        epsilon,
        unseen,
        slot,
        SCALING,
        POWER_2,
        OVERFLOW,
        PARTIALS,
        AMAX_BLOCK,
    )
    total = tl.zeros([ROWS, TILE_K // 16], tl.float32)
    for step in range(0, K, TILE_K):
        k = step + inner
        place = n.to(tl.int64)[:, None] * K + k[None, :]
        codes = tl.load(codes_ptr + place, mask=(n < N)[:, None] & (k < K)[None, :], other=0)
        x = tl.load(x_ptr + k, mask=k < K, other=0.0)
        if SCALING == "1x128":
            x = tl.reshape(x, [TILE_K // _BLOCK, _BLOCK])
            amax = tl.max(magnitude(x), axis=1)
            scales, inverse = block_scales(amax, epsilon, 448.0, OVERFLOW, POWER_2, EPSILON)
            value = decode_fp8(fp8_code(to_float32(x) * scales[:, None], False), False)
            block = step // _BLOCK + tl.arange(0, TILE_K // _BLOCK)
            of_weight = weight_scale_ptr + first // _BLOCK * row_stride + block * block_stride
            inverse = inverse * tl.load(of_weight, mask=block * _BLOCK < K, other=0.0)
            value = tl.reshape(value * inverse[:, None], [TILE_K])
        else:
            value = decode_fp8(
                fp8_code(scaled_float32(x, scale, SCALING == "current"), False),
                False,
            )
        products = decode_fp8(codes, False) * value[None, :]
        total += tl.sum(tl.reshape(products, [ROWS, TILE_K // 16, 16]), axis=2)  # by each thread
    result = tl.sum(total, axis=1)
    if SCALING != "1x128":
        result = result * (tl.div_rn(1.0, scale) * tl.load(weight_scale_ptr))
    _store(out_ptr, n, result, bias_ptr, n, n < N, BIAS)


@triton.jit(
    do_not_specialize=["M", "partials", "slot"],
    do_not_specialize_on_alignment=["scale_ptr", "weight_scale_ptr"],
)
def _few_rows_kernel(
    x_ptr,
    scale_ptr,
    codes_ptr,
    weight_scale_ptr,
    bias_ptr,
    out_ptr,
    M,
    N,
    K,
    length,
    scale_stride,
    row_stride,
    block_stride,
    partials,
    epsilon,
    unseen,
    slot,
    SCALING: tl.constexpr,
    POWER_2: tl.constexpr,
    EPSILON: tl.constexpr,
    OVERFLOW: tl.constexpr,
    PARTIALS: tl.constexpr,
    AMAX_BLOCK: tl.constexpr,
    BIAS: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
):
    first = tl.program_id(0) * TILE_N
    n = first + tl.arange(0, TILE_N)
    m = tl.arange(0, ROWS)
    inner = tl.arange(0, TILE_K)
    scale = _scale_of_all(
        scale_ptr,
        x_ptr,
        M * K,
        partials,
        epsilon,
        unseen,
        slot,
        SCALING,
        POWER_2,
        OVERFLOW,
        PARTIALS,
        AMAX_BLOCK,
    )
    begin = tl.program_id(1) * length
    codes_at = codes_ptr + n.to(tl.int64)[:, None] * K + inner[None, :]
    x_at = x_ptr + m[:, None] * K + inner[None, :]
    total = tl.zeros([TILE_N, ROWS], tl.float32)
    for step in range(begin, tl.minimum(begin + length, K), TILE_K):
        there = step + inner < K
        codes = tl.load(codes_at + step, mask=(n < N)[:, None] & there[None, :], other=0)
        x = tl.load(x_at + step, mask=(m < M)[:, None] & there[None, :], other=0)
        if SCALING == "1x128":
            amax = tl.max(magnitude(x), axis=1)
            scales, inverse = block_scales(amax, epsilon, 448.0, OVERFLOW, POWER_2, EPSILON)
            own = fp8_code(to_float32(x) * scales[:, None], False)
        elif SCALING == "codes":
            own = x
            inverse = tl.load(scale_ptr + step // _BLOCK * scale_stride + m, mask=m < M, other=0.0)
        else:
            own = fp8_code(scaled_float32(x, scale, SCALING == "current"), False)
        if EMULATE:
            a, b = decode_fp8(codes, False), decode_fp8(own, False)
            part = tl.dot(a, tl.trans(b), input_precision="ieee")
        else:
            a, b = codes.to(tl.float8e4nv, bitcast=True), own.to(tl.float8e4nv, bitcast=True)
            part = tl.dot(a, tl.trans(b))
        if SCALING == "1x128" or SCALING == "codes":
            of_weight = weight_scale_ptr + first // _BLOCK * row_stride + step // _BLOCK * block_stride
            part = part * (inverse * tl.load(of_weight))[None, :]
        total += part
    if SCALING == "current" or SCALING == "given" or SCALING == "first":
        total = total * (tl.div_rn(1.0, scale) * tl.load(weight_scale_ptr))
    place = m[None, :] * N + n[:, None]
    inside = (m < M)[None, :] & (n < N)[:, None]
    if SPLIT:
        tl.store(out_ptr + tl.program_id(1) * M * N + place, total, mask=inside)
    else:
        _store(out_ptr, place, total, bias_ptr, n[:, None] + m[None, :] * 0, inside, BIAS)


@triton.jit
def _sum_kernel(
    parts_ptr,
    bias_ptr,
    out_ptr,
    n,
    N,
    BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(SPLITS):
        total += tl.load(parts_ptr + part * n + place, mask=place < n, other=0.0)
    _store(out_ptr, place, total, bias_ptr, place % N, place < n, BIAS)


ONE_ROW_TILE = (8, 2048)  # rows of the weight, elements of the contraction
TILE_N, TILE_K = 64, 128
SUM_BLOCK = 1024
PROGRAMS, PART = 256, 4  # at most so many, of so many tiles or more: parts are written and read once more

# Multiply-adds are allowed: no code depends on a sum, and what a graph launches has them, too.
_one_row = Launcher(_one_row_kernel, num_warps=4, enable_fp_fusion=True)
_few_rows = Launcher(_few_rows_kernel, num_warps=4, num_stages=4, enable_fp_fusion=True)
_sum = Launcher(_sum_kernel, num_warps=4)


def _splits(tiles: int, K: int) -> int:
    """Return into how many parts the contraction is split: 1, 2, 4 or 8, each of several tiles."""
    splits = 1
    while splits < 8 and tiles * splits * 2 <= PROGRAMS and K // (splits * 2) >= PART * TILE_K:
        splits *= 2
    return splits


@remembered
def _launches(
    M: int,
    N: int,
    K: int,
    dtype: torch.dtype,
    strides: tuple[int, int, int],
    bias: bool,
    scaling: str,
    slot: int,
    power_2: bool,
    epsilon: float,
    unseen: float,
    partials: int,
) -> tuple[int, Launch, Launch | None]:
    """Return the parts of the contraction, the launch that multiplies, and the one that adds the parts, if any."""
    given = scaling in ("given", "first", "codes") or partials > 0
    overflow = OVERFLOW_BY_DTYPE[str(dtype)] if scaling == "1x128" else FLT_MAX
    amax_block = min(max(triton.next_power_of_2(M * K), 512), AMAX_BLOCK)
    options = (
        scaling,
        power_2,
        epsilon > 0,
        overflow,
        partials and triton.next_power_of_2(partials),
        amax_block,
    )
    ends = [*strides[-2:], partials, epsilon, unseen, slot]
    operands = [TENSOR, TENSOR if given else None, TENSOR, TENSOR]
    if M == 1 and scaling != "codes":
        rows, tile = ONE_ROW_TILE
        arguments = [*operands, TENSOR if bias else None, TENSOR, N, K, *ends]
        constants = (*options, bias, rows, tile)
        return 1, Launch(_one_row, (cdiv(N, rows), 1, 1), arguments, constants), None
    rows, tiles = max(16, triton.next_power_of_2(M)), cdiv(N, TILE_N)
    splits = _splits(tiles, K)
    length = cdiv(cdiv(K, splits), TILE_K) * TILE_K
    joins = splits > 1
    arguments = [
        *operands,
        TENSOR if bias and not joins else None,
        TENSOR,
        M,
        N,
        K,
        length,
        strides[0],
        *ends,
    ]
    constants = (*options, bias and not joins, joins, rows, TILE_N, TILE_K)
    multiply = Launch(_few_rows, (tiles, splits, 1), arguments, constants)
    if not joins:
        return 1, multiply, None
    arguments = [TENSOR, TENSOR if bias else None, TENSOR, M * N, N]
    grid = cdiv(M * N, SUM_BLOCK), 1, 1
    return splits, multiply, Launch(_sum, grid, arguments, (bias, splits, SUM_BLOCK))


def matmul(
    x: Tensor,
    codes: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    *,
    scaling: str,
    scale: Tensor | None = None,
    slot: int = 0,
    power_2: bool = False,
    epsilon: float = 0.0,
    unseen: float = 0.0,
) -> Tensor:
    """Return ``quantized(x) @ weight.T + bias``, sums in fp32, rounded once.

    Args:
        x: (M, K), bf16, fp16 or fp32, up to 64 rows.
        codes: E4M3 codes of the weight, uint8 (N, K).
        weight_scale: its ``scale_inv``, fp32: (1,), for "1x128" any strides (blocks of K, blocks of N).
        bias: (N,) or None.
        dtype: of the result.
        scaling: of ``x``: "current", "given" or "1x128".
        scale: fp32 (n,), whose element ``slot`` is given.
        power_2, epsilon, unseen: as the quantize functions take them.
    """
    check_input(x, 2)
    x = x.contiguous()
    partial = amax_parts(x) if scaling == "current" and x.numel() > SMALL else None
    given = scale if scaling == "given" else partial
    if unseen < 0.0:
        scaling = "first"
    parts = 0 if partial is None else partial.numel()
    return _run(x, given, codes, weight_scale, bias, dtype, scaling, slot, power_2, epsilon, unseen, parts)


def multiply_codes(
    left: Tensor,
    left_scale: Tensor,
    codes: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return the product of a few quantized rows and a weight, plus a bias, rounded once.

    Args:
        left: E4M3 codes, uint8 (M, K).
        left_scale: the ``scale_inv`` of 1 x 128 elements, fp32 (blocks of K, M or more), contiguous.
        codes, weight_scale, bias, dtype: as :func:`matmul` takes them for "1x128".
    """
    check_device(left)
    return _run(left.contiguous(), left_scale, codes, weight_scale, bias, dtype, "codes")


def _run(
    x: Tensor,
    given: Tensor | None,
    codes: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    scaling: str,
    slot: int = 0,
    power_2: bool = False,
    epsilon: float = 0.0,
    unseen: float = 0.0,
    partials: int = 0,
) -> Tensor:
    codes = codes.contiguous()
    (M, K), N = x.shape, codes.shape[0]
    strides = (given.stride(0) if scaling == "codes" and given is not None else 0, 0, 0)
    if scaling in ("1x128", "codes"):
        strides = (strides[0], weight_scale.stride(1), weight_scale.stride(0))
    splits, multiply, add = _launches(
        x, M, N, K, x.dtype, strides, bias is not None, scaling, slot, power_2, epsilon, unseen, partials
    )
    new = beside(x)
    out: Any = new(*contiguous((M, N)), dtype)
    into = out if add is None else new(*contiguous((splits, M, N)), torch.float32)
    biases = [] if bias is None else [bias]
    tensors = [x, *([] if given is None else [given]), codes, weight_scale]
    multiply([*tensors, *(biases if add is None else []), into])
    if add is not None:
        add([into, *biases, out])
    return out  # type: ignore[no-any-return]
