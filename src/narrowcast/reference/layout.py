"""Shapes and groups: the matrix after an N-d tensor, zero padding, one scale spread over a group of
elements."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .._device import HIGH_PRECISION
from ..formats import round_up


def as_matrix(x: Tensor) -> Tensor:
    """Flatten the leading dimensions.

    Args:
        x: shape (*lead, K), rank at least 2.

    Raises:
        ValueError: rank below 2, if there is no dimension to group column-wise scales along.

    Numerics:
        Shape (M, K) with M the product of ``lead``; contiguous, a view where ``x`` is contiguous.
    """
    if x.dim() < 2:
        raise ValueError(f"block formats need a tensor of rank 2 or more, got shape {tuple(x.shape)}")
    return x.contiguous().reshape(math.prod(x.shape[:-1]), x.shape[-1])


def bytes_of_rows(x: Tensor) -> Tensor:
    """Return the bytes of a matrix's rows, uint8 (M, K * bytes of an element); a view where ``x`` (M, K) is contiguous.

    A dimension of one element counts as contiguous whatever its stride, which a view as bytes would refuse.
    """
    dense = x.contiguous().as_strided((x.numel(),), (1,))
    return dense.view(torch.uint8).view(x.shape[0], x.shape[1] * x.element_size())


def widen(x: Tensor) -> Tensor:
    """Return the values of a tensor to quantize in fp32.

    Args:
        x: fp32, bf16 or fp16, any shape and strides.

    Raises:
        TypeError: another dtype.

    Numerics:
        Exact, contiguous and cut from autograd; shares memory with ``x`` where that already is contiguous
        fp32.
    """
    if x.dtype not in HIGH_PRECISION:
        raise TypeError(f"cannot quantize a tensor of {x.dtype}; use float32, bfloat16 or float16")
    return x.detach().contiguous().float()


def pad_matrix(x: Tensor, rows: int, columns: int) -> Tensor:
    """Append zeros until both dimensions are multiples.

    Args:
        x: shape (M, K).
        rows: multiple for M.
        columns: multiple for K.

    Numerics:
        Shape (round_up(M, rows), round_up(K, columns)); ``x`` itself if nothing is missing.
    """
    missing_rows, missing_columns = -x.shape[0] % rows, -x.shape[1] % columns
    return F.pad(x, (0, missing_columns, 0, missing_rows)) if missing_rows or missing_columns else x


def pad_scales(scales: Tensor, rows: int, columns: int) -> Tensor:
    """Copy scales into the corner of a zeroed buffer.

    Args:
        scales: shape (a, b), any strides.
        rows: multiple for the rows of the buffer.
        columns: multiple for its columns.

    Numerics:
        New contiguous tensor of shape (round_up(a, rows), round_up(b, columns)); the padding is 0.
    """
    a, b = scales.shape
    out = scales.new_zeros(round_up(a, rows), round_up(b, columns))
    out[:a, :b] = scales
    return out


def magnitude(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return ``|x|`` with NaN replaced by 0, so that a maximum ignores it.

    Args:
        x: fp32, any shape.
        out: fp32 of the same shape that receives the result; None for a new tensor.

    Numerics:
        fp32, exact; infinities stay.
    """
    return torch.abs(x, out=out).nan_to_num_(nan=0.0, posinf=math.inf)


def group_max(x: Tensor, rows: int, columns: int) -> Tensor:
    """Return the maximum over tiles of a non-negative matrix; tiles at the edges may be short.

    Args:
        x: fp32 >= 0, shape (M, K).
        rows: height of a tile.
        columns: width of a tile.

    Numerics:
        Shape (cdiv(M, rows), cdiv(K, columns)); exact.
    """
    x = pad_matrix(x, rows, columns)
    if rows > 1:
        x = x.view(x.shape[0] // rows, rows, x.shape[1]).amax(1)
    if columns == 1:
        return x
    if columns < 32 and x.is_cpu and x.numel() > 0:
        # A CPU reduction over fewer than 32 contiguous elements is not vectorised; pooling is 4 times faster.
        return F.max_pool1d(x.unsqueeze(0), columns).squeeze(0)
    return x.view(x.shape[0], x.shape[1] // columns, columns).amax(2)


def multiply_groups(x: Tensor, factors: Tensor, rows: int, columns: int, *, out: Tensor) -> Tensor:
    """Multiply every tile of a matrix by its own factor.

    Args:
        x: fp32, shape (M, K), contiguous.
        factors: fp32, shape (cdiv(M, rows), cdiv(K, columns)).
        rows: height of a tile.
        columns: width of a tile.
        out: fp32, shape (M, K), contiguous; receives the result and may be ``x`` itself.

    Raises:
        RuntimeError: the shapes do not belong together.

    Numerics:
        ``out``, one rounding per element.
    """
    m, k = x.shape
    if m % rows or k % columns:
        return torch.mul(x, spread(factors, rows, columns)[:m, :k], out=out)
    tiles = (m // rows, rows, k // columns, columns)
    torch.mul(x.view(tiles), factors[:, None, :, None], out=out.view(tiles))
    return out


def spread(values: Tensor, rows: int, columns: int) -> Tensor:
    """Repeat every value over a tile.

    Args:
        values: shape (a, b).
        rows: height of a tile.
        columns: width of a tile.

    Numerics:
        Shape (a * rows, b * columns), a new contiguous tensor unless the tile is 1 x 1.
    """
    a, b = values.shape
    return values[:, None, :, None].expand(a, rows, b, columns).reshape(a * rows, b * columns)


def transpose_bytes(x: Tensor) -> Tensor:
    """Return the transpose of a matrix as a new contiguous tensor, also where the two layouts coincide."""
    return x.t().clone(memory_format=torch.contiguous_format)
