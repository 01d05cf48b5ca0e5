"""Products whose rows do not depend on each other: fixed steps along the contraction, and one order of sums.

A library's GEMM splits the contraction, or takes other steps, where there are few rows. Here every program walks along
the whole contraction in steps of one size. The order of sums inside a step is the tensor cores'. FP8 operands are
multiplied as codes, and the product of a step is scaled and added in fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._device import HIGH_PRECISION
from ..formats import cdiv
from .activation import exp2
from .codecs import at_least, operand, product, round_to_dtype
from .grouped_gemm import tile_origin
from .launch import Launcher, check_device
from .reduction import fold_lanes

# A tile's size changes no bit: an element of the product is of its row and its column.
SMALL_TILE = (64, 64)
LARGE_TILE = (128, 128)
LARGE_FROM = 512
"""Rows from which the larger tile is faster, in 16 bits, and for codes in one part; more parts take its registers."""
STEP_BYTES = 128
"""Bytes of an operand's row in a step; fewer if a block of scales has fewer."""

BAND = 8
SOFTMAX_ROWS = 4
LANES = 256


@triton.jit(
    do_not_specialize=["M", "left_scale_step"],
    do_not_specialize_on_alignment=["left_scale_ptr", "right_scale_ptr"],
)
def _matmul_kernel(
    out_ptr,
    left_ptr,
    right_ptr,
    left_scale_ptr,
    right_scale_ptr,
    M,
    N,
    K,
    steps_of_part,
    left_row,
    right_batch,
    right_row,
    right_column,
    left_scale_row,
    left_scale_step,
    right_scale_row,
    right_scale_step,
    SPLITS: tl.constexpr,
    SCALED: tl.constexpr,
    RIGHT_BLOCK: tl.constexpr,
    EVEN: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    BAND: tl.constexpr,
):
    batch = tl.program_id(1).to(tl.int64)
    m0, n0 = tile_origin(tl.program_id(0), M, N, TILE_M, TILE_N, BAND)
    row = tl.arange(0, TILE_M)
    column = tl.arange(0, TILE_N)
    inner = tl.arange(0, TILE_K)
    # columns past the end repeat the last one; rows are not read: many programs would read the last of few
    here = row < M - m0
    left_at = tl.where(here, row, 0)
    right_at = tl.minimum(column, N - 1 - n0)
    left = left_ptr + (batch * M + m0) * left_row
    right = right_ptr + batch * right_batch + n0.to(tl.int64) * right_column
    left_offsets = left_at[:, None] * left_row + inner[None, :]
    right_offsets = right_at[None, :] * right_column + inner[:, None] * right_row
    ONE_SCALE: tl.constexpr = SCALED == "blocks" and RIGHT_BLOCK % TILE_N == 0
    left_scale = left_scale_ptr + m0.to(tl.int64) * left_scale_row
    right_scale = right_scale_ptr + (n0 // RIGHT_BLOCK).to(tl.int64) * right_scale_row
    left_scale_offsets = left_at * left_scale_row
    right_scale_offsets = 0 if ONE_SCALE else right_at // RIGHT_BLOCK * right_scale_row
    # Eight parts are added as halves of halves of halves; where there are fewer, the outer loops run once.
    halves = tl.zeros([TILE_M, TILE_N], tl.float32)
    for half in range(2 if SPLITS == 8 else 1):
        quarters = tl.zeros([TILE_M, TILE_N], tl.float32)
        for quarter in range(2 if SPLITS >= 4 else 1):
            eighths = tl.zeros([TILE_M, TILE_N], tl.float32)
            for eighth in range(2 if SPLITS >= 2 else 1):
                total = tl.zeros([TILE_M, TILE_N], tl.float32)
                for step in tl.range(0, steps_of_part):
                    if EVEN:
                        a = tl.load(left + left_offsets, mask=here[:, None], other=0.0)
                        b = tl.load(right + right_offsets)
                    else:
                        there = step * TILE_K + inner < K
                        a = tl.load(left + left_offsets, mask=here[:, None] & there[None, :], other=0.0)
                        b = tl.load(right + right_offsets, mask=there[:, None], other=0.0)
                    a = operand(a)
                    b = operand(b)
                    if SCALED == "blocks":
                        x = tl.load(left_scale + left_scale_offsets)[:, None]
                        y = tl.load(right_scale + right_scale_offsets)
                        y = tl.full([1, TILE_N], y, tl.float32) if ONE_SCALE else y[None, :]
                        total = tl.fma(tl.dot(a, b) * x, y, total)
                        left_scale += left_scale_step
                        right_scale += right_scale_step
                    elif a.dtype.primitive_bitwidth == 8:
                        total = tl.dot(a, b, total, max_num_imprecise_acc=TILE_K)
                    else:
                        total = tl.dot(a, b, total, input_precision="tf32x3")
                    left += TILE_K
                    right += TILE_K * right_row
                if SCALED == "result":
                    total *= (
                        tl.load(left_scale + left_scale_offsets)[:, None]
                        * tl.load(right_scale + right_scale_offsets)[None, :]
                    )
                eighths += total
            quarters += eighths
        halves += quarters
    target = out_ptr + ((batch * M + m0) * N + n0) + row[:, None].to(tl.int64) * N + column[None, :]
    inside = here[:, None] & (column < N - n0)[None, :]
    tl.store(target, round_to_dtype(halves, out_ptr.dtype.element_ty), mask=inside)


_small = Launcher(_matmul_kernel, num_warps=4, num_stages=4)
_large = Launcher(_matmul_kernel, num_warps=8, num_stages=3)


def _product(
    left: Tensor,
    right: Tensor,
    strides: tuple[int, int, int],
    columns: int,
    splits: int,
    scales: tuple[Tensor, Tensor] | None,
    dtype: torch.dtype,
    block: int = 0,
    right_block: int = 1,
) -> Tensor:
    """Return ``left @ right`` of matrices (batch, M, K) and (batch, K, N), the second with these strides.

    ``scales``: of the result, one for all or one per row and column; or of blocks, (M, blocks), (N, blocks).
    """
    check_device(left)
    batch, M, K = left.shape
    step = min(block or STEP_BYTES, STEP_BYTES) // left.element_size()
    out = torch.empty((batch, M, columns), dtype=dtype, device=left.device)
    if not out.numel():
        return out
    if not K:
        return out.zero_()
    scaled, scale_strides = "", (0, 0, 0, 0)
    if scales is not None:
        blocks = scales[0].dim() == 2
        scaled = "blocks" if blocks else "result"
        scale_strides = tuple(
            stride for scale in scales for stride in (scale.stride() if blocks else (int(scale.numel() > 1), 0))
        )  # fmt: skip
    large = M >= LARGE_FROM and (left.element_size() == 2 or (splits == 1 and left.element_size() == 1))
    launcher, (tile_m, tile_n) = (_large, LARGE_TILE) if large else (_small, SMALL_TILE)
    launcher(
        (cdiv(M, tile_m) * cdiv(columns, tile_n), batch, 1),
        (
            out, left, right, *(scales or (left, right)), M, columns, K, cdiv(K // splits, step), left.stride(1),
            *strides, *scale_strides,
        ),
        (splits, scaled, right_block, K % step == 0, tile_m, tile_n, step, BAND),
    )  # fmt: skip
    return out


def _matrices(x: Tensor) -> Tensor:
    return x[None] if x.dim() == 2 else x.flatten(0, -3)


def _check(left: Tensor, right: Tensor) -> None:
    for name, data in (("left", left), ("right", right)):
        if data.dtype not in HIGH_PRECISION or data.dtype != left.dtype:
            raise ValueError(f"{name} is {data.dtype}; give fp32, bf16 or fp16 on both sides")


def matmul(
    left: Tensor,
    right: Tensor,
    splits: int = 1,
    scales: tuple[Tensor, Tensor] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Compute ``reference.batch_invariant.matmul`` in an order of its own, and of operands that are not rounded."""
    _check(left, right)
    a, b = _matrices(left).contiguous(), _matrices(right)
    strides = b.stride(0), b.stride(2), b.stride(1)
    out = _product(a, b, strides, b.shape[1], splits, scales, dtype)
    return out.view(*left.shape[:-1], right.shape[-2])


def multiply_codes(
    left: Tensor,
    left_scale: Tensor,
    right: Tensor,
    right_scale: Tensor,
    splits: int,
    dtype: torch.dtype,
    block: int = 0,
    right_block: int = 1,
) -> Tensor:
    """Return ``left @ right.T`` of FP8 codes, scaled.

    Args:
        left, right: (M, K) and (N, >= K), FP8, rows contiguous.
        left_scale, right_scale: fp32, one for all or one per row; or of blocks of a row, (M, blocks) and
            (N / right_block, blocks).
        splits: as of :func:`matmul`.
        dtype: of the result.
        block: elements of a row that share a scale; 0 for all.
        right_block: rows of ``right`` that share the scales of their blocks.

    Numerics:
        The products of 128 elements of the contraction, or of a block, are summed by the tensor cores. With blocks, a
        sum ``p`` is added as ``RN(RN(p * left_scale) * right_scale + total)``. Without, it is added as it is, and the
        sum of a part is multiplied by the rounded product of both scales. Parts are added as those of :func:`matmul`.
    """
    strides = 0, right.stride(1), right.stride(0)
    scales = left_scale, right_scale
    return _product(left[None], right, strides, right.shape[0], splits, scales, dtype, block, right_block)[0]


def mix(weights: Tensor, values: Tensor) -> Tensor:
    """Compute ``reference.batch_invariant.mix`` in an order of its own, and of operands that are not rounded."""
    seen = (weights != 0).any(-2)[..., None]
    a, b = _matrices(weights).contiguous(), _matrices(torch.where(seen, values, 0.0).to(weights.dtype))
    _check(a, b)
    out = _product(a, b, b.stride(), b.shape[2], 1, None, torch.float32)
    return out.view(*weights.shape[:-1], values.shape[-1])


@triton.jit
def _exponential(x):
    """Return the exponential of fp32 that is not positive; 0 where its exponent is below -125."""
    t = product(x, tl.full(x.shape, 1.4426950408889634, tl.float32))
    return tl.where(t < -125.0, 0.0, exp2(at_least(t, -125.0)))


@triton.jit(do_not_specialize=["T"])
def _softmax_kernel(x_ptr, out_ptr, T, K, ROWS: tl.constexpr, LANES: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, LANES)
    offsets = row[:, None] * K + lane[None, :]
    there = (row < T)[:, None]
    highest = tl.full([ROWS, LANES], float("-inf"), tl.float32)
    for start in tl.range(0, K, LANES):
        inside = there & (lane < K - start)[None, :]
        highest = tl.maximum(highest, tl.load(x_ptr + offsets + start, mask=inside, other=float("-inf")))
    base = tl.max(highest, axis=1)
    base = tl.where(base == float("-inf"), 0.0, base)[:, None]
    lanes = tl.zeros([ROWS, LANES], tl.float32)
    for start in tl.range(0, K, LANES):
        inside = there & (lane < K - start)[None, :]
        lanes += _exponential(tl.load(x_ptr + offsets + start, mask=inside, other=float("-inf")) - base)
    total = fold_lanes(lanes)
    total = tl.where(total == 0.0, 1.0, total)
    totals = tl.broadcast_to(total[:, None], [ROWS, LANES])
    for start in tl.range(0, K, LANES):
        inside = there & (lane < K - start)[None, :]
        e = _exponential(tl.load(x_ptr + offsets + start, mask=inside, other=0.0) - base)
        tl.store(out_ptr + offsets + start, tl.div_rn(e, totals), mask=inside)


_softmax = Launcher(_softmax_kernel, num_warps=4)


def softmax(logits: Tensor) -> Tensor:
    """Compute ``reference.batch_invariant.softmax``.

    Raises:
        ValueError: a tensor that the kernel cannot reach, or no fp32.
    """
    check_device(logits)
    if logits.dtype != torch.float32:
        raise ValueError(f"logits are {logits.dtype}; give torch.float32")
    x, out = logits.contiguous(), torch.empty_like(logits, memory_format=torch.contiguous_format)
    if x.numel():
        K = x.shape[-1]
        T = x.numel() // K
        _softmax((cdiv(T, SOFTMAX_ROWS), 1, 1), (x, out, T, K), (SOFTMAX_ROWS, LANES))
    return out
