"""Tiles: which part of the matrix a program takes, and loads and stores of four interleaved rows.

Kernels that also write a transpose cut the matrix [M, K] into tiles and read each tile as four tensors of shape
[rows / 4, columns], tensor ``j`` holding rows ``4 * i + j``. Codes of four consecutive rows then meet in one thread,
where they become one 32-bit word (``codecs.pack_codes``), and the tile is transposed as words.

Programs walk the matrix in bands of ``2**BAND_BITS`` tile rows, down a band first: the programs in flight then cover
a region that is long in both directions, so that reads and transposed writes both touch long runs of memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

BAND_BITS = 1


@triton.jit
def tile_position(band_bits, REVERSE: tl.constexpr):
    """Tile row and tile column of this program, as 64-bit integers; ``REVERSE`` walks from the last tile back."""
    x = tl.program_id(0)
    band = tl.program_id(1)
    if REVERSE:
        x = tl.num_programs(0) - 1 - x
        band = tl.num_programs(1) - 1 - band
    tile_k = x >> band_bits
    return ((band << band_bits) + (x - (tile_k << band_bits))).to(tl.int64), tile_k.to(tl.int64)


def tile_grid(tile_rows: int, tile_columns: int) -> tuple[tuple[int, int, int], int]:
    """Return grid and ``band_bits`` for a matrix of that many tiles; the second grid dimension is limited to 65535."""
    bits = min(BAND_BITS, (tile_rows - 1).bit_length())
    while (tile_rows - 1 >> bits) >= 65535:
        bits += 1
    return (tile_columns << bits, (tile_rows - 1 >> bits) + 1, 1), bits


def is_wide(M: int, K: int) -> bool:
    """Return whether offsets within a tile, twice as wide for gated operands, may need 64 bits."""
    return max(M, K) >= 2**22


@triton.jit
def load_elements(pointers, inside, EVEN: tl.constexpr):
    """Load elements; those that are not ``inside`` read as zero, and with ``EVEN`` all are."""
    if EVEN:
        return tl.load(pointers)
    return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def store_elements(pointers, values, inside, EVEN: tl.constexpr):
    """Store what ``load_elements`` would read there."""
    if EVEN:
        tl.store(pointers, values)
    else:
        tl.store(pointers, values, mask=inside)


@triton.jit
def load_row(pointer, offsets, row, columns, rows_left, columns_left, EVEN: tl.constexpr):
    """Load rows ``row`` and ``columns`` of a tile; what lies outside the matrix reads as zero."""
    if EVEN:
        return tl.load(pointer + offsets)
    return tl.load(pointer + offsets, mask=(row < rows_left) & (columns < columns_left), other=0.0)


@triton.jit
def store_row(pointer, offsets, codes, row, columns, rows_left, columns_left, EVEN: tl.constexpr):
    """Store what ``load_row`` would read there."""
    if EVEN:
        tl.store(pointer + offsets, codes)
    else:
        tl.store(pointer + offsets, codes, mask=(row < rows_left) & (columns < columns_left))


@triton.jit
def load_tile(pointer, offsets, row, columns, K, rows_left, columns_left, EVEN: tl.constexpr):
    """Load four interleaved rows, the first of which are ``row``."""
    rows = ()
    for j in tl.static_range(4):
        rows = rows + (load_row(pointer + j * K, offsets, row + j, columns, rows_left, columns_left, EVEN),)
    return rows


@triton.jit
def store_tile(pointer, offsets, codes, row, columns, K, rows_left, columns_left, EVEN: tl.constexpr):
    """Store what ``load_tile`` would read there."""
    for j in tl.static_range(4):
        store_row(pointer + j * K, offsets, codes[j], row + j, columns, rows_left, columns_left, EVEN)


@triton.jit
def store_transposed(
    pointer, words, m0, k0, M, rows_left, columns_left, WORDS: tl.constexpr, EVEN: tl.constexpr
):
    """Store a tile of words [rows / 4, columns], four row codes each, into the transposed byte matrix [K, M].

    Args:
        m0, k0: first row and first column of the tile in the logical matrix.
        WORDS: whether M is a multiple of 4, so that words are aligned in the transposed rows.
        EVEN: whether the tile lies inside the matrix.
    """
    transposed = tl.trans(words)
    column = tl.arange(0, words.shape[1])[:, None]
    group = tl.arange(0, words.shape[0])[None, :]
    if WORDS:
        stride = M // 4
        target = pointer.to(tl.pointer_type(tl.uint32)) + (k0 * stride + m0 // 4) + (column * stride + group)
        if EVEN:
            tl.store(target, transposed)
        else:
            tl.store(target, transposed, mask=(column < columns_left) & (group < rows_left // 4))
    else:
        target = pointer + (k0 * M + m0) + (column * M + group * 4)
        for j in tl.static_range(4):
            inside = (column < columns_left) & (group * 4 + j < rows_left)
            tl.store(target + j, (transposed >> (8 * j)).to(tl.uint8), mask=inside)


@triton.jit
def load_rows(pointer, K, left, inside, EVICTION: tl.constexpr):
    """Return four interleaved rows, of which as many are there as are ``left``."""
    rows = ()
    for j in tl.static_range(4):
        values = tl.load(pointer + j * K, mask=inside & (left > j), other=0.0, eviction_policy=EVICTION)
        rows = rows + (values,)
    return rows


@triton.jit
def store_rows(pointer, codes, K, left, inside):
    """Store four interleaved rows, as many as are ``left``."""
    for j in tl.static_range(4):
        tl.store(pointer + j * K, codes[j], mask=inside & (left > j))
