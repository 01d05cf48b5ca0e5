"""The MX formats: elements of 8, 6 or 4 bits with one power-of-two (E8M0) scale per 32 consecutive elements.

One algorithm serves MXFP8, MXFP6 and MXFP4 (OCP Microscaling Formats v1.0); the element format is its parameter. The
two directions are quantized separately from the source. In the 2-D variant a scale belongs to a 32 x 32 tile and both
directions hold the same codes. Groups at the edges may be short.

The scale is the smallest power of two under which the amax of the group is in range: ``amax / fmt.max`` rounded *up* to
a power of two. The OCP document suggests ``2**(floor(log2(amax)) - emax)`` instead, which is smaller by half whenever
the significand of the amax exceeds that of ``fmt.max``, and then clips the largest elements of the group, those that
weigh most in a product: under E2M1, 7.9 becomes 6. Rounding up clips nothing, costs such groups the smallest code, and
is what MXFP8 does here, so all widths share one rule.

Two things depend on the width:

- *Codes of one byte* keep the logical orientation in both directions, and a NaN stays one NaN.
- *Codes of six or four bits* are packed along the contraction (``codecs.pack_codes``), zero-padded to whole groups; the
  column-wise data are the transpose, as tensor cores read them. Their formats have no NaN, so a NaN poisons its group:
  the scale is 0xFF, every code of the group ``+fmt.max``, and all of it decodes to NaN.
"""

import torch
from torch import Tensor

from ..formats import MX_BLOCK, SCALE_TILE_COLUMNS, SCALE_TILE_ROWS, ElementFormat, cdiv
from .codecs import (
    decode_e8m0,
    decode_float8,
    decode_subbyte,
    encode_e8m0,
    encode_float8_,
    encode_subbyte_,
    pack_codes,
    reciprocal_e8m0,
    unpack_codes,
)
from .layout import (
    as_matrix,
    group_max,
    magnitude,
    multiply_groups,
    pad_matrix,
    pad_scales,
    spread,
    transpose_bytes,
    widen,
)


def quantize(
    x: Tensor, fmt: ElementFormat, *, rowwise: bool, columnwise: bool, two_d: bool = False
) -> list[Tensor]:
    """Quantize a tensor in one or both directions.

    Args:
        x: fp32, bf16 or fp16, shape (*lead, K), any strides; M is the product of ``lead``.
        fmt: E4M3, E5M2, E2M3, E3M2 or E2M1.
        rowwise: groups of 32 along K.
        columnwise: groups of 32 along M.
        two_d: one scale per 32 x 32 tile, replicated in the scale buffers.

    Raises:
        TypeError: ``x`` has another dtype.
        ValueError: rank below 2.

    Numerics:
        ``b = E8M0_up(RN(amax * RN(1 / fmt.max)))``, code = saturating ``fmt(x * 2**(127 - b))``.
        Row-wise ``[data, scale_inv (round_up(M, 128), round_up(cdiv(K, 32), 4))]``, then column-wise, all uint8.
        Of eight bits: data ``x.shape`` in both directions, column-wise scales (round_up(cdiv(M, 32), 4), round_up(K,
        128)). Packed: data (*lead, round_up(K, 32) * bits / 8) and (K, round_up(M, 32) * bits / 8), column-wise scales
        (round_up(K, 128), round_up(cdiv(M, 32), 4)).
    """
    matrix = as_matrix(widen(x))
    packed = fmt.bits < 8
    # of packed formats, a NaN becomes the amax of its group
    size = matrix.abs() if packed else magnitude(matrix)
    groups = [(MX_BLOCK, MX_BLOCK)] if two_d else [(1, MX_BLOCK)] * rowwise + [(MX_BLOCK, 1)] * columnwise
    scales = [encode_e8m0(group_max(size, *group).mul_(fmt.max_reciprocal)) for group in groups]
    encode = encode_subbyte_ if packed else encode_float8_
    # The magnitudes have served; their memory takes the scaled elements of one direction after the other.
    codes = [
        encode(multiply_groups(matrix, reciprocal_e8m0(scale), *group, out=size), fmt)
        for scale, group in zip(scales, groups, strict=True)
    ]
    out: list[Tensor] = []
    if rowwise:
        rows = spread(scales[0], MX_BLOCK, 1)[: matrix.shape[0]] if two_d else scales[0]
        data = _packed(codes[0], fmt) if packed else codes[0]
        data = data.view(*x.shape[:-1], data.shape[1])
        out += [data, pad_scales(rows, SCALE_TILE_ROWS, SCALE_TILE_COLUMNS)]
    if columnwise:
        columns = spread(scales[-1], 1, MX_BLOCK)[:, : matrix.shape[1]] if two_d else scales[-1]
        if packed:
            out += [
                _packed(codes[-1].t(), fmt),
                pad_scales(columns.t(), SCALE_TILE_ROWS, SCALE_TILE_COLUMNS),
            ]
        else:
            data = codes[-1].clone() if two_d and rowwise else codes[-1]
            out += [data.view(x.shape), pad_scales(columns, SCALE_TILE_COLUMNS, SCALE_TILE_ROWS)]
    return out


