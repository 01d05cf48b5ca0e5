"""FP8 block scaling: FP8 elements with one fp32 scale per 128 elements or per 128 x 128 tile.

1-D scales run along the direction that is quantized, and their buffers are stored transposed relative to the
data; 2-D scales belong to a tile, so that both directions hold the same codes. Column-wise data is
transposed. Blocks at the edges cover what is left.
"""

import torch
from torch import Tensor

from ..formats import (
    BF16_MAX,
    FLOAT8_BLOCK,
    FLOAT8_BLOCK_SCALE_ALIGNMENT,
    FLT_MAX,
    FP16_MAX,
    ElementFormat,
    cdiv,
)
from . import scaling
from .codecs import decode_float8, encode_float8_
from .layout import (
    as_matrix,
    group_max,
    magnitude,
    multiply_groups,
    pad_scales,
    transpose_bytes,
    widen,
)

_INPUT_MAX = {torch.float32: FLT_MAX, torch.bfloat16: BF16_MAX, torch.float16: FP16_MAX}


def quantize(
    x: Tensor,
    fmt: ElementFormat,
    *,
    rowwise: bool,
    columnwise: bool,
    block_dim: int,
    power_2: bool,
    epsilon: float,
) -> list[Tensor]:
    """Quantize a tensor in one or both directions.

    Args:
        x: fp32, bf16 or fp16, shape (*lead, K), any strides; M is the product of ``lead``.
        fmt: E4M3 or E5M2.
        rowwise: blocks along K.
        columnwise: blocks along M.
        block_dim: 1 for blocks of 128 elements, 2 for tiles of 128 x 128.
        power_2: round scales down to powers of two.
        epsilon: lower bound for the amax of a block.

    Raises:
        TypeError: ``x`` has another dtype.
        ValueError: rank below 2, ``block_dim`` neither 1 nor 2, or the format is not FP8.

    Numerics:
        Row-wise ``[data uint8 x.shape, scale_inv fp32]``, then column-wise ``[data uint8 (K, *lead),
        scale_inv fp32]``. 1-D scale shapes are (cdiv(K, 128), round_up(M, 4)) and (cdiv(M, 128), round_up(K,
        4)), 2-D ones (cdiv(M, 128), round_up(cdiv(K, 128), 4)) and (cdiv(K, 128), round_up(cdiv(M, 128), 4)).
        The scale of a block is ``scale_from_amax`` with the input dtype's maximum on overflow, code =
        saturating ``fmt(RN(x * scale))``.
    """
    if block_dim not in (1, 2):
        raise ValueError(f"block_dim is {block_dim}; use 1 (blocks of 128) or 2 (tiles of 128 x 128)")
    matrix = as_matrix(widen(x))
    size = magnitude(matrix)
    groups = _groups(rowwise, columnwise, block_dim)
    scales = [
        scaling.scale_from_amax(
            group_max(size, *group), fmt.max, power_2=power_2, epsilon=epsilon, overflow=_INPUT_MAX[x.dtype]
        )
        for group in groups
    ]
    # The magnitudes have served; their memory takes the scaled elements of one direction after the other.
    data = [
        encode_float8_(multiply_groups(matrix, scale, *group, out=size), fmt)
        for scale, group in zip(scales, groups, strict=True)
    ]
    out: list[Tensor] = []
    if rowwise:
        scale_inv = scaling.reciprocal(scales[0])
        out += [data[0].view(x.shape), _pad(scale_inv if block_dim == 2 else scale_inv.t())]
    if columnwise:
        scale_inv = scaling.reciprocal(scales[-1])
        transposed = transpose_bytes(data[-1]).view(x.shape[-1], *x.shape[:-1])
        out += [transposed, _pad(scale_inv.t() if block_dim == 2 else scale_inv)]
    return out


def _groups(rowwise: bool, columnwise: bool, block_dim: int) -> list[tuple[int, int]]:
    if block_dim == 2:
        return [(FLOAT8_BLOCK, FLOAT8_BLOCK)] if rowwise or columnwise else []
    return [(1, FLOAT8_BLOCK)] * rowwise + [(FLOAT8_BLOCK, 1)] * columnwise


def _pad(scales: Tensor) -> Tensor:
    return pad_scales(scales, 1, FLOAT8_BLOCK_SCALE_ALIGNMENT)


def dequantize_rowwise(
    data: Tensor, scale_inv: Tensor, fmt: ElementFormat, dtype: torch.dtype, *, two_d: bool
) -> Tensor:
    """Decode row-wise data.

    Args:
        data: uint8 codes, shape (*lead, K).
        scale_inv: fp32, shape as ``quantize`` gives it.
        fmt: the format of the codes.
        dtype: the nominal dtype of the result.
        two_d: the scales belong to tiles.

    Raises:
        ValueError: rank below 2, or the format is not FP8.

    Numerics:
        ``RN(code * scale_inv)`` in fp32, then rounded to ``dtype``.
    """
    codes = as_matrix(data)
    m, k = codes.shape
    blocks = cdiv(k, FLOAT8_BLOCK)
    if two_d:
        rows, factors = FLOAT8_BLOCK, scale_inv[:, :blocks]
    else:
        rows, factors = 1, scale_inv[:, :m].t()
    values = decode_float8(codes, fmt)
    return multiply_groups(values, factors, rows, FLOAT8_BLOCK, out=values).view(data.shape).to(dtype)


def dequantize_columnwise(
    data: Tensor, scale_inv: Tensor, fmt: ElementFormat, dtype: torch.dtype, *, two_d: bool
) -> Tensor:
    """Decode column-wise data (K, *lead) into the logical orientation (*lead, K); else as ``dequantize_rowwise``."""
    codes = as_matrix(data.movedim(0, -1))
    m, k = codes.shape
    if two_d:
        columns, factors = FLOAT8_BLOCK, scale_inv[:, : cdiv(m, FLOAT8_BLOCK)].t()
    else:
        columns, factors = 1, scale_inv[:, :k]
    values = decode_float8(codes, fmt)
    multiply_groups(values, factors, FLOAT8_BLOCK, columns, out=values)
    return values.view(*data.shape[1:], data.shape[0]).to(dtype)
