"""The GEMMs of ``grouped_gemm`` on Hopper's tensor cores with warps of two kinds: some load, the others multiply.

``grouped_gemm`` takes what this file does not: operands whose rows do not start at 16 bytes, other GPUs, the
interpreter. The sums are the same ones in the same order. What Triton's language leaves to its compiler is said here:
one warp brings codes into a ring of buffers, two groups of four warps multiply a half of the tile's rows each. They
wait for nothing but these codes, so while one of them adds up partial sums or stores, the other keeps the tensor cores
busy; with block scales, a partial sum of rows is added up beside the product of the group's own next step. Results
leave through shared memory, which the copy engine empties while the next tile is multiplied.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..formats import FLOAT8_BLOCK
from ..upstream.gluon import reinterpret
from .launch import GluonLauncher

TILE_K = 128
BAND = 16
TILE = (128, 256, 1)
NARROW_TILE = (128, 128, 1)
BLOCK_ROWS_TILE = (128, 128, 1)
BLOCK_CONTRACTION_TILE = (128, 256, 2)
"""Rows and columns of a tile, and how many parts of bf16 results are on their way out at once."""
WASTE = 24
"""The share of wide tiles that may lie outside the result; more costs longer than a narrow tile's reads."""
WIDTH = 128
"""Columns of such a part, and of a partial sum."""
SHARED_MEMORY = 231424
"""Bytes that buffers may have; a block may have 1024 more, for barriers and alignment."""

# their names up to Triton 3.6, and since
load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
store_tile = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
CODES = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
SCALES = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
RESULTS = {
    bits: gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=2) for bits in (16, 32)
}


@gluon.jit
def _groups_in_front(
    tile, group, end, first, start, padded, size, splits_ptr, rows, M, across, groups, CONTRACTION: gl.constexpr,
    ALIGNMENT: gl.constexpr, TILE_M: gl.constexpr,
):  # fmt: skip
    """Advance to the group of ``tile``: number, tiles before its end and start, first row, padded, and size."""
    while (tile >= end) & (group <= groups):
        start += size
        padded += (size + (ALIGNMENT - 1)) // ALIGNMENT * ALIGNMENT
        group += 1
        first = end
        size = rows - start
        if group < groups:
            size = gl.minimum(gl.load(splits_ptr + group).to(gl.int32), size)
        height = size
        if CONTRACTION:
            height = M
        end += gl.cdiv(height, TILE_M) * across
    return group, end, first, start, padded, size