def _packed(codes: Tensor, fmt: ElementFormat) -> Tensor:
    return pack_codes(pad_matrix(codes, 1, MX_BLOCK), fmt.bits)


def dequantize_rowwise(data: Tensor, scale_inv: Tensor, fmt: ElementFormat, dtype: torch.dtype) -> Tensor:
    """Decode row-wise data of one-byte codes.

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
    values = decode_float8(as_matrix(data), fmt)
    return _scaled(values, scale_inv, data.shape[:-1], dtype, 1, MX_BLOCK)


def dequantize_columnwise(data: Tensor, scale_inv: Tensor, fmt: ElementFormat, dtype: torch.dtype) -> Tensor:
    """Decode column-wise data of one-byte codes, which have the logical orientation; as ``dequantize_rowwise``.

    Args:
        scale_inv: uint8, compact, shape (round_up(cdiv(M, 32), 4), round_up(K, 128)).
    """
    values = decode_float8(as_matrix(data), fmt)
    return _scaled(values, scale_inv, data.shape[:-1], dtype, MX_BLOCK, 1)


def _scaled(
    values: Tensor, scale_inv: Tensor, lead: torch.Size, dtype: torch.dtype, rows: int, columns: int
) -> Tensor:
    """Decoded codes (M, C), which are overwritten, times their groups' scales: (*lead, C)."""
    m, k = values.shape
    factors = decode_e8m0(scale_inv[: cdiv(m, rows), : cdiv(k, columns)])
    return multiply_groups(values, factors, rows, columns, out=values).view(*lead, k).to(dtype)


def dequantize_packed_rowwise(
    data: Tensor, scale_inv: Tensor, fmt: ElementFormat, dtype: torch.dtype
) -> Tensor:
    """Decode row-wise data of packed codes, padding included.

    Args:
        data: uint8, shape (*lead, C * bits / 8), C a multiple of 32.
        scale_inv: uint8, compact, shape (round_up(M, 128), round_up(C / 32, 4)).
        fmt: E2M3, E3M2 or E2M1.
        dtype: the nominal dtype of the result.

    Raises:
        ValueError: rank below 2, or the format fills a byte.

    Numerics:
        (*lead, C): ``code * 2**(b - 127)`` in fp32, then rounded to ``dtype``. Codes have at most four significant
        bits and none below ``2**-4``, so every value is exact in bf16, subnormals of bf16 included, unless it exceeds
        the range of fp32; it then is infinite.
    """
    values = decode_subbyte(unpack_codes(as_matrix(data), fmt.bits), fmt)
    return _scaled(values, scale_inv, data.shape[:-1], dtype, 1, MX_BLOCK)


def dequantize_packed_columnwise(
    data: Tensor, scale_inv: Tensor, fmt: ElementFormat, dtype: torch.dtype
) -> Tensor:
    """Decode column-wise data of packed codes into the logical orientation, padding included.

    Args:
        data: uint8, shape (K, R * bits / 8), R a multiple of 32.
        scale_inv: uint8, compact, shape (round_up(K, 128), round_up(R / 32, 4)).
        fmt, dtype: as of ``dequantize_packed_rowwise``; so are errors and values.

    Numerics:
        (R, K), also for N-d sources.
    """
    return transpose_bytes(dequantize_packed_rowwise(data, scale_inv, fmt, dtype))
