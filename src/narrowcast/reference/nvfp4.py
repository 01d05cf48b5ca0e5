"""NVFP4: E2M1 elements with one E4M3 scale per 16 elements and one fp32 amax per tensor (or per row).

The two directions are quantized separately from the source; column-wise data is transposed. Everything is
computed in the layout of the source, groups of 16 running down the rows for the column-wise direction, and
only packed bytes are transposed. The matrix is padded with zeros to whole groups in the directions that pack,
and rotations and tiles see those zeros.

E2M1 has no NaN, so a NaN poisons its group (of a tile: the tile): the scale is the NaN of E4M3, every code +6, and
all of it decodes to NaN. An infinite amax makes what decodes with it infinite or NaN.

Options: 16 x 16 tiles (weights), the random Hadamard transform of the column-wise direction, stochastic
rounding (gradients), one amax per row (activations), and "4 over 6": map the amax of a block to 4 or to 6,
whichever loses less.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..formats import (
    E2M1,
    E4M3,
    FLT_MAX,
    NVFP4_BLOCK,
    SCALE_TILE_COLUMNS,
    SCALE_TILE_ROWS,
    check_nvfp4,
    round_to_float32,
)
from .codecs import (
    decode_float8,
    decode_subbyte,
    encode_float4_stochastic_,
    encode_float8,
    encode_float8_,
    encode_subbyte_,
    pack_codes,
    unpack_codes,
)
from .hadamard import rotate_rows, unrotate_rows
from .layout import (
    as_matrix,
    group_max,
    multiply_groups,
    pad_matrix,
    pad_scales,
    spread,
    transpose_bytes,
    widen,
)
from .philox import random_words
from .scaling import reciprocal

_ROWWISE_STREAM = 0
_COLUMNWISE_STREAM = 1


@dataclass(frozen=True)
class _Options:
    two_d: bool
    rht: bool
    random_signs: bool
    row_scaled: bool
    four_over_six: bool
    e4m3_max: int
    error_mode: str
    seed: Tensor | None
    amaxes: tuple[Tensor, Tensor] | None
    groups: tuple[Tensor, int] | None

    def __post_init__(self) -> None:
        chosen = [name for name in ("two_d", "rht", "row_scaled", "four_over_six") if getattr(self, name)]
        check_nvfp4(self.error_mode, (*chosen, *(["stochastic rounding"] if self.seed is not None else ())))

    @property
    def codes_are_shared(self) -> bool:
        """Whether both directions of a tile hold the same codes and scales."""
        return self.two_d and not (self.rht or self.four_over_six) and self.seed is None


@dataclass(frozen=True)
class _Scratch:
    """Memory of the matrix's shape that one direction after the other computes in, fp32 and int32."""

    values: Tensor
    bits: Tensor


