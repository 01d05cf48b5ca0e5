"""FP8 GEMMs of groups in one launch: on each group's rows, or over each group's part of the contraction.

Both operands are K-major: rows of codes whose last dim is the contraction. Programs stay on their multiprocessor and
take tile after tile of all groups; where a group starts is computed from the splits on the device, so nothing waits
for them. On Hopper the tensor cores accumulate FP8 in registers of about 14 bits: unless fast accumulation is asked
for, partial sums are added to fp32 registers every 128 of the contraction, and scaled there with block scales. What
``grouped_hopper`` takes it multiplies there, to the same bits.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats import FLOAT8_BLOCK, cdiv
from .codecs import round_to_dtype, to_float32
from .grouped_quantize import group_ends
from .launch import Launcher, NotCompiledError, check_device, for_hopper

TILE_M = 128
TILE_N = 128
# With scales per row on both sides: in this shape a thread need not load each of its own.
VECTORS_TILE = (64, 256)
WIDE_TILE_N = 256  # for half of the reads of the left operand, where no registers go to partial sums
TILE_K = 128
BAND = 8
PROMOTION = 128
ROWS = 16
COLUMNS = 1024

INTERPRETED_PROGRAMS = 3
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@triton.jit
def _pick(values, index, group):
    """Return the entry of one group."""
    return tl.sum(tl.where(index == group, values, 0), axis=0)


@triton.jit
def tile_origin(tile, rows, columns, TILE_M: tl.constexpr, TILE_N: tl.constexpr, BAND: tl.constexpr):
    """Return first row and column of a tile of one group; consecutive tiles run down ``BAND`` tile rows first."""
    tile_rows = tl.cdiv(rows, TILE_M)
    per_band = BAND * tl.cdiv(columns, TILE_N)
    first = (tile // per_band) * BAND
    height = tl.minimum(tile_rows - first, BAND)
    inside = tile % per_band
    return (first + inside % height) * TILE_M, (inside // height) * TILE_N


@triton.jit
def _load_codes(pointers, left, EVEN: tl.constexpr, TILE_K: tl.constexpr):
    """Return codes of one step; what lies past the contraction reads as zero."""
    if EVEN:
        return tl.load(pointers)
    return tl.load(pointers, mask=tl.arange(0, TILE_K)[None, :] < left, other=0.0)


@triton.jit
def _load_scales(pointers, left, ONE: tl.constexpr):
    """Block scales of one step, one for all rows or one per row; zeros when no steps are ``left``."""
    if ONE:
        return tl.load(pointers, mask=left > 0, other=0.0)
    # compared as a vector: the interpreter spreads a truth value out as numbers, which are no mask
    return tl.load(pointers, mask=tl.full(pointers.shape, left, tl.int32) > 0, other=0.0)


@triton.jit
def _product(
    left,
    right,
    left_scale,
    right_scale,
    length,
    left_scale_step,
    right_scale_step,
    BLOCK_SCALED: tl.constexpr,
    ONE_RIGHT_SCALE: tl.constexpr,
    EVEN: tl.constexpr,
    PROMOTION: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """Return fp32 tile of ``left @ right.T`` over ``length`` of the contraction, from pointers to the first step."""
    total = tl.zeros([TILE_M, TILE_N], tl.float32)
    steps = tl.cdiv(length, TILE_K)
    if BLOCK_SCALED:
        # Scales arrive a step ahead: the compiler fetches only the codes early, and would wait for each of these.
        scale_a = _load_scales(left_scale, steps, False)
        scale_b = _load_scales(right_scale, steps, ONE_RIGHT_SCALE)
        for step in tl.range(0, steps):
            a = _load_codes(left, length - step * TILE_K, EVEN, TILE_K)
            b = _load_codes(right, length - step * TILE_K, EVEN, TILE_K)
            left_scale += left_scale_step
            right_scale += right_scale_step
            next_a = _load_scales(left_scale, steps - (step + 1), False)
            next_b = _load_scales(right_scale, steps - (step + 1), ONE_RIGHT_SCALE)
            partial = tl.dot(a, tl.trans(b))
            if ONE_RIGHT_SCALE:
                total = tl.fma(partial, (scale_a * scale_b)[:, None], total)
            else:
                total = tl.fma(partial * scale_a[:, None], scale_b[None, :], total)
            scale_a = next_a
            scale_b = next_b
            left += TILE_K
            right += TILE_K
    else:
        for step in tl.range(0, steps):
            a = _load_codes(left, length - step * TILE_K, EVEN, TILE_K)
            b = _load_codes(right, length - step * TILE_K, EVEN, TILE_K)
            total = tl.dot(a, tl.trans(b), total, max_num_imprecise_acc=PROMOTION)
            left += TILE_K
            right += TILE_K
    return total


@triton.jit
def _starts(ends, index):
    """Return where groups begin that end at ``ends``: where the one in front does."""
    in_front = tl.max(tl.where(index[None, :] < index[:, None], ends[None, :], 0), axis=1)
    return tl.where(index == 0, 0, in_front)


@triton.jit
def _store_rows_of_group(
    total, out_ptr, bias_ptr, member, inside_groups, start, row, size, column, N, BIAS: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    """Add the bias of a group and store a tile; ``inside_groups``: it is no tile of the rows after the last one."""
    if BIAS:
        bias = to_float32(tl.load(bias_ptr + member * N + column, mask=column < N, other=0.0))
        bias = to_float32(round_to_dtype(bias, OUT))
        total += tl.where(inside_groups, bias, 0.0)[None, :]
    target = out_ptr + (start + row).to(tl.int64)[:, None] * N + column[None, :]
    inside = (row < size)[:, None] & (column < N)[None, :]
    tl.store(target, round_to_dtype(total, OUT), mask=inside)


@triton.jit(
    do_not_specialize=["groups"],
    do_not_specialize_on_alignment=["left_scale_ptr", "right_scale_ptr", "bias_ptr", "splits_ptr"],
)
def _grouped_gemm_rows_kernel(
    out_ptr,
    left_ptr,
    left_scale_ptr,
    right_ptr,
    right_scale_ptr,
    bias_ptr,
    splits_ptr,
    T,
    N,
    K,
    groups,
    right_group,
    right_row,
    left_scale_row,
    left_scale_step,
    right_scale_group,
    right_scale_row,
    right_scale_step,
    BLOCK_SCALED: tl.constexpr,
    LEFT_BLOCK: tl.constexpr,
    RIGHT_BLOCK: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    PROMOTION: tl.constexpr,
    GROUPS: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    BAND: tl.constexpr,
):
    OUT: tl.constexpr = out_ptr.dtype.element_ty
    index = tl.arange(0, GROUPS)
    ends, padded_ends = group_ends(splits_ptr, groups, ALIGNMENT, GROUPS)
    # The rows after the last group are one more group, whose contraction is empty: it becomes zeros.
    ends = tl.where(index == groups, T, tl.minimum(ends, T))
    starts = _starts(ends, index)
    padded_starts = _starts(padded_ends, index)
    tiles = tl.where(index <= groups, tl.cdiv(ends - starts, TILE_M) * tl.cdiv(N, TILE_N), 0)
    tile_ends = tl.cumsum(tiles, axis=0)
    for tile in tl.range(tl.program_id(0), tl.sum(tiles, axis=0), tl.num_programs(0)):
        group = tl.sum((tile_ends <= tile).to(tl.int32), axis=0)
        start = _pick(starts, index, group)
        size = _pick(ends, index, group) - start
        padded_start = _pick(padded_starts, index, group)
        first = _pick(tile_ends, index, group) - _pick(tiles, index, group)
        m0, n0 = tile_origin(tile - first, size, N, TILE_M, TILE_N, BAND)
        member = tl.minimum(group, groups - 1).to(tl.int64)
        row = m0 + tl.arange(0, TILE_M)
        column = n0 + tl.arange(0, TILE_N)
        # rows past the end repeat the last one
        left_row = (padded_start + tl.minimum(row, size - 1)).to(tl.int64)
        right_row_index = tl.minimum(column, N - 1).to(tl.int64)
        step = tl.arange(0, TILE_K)[None, :]
        left = left_ptr + left_row[:, None] * K + step
        right = right_ptr + member * right_group + right_row_index[:, None] * right_row + step
        length = tl.where(group < groups, K, 0)
        left_scale = left_scale_ptr + (left_row // LEFT_BLOCK) * left_scale_row
        right_scale = right_scale_ptr + member * right_scale_group
        if RIGHT_BLOCK % TILE_N == 0:  # one scale for all columns of the tile
            right_scale += (n0 // RIGHT_BLOCK).to(tl.int64) * right_scale_row
        else:
            right_scale += (right_row_index // RIGHT_BLOCK) * right_scale_row
        total = _product(
            left, right, left_scale, right_scale, length, left_scale_step, right_scale_step, BLOCK_SCALED,
            RIGHT_BLOCK % TILE_N == 0, EVEN, PROMOTION, TILE_M, TILE_N, TILE_K,
        )  # fmt: skip
        if not BLOCK_SCALED:
            total *= tl.load(left_scale_ptr + member) * tl.load(right_scale_ptr + member)
        _store_rows_of_group(
            total, out_ptr, bias_ptr, member, group < groups, start, row, size, column, N, BIAS, OUT
        )


@triton.jit(
    do_not_specialize=["groups"],
    do_not_specialize_on_alignment=["left_scale_ptr", "right_scale_ptr", "splits_ptr"],
)
def _grouped_gemm_contraction_kernel(
    out_ptr,
    left_ptr,
    left_scale_ptr,
    right_ptr,
    right_scale_ptr,
    splits_ptr,
    M,
    N,
    P,
    groups,
    left_scale_row,
    left_scale_step,
    right_scale_row,
    right_scale_step,
    BLOCK_SCALED: tl.constexpr,
    LEFT_BLOCK: tl.constexpr,
    RIGHT_BLOCK: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    PROMOTION: tl.constexpr,
    GROUPS: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    BAND: tl.constexpr,
):
    OUT: tl.constexpr = out_ptr.dtype.element_ty
    index = tl.arange(0, GROUPS)
    _, ends = group_ends(splits_ptr, groups, ALIGNMENT, GROUPS)
    ends = tl.minimum(ends, P)
    starts = _starts(ends, index)
    per_group = tl.cdiv(M, TILE_M) * tl.cdiv(N, TILE_N)
    for tile in tl.range(tl.program_id(0), groups * per_group, tl.num_programs(0)):
        group = tile // per_group
        # multiplied out, which tells the compiler how far the loads are aligned
        start = _pick(starts // ALIGNMENT, index, group) * ALIGNMENT
        length = _pick((ends - starts) // ALIGNMENT, index, group) * ALIGNMENT
        m0, n0 = tile_origin(tile - group * per_group, M, N, TILE_M, TILE_N, BAND)
        row = m0 + tl.arange(0, TILE_M)
        column = n0 + tl.arange(0, TILE_N)
        left_row = tl.minimum(row, M - 1).to(tl.int64)
        right_row = tl.minimum(column, N - 1).to(tl.int64)
        step = start + tl.arange(0, TILE_K)[None, :]
        left = left_ptr + left_row[:, None] * P + step
        right = right_ptr + right_row[:, None] * P + step
        target = out_ptr + (group.to(tl.int64) * M + row)[:, None] * N + column[None, :]
        block = start // TILE_K
        total = _product(
            left, right,
            left_scale_ptr + (left_row // LEFT_BLOCK) * left_scale_row + block * left_scale_step,
            right_scale_ptr + (right_row // RIGHT_BLOCK) * right_scale_row + block * right_scale_step,
            length, left_scale_step, right_scale_step, BLOCK_SCALED, False, ALIGNMENT % TILE_K == 0, PROMOTION,
            TILE_M, TILE_N, TILE_K,
        )  # fmt: skip
        if not BLOCK_SCALED:
            total *= tl.load(left_scale_ptr + group) * tl.load(right_scale_ptr + group)
        inside = (row < M)[:, None] & (column < N)[None, :]
        tl.store(target, round_to_dtype(total, OUT), mask=inside)


@triton.jit(do_not_specialize=["groups"], do_not_specialize_on_alignment=["bias_ptr", "splits_ptr"])
def _grouped_gemm_finish_kernel(
    out_ptr,
    bias_ptr,
    splits_ptr,
    T,
    N,
    groups,
    BIAS: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    OUT: tl.constexpr = out_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    ends, _ = group_ends(splits_ptr, groups, 1, GROUPS)
    group = tl.sum((ends[None, :] <= row[:, None]).to(tl.int32), axis=1)
    behind = row >= tl.max(ends, axis=0)
    if BIAS:
        needed = row < T
    else:
        needed = behind & (row < T)
        if tl.max(needed.to(tl.int32), axis=0) == 0:
            return
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    target = out_ptr + row[:, None] * N + column[None, :]
    inside = needed[:, None] & (column < N)[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    if BIAS:
        kept = inside & (group < groups)[:, None]
        bias = tl.load(bias_ptr + group.to(tl.int64)[:, None] * N + column[None, :], mask=kept, other=0.0)
        bias = to_float32(round_to_dtype(to_float32(bias), OUT))
        total = to_float32(tl.load(target, mask=kept, other=0.0)) + bias
    tl.store(target, round_to_dtype(total, OUT), mask=inside)


# In as many steps at once as shared memory holds; GPUs of compute capability 8.9 and 12 have less than half of it.
ROOM = 200 * 1024
FEW_STAGES = 2
_rows, _rows_in_little = (
    Launcher(_grouped_gemm_rows_kernel, num_warps=8, num_stages=stages) for stages in (4, FEW_STAGES)
)
_contraction, _contraction_in_little = (
    Launcher(_grouped_gemm_contraction_kernel, num_warps=8, num_stages=stages) for stages in (4, FEW_STAGES)
)
_finish = Launcher(_grouped_gemm_finish_kernel, num_warps=4)


def rows(
    left: Tensor,
    left_scale: Tensor,
    right: Tensor,
    right_scale: Tensor,
    splits: Tensor,
    bias: Tensor | None,
    *,
    left_block: int,
    right_block: int,
    alignment: int,
    dtype: torch.dtype,
    rows: int,
    columns: int,
    fast_accumulation: bool = False,
    covered: bool = False,
) -> Tensor:
    """Multiply every group of rows with its own matrix: ``RN_dtype(left @ right.T + RN_dtype(bias))`` in fp32.

    Rows of the result beyond the sum of the splits are 0. Sums have the order of the hardware.

    Args:
        left: (P, K) float8_e4m3fn or float8_e5m2, contiguous; groups start at multiples of ``alignment``.
        left_scale: fp32 (G,), one per group; or per block, (P / left_block, K / 128), of any strides.
        right: (G, >= columns, K), as ``left``; its last dim contiguous, elements past K are not read.
        right_scale: fp32 (G,), or per block, (G, columns / right_block, K / 128), of any strides.
        splits: int32 or int64 (G,) on the device of ``left``; not read by the host.
        bias: (G, columns) or None.
        left_block, right_block: rows that share a scale.
        alignment: rows that groups of ``left`` are padded to.
        dtype: bf16, fp16 or fp32.
        rows, columns: size of the result; its groups lie one after the other.
        fast_accumulation: leave sums in the tensor cores' registers; ignored with block scales.
        covered: nothing reads rows beyond the sum of the splits; they may stay as the memory was.
    """
    _check(left, right, 3)
    if right.shape[1] < columns or right.shape[2] < left.shape[1]:
        raise ValueError(
            f"right has shape {tuple(right.shape)}; give at least {columns} rows of at least {left.shape[1]} elements "
            "per group"
        )
    groups, K = splits.shape[0], left.shape[1]
    out = torch.empty((rows, columns), dtype=dtype, device=left.device)
    if out.numel() == 0:
        return out
    block_scaled = left_scale.dim() > 1
    blocks = (left_block, right_block) if block_scaled else None
    programs, has_room = limits(left.device)
    faster = _faster(left, right, right_scale, columns, alignment, blocks)
    if faster is not None:
        bias = None if bias is None else bias.contiguous()
        operands = left, left_scale, right, right_scale, splits, bias
        if _multiplied(faster, out, *operands, alignment, programs, fast_accumulation, covered=covered):
            return out
    strides = (right.stride(0), right.stride(1))
    strides += (*left_scale.stride(), *right_scale.stride()) if block_scaled else (0, 0, 0, 0, 0)
    tile_n = WIDE_TILE_N if fast_accumulation and not block_scaled else TILE_N
    most_tiles = (cdiv(rows, TILE_M) + groups + 1) * cdiv(columns, tile_n)
    bias = None if bias is None else bias.contiguous()
    launcher = _rows if has_room else _rows_in_little
    launcher(
        (min(most_tiles, programs), 1, 1),
        (
            out, left, left_scale, right, right_scale, left_scale if bias is None else bias, splits, rows, columns, K,
            groups, *strides,
        ),
        (
            block_scaled, left_block, right_block, alignment, bias is not None, K % TILE_K == 0,
            None if fast_accumulation else PROMOTION, triton.next_power_of_2(groups + 1), TILE_M, tile_n, TILE_K, BAND,
        ),
    )  # fmt: skip
    return out


def contraction(
    left: Tensor,
    left_scale: Tensor,
    right: Tensor,
    right_scale: Tensor,
    splits: Tensor,
    *,
    left_block: int,
    right_block: int,
    alignment: int,
    dtype: torch.dtype,
    fast_accumulation: bool = False,
) -> Tensor:
    """Multiply two matrices over every group's part of the contraction: (G, N, K), in fp32; 0 for an empty group.

    Args:
        left: (N, P) float8_e4m3fn or float8_e5m2, contiguous, zeros between the groups.
        right: (K, P), as ``left``.
        left_scale, right_scale: fp32 (G,), or per block, (N / left_block, P / 128), of any strides.
        splits, left_block, right_block, dtype: as of :func:`rows`, for columns.
        alignment: groups of columns start at multiples of it; a multiple of 128 with block scales.
        fast_accumulation: leave sums in the tensor cores' registers; ignored with block scales.
    """
    _check(left, right, 2)
    block_scaled = left_scale.dim() > 1
    if left.shape[1] != right.shape[1] or not right.is_contiguous():
        raise ValueError(
            f"left and right contract over {left.shape[1]} and {right.shape[1]} elements; give contiguous matrices of "
            "one length"
        )
    if block_scaled and alignment % FLOAT8_BLOCK:
        raise ValueError(f"alignment is {alignment}; with block scales use a multiple of {FLOAT8_BLOCK}")
    (M, P), N, groups = left.shape, right.shape[0], splits.shape[0]
    out = torch.empty((groups, M, N), dtype=dtype, device=left.device)
    if out.numel() == 0:
        return out
    blocks = (left_block, right_block) if block_scaled else None
    programs, has_room = limits(left.device)
    faster = _faster(left, right, right_scale, N, alignment, blocks)
    if faster is not None:
        operands = left, left_scale, right, right_scale, splits, None
        if _multiplied(faster, out, *operands, alignment, programs, fast_accumulation):
            return out
    strides = (*left_scale.stride(), *right_scale.stride()) if block_scaled else (0, 0, 0, 0)
    wide = WIDE_TILE_N if fast_accumulation else TILE_N
    tile_m, tile_n = VECTORS_TILE if block_scaled else (TILE_M, wide)
    launcher = _contraction if has_room else _contraction_in_little
    launcher(
        (min(groups * cdiv(M, tile_m) * cdiv(N, tile_n), programs), 1, 1),
        (out, left, left_scale, right, right_scale, splits, M, N, P, groups, *strides),
        (
            block_scaled, left_block, right_block, alignment, None if fast_accumulation else PROMOTION,
            triton.next_power_of_2(max(groups, 1)), tile_m, tile_n, TILE_K, BAND,
        ),
    )  # fmt: skip
    return out


def finish_rows_(out: Tensor, splits: Tensor, bias: Tensor | None) -> None:
    """Add every group's bias to its rows, and make the rows after the last group zero.

    Args:
        out: (T, N) bf16, fp16 or fp32, contiguous.
        splits: int32 or int64 (G,) on the device of ``out``.
        bias: (G, N) or None.

    Raises:
        ValueError: a tensor the kernel cannot reach.

    Numerics:
        ``RN(out + RN(bias))``.
    """
    check_device(out)
    (T, N), groups = out.shape, splits.shape[0]
    if out.numel() == 0:
        return
    bias = None if bias is None else bias.contiguous()
    _finish(
        (cdiv(T, ROWS), cdiv(N, COLUMNS), 1),
        (out, out if bias is None else bias, splits, T, N, groups),
        (bias is not None, triton.next_power_of_2(max(groups, 1)), ROWS, COLUMNS),
    )


def _check(left: Tensor, right: Tensor, right_rank: int) -> None:
    check_device(left)
    for name, data, rank in (("left", left, 2), ("right", right, right_rank)):
        if data.dtype not in _FP8:
            raise ValueError(f"{name} is {data.dtype}; give torch.float8_e4m3fn or torch.float8_e5m2")
        if data.dim() != rank or (data.numel() and data.stride(-1) != 1):
            raise ValueError(
                f"{name} has shape {tuple(data.shape)} and strides {data.stride()}; give rank {rank} with a contiguous "
                "last dim"
            )
    if not left.is_contiguous():
        raise ValueError(f"left has strides {left.stride()}; give a contiguous matrix")


def _faster(left: Tensor, *operands: Any) -> Any:
    """Return the module that multiplies these operands faster, or None."""
    module = for_hopper("grouped_hopper", left.device)
    return module if module is not None and module.takes(left, *operands) else None


def _multiplied(faster: Any, *arguments: Any, **options: Any) -> bool:
    """Return whether that module multiplied; otherwise Triton does not compile its kernel, and nothing ran."""
    try:
        faster.multiply(*arguments, **options)
    except NotCompiledError:
        return False
    return True


@functools.cache
def limits(device: torch.device) -> tuple[int, bool]:
    """Return how many programs fill a device, and whether a block may have ``ROOM`` bytes of shared memory."""
    if device.type != "cuda":
        return INTERPRETED_PROGRAMS, True  # few, so that a program takes several tiles
    gpu = torch.cuda.get_device_properties(device)
    return gpu.multi_processor_count, gpu.shared_memory_per_block_optin >= ROOM
