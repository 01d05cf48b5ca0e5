"""NVFP4: E2M1 elements, E4M3 scales per 16, a global amax; every option of the reference, both directions per tile.

Two passes: the amaxes (per tensor, per row and column, or of the rotated columns), then the encoding, group by group
(``nvfp4_groups``). The second direction reads the tile again, from L1, which is cheaper than holding it.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats import (
    NVFP4,
    NVFP4_ROW_SCALED,
    RHT_SIGN_MASK,
    SCALE_TILE_ROWS,
    cdiv,
    check_nvfp4,
    round_up,
)
from .codecs import magnitude, round_pair_to_bfloat16
from .launch import Launcher, check_input
from .nvfp4_groups import encode, group_amax, load_columns, load_rows, rotate, round_group
from .tiles import tile_grid, tile_position

TILE_M = 128
TILE_K = 64


@triton.jit
def _raise(amax_ptr, value, inside):
    """Raise fp32 amaxes in memory; non-negative floats order like their bits."""
    previous = tl.load(amax_ptr, mask=inside, other=0.0)
    tl.atomic_max(
        amax_ptr.to(tl.pointer_type(tl.int32)),
        value.to(tl.int32, bitcast=True),
        mask=inside & (value > previous),
        sem="relaxed",
    )


@triton.jit
def _raise_one(amax_ptr, value):
    _raise(amax_ptr, value, value >= 0.0)


@triton.jit(do_not_specialize=["groups", "band_bits"], do_not_specialize_on_alignment=["group_ptr"])
def _nvfp4_amax_kernel(
    x_ptr,
    amax_ptr,
    group_ptr,
    M,
    K,
    groups,
    band_bits,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    RHT: tl.constexpr,
    SIGN_MASK: tl.constexpr,
    ROW_SCALED: tl.constexpr,
    GROUPED: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
    EVEN: tl.constexpr,
    WIDE: tl.constexpr,
):
    # Per tensor: amax_ptr[0] is max|x|, amax_ptr[1] that of the rotated columns. Row-scaled: M rows, then K columns.
    # Grouped: the first of every group, and of rows in none, then the second; row-scaled: the columns of each group.
    tile_m, tile_k = tile_position(band_bits, False)
    m0 = tile_m * TILE_M
    k0 = tile_k * TILE_K
    if m0 >= M:
        return
    if WIDE:
        M = M.to(tl.int64)
        K = K.to(tl.int64)
    rows_left = tl.minimum(M - m0, TILE_M).to(tl.int32)
    columns_left = tl.minimum(K - k0, TILE_K).to(tl.int32)
    x_tile = x_ptr + (m0 * K + k0)
    if GROUPED and not ROW_SCALED:
        amax_ptr += tl.load(group_ptr + tile_m)
    if RHT:
        xs = load_rows(x_tile, K, rows_left, columns_left, TILE_M, TILE_K, EVEN)
        if ROWWISE:
            _raise_one(amax_ptr, tl.max(group_amax(xs)))
        # Rounding is monotonic: the largest rounded magnitude is the largest one, rounded.
        largest = group_amax(rotate(xs, SIGN_MASK))
        largest, _same = round_pair_to_bfloat16(largest, largest)
        _raise_one(amax_ptr + (groups + 1 if GROUPED else 1), tl.max(largest))
    else:
        row = tl.arange(0, TILE_M)
        column = tl.arange(0, TILE_K)
        offsets = row[:, None] * K + column[None, :]
        inside = (row < rows_left)[:, None] & (column < columns_left)[None, :]
        if EVEN:
            size = magnitude(tl.load(x_tile + offsets))
        else:
            size = magnitude(tl.load(x_tile + offsets, mask=inside, other=0.0))
        if ROW_SCALED:
            if ROWWISE:
                _raise(amax_ptr + m0 + row, tl.maximum(tl.max(size, axis=1), 0.0), row < rows_left)
            if COLUMNWISE:
                columns = amax_ptr + M
                if GROUPED:
                    columns += tl.load(group_ptr + tile_m) * K
                _raise(columns + k0 + column, tl.maximum(tl.max(size, axis=0), 0.0), column < columns_left)
        else:
            _raise_one(amax_ptr, tl.maximum(tl.max(size), 0.0))


@triton.jit
def _load_amax(amax_ptr, copy_ptr, start, line, inside, copies, ROW_SCALED: tl.constexpr):
    """Return the amaxes of lines ``start + line``, or of the tensor; stored to their result where ``copies``."""
    if ROW_SCALED:
        amax = tl.load(amax_ptr + start + line, mask=inside, other=0.0)
        if copies:
            tl.store(copy_ptr + start + line, amax, mask=inside)
        return amax
    else:
        amax = tl.load(amax_ptr)
        if copies:
            tl.store(copy_ptr, amax)
        return tl.full((1, 1), 0.0, tl.float32) + amax


@triton.jit
def _of_group(
    amax_ptr,
    group_ptr,
    seed_ptr,
    tile_m,
    M,
    K,
    groups,
    RHT: tl.constexpr,
    ROW_SCALED: tl.constexpr,
    GROUPED: tl.constexpr,
    TILE_M: tl.constexpr,
):
    """Return where a tile's amaxes and seed are, its number in its group, and the group's blocks of 16 rows."""
    if GROUPED:
        tiles = tl.cdiv(M, TILE_M)
        group = tl.load(group_ptr + tile_m)
        first = tl.load(group_ptr + tiles + tile_m)
        rows = tl.load(group_ptr + 2 * tiles + tile_m)
        if ROW_SCALED:
            own = amax_ptr
            second = amax_ptr + M + group * K
        else:
            own = amax_ptr + group
            second = own + (groups + 1 if RHT else 0)
        return own, second, seed_ptr + group, tile_m - first, (rows + 15) // 16
    else:
        second = amax_ptr + (M if ROW_SCALED else 1 if RHT else 0)
        return amax_ptr, second, seed_ptr, tile_m, (M + 15) // 16


@triton.jit
def _store_groups(
    data_ptr, scale_ptr, words, scale, start, first_block, blocks, lines_left, GROUPS: tl.constexpr
):
    """Store the words [lines, 2 * GROUPS] and block scales [lines, GROUPS] of a tile whose first line is ``start``."""
    line = tl.arange(0, words.shape[0])[:, None]
    word = tl.arange(0, 2 * GROUPS)[None, :]
    target = data_ptr.to(tl.pointer_type(tl.uint32)) + (start * blocks * 2 + first_block * 2)
    inside = (line < lines_left) & (word < (blocks - first_block) * 2)
    tl.store(target + (line * (blocks * 2) + word), words, mask=inside)
    stride = (blocks + 3) // 4 * 4
    block = tl.arange(0, GROUPS)[None, :]
    scale = tl.where(line < lines_left, scale, 0)
    target = scale_ptr + (start * stride + first_block)
    tl.store(target + (line * stride + block), scale, mask=first_block + block < stride)


@triton.jit(
    do_not_specialize=["groups", "band_bits"], do_not_specialize_on_alignment=["seed_ptr", "group_ptr"]
)
def _nvfp4_encode_kernel(
    x_ptr,
    amax_ptr,
    group_ptr,
    seed_ptr,
    row_data_ptr,
    row_scale_ptr,
    column_data_ptr,
    column_scale_ptr,
    row_amax_ptr,
    column_amax_ptr,
    M,
    K,
    groups,
    band_bits,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    TWO_D: tl.constexpr,
    RHT: tl.constexpr,
    SIGN_MASK: tl.constexpr,
    ROW_SCALED: tl.constexpr,
    GROUPED: tl.constexpr,
    FOUR_OVER_SIX: tl.constexpr,
    E4M3_MAX: tl.constexpr,
    MSE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
    EVEN: tl.constexpr,
    WIDE: tl.constexpr,
):
    GROUPS_M: tl.constexpr = TILE_M // 16
    GROUPS_K: tl.constexpr = TILE_K // 16
    # The amax pass ends at the last rows, so what L2 still holds is there: start there.
    tile_m, tile_k = tile_position(band_bits, True)
    m0 = tile_m * TILE_M
    k0 = tile_k * TILE_K
    if m0 >= M:
        return
    if WIDE:
        M = M.to(tl.int64)
        K = K.to(tl.int64)
    rows_left = tl.minimum(M - m0, TILE_M).to(tl.int32)
    columns_left = tl.minimum(K - k0, TILE_K).to(tl.int32)
    x_tile = x_ptr + (m0 * K + k0)
    blocks_m, blocks_k = (M + 15) // 16, (K + 15) // 16
    row_amaxes, column_amaxes, seed_ptr, own_tile, height = _of_group(
        amax_ptr, group_ptr, seed_ptr, tile_m, M, K, groups, RHT, ROW_SCALED, GROUPED, TILE_M
    )
    is_first = (tile_m == 0) & (tile_k == 0) & (not GROUPED)  # whose results are copied outside

    if ROWWISE:
        xs = load_columns(x_tile, K, rows_left, columns_left, TILE_M, TILE_K, EVEN)
        row = tl.arange(0, TILE_M)[:, None]
        block = tl.arange(0, GROUPS_K)[None, :]
        copies = tile_k == 0 if ROW_SCALED else is_first
        amax = _load_amax(row_amaxes, row_amax_ptr, m0, row, row < rows_left, copies, ROW_SCALED)
        index = (own_tile * TILE_M + row) * blocks_k + (tile_k * GROUPS_K + block)
        scale, low, high = encode(
            xs, amax, seed_ptr, index, 0, TWO_D, FOUR_OVER_SIX, E4M3_MAX, MSE, STOCHASTIC
        )
        words = tl.reshape(tl.join(low, high), (TILE_M, 2 * GROUPS_K))
        first = tile_k * GROUPS_K
        _store_groups(row_data_ptr, row_scale_ptr, words, scale, m0, first, blocks_k, rows_left, GROUPS_K)

    if COLUMNWISE:
        xs = load_rows(x_tile, K, rows_left, columns_left, TILE_M, TILE_K, EVEN)
        if RHT:
            xs = round_group(rotate(xs, SIGN_MASK))
        column = tl.arange(0, TILE_K)[None, :]
        block = tl.arange(0, GROUPS_M)[:, None]
        copies = (tile_m == 0) & (not GROUPED) if ROW_SCALED else is_first
        amax = _load_amax(
            column_amaxes, column_amax_ptr, k0, column, column < columns_left, copies, ROW_SCALED
        )
        index = (k0 + column) * height + (own_tile * GROUPS_M + block)
        scale, low, high = encode(
            xs, amax, seed_ptr, index, 1, TWO_D, FOUR_OVER_SIX, E4M3_MAX, MSE, STOCHASTIC
        )
        words = tl.reshape(tl.permute(tl.join(low, high), (1, 0, 2)), (TILE_K, 2 * GROUPS_M))
        first = tile_m * GROUPS_M
        scale = tl.trans(scale)
        _store_groups(
            column_data_ptr, column_scale_ptr, words, scale, k0, first, blocks_m, columns_left, GROUPS_M
        )


_amax = Launcher(_nvfp4_amax_kernel, num_warps=4)
_encode_tiles = Launcher(_nvfp4_encode_kernel, num_warps=4)
# Two candidates at once need twice the registers per element. Tiles of 16 x 16: with four warps, Triton 3.6 for sm_90
# packs the column-wise codes of other groups, though their scales are right.
_encode_tiles_wide = Launcher(_nvfp4_encode_kernel, num_warps=8)


def _check_options(
    two_d: bool, rht: bool, row_scaled: bool, four_over_six: bool, error_mode: str, stochastic: bool
) -> None:
    if two_d and rht:  # which the reference does
        raise ValueError("the kernels of NVFP4 cannot combine rht with two_d; turn one of them off")
    given = {
        "two_d": two_d,
        "rht": rht,
        "row_scaled": row_scaled,
        "four_over_six": four_over_six,
        "stochastic rounding": stochastic,
    }
    check_nvfp4(error_mode, tuple(name for name, chosen in given.items() if chosen))


def supports(**options: object) -> bool:
    """Return whether ``quantize`` runs with these options; what it does not is for the reference.

    Stochastic rounding and the rotation of 16 x 16 tiles, which no recipe uses, run in the reference.

    Args:
        options: keyword arguments of ``quantize`` beside the directions.
    """
    if options.get("two_d") and (options.get("rht") or options.get("seed") is not None):
        return False
    return options.keys() <= (quantize.__kwdefaults__ or {}).keys()


def quantize(
    x: Tensor,
    *,
    rowwise: bool,
    columnwise: bool,
    two_d: bool = False,
    rht: bool = False,
    random_signs: bool = True,
    row_scaled: bool = False,
    four_over_six: bool = False,
    e4m3_max: int = 448,
    error_mode: str = "MAE",
    seed: Tensor | None = None,
    groups: tuple[Tensor, int] | None = None,
) -> list[Tensor]:
    """Compute ``reference.nvfp4.quantize``, stochastic rounding included: a pass for amax and one that encodes."""
    check_input(x, 2)
    _check_options(two_d, rht, row_scaled, four_over_six, error_mode, seed is not None)
    x = x.contiguous()
    K = x.shape[-1]
    M = math.prod(x.shape[:-1])
    allocate = torch.zeros if x.numel() == 0 else torch.empty
    described = (NVFP4_ROW_SCALED if row_scaled else NVFP4).describe(tuple(x.shape), rowwise, columnwise)
    outputs = [
        allocate(shape, dtype=getattr(torch, dtype), device=x.device) for shape, dtype in described.values()
    ]
    if x.numel() == 0 or not outputs:
        if groups is None or not outputs:
            return outputs
        sizes = (M, K * groups[1]) if row_scaled else (groups[1], groups[1])
        wanted = [size for size, chosen in zip(sizes, (rowwise, columnwise)) if chosen]
        zeros = [torch.zeros(size, dtype=torch.float32, device=x.device) for size in wanted]
        return [*outputs[: -len(zeros)], *zeros]
    directions = rowwise + columnwise
    buffers, amaxes = outputs[:-directions], outputs[-directions:]
    rht = rht and columnwise
    sign_mask = RHT_SIGN_MASK if rht and random_signs else 0
    # Tiles cover the matrix rounded up to 128 x 128, so that they also write the zeros that pad the scales.
    grid, band_bits = tile_grid(cdiv(M, TILE_M), round_up(K, SCALE_TILE_ROWS) // TILE_K)
    even = M % SCALE_TILE_ROWS == 0 and K % SCALE_TILE_ROWS == 0
    tile = (TILE_M, TILE_K, even, max(M, K) >= 2**23)
    blocks, count = (None, 0) if groups is None else groups
    size = M + K * (count + 1) if row_scaled else 2 * (count + 1)  # without groups M + K, or 2
    amax = torch.zeros(size, dtype=torch.float32, device=x.device)
    table = amax if blocks is None else blocks.contiguous()
    if seed is not None and blocks is not None:
        seed = seed + torch.arange(count + 1, device=x.device)
    kind = (rht, sign_mask, row_scaled, blocks is not None)
    _amax(grid, (x, amax, table, M, K, count, band_bits), (rowwise, columnwise, *kind, *tile))
    # An absent direction passes the other's pointers: the constants keep the kernel from touching them.
    encode = _encode_tiles_wide if four_over_six or two_d else _encode_tiles
    encode(
        grid,
        (
            x, amax, table, amax if seed is None else seed, *buffers[:2], *buffers[-2:], amaxes[0], amaxes[-1], M, K,
            count, band_bits,
        ),
        (
            rowwise, columnwise, two_d, *kind, four_over_six, e4m3_max, error_mode == "MSE", seed is not None, *tile,
        ),
    )  # fmt: skip
    if blocks is None:
        return outputs
    if row_scaled:
        found = [
            *([amaxes[0]] if rowwise else []),
            *([amax[M : M + K * count].clone()] if columnwise else []),
        ]
        return [*buffers, *found]
    sides = amax.view(2, count + 1)[:, :count]
    found = [*([sides[0]] if rowwise else []), *([sides[1 if rht else 0]] if columnwise else [])]
    return [*buffers, *(side.clone() for side in found)]
