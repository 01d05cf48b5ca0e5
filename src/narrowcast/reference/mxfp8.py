"""MXFP8: FP8 elements with one power-of-two (E8M0) scale per 32 consecutive elements.

The two directions are quantized separately from the source; the column-wise data is not transposed. In the
2-D variant a scale belongs to a 32 x 32 tile and both directions hold the same codes. Groups at the edges may
be short.
"""

import torch
from torch import Tensor

from ..formats import MXFP8_BLOCK, SCALE_TILE_COLUMNS, SCALE_TILE_ROWS, ElementFormat, cdiv
from .codecs import (
    decode_e8m0,
    decode_float8,
    encode_e8m0,
    encode_float8_,
    reciprocal_e8m0,
)
from .layout import (
    as_matrix,
    group_max,
    magnitude,
    multiply_groups,
    pad_scales,
    spread,
    widen,
)


def quantize(
    x: Tensor, fmt: ElementFormat, *, rowwise: bool, columnwise: bool, two_d: bool = False
) -> list[Tensor]:
    """Quantize a tensor in one or both directions.

    Args:
        x: fp32, bf16 or fp16, shape (*lead, K), any strides; M is the product of ``lead``.
        fmt: E4M3 or E5M2.
        rowwise: groups of 32 along K.
        columnwise: groups of 32 along M.
        two_d: one scale per 32 x 32 tile, replicated in the scale buffers.

    Raises:
        TypeError: ``x`` has another dtype.
        ValueError: rank below 2, or the format is not FP8.

    Numerics:
        ``[data uint8 x.shape, scale_inv uint8 (round_up(M, 128), round_up(cdiv(K, 32), 4))]`` row-wise, then
        ``[data uint8 x.shape, scale_inv uint8 (round_up(cdiv(M, 32), 4), round_up(K, 128))]`` column-wise.
        ``b = E8M0_up(RN(amax * RN(1 / fmt.max)))``, code = saturating ``fmt(x * 2**(127 - b))``.
    """
    matrix = as_matrix(widen(x))
    size = magnitude(matrix)
    groups = (
        [(MXFP8_BLOCK, MXFP8_BLOCK)]
        if two_d
        else [(1, MXFP8_BLOCK)] * rowwise + [(MXFP8_BLOCK, 1)] * columnwise
    )
    scales = [encode_e8m0(group_max(size, *group).mul_(fmt.max_reciprocal)) for group in groups]
    # The magnitudes have served; their memory takes the scaled elements of one direction after the other.
    data = [
        encode_float8_(multiply_groups(matrix, reciprocal_e8m0(scale), *group, out=size), fmt).view(x.shape)
        for scale, group in zip(scales, groups, strict=True)
    ]
    if two_d and rowwise and columnwise:
        data.append(data[0].clone())
    out: list[Tensor] = []
    if rowwise:
        rows = spread(scales[0], MXFP8_BLOCK, 1)[: matrix.shape[0]] if two_d else scales[0]
        out += [data[0], pad_scales(rows, SCALE_TILE_ROWS, SCALE_TILE_COLUMNS)]
    if columnwise:
        columns = spread(scales[-1], 1, MXFP8_BLOCK)[:, : matrix.shape[1]] if two_d else scales[-1]
        out += [data[-1], pad_scales(columns, SCALE_TILE_COLUMNS, SCALE_TILE_ROWS)]
    return out


def dequantize_rowwise(data: Tensor, scale_inv: Tensor, fmt: ElementFormat, dtype: torch.dtype) -> Tensor:
    """Decode row-wise data.

    Args:
        data: uint8 codes, shape (*lead, K).
        scale_inv: uint8, compact, shape (round_up(M, 128), round_up(cdiv(K, 32), 4)).
        fmt: the format of the codes.
        dtype: the nominal dtype of the result.

    Raises:
        ValueError: rank below 2, or the format is not FP8.

    Numerics:
        ``code * 2**(b - 127)`` in fp32, then rounded to ``dtype``.
    """
    return _dequantize(data, scale_inv, fmt, dtype, 1, MXFP8_BLOCK)


def dequantize_columnwise(data: Tensor, scale_inv: Tensor, fmt: ElementFormat, dtype: torch.dtype) -> Tensor:
    """Decode column-wise data, which has the logical orientation.

    Args:
        data: uint8 codes, shape (*lead, K).
        scale_inv: uint8, compact, shape (round_up(cdiv(M, 32), 4), round_up(K, 128)).
        fmt: the format of the codes.
        dtype: the nominal dtype of the result.

    Raises:
        ValueError: rank below 2, or the format is not FP8.

    Numerics:
        ``code * 2**(b - 127)`` in fp32, then rounded to ``dtype``.
    """
    return _dequantize(data, scale_inv, fmt, dtype, MXFP8_BLOCK, 1)


def _dequantize(
    data: Tensor, scale_inv: Tensor, fmt: ElementFormat, dtype: torch.dtype, rows: int, columns: int
) -> Tensor:
    codes = as_matrix(data)
    m, k = codes.shape
    factors = decode_e8m0(scale_inv[: cdiv(m, rows), : cdiv(k, columns)])
    values = decode_float8(codes, fmt)
    return multiply_groups(values, factors, rows, columns, out=values).view(data.shape).to(dtype)
