"""The order in which a block-scaled tensor-core GEMM reads its scales.

A tile of 128 rows by 4 columns becomes 512 consecutive bytes: within it, row ``r`` goes to ``(r % 32) * 16 +
r // 32 * 4``. The MXFP8 column-wise scales are transposed first, so that a row is a column of the matrix.
"""

import torch
from torch import Tensor

from ..formats import SCALE_TILE_COLUMNS, SCALE_TILE_ROWS

_LANES = 32


def swizzle_scales(scales: Tensor) -> Tensor:
    """Reorder compact scales for the GEMM.

    Args:
        scales: uint8 (R, C), R a multiple of 128 and C of 4.

    Raises:
        ValueError: another shape.

    Numerics:
        A new contiguous tensor of the same shape; its bytes in memory order are the layout.
    """
    r, c = _checked(scales)
    tiles = scales.reshape(
        r // SCALE_TILE_ROWS, SCALE_TILE_ROWS // _LANES, _LANES, c // SCALE_TILE_COLUMNS, SCALE_TILE_COLUMNS
    )
    return tiles.permute(0, 3, 2, 1, 4).clone(memory_format=torch.contiguous_format).view(r, c)


def unswizzle_scales(scales: Tensor) -> Tensor:
    """Undo ``swizzle_scales``; as a new contiguous tensor of the same shape."""
    r, c = _checked(scales)
    tiles = scales.reshape(
        r // SCALE_TILE_ROWS, c // SCALE_TILE_COLUMNS, _LANES, SCALE_TILE_ROWS // _LANES, SCALE_TILE_COLUMNS
    )
    return tiles.permute(0, 3, 2, 1, 4).clone(memory_format=torch.contiguous_format).view(r, c)


def _checked(scales: Tensor) -> tuple[int, int]:
    if scales.dim() != 2 or scales.shape[0] % SCALE_TILE_ROWS or scales.shape[1] % SCALE_TILE_COLUMNS:
        raise ValueError(
            f"scales of shape {tuple(scales.shape)} cannot be swizzled; "
            f"pad them to a multiple of {SCALE_TILE_ROWS} rows and {SCALE_TILE_COLUMNS} columns"
        )
    return scales.shape[0], scales.shape[1]
