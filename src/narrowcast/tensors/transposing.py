"""Column-wise buffers from row-wise ones, for formats that quantize a matrix and its transpose to the same codes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .._tracing import after
from ..formats import (
    FLOAT8_BLOCK,
    FLOAT8_BLOCK_SCALE_ALIGNMENT,
    MX_BLOCK,
    NVFP4_BLOCK,
    SCALE_TILE_COLUMNS,
    SCALE_TILE_ROWS,
    cdiv,
)
from ..functional import transpose_codes


def transposed(rowwise: list[Tensor], features: int, grad: Tensor | None = None) -> list[Tensor]:
    """Return column-wise buffers of a matrix (rows, features) from its row-wise ones, where both directions hold the
    same.

    That is per-tensor FP8, scale (1,); FP8 in 128 x 128 tiles, fp32 scales (rows of tiles, columns of tiles and
    padding); MXFP8 in 32 x 32 and NVFP4 in 16 x 16 tiles, whose scales are repeated for every row of a tile. The rows
    may be those of several leading dims.

    Args:
        grad: of a backward; the graph of one transposes once it is there, and its forward keeps no result.
    """
    codes, scale, *amax = rowwise
    if scale.dim() == 1 and not amax:
        return [transpose_codes(codes, grad), scale]
    if codes.dim() < 2:  # a vector in blocks of 128 is a matrix of one row
        matrix = codes.reshape(1, -1)
    else:
        matrix = codes if codes.dim() == 2 else codes.flatten(0, -2)
    rows = matrix.shape[0]
    if amax:
        matrix = after(grad, matrix)
        nibbles = torch.stack((matrix & 15, matrix >> 4), -1).flatten(-2)[:, :features]
        turned = transpose_codes(nibbles.contiguous())
        if rows % NVFP4_BLOCK:
            turned = F.pad(turned, (0, -rows % NVFP4_BLOCK))
        tiles = scale[:rows:NVFP4_BLOCK, : cdiv(features, NVFP4_BLOCK)].t()
        scale = tiles.repeat_interleave(NVFP4_BLOCK, 0)[:features]
        padding = (0, -scale.shape[1] % SCALE_TILE_COLUMNS, 0, -features % SCALE_TILE_ROWS)
        return [turned[:, ::2] | (turned[:, 1::2] << 4), F.pad(scale, padding), *amax]
    if scale.dtype == torch.uint8:  # both directions' codes have one layout
        tiles = scale[:rows:MX_BLOCK, : cdiv(features, MX_BLOCK)]
        scale = tiles.repeat_interleave(MX_BLOCK, 1)[:, :features]
        padding = (0, -features % SCALE_TILE_ROWS, 0, -scale.shape[0] % SCALE_TILE_COLUMNS)
        return [codes, F.pad(scale, padding)]
    rows, columns = (cdiv(size, FLOAT8_BLOCK) for size in matrix.shape)
    # contiguous before the padding, which keeps the strides if there is nothing to pad
    scale = F.pad(scale[:rows, :columns].t().contiguous(), (0, -rows % FLOAT8_BLOCK_SCALE_ALIGNMENT))
    return [transpose_codes(codes, grad), scale]