@dataclass(frozen=True)
class _Encoded:
    """Codes (Mp, Kp), E4M3 scales per group and the amax that the global scale came from, in the source's
    layout."""

    codes: Tensor
    scales: Tensor
    amax: Tensor


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
    amaxes: tuple[Tensor, Tensor] | None = None,
    groups: tuple[Tensor, int] | None = None,
) -> list[Tensor]:
    """Quantize a tensor in one or both directions.

    Args:
        x: fp32, bf16 or fp16, shape (*lead, K), any strides; M is the product of ``lead``.
        rowwise: groups of 16 along K.
        columnwise: groups of 16 along M.
        two_d: one block amax per 16 x 16 tile.
        rht: rotate groups of 16 rows before column-wise quantization; the rotated values are rounded to bf16.
        random_signs: the rotation uses the fixed sign pattern, else all signs are plus.
        row_scaled: one amax per row (column-wise: per column) instead of one per tensor.
        four_over_six: choose per block, or per tile, between mapping its amax to 4 and to 6.
        e4m3_max: the block scale that the tensor's amax maps to, 448 or 256.
        error_mode: what "4 over 6" minimizes, "MAE" or "MSE".
        seed: int64 [1] for stochastic rounding of the elements, None for round to nearest even.
        amaxes: fp32 [1] each, row-wise and column-wise, to scale by instead of the tensor's own.
        groups: of a matrix whose groups of rows are quantized each as if it were alone: int64 (3, M / 128), for every
            128 rows their group, the first 128 rows of that group, and its rows; and how many groups G there are. Rows
            of group G are in none. The amaxes are [G], of columns [G * K]; group g takes ``seed + g``.

    Raises:
        TypeError: ``x`` has another dtype.
        ValueError: rank below 2, or options that exclude each other.

    Numerics:
        ``data uint8 (*lead, round_up(K, 16) / 2), scale_inv uint8 (round_up(M, 128), round_up(cdiv(K, 16),
        4))`` row-wise, ``data uint8 (K, round_up(M, 16) / 2), scale_inv uint8 (round_up(K, 128),
        round_up(cdiv(M, 16), 4))`` column-wise, then the fp32 amaxes ([1], or [M] and [K]), each where its
        direction is requested. With ``S = min(RN(6 * e4m3_max / amax), FLT_MAX)`` a block has scale
        ``E4M3(RN(block_amax * RN(S * RN(1/6))))`` and its elements are ``E2M1(RN(x * min(RN(1 / RN(scale *
        RN(1/S))), FLT_MAX)))``.
    """
    options = _Options(
        two_d,
        rht,
        random_signs,
        row_scaled,
        four_over_six,
        e4m3_max,
        error_mode,
        seed,
        amaxes,
        groups,
    )
    source = as_matrix(widen(x))
    m, k = source.shape
    matrix = pad_matrix(
        source, NVFP4_BLOCK if columnwise or two_d else 1, NVFP4_BLOCK if rowwise or two_d else 1
    )
    owned = x.dtype != torch.float32 or matrix is not source
    row, column = _encode_directions(matrix, owned, rowwise, columnwise, options)
    buffers: list[Tensor] = []
    scaled_by: list[Tensor] = []
    if row is not None:
        data = pack_codes(row.codes[:m], 4)
        scales = spread(row.scales, NVFP4_BLOCK, 1) if options.codes_are_shared else row.scales
        buffers += [data.view(*x.shape[:-1], data.shape[1]), _pad(scales[:m])]
        scaled_by.append(_amax_of_result(row.amax, m, options, True))
    if column is not None:
        data = transpose_bytes(_pack_rows(column.codes)[:, :k])
        scales = spread(column.scales, 1, NVFP4_BLOCK) if options.codes_are_shared else column.scales
        buffers += [data, _pad(scales[:, :k].t())]
        scaled_by.append(_amax_of_result(column.amax, k, options, False))
    # Copied: two directions of one tile share their amax, and a slice would keep its padding alive.
    return buffers + [amax.clone() for amax in scaled_by]


