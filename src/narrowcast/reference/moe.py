"""Rows of tokens copied to their experts, and the experts' rows added up for their tokens."""

import torch
from torch import Tensor

from . import block_scaled_rows
from .layout import bytes_of_rows
from .reduction import round_to_dtype, row_sum


def spread(x: Tensor, positions: Tensor, columns: int) -> Tensor:
    """Copy the token of every row of the result.

    Args:
        x: (T, K), any dtype.
        positions: int32 (R,); ``token * columns + column``, or -1 for a row of zeros.
        columns: of the map that the positions count in.

    Numerics:
        (R, K); bytes are moved.
    """
    if x.numel() == 0:
        return x.new_zeros((positions.shape[0], x.shape[1]))
    raw = bytes_of_rows(x)
    keep = (positions >= 0).to(torch.uint8).neg().unsqueeze(1)
    return raw[positions.clamp(min=0) // columns].bitwise_and_(keep).view(x.dtype)


def positions(row_map: Tensor, rows: int) -> Tensor:
    """Return the inverse of a row map: where in the map each row is named.

    Args:
        row_map: int32, any shape; numbers of rows, each at most once, -1 for none.
        rows: of the result; what the map names beyond is left out.

    Numerics:
        int32 (rows,), -1 for rows that the map does not name.
    """
    flat = row_map.reshape(-1)
    target = torch.where((flat < 0) | (flat >= rows), rows, flat).long()
    count = torch.arange(flat.shape[0], dtype=torch.int32, device=flat.device)
    inverse = torch.full((rows + 1,), -1, dtype=torch.int32, device=flat.device)
    return inverse.scatter_(0, target, count)[:rows].clone()


def collect(rows: Tensor, row_map: Tensor, weights: Tensor | None) -> Tensor:
    """Add up the rows of every token.

    Args:
        rows: (R, K), bf16, fp16 or fp32.
        row_map: int32 (T, C), rows to add, -1 for none.
        weights: fp32 (T, C), what each row is multiplied by; None adds the rows as they are.

    Numerics:
        (T, K) in the dtype of ``rows``. The sum starts from zero in fp32 and goes through the columns of the map in
        order; each product is rounded to fp32, the sum once to the dtype. A token without rows gets zeros.
    """
    total = rows.new_zeros((row_map.shape[0], rows.shape[1]), dtype=torch.float32)
    for column in range(row_map.shape[1]):
        token = (row_map[:, column] >= 0).nonzero().squeeze(1)
        values = rows[row_map[token, column]].float()
        total[token] += values if weights is None else weights[token, column, None] * values
    return round_to_dtype(total, rows.dtype)


def collect_coded(
    codes: Tensor, scales: Tensor, e5m2: bool, row_map: Tensor, weights: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return ``collect`` of ``block_scaled_rows.rows``."""
    return collect(block_scaled_rows.rows(codes, scales, e5m2, dtype), row_map, weights)


def collect_backward(
    grad: Tensor,
    rows: Tensor,
    positions: Tensor,
    weights: Tensor,
    scales: Tensor | None = None,
    e5m2: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return gradients of ``collect`` with weights.

    Args:
        grad: (T, K), of the result, in the dtype of ``rows``.
        rows: (R, K), as given to ``collect``, or with ``scales`` the codes given to ``collect_coded``.
        positions: int32 (R,); ``token * C + column`` of every row, or -1 for one that no token has.
        weights: fp32 (T, C).

    Numerics:
        The gradient of the rows, like ``rows``: ``RN(weight * grad)``, zero where no token has the row. Per row, fp32
        (R,): ``row_sum(grad * row)``, a sum that is zero is +0, and 0 where no token has the row.
    """
    if scales is not None:
        rows = block_scaled_rows.rows(rows, scales, e5m2, grad.dtype)
    known = positions >= 0
    if grad.numel() == 0 or rows.numel() == 0:
        return torch.zeros_like(rows), rows.new_zeros(rows.shape[0], dtype=torch.float32)
    g = grad.float()[positions.clamp(min=0) // weights.shape[1]]
    weight = weights.flatten()[positions.clamp(min=0)].unsqueeze(1)
    drows = torch.where(known.unsqueeze(1), round_to_dtype(weight * g, rows.dtype), 0)
    sums = round_to_dtype(row_sum(g * rows.float()) + 0.0, torch.float32)
    return drows, torch.where(known, sums, 0)