@gluon.jit
def _origin(tile, rows, across, TILE_M: gl.constexpr, TILE_N: gl.constexpr, BAND: gl.constexpr):
    """Return the origin like ``grouped_gemm.tile_origin``."""
    per_band = BAND * across
    first = (tile // per_band) * BAND
    height = gl.minimum(gl.cdiv(rows, TILE_M) - first, BAND)
    inside = tile % per_band
    return (first + inside % height) * TILE_M, (inside // height) * TILE_N


@gluon.jit
def _load(
    left, right, scales, splits_ptr, lefts, rights, right_scales, full, free, numbers, right_rows, right_columns,
    scales_step, SCALES: gl.constexpr, CONTRACTION: gl.constexpr, COVERED: gl.constexpr, ALIGNMENT: gl.constexpr,
    TILE_M: gl.constexpr, TILE_N: gl.constexpr, TILE_K: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr,
):  # fmt: skip
    """Return the loading warp: codes, and ``SCALES`` of columns, of every step as soon as there is room in the ring."""
    rows, M, N, K, groups = numbers
    across = gl.cdiv(N, TILE_N)
    tile = gl.program_id(0)
    zero = gl.to_tensor(0)
    group, end, first, start, padded, size = _groups_in_front(
        tile, zero - 1, zero, zero, zero, zero, zero, splits_ptr, rows, M, across, groups, CONTRACTION, ALIGNMENT,
        TILE_M,
    )  # fmt: skip
    at = 0
    while group <= groups - COVERED:
        if CONTRACTION:
            m0, n0 = _origin(tile - first, M, across, TILE_M, TILE_N, BAND)
            steps = gl.cdiv(size, TILE_K)
            left_row = m0
            right_row = n0
            left_column = padded
            right_column = padded
        else:
            m0, n0 = _origin(tile - first, size, across, TILE_M, TILE_N, BAND)
            steps = gl.where(group < groups, gl.cdiv(K, TILE_K), 0)
            left_row = padded + m0
            right_row = group * right_rows + n0
            left_column = zero
            right_column = group * right_columns
        for step in range(steps):
            stage = at % STAGES
            mbarrier.wait(free.index(stage), ((at // STAGES) & 1) ^ 1)
            loaded = full.index(stage)
            mbarrier.expect(loaded, (TILE_M + TILE_N) * TILE_K + 4 * TILE_N * SCALES)
            load_tile(left, [left_row, left_column + step * TILE_K], loaded, lefts.index(stage))
            load_tile(right, [right_row, right_column + step * TILE_K], loaded, rights.index(stage))
            if SCALES:
                scale = (right_column // TILE_K + step) * scales_step + n0
                load_tile(scales, [scale], loaded, right_scales.index(stage))
            at += 1
        tile += gl.num_programs(0)
        group, end, first, start, padded, size = _groups_in_front(
            tile, group, end, first, start, padded, size, splits_ptr, rows, M, across, groups, CONTRACTION, ALIGNMENT,
            TILE_M,
        )  # fmt: skip


@gluon.jit
def _scaled(partial, left_scale, right_scale, total, CONTRACTION: gl.constexpr):
    """Add a partial product, scaled: by scales of rows and columns, or of rows and one."""
    if CONTRACTION:
        partial = partial * left_scale[:, None]
        _, scale = gl.broadcast(partial, right_scale[None, :])
    else:
        _, scale = gl.broadcast(partial, (left_scale * right_scale)[:, None])
    return gl.fma(partial, scale, total)


@gluon.jit
def _store(
    total, out_ptr, out, staging, bias_ptr, biases, start, row, column, rows, N, BIAS: gl.constexpr,
    HEIGHT: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip
    """Add the bias and store at ``row`` and ``column`` of a group that starts at ``start`` and has ``rows``."""
    OUT: gl.constexpr = out_ptr.dtype.element_ty
    if BIAS:
        at = column + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, total.type.layout))
        total += gl.load(bias_ptr + at, mask=at < biases, other=0.0).to(OUT).to(gl.float32)[None, :]
    staging.store(total.to(OUT))
    fence_async_shared()
    if row + HEIGHT <= rows:
        store_tile(out, [start + row, column], staging)
    else:  # later rows belong to another group
        LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
        down = row + gl.arange(0, HEIGHT, layout=gl.SliceLayout(1, LAYOUT))
        along = column + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LAYOUT))
        target = out_ptr + (start + down).to(gl.int64)[:, None] * N + along[None, :]
        gl.store(target, staging.load(LAYOUT), mask=(down < rows)[:, None] & (along < N)[None, :])


@gluon.jit
def _product(
    left, right, at, nothing, HALF: gl.constexpr, PART: gl.constexpr, STAGES: gl.constexpr, HEIGHT: gl.constexpr,
    WIDTH: gl.constexpr,
):  # fmt: skip
    """Start one step's product of a half of the rows and a part of the columns."""
    a = left.index(at % STAGES).slice(HALF * HEIGHT, HEIGHT, dim=0)
    b = right.index(at % STAGES).slice(PART * WIDTH, WIDTH, dim=0).permute((1, 0))
    return warpgroup_mma(a, b, nothing, use_acc=False, is_async=True)


@gluon.jit
def _add_steps(
    total, nothing, left_scale, right_scale, left_scale_step, right_scale_step, lefts, rights, full, free, at, step,
    COUNT: gl.constexpr, HALF: gl.constexpr, STAGES: gl.constexpr, HEIGHT: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip
    """Add ``COUNT`` steps, scaled; the tensor cores multiply the next one meanwhile."""
    a_scales = ()
    b_scales = ()
    for i in gl.static_range(COUNT):
        a_scales = a_scales + (gl.load(left_scale + (step + i) * left_scale_step),)
        b_scales = b_scales + (gl.load(right_scale + (step + i) * right_scale_step),)
    mbarrier.wait(full.index(at % STAGES), (at // STAGES) & 1)
    partials = (_product(lefts, rights, at, nothing, HALF, 0, STAGES, HEIGHT, WIDTH),)
    for i in gl.static_range(COUNT):
        if i < COUNT - 1:
            mbarrier.wait(full.index((at + 1) % STAGES), ((at + 1) // STAGES) & 1)
            partials = partials + (_product(lefts, rights, at + 1, nothing, HALF, 0, STAGES, HEIGHT, WIDTH),)
        partial = warpgroup_mma_wait(1 if i < COUNT - 1 else 0, deps=[partials[i]])
        mbarrier.arrive(free.index(at % STAGES), count=1)
        total = _scaled(partial, a_scales[i], b_scales[i], total, False)
        # Added up here, where it waits for nothing: LLVM would do it after the last product, with registers for each.
        total = warpgroup_mma_wait(1 if i < COUNT - 1 else 0, deps=[total])
        at += 1
    return total, at, step + COUNT


@gluon.jit
def _scaled_rows(
    left_scale, right_scale, left_scale_step, right_scale_step, lefts, rights, full, free, at, steps,
    HALF: gl.constexpr, STAGES: gl.constexpr, HEIGHT: gl.constexpr, WIDTH: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Return fp32 sums over ``steps`` loaded from ``at`` on, with scales of rows and one scale of the columns."""
    nothing = gl.zeros([HEIGHT, WIDTH], gl.float32, LAYOUT)
    total = nothing
    step = gl.to_tensor(0)
    for _ in range(steps // 4):
        total, at, step = _add_steps(
            total, nothing, left_scale, right_scale, left_scale_step, right_scale_step, lefts, rights, full, free, at,
            step, 4, HALF, STAGES, HEIGHT, WIDTH,
        )  # fmt: skip
    for _ in range(steps % 4):
        total, at, step = _add_steps(
            total, nothing, left_scale, right_scale, left_scale_step, right_scale_step, lefts, rights, full, free, at,
            step, 1, HALF, STAGES, HEIGHT, WIDTH,
        )  # fmt: skip
    return (total,), at


@gluon.jit
def _tile_product(
    left_scale, left_scale_step, lefts, rights, right_scales, full, free, at, steps, HALF: gl.constexpr,
    SCALES: gl.constexpr, PROMOTED: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr, HEIGHT: gl.constexpr,
    WIDTH: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Return fp32 sums over the ``steps`` that are loaded ``at`` and after; with ``SCALES``, of rows and columns."""
    nothing = gl.zeros([HEIGHT, WIDTH], gl.float32, LAYOUT)
    totals = ()
    for _ in gl.static_range(PARTS):
        totals = totals + (nothing,)
    a_scale = gl.to_tensor(0.0)
    if SCALES:  # those of rows arrive a step ahead of their use, the last ones once more
        a_scale = gl.load(left_scale)
    for step in range(steps):
        stage = at % STAGES
        next_a_scale = a_scale
        if SCALES:
            next_a_scale = gl.load(left_scale + gl.minimum(step + 1, steps - 1) * left_scale_step)
        sums = ()
        for part in gl.static_range(PARTS):
            # The wait is repeated although the tile has arrived: it is a jump, across which ptxas does not move
            # additions to the next product. Moved, their partial sum would need registers of its own.
            if part == 0 or (PROMOTED and not SCALES):
                mbarrier.wait(full.index(stage), (at // STAGES) & 1)
            if PROMOTED:
                partial = _product(lefts, rights, at, nothing, HALF, part, STAGES, HEIGHT, WIDTH)
                partial = warpgroup_mma_wait(0, deps=[partial])
                if SCALES:
                    columns = right_scales.index(stage).slice(part * WIDTH, WIDTH, dim=0)
                    b_scale = columns.load(gl.SliceLayout(0, LAYOUT))
                    total = _scaled(partial, a_scale, b_scale, totals[part], True)
                else:
                    total = totals[part] + partial
                sums = sums + (warpgroup_mma_wait(0, deps=[total]),)  # as in ``_add_steps``
            else:
                a = lefts.index(stage).slice(HALF * HEIGHT, HEIGHT, dim=0)
                b = rights.index(stage).slice(part * WIDTH, WIDTH, dim=0).permute((1, 0))
                sums = sums + (warpgroup_mma(a, b, totals[part], is_async=True),)
        if not PROMOTED:
            waited = warpgroup_mma_wait(0, deps=sums)
            sums = waited if PARTS > 1 else (waited,)  # one is returned as itself
        mbarrier.arrive(free.index(stage), count=1)
        totals = sums
        a_scale = next_a_scale
        at += 1
    return totals, at


@gluon.jit
def _add_thin(
    total, staging, thin, row, column, rows, N, RANK: gl.constexpr, HEIGHT: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip
    """Add the product of a row of the thin left matrix and one of the right to each sum; ``staging`` is free memory."""
    left_ptr, right_ptr, rank = thin
    LAYOUT: gl.constexpr = total.type.layout
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    RIGHT: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=2 * RANK, element_bitwidth=16, rank=2)
    down = row + gl.arange(0, HEIGHT, layout=gl.SliceLayout(1, LEFT))
    inner = gl.arange(0, RANK, layout=gl.SliceLayout(0, LEFT))
    inside = (down < rows)[:, None] & (inner < rank)[None, :]
    left = gl.load(left_ptr + down[:, None] * rank + inner[None, :], mask=inside, other=0.0)
    along = column + gl.arange(0, WIDTH, layout=gl.SliceLayout(1, RIGHT))
    inner = gl.arange(0, RANK, layout=gl.SliceLayout(0, RIGHT))
    inside = (along < N)[:, None] & (inner < rank)[None, :]
    right = gl.load(right_ptr + along[:, None] * rank + inner[None, :], mask=inside, other=0.0)
    memory = reinterpret(staging, right.dtype, [WIDTH, RANK], SHARED)
    memory.store(right)
    fence_async_shared()
    sums = gl.convert_layout(total, SUMS)
    sums = warpgroup_mma(left, memory.permute((1, 0)), sums, is_async=True)
    sums = warpgroup_mma_wait(0, deps=[sums])
    barrier()  # the memory is written to next
    return gl.convert_layout(sums, LAYOUT)


@gluon.jit
def _multiply(
    out_ptr, out, stagings, left_scale_ptr, right_scale_ptr, bias_ptr, splits_ptr, lefts, rights, right_scales, full,
    free, numbers, strides, thin, RANK: gl.constexpr, HALF: gl.constexpr, CONTRACTION: gl.constexpr,
    COVERED: gl.constexpr, BLOCK_SCALED: gl.constexpr, PROMOTED: gl.constexpr, BIAS: gl.constexpr,
    ALIGNMENT: gl.constexpr, TILE_M: gl.constexpr, TILE_N: gl.constexpr, TILE_K: gl.constexpr, STAGES: gl.constexpr,
    BAND: gl.constexpr, WIDTH: gl.constexpr, STAGINGS: gl.constexpr,
):  # fmt: skip
    """Return four of the multiplying warps: the first or second ``HALF`` of every tile's rows."""
    PARTS: gl.constexpr = TILE_N // WIDTH
    HEIGHT: gl.constexpr = TILE_M // 2
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 32])
    left_scale_row, left_scale_step, right_scale_group, right_scale_row, right_scale_step = strides
    rows, M, N, K, groups = numbers
    across = gl.cdiv(N, TILE_N)
    tile = gl.program_id(0)
    zero = gl.to_tensor(0)
    group, end, first, start, padded, size = _groups_in_front(
        tile, zero - 1, zero, zero, zero, zero, zero, splits_ptr, rows, M, across, groups, CONTRACTION, ALIGNMENT,
        TILE_M,
    )  # fmt: skip
    at = zero
    down = gl.arange(0, HEIGHT, layout=gl.SliceLayout(1, LAYOUT))
    while group <= groups - COVERED:
        member = gl.minimum(group, groups - 1)
        if CONTRACTION:
            height = M
            out_start = group * M
            steps = gl.cdiv(size, TILE_K)
        else:
            height = size
            out_start = start
            steps = gl.where(group < groups, gl.cdiv(K, TILE_K), 0)
        m0, n0 = _origin(tile - first, height, across, TILE_M, TILE_N, BAND)
        m0 += HALF * HEIGHT
        first_scale = gl.where(steps > 0, padded, 0)
        left_scale = left_scale_ptr + gl.minimum(m0 + down, height - 1) * left_scale_row
        if CONTRACTION:
            left_scale += first_scale // TILE_K * left_scale_step
        else:
            left_scale += first_scale * left_scale_row
        right_scale = right_scale_ptr + member * right_scale_group + n0 // 128 * right_scale_row
        if not BLOCK_SCALED:
            scale = gl.load(left_scale_ptr + member) * gl.load(right_scale_ptr + member)
        if BLOCK_SCALED and not CONTRACTION:
            totals, at = _scaled_rows(
                left_scale, right_scale, left_scale_step, right_scale_step, lefts, rights, full, free, at, steps, HALF,
                STAGES, HEIGHT, WIDTH, LAYOUT,
            )  # fmt: skip
        else:
            totals, at = _tile_product(
                left_scale, left_scale_step, lefts, rights, right_scales, full, free, at, steps, HALF, BLOCK_SCALED,
                PROMOTED, PARTS, STAGES, HEIGHT, WIDTH, LAYOUT,
            )  # fmt: skip
        bias = bias_ptr + member.to(gl.int64) * N
        biases = gl.where(group < groups, N, 0)  # the rows after the last group get none
        for part in gl.static_range(PARTS):
            total = totals[part]
            if not BLOCK_SCALED:
                total *= scale
            if part % STAGINGS == 0:
                tma.store_wait(0)  # until the engine has read what is in them
            staging = stagings.index(HALF * STAGINGS + part % STAGINGS)
            if RANK:
                total = _add_thin(total, staging, thin, m0, n0 + part * WIDTH, height, N, RANK, HEIGHT, WIDTH)
            _store(
                total, out_ptr, out, staging, bias, biases, out_start, m0, n0 + part * WIDTH, height, N, BIAS, HEIGHT,
                WIDTH,
            )  # fmt: skip
        tile += gl.num_programs(0)
        group, end, first, start, padded, size = _groups_in_front(
            tile, group, end, first, start, padded, size, splits_ptr, rows, M, across, groups, CONTRACTION, ALIGNMENT,
            TILE_M,
        )  # fmt: skip
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=["groups"],
    do_not_specialize_on_alignment=["left_scale_ptr", "right_scale_ptr", "bias_ptr", "splits_ptr"],
)
def _grouped_hopper_kernel(
    out_ptr,
    out,
    left,
    left_scale_ptr,
    right,
    right_scale_ptr,
    scales,
    bias_ptr,
    splits_ptr,
    rows,
    M,
    N,
    K,
    groups,
    right_rows,
    right_columns,
    left_scale_row,
    left_scale_step,
    right_scale_group,
    right_scale_row,
    right_scale_step,
    thin_left_ptr,
    thin_right_ptr,
    thin_rank,
    RANK: gl.constexpr,
    CONTRACTION: gl.constexpr,
    COVERED: gl.constexpr,
    BLOCK_SCALED: gl.constexpr,
    PROMOTED: gl.constexpr,
    BIAS: gl.constexpr,
    ALIGNMENT: gl.constexpr,
    TILE_M: gl.constexpr,
    TILE_N: gl.constexpr,
    TILE_K: gl.constexpr,
    STAGES: gl.constexpr,
    BAND: gl.constexpr,
    WIDTH: gl.constexpr,
    STAGINGS: gl.constexpr,
):
    SCALES: gl.constexpr = BLOCK_SCALED and CONTRACTION
    lefts = gl.allocate_shared_memory(left.dtype, [STAGES, TILE_M, TILE_K], left.layout)
    rights = gl.allocate_shared_memory(right.dtype, [STAGES, TILE_N, TILE_K], right.layout)
    stagings = gl.allocate_shared_memory(out.dtype, [2 * STAGINGS, TILE_M // 2, WIDTH], out.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    right_scales = full
    if SCALES:
        right_scales = gl.allocate_shared_memory(gl.float32, [STAGES, TILE_N], scales.layout)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)  # by both groups of multiplying warps
    fence_async_shared()
    numbers = rows, M, N, K, groups
    strides = left_scale_row, left_scale_step, right_scale_group, right_scale_row, right_scale_step
    thin = thin_left_ptr, thin_right_ptr, thin_rank
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    out_ptr, out, stagings, left_scale_ptr, right_scale_ptr, bias_ptr, splits_ptr, lefts, rights,
                    right_scales, full, free, numbers, strides, thin, RANK, 0, CONTRACTION, COVERED, BLOCK_SCALED,
                    PROMOTED, BIAS, ALIGNMENT, TILE_M, TILE_N, TILE_K, STAGES, BAND, WIDTH, STAGINGS,
                ),
            ),
            (
                _multiply,
                (
                    out_ptr, out, stagings, left_scale_ptr, right_scale_ptr, bias_ptr, splits_ptr, lefts, rights,
                    right_scales, full, free, numbers, strides, thin, RANK, 1, CONTRACTION, COVERED, BLOCK_SCALED,
                    PROMOTED, BIAS, ALIGNMENT, TILE_M, TILE_N, TILE_K, STAGES, BAND, WIDTH, STAGINGS,
                ),
            ),
            (
                _load,
                (
                    left, right, scales, splits_ptr, lefts, rights, right_scales, full, free, numbers, right_rows,
                    right_columns, right_scale_step, SCALES, CONTRACTION, COVERED, ALIGNMENT, TILE_M, TILE_N, TILE_K,
                    STAGES, BAND,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


grouped = GluonLauncher(_grouped_hopper_kernel, num_warps=4)


def takes(
    left: Tensor,
    right: Tensor,
    right_scale: Tensor,
    columns: int,
    alignment: int,
    blocks: tuple[int, int] | None,
) -> bool:
    """Return whether :func:`multiply` takes these operands.

    Args:
        left: (T, K) or (M, P).
        right: (G, N, K) or (N, P).
        columns: of the result.
        alignment: that groups along the contraction start at.
        blocks: rows of a block of the left and the right scales, or None if a scale is a group's.
    """
    if not (left.numel() and right.numel()) or (left.data_ptr() | right.data_ptr()) % 16 or columns % 8:
        return False
    if any(pitch % 16 for pitch in (left.stride(0), *right.stride()[:-1])):
        return False
    if right.dim() == 3:
        return blocks in (None, (1, FLOAT8_BLOCK)) and _matrix_of(right) is not None
    if blocks is not None and (right_scale.stride(0) != 1 or right_scale.data_ptr() % 16):
        return False
    # rows that a step reads beyond a group's end must be zero
    return blocks in (None, (1, 1)) and alignment % TILE_K == 0


def _matrix_of(right: Tensor) -> tuple[list[int], int, int] | None:
    """Return the shape of one matrix that holds all groups' (N, K), and their distances down and across."""
    groups, rows, columns = right.shape
    between, pitch, _ = right.stride()
    if between == rows * pitch:
        return [groups * rows, columns], rows, 0
    beside = groups * between <= pitch
    # a step beyond K must not read of the next group
    return (
        ([rows, (groups - 1) * between + columns], 0, between) if beside and between % TILE_K == 0 else None
    )


def multiply(*operands: Any, **options: Any) -> None:
    """Compute ``grouped_gemm.rows``, or ``contraction`` if ``right`` is a matrix; operands of :func:`launch_of`."""
    grouped(*launch_of(*operands, **options))


def launch_of(
    out: Tensor,
    left: Tensor,
    left_scale: Tensor,
    right: Tensor,
    right_scale: Tensor,
    splits: Tensor,
    bias: Tensor | None,
    alignment: int,
    programs: int,
    fast_accumulation: bool,
    thin: tuple[Tensor, Tensor] | None = None,
    covered: bool = False,
) -> tuple[tuple[int, int, int], tuple[Any, ...], tuple[Any, ...]]:
    """Return grid, arguments and constants of a launch of ``grouped``.

    Args:
        programs: multiprocessors of the GPU.
        thin: (rows, r) and (N, r), contiguous, in the dtype of ``out``; their product is added to the one group's.
        covered: rows of no group are not written.
    """
    contraction, block_scaled = right.dim() == 2, left_scale.dim() > 1
    if contraction:
        (M, rows), N = left.shape, right.shape[0]
        K, shape, down, across = rows, list(right.shape), 0, 0
    else:
        (rows, N), K = out.shape, left.shape[1]
        matrix = _matrix_of(right)
        assert matrix is not None  # ``takes`` has seen to it
        M, (shape, down, across) = rows, matrix
    in_ring = contraction and block_scaled  # the right scales, too
    tile_m, tile_n, stagings = TILE
    if block_scaled:
        tile_m, tile_n, stagings = BLOCK_CONTRACTION_TILE if contraction else BLOCK_ROWS_TILE
    elif not contraction and 0 < N % tile_n <= NARROW_TILE[1] and -N % tile_n > N // WASTE:
        tile_m, tile_n, stagings = NARROW_TILE
    out_size = out.element_size()
    stagings = stagings if out_size == 2 else 1
    room = SHARED_MEMORY - stagings * tile_m * WIDTH * out_size
    stages = room // ((tile_m + tile_n) * TILE_K + 4 * tile_n * in_ring)
    lefts, rights = _tiles(left, list(left.shape), tile_m), _tiles(right, shape, tile_n)
    results = TensorDescriptor(
        out, [out.numel() // N, N], [N, 1], [tile_m // 2, WIDTH], RESULTS[8 * out_size]
    )
    scales, strides = lefts, (0, 0, 0, 0, 0)
    if block_scaled:
        strides = (*left_scale.stride(), *([0] if contraction else []), *right_scale.stride())
    if in_ring:
        entries = (right_scale.shape[1] - 1) * right_scale.stride(1) + N
        scales = TensorDescriptor(right_scale, [entries], [1], [tile_n], SCALES)
    thin_left, thin_right = (out, out) if thin is None else thin
    rank = 0 if thin is None else thin_left.shape[1]
    return (
        (programs, 1, 1),
        (
            out, results, lefts, left_scale, rights, right_scale, scales, left_scale if bias is None else bias, splits,
            rows, M, N, K, splits.shape[0], down, across, *strides, thin_left, thin_right, rank,
        ),
        (
            max(16, 1 << (rank - 1).bit_length()) if rank else 0, contraction, contraction or covered, block_scaled,
            block_scaled or not fast_accumulation, bias is not None, alignment, tile_m, tile_n, TILE_K, stages, BAND,
            WIDTH, stagings,
        ),
    )  # fmt: skip


def _tiles(codes: Tensor, shape: list[int], rows: int) -> TensorDescriptor:
    """Return codes as the loading warp reads them, ``rows`` at a time; what lies outside ``shape`` reads as zero."""
    return TensorDescriptor(codes, shape, [codes.stride(-2), 1], [rows, TILE_K], CODES)
