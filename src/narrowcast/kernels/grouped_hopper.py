"""The GEMMs of ``grouped_gemm`` on Hopper's tensor cores with warps of two kinds: some load, the others multiply.

``grouped_gemm`` takes what this file does not: operands whose rows do not start at 16 bytes, other GPUs, the
interpreter. The sums are the same ones in the same order. What Triton's language leaves to its compiler is said here:
one warp brings codes into a ring of buffers, two groups of four warps multiply a half of the tile's rows each. They
wait for nothing but these codes, so while one of them adds up partial sums or stores, the other keeps the tensor cores
busy.
"""

from __future__ import annotations

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
from .launch import Launcher

TILE_K = 128
BAND = 8
TILE = (128, 256, 4, 128)
BLOCK_ROWS_TILE = (128, 256, 4, 64)
BLOCK_CONTRACTION_TILE = (128, 128, 6, 128)
"""Rows and columns of a tile, buffers in the ring, columns of a partial sum, for which registers must be left."""

# its name up to Triton 3.6, and since
load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
CODES = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)


@gluon.jit
def _groups_in_front(
    tile, group, end, first, start, padded, size, splits_ptr, rows, M, across, groups, CONTRACTION: gl.constexpr,
    ALIGNMENT: gl.constexpr, TILE_M: gl.constexpr,
):  # fmt: skip
    """Go on to the group of ``tile``: its number, tiles before its end and start, first row, padded, and size."""
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
    """As ``grouped_gemm._tile_origin``."""
    per_band = BAND * across
    first = (tile // per_band) * BAND
    height = gl.minimum(gl.cdiv(rows, TILE_M) - first, BAND)
    inside = tile % per_band
    return (first + inside % height) * TILE_M, (inside // height) * TILE_N


@gluon.jit
def _load(
    left, right, splits_ptr, lefts, rights, full, free, numbers, right_rows, right_columns,
    CONTRACTION: gl.constexpr, ALIGNMENT: gl.constexpr, TILE_M: gl.constexpr, TILE_N: gl.constexpr,
    TILE_K: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr,
):  # fmt: skip
    """The loading warp: the codes of every step of every tile, as soon as there is room in the ring."""
    rows, M, N, K, groups = numbers
    across = gl.cdiv(N, TILE_N)
    tile = gl.program_id(0)
    zero = gl.to_tensor(0)
    group, end, first, start, padded, size = _groups_in_front(
        tile, zero - 1, zero, zero, zero, zero, zero, splits_ptr, rows, M, across, groups, CONTRACTION, ALIGNMENT,
        TILE_M,
    )  # fmt: skip
    at = 0
    while group <= groups - CONTRACTION:
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
            mbarrier.expect(loaded, (TILE_M + TILE_N) * TILE_K)
            load_tile(left, [left_row, left_column + step * TILE_K], loaded, lefts.index(stage))
            load_tile(right, [right_row, right_column + step * TILE_K], loaded, rights.index(stage))
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
    total, out_ptr, bias_ptr, biases, start, row, column, rows, N, BIAS: gl.constexpr, TILE_M: gl.constexpr,
    TILE_N: gl.constexpr,
):  # fmt: skip
    """Add the bias and store at ``row`` and ``column`` of a group that starts at ``start`` and has ``rows``."""
    OUT: gl.constexpr = out_ptr.dtype.element_ty
    if BIAS:
        at = column + gl.arange(0, TILE_N, layout=gl.SliceLayout(0, total.type.layout))
        total += gl.load(bias_ptr + at, mask=at < biases, other=0.0).to(OUT).to(gl.float32)[None, :]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    value = gl.convert_layout(total.to(OUT), LAYOUT)
    row += gl.arange(0, TILE_M, layout=gl.SliceLayout(1, LAYOUT))
    column += gl.arange(0, TILE_N, layout=gl.SliceLayout(0, LAYOUT))
    target = out_ptr + (start + row).to(gl.int64)[:, None] * N + column[None, :]
    gl.store(target, value, mask=(row < rows)[:, None] & (column < N)[None, :])


@gluon.jit
def _scales(
    left, right, columns, left_step, right_step, right_row, step, BLOCK_SCALED: gl.constexpr,
    CONTRACTION: gl.constexpr, PARTS: gl.constexpr, LAYOUT: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip
    """Block scales of one step: of rows, and for every part of the ``columns`` that there are, or of its block."""
    a = gl.to_tensor(0.0)
    b = ()
    if BLOCK_SCALED:
        a = gl.load(left + step * left_step)
        right += step * right_step
        for part in gl.static_range(PARTS):
            if CONTRACTION:
                column = part * WIDTH + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LAYOUT))
                b = b + (gl.load(right + column * right_row, mask=column < columns, other=0.0),)
            else:
                b = b + (gl.load(right + gl.minimum(part * WIDTH, columns - 1) // 128 * right_row),)
    return a, b


@gluon.jit
def _tile_product(
    left_scale, right_scale, columns, left_scale_step, right_scale_step, right_scale_row, lefts, rights, full, free, at,
    steps, HALF: gl.constexpr, CONTRACTION: gl.constexpr, BLOCK_SCALED: gl.constexpr, PROMOTED: gl.constexpr,
    PARTS: gl.constexpr, TILE_M: gl.constexpr, STAGES: gl.constexpr, LAYOUT: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip
    """fp32 sums over the ``steps`` that are loaded ``at`` and after, without scales or with those of blocks."""
    HEIGHT: gl.constexpr = TILE_M // 2
    nothing = gl.zeros([HEIGHT, WIDTH], gl.float32, LAYOUT)
    totals = ()
    for _ in gl.static_range(PARTS):
        totals = totals + (nothing,)
    # Scales of blocks arrive a step ahead of their use; the last ones once more.
    a_scale, b_scales = _scales(
        left_scale, right_scale, columns, left_scale_step, right_scale_step, right_scale_row, 0, BLOCK_SCALED,
        CONTRACTION, PARTS, LAYOUT, WIDTH,
    )  # fmt: skip
    for step in range(steps):
        stage = at % STAGES
        ahead = gl.minimum(step + 1, steps - 1)
        next_a_scale, next_b_scales = _scales(
            left_scale, right_scale, columns, left_scale_step, right_scale_step, right_scale_row, ahead, BLOCK_SCALED,
            CONTRACTION, PARTS, LAYOUT, WIDTH,
        )  # fmt: skip
        mbarrier.wait(full.index(stage), (at // STAGES) & 1)
        a = lefts.index(stage).slice(HALF * HEIGHT, HEIGHT, dim=0)
        sums = ()
        for part in gl.static_range(PARTS):
            b = rights.index(stage).slice(part * WIDTH, WIDTH, dim=0).permute((1, 0))
            if PROMOTED:
                partial = warpgroup_mma(a, b, nothing, use_acc=False, is_async=True)
                partial = warpgroup_mma_wait(0, deps=[partial])
                if part == PARTS - 1:
                    mbarrier.arrive(free.index(stage), count=1)
                if BLOCK_SCALED:
                    sums = sums + (_scaled(partial, a_scale, b_scales[part], totals[part], CONTRACTION),)
                else:
                    sums = sums + (totals[part] + partial,)
            else:
                sums = sums + (warpgroup_mma(a, b, totals[part], is_async=True),)
        if not PROMOTED:
            sums = warpgroup_mma_wait(0, deps=sums)
            mbarrier.arrive(free.index(stage), count=1)
        totals = sums
        a_scale = next_a_scale
        b_scales = next_b_scales
        at += 1
    return totals, at


@gluon.jit
def _multiply(
    out_ptr, left_scale_ptr, right_scale_ptr, bias_ptr, splits_ptr, lefts, rights, full, free, numbers, strides,
    HALF: gl.constexpr,
    CONTRACTION: gl.constexpr, BLOCK_SCALED: gl.constexpr, PROMOTED: gl.constexpr, BIAS: gl.constexpr,
    ALIGNMENT: gl.constexpr, TILE_M: gl.constexpr, TILE_N: gl.constexpr, TILE_K: gl.constexpr, STAGES: gl.constexpr,
    BAND: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip
    """Four of the multiplying warps: the first or second ``HALF`` of every tile's rows."""
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
    while group <= groups - CONTRACTION:
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
        right_scale = right_scale_ptr + member * right_scale_group
        if CONTRACTION:
            left_scale += first_scale // TILE_K * left_scale_step
            right_scale += first_scale // TILE_K * right_scale_step + n0 * right_scale_row
        else:
            left_scale += first_scale * left_scale_row
            right_scale += n0 // 128 * right_scale_row
        totals, at = _tile_product(
            left_scale, right_scale, N - n0, left_scale_step, right_scale_step, right_scale_row, lefts, rights, full,
            free, at, steps, HALF, CONTRACTION, BLOCK_SCALED, PROMOTED, PARTS, TILE_M, STAGES, LAYOUT, WIDTH,
        )  # fmt: skip
        bias = bias_ptr + member.to(gl.int64) * N
        biases = gl.where(group < groups, N, 0)  # the rows behind the last group get none
        for part in gl.static_range(PARTS):
            total = totals[part]
            if not BLOCK_SCALED:
                total *= gl.load(left_scale_ptr + member) * gl.load(right_scale_ptr + member)
            _store(
                total, out_ptr, bias, biases, out_start, m0, n0 + part * WIDTH, height, N, BIAS, HEIGHT, WIDTH
            )
        tile += gl.num_programs(0)
        group, end, first, start, padded, size = _groups_in_front(
            tile, group, end, first, start, padded, size, splits_ptr, rows, M, across, groups, CONTRACTION, ALIGNMENT,
            TILE_M,
        )  # fmt: skip


@gluon.jit(
    do_not_specialize=["groups"],
    do_not_specialize_on_alignment=["left_scale_ptr", "right_scale_ptr", "bias_ptr", "splits_ptr"],
)
def _grouped_kernel(
    out_ptr,
    left,
    left_scale_ptr,
    right,
    right_scale_ptr,
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
    CONTRACTION: gl.constexpr,
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
):
    lefts = gl.allocate_shared_memory(left.dtype, [STAGES, TILE_M, TILE_K], left.layout)
    rights = gl.allocate_shared_memory(right.dtype, [STAGES, TILE_N, TILE_K], right.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)  # by both groups of multiplying warps
    fence_async_shared()
    numbers = rows, M, N, K, groups
    strides = left_scale_row, left_scale_step, right_scale_group, right_scale_row, right_scale_step
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    out_ptr, left_scale_ptr, right_scale_ptr, bias_ptr, splits_ptr, lefts, rights, full, free, numbers,
                    strides, 0, CONTRACTION, BLOCK_SCALED, PROMOTED, BIAS, ALIGNMENT, TILE_M, TILE_N, TILE_K, STAGES,
                    BAND, WIDTH,
                ),
            ),
            (
                _multiply,
                (
                    out_ptr, left_scale_ptr, right_scale_ptr, bias_ptr, splits_ptr, lefts, rights, full, free, numbers,
                    strides, 1, CONTRACTION, BLOCK_SCALED, PROMOTED, BIAS, ALIGNMENT, TILE_M, TILE_N, TILE_K, STAGES,
                    BAND, WIDTH,
                ),
            ),
            (
                _load,
                (
                    left, right, splits_ptr, lefts, rights, full, free, numbers, right_rows, right_columns,
                    CONTRACTION, ALIGNMENT, TILE_M, TILE_N, TILE_K, STAGES, BAND,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


_grouped = Launcher(_grouped_kernel, num_warps=4)


def takes(left: Tensor, right: Tensor, alignment: int, blocks: tuple[int, int] | None) -> bool:
    """Whether :func:`multiply` takes these operands.

    Args:
        left: (T, K) or (M, P). right: (G, N, K) or (N, P). alignment: that groups along the contraction start at.
        blocks: rows of a block of the left and the right scales, or None where a scale is a group's.
    """
    if not (left.numel() and right.numel()) or (left.data_ptr() | right.data_ptr()) % 16:
        return False
    if any(pitch % 16 for pitch in (left.stride(0), *right.stride()[:-1])):
        return False
    if right.dim() == 2:  # what a step reads beyond a group's end must be zero
        return blocks in (None, (1, 1)) and alignment % TILE_K == 0
    return blocks in (None, (1, FLOAT8_BLOCK)) and _matrix_of(right) is not None


def _matrix_of(right: Tensor) -> tuple[list[int], int, int] | None:
    """Shape of one matrix that holds all groups' (N, K), and how far apart they are in it, down and across."""
    groups, rows, columns = right.shape
    between, pitch, _ = right.stride()
    if between == rows * pitch:
        return [groups * rows, columns], rows, 0
    beside = groups * between <= pitch
    # a step beyond K must not read of the next group
    return (
        ([rows, (groups - 1) * between + columns], 0, between) if beside and between % TILE_K == 0 else None
    )


def multiply(
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
) -> None:
    """``grouped_gemm.rows``, or where ``right`` is a matrix ``contraction``, into ``out``.

    Args:
        programs: multiprocessors of the GPU.
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
    strides: tuple[int, ...] = (0, 0, 0, 0, 0)
    tile_m, tile_n, stages, width = TILE
    if block_scaled:
        tile_m, tile_n, stages, width = BLOCK_CONTRACTION_TILE if contraction else BLOCK_ROWS_TILE
        strides = (*left_scale.stride(), *([0] if contraction else []), *right_scale.stride())
    lefts, rights = _tiles(left, list(left.shape), tile_m), _tiles(right, shape, tile_n)
    _grouped(
        (programs, 1, 1),
        (
            out, lefts, left_scale, rights, right_scale, left_scale if bias is None else bias, splits, rows, M, N, K,
            splits.shape[0], down, across, *strides,
        ),
        (
            contraction, block_scaled, block_scaled or not fast_accumulation, bias is not None, alignment, tile_m,
            tile_n, TILE_K, stages, BAND, width,
        ),
    )  # fmt: skip


def _tiles(codes: Tensor, shape: list[int], rows: int) -> TensorDescriptor:
    """Codes as the loading warp reads them, ``rows`` at a time; what lies outside of ``shape`` reads as zero."""
    return TensorDescriptor(codes, shape, [codes.stride(-2), 1], [rows, TILE_K], CODES)
