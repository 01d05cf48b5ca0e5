"""FP8 block scaling: FP8 elements with one fp32 scale per 128 elements or per 128 x 128 tile.

1-D scales run along the direction that is quantized, and their buffers are stored transposed relative to the
data; 2-D scales belong to a tile, so that both directions hold the same codes. Column-wise data is
transposed. Blocks at the edges cover what is left.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ..formats import BF16_MAX, FLOAT8_BLOCK_1D, FLOAT8_BLOCK_2D, FLT_MAX, FP16_MAX, ElementFormat
from . import block_scaling, scaling

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

    def fp32(amax: Tensor) -> tuple[Tensor, Tensor]:
        scale = scaling.scale_from_amax(
            amax, fmt.max, power_2=power_2, epsilon=epsilon, overflow=_INPUT_MAX[x.dtype]
        )
        return scale, scaling.reciprocal(scale)

    layout = FLOAT8_BLOCK_1D if block_dim == 1 else FLOAT8_BLOCK_2D
    return block_scaling.quantize(x, layout, fmt, fp32, rowwise=rowwise, columnwise=columnwise)


def _dequantize(
    columnwise: bool, data: Tensor, scale_inv: Tensor, fmt: ElementFormat, dtype: torch.dtype, *, two_d: bool
) -> Tensor:
    """Decode one direction into the logical orientation (*lead, K).

    Args:
        data: uint8 codes, shape (*lead, K), column-wise (K, *lead).
        scale_inv: fp32, shape as ``quantize`` gives it.
        fmt: the format of the codes.
        dtype: the nominal dtype of the result.
        two_d: the scales belong to tiles.

    Raises:
        ValueError: rank below 2, or the format is not FP8.

    Numerics:
        ``RN(code * scale_inv)`` in fp32, then rounded to ``dtype``.
    """
    layout = FLOAT8_BLOCK_2D if two_d else FLOAT8_BLOCK_1D
    return block_scaling.dequantize(data, scale_inv, fmt, dtype, layout=layout, columnwise=columnwise)


dequantize_rowwise = partial(_dequantize, False)
dequantize_columnwise = partial(_dequantize, True)