def _amax_of_result(amax: Tensor, lines: int, options: _Options, by_row: bool) -> Tensor:
    """Return what an amax of ``_Encoded`` is in the result: [1], that of every line, or of every group."""
    own = lines if options.row_scaled else 1
    if options.groups is None or (options.row_scaled and by_row):
        return amax.flatten()[:own]
    (blocks, *_), count = options.groups
    step = max(amax.shape[0] // max(blocks.shape[0], 1), 1)
    of_group = amax.new_zeros((count + 1, amax.shape[1]))
    return of_group.index_copy(0, blocks, amax[::step])[:count, :own].flatten()


def _pad(scales: Tensor) -> Tensor:
    return pad_scales(scales, SCALE_TILE_ROWS, SCALE_TILE_COLUMNS)


def _encode_directions(
    matrix: Tensor, owned: bool, rowwise: bool, columnwise: bool, options: _Options
) -> tuple[_Encoded | None, _Encoded | None]:
    """Encode both directions; a matrix that is ``owned`` may be overwritten."""
    size = matrix.abs()
    scratch = _Scratch(size, torch.empty_like(size, dtype=torch.int32))
    if options.codes_are_shared:
        amaxes = _amaxes(size, [(NVFP4_BLOCK, NVFP4_BLOCK)], options)[0]
        shared = _encode(matrix, amaxes, NVFP4_BLOCK, NVFP4_BLOCK, options, scratch)
        return shared if rowwise else None, shared if columnwise else None
    # All amaxes come first: the magnitudes' memory takes the scaled elements afterwards.
    unrotated = columnwise and not options.rht
    amaxes = _amaxes(size, [(1, NVFP4_BLOCK)] * rowwise + [(NVFP4_BLOCK, 1)] * unrotated, options)
    row = _encode(matrix, amaxes[0], 1, NVFP4_BLOCK, options, scratch) if rowwise else None
    if columnwise and options.rht:
        matrix = rotate_rows(
            matrix, options.random_signs, scratch=scratch.values, out=matrix if owned else None
        )
        amaxes = _amaxes(torch.abs(matrix, out=scratch.values), [(NVFP4_BLOCK, 1)], options)
    column = _encode(matrix, amaxes[-1], NVFP4_BLOCK, 1, options, scratch) if columnwise else None
    return row, column


def _amaxes(size: Tensor, groups: list[tuple[int, int]], options: _Options) -> list[tuple[Tensor, Tensor]]:
    """Return, per grouping, the amax of each group and the amax of the global scale; overwrites ``size``.

    A NaN is the amax of its group, but no part of the other, which the whole tensor shares.
    """
    blocks = [_block_amax(size, rows, columns, options.two_d) for rows, columns in groups]
    size.nan_to_num_(nan=0.0, posinf=math.inf)
    lines = [1 if columns > 1 else 0 for _, columns in groups]
    if options.groups is not None:
        amaxes = [
            _global_amax(size, 1, True)
            if options.row_scaled and rows == 1
            else _amax_of_groups(size, rows, options.row_scaled, *options.groups)
            for rows, _ in groups
        ]
    elif options.amaxes is None:
        amaxes = [_global_amax(size, line, options.row_scaled) for line in lines]
    else:
        amaxes = [options.amaxes[1 - line].view(1, 1) for line in lines]
    return list(zip(blocks, amaxes))


def _block_amax(size: Tensor, rows: int, columns: int, two_d: bool) -> Tensor:
    """Return the amax of each group; in a tile, that of the tile for each of its groups."""
    amax = group_max(size, rows, columns)
    return spread(group_max(amax, columns, rows), columns, rows) if two_d and rows != columns else amax


def _encode(
    matrix: Tensor,
    amaxes: tuple[Tensor, Tensor],
    rows: int,
    columns: int,
    options: _Options,
    scratch: _Scratch,
) -> _Encoded:
    """Encode groups of (rows, columns): (1, 16) row-wise, (16, 1) column-wise, (16, 16) for shared tiles."""
    block_amax, amax = amaxes
    global_scale = _global_scale(amax, options.e4m3_max)
    if options.four_over_six:
        codes, scales = _encode_four_over_six(
            matrix, block_amax, amax, global_scale, rows, columns, options, scratch
        )
        return _Encoded(codes, scales, amax)
    factor = global_scale * E2M1.max_reciprocal
    scales = encode_float8_(block_amax * factor, E4M3)
    element_scale = _element_scale(decode_float8(scales, E4M3), global_scale)
    scaled = multiply_groups(matrix, element_scale, rows, columns, out=scratch.values)
    if options.seed is None:
        return _Encoded(encode_subbyte_(scaled, E2M1, scratch.bits), scales, amax)
    random = _random_like(scaled, rows, columns, options.seed, options.groups)
    return _Encoded(encode_float4_stochastic_(scaled, random, scratch.bits), scales, amax)


def _global_amax(size: Tensor, dim: int, per_line: bool) -> Tensor:
    """Return the amax of the global scale, shaped to broadcast over amaxes of groups; 0 for an empty tensor."""
    if per_line and size.shape[dim] > 0:
        return size.amax(dim, keepdim=True)
    if per_line:
        return size.sum(dim, keepdim=True)
    return (size.amax() if size.numel() > 0 else size.sum()).reshape(1, 1)


def _amax_of_groups(size: Tensor, rows: int, by_column: bool, table: Tensor, count: int) -> Tensor:
    """Return the amax of the group of every ``rows`` rows, as a column, or of each of its columns."""
    blocks = table[0]
    largest = size if by_column else _global_amax(size, 1, True)
    of_block = largest.unflatten(0, (blocks.shape[0], SCALE_TILE_ROWS)).amax(1)
    index = blocks.unsqueeze(1).expand(of_block.shape)
    amax = of_block.new_zeros((count + 1, of_block.shape[1])).scatter_reduce(0, index, of_block, "amax")
    return amax[blocks].repeat_interleave(SCALE_TILE_ROWS // rows, dim=0)


def _global_scale(amax: Tensor, e4m3_max: int) -> Tensor:
    # An infinite amax gives 0 and an amax of 0 infinity; neither is a scale.
    scale = torch.full_like(amax, E2M1.max * e4m3_max).div_(amax).clamp_(max=FLT_MAX)
    return scale.masked_fill_((amax == 0.0).logical_or_(scale == 0.0), 1.0)


def _element_scale(block_scale: Tensor, global_scale: Tensor) -> Tensor:
    """Return the encoding factor of elements; a block scale of 0 saturates, not infinity."""
    return reciprocal(block_scale * reciprocal(global_scale)).clamp_(max=FLT_MAX)


def _random_like(
    x: Tensor, rows: int, columns: int, seed: Tensor, groups: tuple[Tensor, int] | None
) -> Tensor:
    """Return a random integer 0..255 for every element, as fp32 in the layout of ``x``.

    Blocks are numbered row-major in the direction's own matrix, of a group in the group's: (M, K / 16) row-wise, (K, M
    / 16) column-wise.
    """
    m, k = x.shape[0] // rows, x.shape[1] // columns
    line, across = torch.arange(m, device=x.device).unsqueeze(1), torch.arange(k, device=x.device)
    height: Tensor | int = m
    if groups is not None:
        each = SCALE_TILE_ROWS // rows
        group, first, size = (of_block.repeat_interleave(each).unsqueeze(1) for of_block in groups[0])
        line, height, seed = line - each * first, (size + rows - 1) // rows, seed.view(1, 1) + group
    if columns > 1:
        # Little-endian words side by side are the bytes of a block in the order of its elements.
        words = torch.stack(random_words(seed, line * k + across, _ROWWISE_STREAM), dim=2)
        return words.view(torch.uint8).view(x.shape).float()
    words = torch.stack(random_words(seed, across * height + line, _COLUMNWISE_STREAM), dim=1)
    shifts = torch.arange(0, 32, 8, dtype=torch.int32, device=x.device).view(4, 1)
    return (words.unsqueeze(2) >> shifts).bitwise_and_(0xFF).view(x.shape).float()


def _encode_four_over_six(
    matrix: Tensor,
    block_amax: Tensor,
    amax: Tensor,
    global_scale: Tensor,
    rows: int,
    columns: int,
    options: _Options,
    scratch: _Scratch,
) -> tuple[Tensor, Tensor]:
    base = block_amax.div(torch.full_like(block_amax, E2M1.max)).mul_(global_scale)
    # of groups: one for every block of rows
    of_elements = spread(amax, rows, 1) if rows > 1 and amax.shape[0] > 1 else amax

    def candidate(expand: float) -> tuple[Tensor, Tensor, Tensor]:
        scales = encode_float8(base * expand, E4M3)
        decoded = decode_float8(scales, E4M3)
        element_scale = _element_scale(decoded, global_scale)
        codes = encode_subbyte_(
            multiply_groups(matrix, element_scale, rows, columns, out=scratch.values), E2M1, scratch.bits
        )
        value = decode_subbyte(codes, E2M1)
        multiply_groups(value, decoded, rows, columns, out=value)
        # A tensor as the divisor: by a number, an accelerator multiplies with the reciprocal.
        divisor = torch.full_like(of_elements, E2M1.max * options.e4m3_max)
        value.mul_(of_elements).div_(divisor).sub_(matrix)
        error = _block_sum(value.mul_(value) if options.error_mode == "MSE" else value.abs_(), rows, columns)
        return codes, scales, _tile_sum(error, 0 if columns > 1 else 1) if options.two_d else error

    codes4, scales4, error4 = candidate(1.5)
    codes6, scales6, error6 = candidate(1.0)
    # All bits where 4 is strictly better, so that bitwise operations select.
    pick4 = (error4 < error6).to(torch.uint8).mul_(0xFF)
    scales = scales6 ^ (scales4.bitwise_xor_(scales6) & pick4)
    codes = codes6 ^ (codes4.bitwise_xor_(codes6) & spread(pick4, rows, columns))
    return codes, scales


def _block_sum(terms: Tensor, rows: int, columns: int) -> Tensor:
    """Sum the 16 elements of each group one after the other, in order, each addition rounded to fp32."""
    m, k = terms.shape
    first, *rest = terms.view(m // rows, rows, k // columns, columns).unbind(1 if rows > 1 else 3)
    total = first.clone()
    for term in rest:
        total.add_(term)
    return total.view(m // rows, k // columns)


def _tile_sum(error: Tensor, dim: int) -> Tensor:
    """Sum the errors of a tile's 16 lines as a tree (distances 8, 4, 2, 1), repeated for every line."""
    lines = error.unflatten(dim, (error.shape[dim] // NVFP4_BLOCK, NVFP4_BLOCK))
    for half in (8, 4, 2, 1):
        lines = lines.narrow(dim + 1, 0, half) + lines.narrow(dim + 1, half, half)
    return lines.expand(*lines.shape[: dim + 1], NVFP4_BLOCK, *lines.shape[dim + 2 :]).reshape(error.shape)


def _pack_rows(codes: Tensor) -> Tensor:
    """Pack pairs of rows: (M, K) codes to (M / 2, K) bytes, the even row in the low nibble."""
    pairs = codes.view(codes.shape[0] // 2, 2, codes.shape[1])
    return pairs[:, 1].bitwise_left_shift(4).bitwise_or_(pairs[:, 0])


def _unpack_rows(data: Tensor) -> Tensor:
    codes = torch.stack((data.bitwise_and(0x0F), data.bitwise_right_shift(4)), dim=1)
    return codes.view(2 * data.shape[0], data.shape[1])


def dequantize_rowwise(
    data: Tensor, scale_inv: Tensor, amax: Tensor, e4m3_max: int, dtype: torch.dtype, *, columns: int
) -> Tensor:
    """Decode row-wise data.

    Args:
        data: uint8, shape (*lead, round_up(columns, 16) / 2).
        scale_inv: uint8, compact, shape (round_up(M, 128), round_up(cdiv(columns, 16), 4)).
        amax: fp32 [1], or [M] for row-scaled data.
        e4m3_max: as it was when quantizing.
        dtype: the nominal dtype of the result.
        columns: K, the last dimension of the logical tensor.

    Raises:
        ValueError: rank below 2.

    Numerics:
        Shape (*lead, K); ``RN(code * RN(RN(scale * amax) * RN(1 / (6 * e4m3_max))))``, then rounded to
        ``dtype``.
    """
    codes = unpack_codes(as_matrix(data), 4)
    m, k = codes.shape
    factors = _element_scale_inv(scale_inv[:m, : k // NVFP4_BLOCK], amax.view(amax.numel(), 1), e4m3_max)
    value = decode_subbyte(codes, E2M1)
    multiply_groups(value, factors, 1, NVFP4_BLOCK, out=value)
    return value[:, :columns].to(dtype).contiguous().view(*data.shape[:-1], columns)


def dequantize_columnwise(
    data: Tensor,
    scale_inv: Tensor,
    amax: Tensor,
    e4m3_max: int,
    dtype: torch.dtype,
    *,
    rows: int,
    rht: bool = False,
    random_signs: bool = True,
) -> Tensor:
    """Decode column-wise data into the logical orientation.

    Args:
        data: uint8, shape (K, round_up(rows, 16) / 2).
        scale_inv: uint8, compact, shape (round_up(K, 128), round_up(cdiv(rows, 16), 4)).
        amax: fp32 [1], or [K] for row-scaled data.
        e4m3_max, dtype: as of ``dequantize_rowwise``; so are errors and elements.
        rows: M, the number of rows of the logical matrix.
        rht: undo the rotation, in fp32; False returns rotated values as they are.
        random_signs: the setting of the rotation.

    Numerics:
        Shape (M, K), also for N-d sources.
    """
    codes = _unpack_rows(transpose_bytes(as_matrix(data)))
    m, k = codes.shape
    factors = _element_scale_inv(scale_inv[:k, : m // NVFP4_BLOCK].t(), amax.view(1, amax.numel()), e4m3_max)
    value = decode_subbyte(codes, E2M1)
    multiply_groups(value, factors, NVFP4_BLOCK, 1, out=value)
    if rht:
        value = unrotate_rows(value, random_signs)
    return value[:rows].to(dtype)


def _element_scale_inv(scale_inv: Tensor, amax: Tensor, e4m3_max: int) -> Tensor:
    return decode_float8(scale_inv, E4M3).mul(amax).mul_(round_to_float32(1.0 / (E2M1.max * e4m3_max)))


def decode_block_scaled(data: Tensor, scale_inv: Tensor, dtype: torch.dtype) -> Tensor:
    """Decode codes times block scales, without the tensor's amax: what an emulated GEMM multiplies.

    Args:
        data: uint8, shape (R, C / 2), C a multiple of 16: row-wise data as a matrix, or column-wise data as
            stored.
        scale_inv: uint8, compact scales of the same direction.
        dtype: fp32, bf16 or fp16; the values are exact in each.

    Raises:
        ValueError: rank below 2.

    Numerics:
        Shape (R, C); ``code * scale`` has at most six significant bits, so no rounding takes place.
    """
    codes = unpack_codes(as_matrix(data), 4)
    rows, columns = codes.shape
    scales = decode_float8(scale_inv[:rows, : columns // NVFP4_BLOCK], E4M3)
    value = decode_subbyte(codes, E2M1)
    return multiply_groups(value, scales, 1, NVFP4_BLOCK, out=value).to(dtype)
