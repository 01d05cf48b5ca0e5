"""Groups decoded on the device: rows in the order of their groups, weights as (G, N, K); nothing reads the splits.

Layouts are those of ``grouped_quantize``. Groups of the split layout have no place that the host does not compute.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .grouped_quantize import ALIGNMENT
from .numerics import numerics_for


class Decoded(NamedTuple):
    """Values that are exact in their dtype, and the scale of each group (G,) that waits for the product, or None."""

    values: Tensor
    scale: Tensor | None


def can_decode(layout: str, quantizer: Any) -> bool:
    """Return whether bf16 holds the values of these groups, and the device finds them."""
    return layout != "split" and (quantizer._has_one_scale or quantizer._scales_are_powers())


def group_of_row(splits: Tensor, rows: int) -> Tensor:
    """Return the group of every row, int64 (rows,); the number of groups for rows of none."""
    return torch.searchsorted(splits.cumsum(0), torch.arange(rows, device=splits.device), right=True)


def padded_places(splits: Tensor, group: Tensor, alignment: int) -> Tensor:
    """Return where the rows of groups (rows,) are if each group starts at a multiple; 0 for rows of no group."""
    starts = splits.cumsum(0) - splits
    padded = (splits + (alignment - 1)) // alignment * alignment
    moved = F.pad(padded.cumsum(0) - padded - starts, (0, 1))
    places = torch.arange(group.shape[0], device=group.device) + moved[group]
    return torch.where(group < splits.shape[0], places, 0)


def rows_of_groups(
    buffers: list[Tensor],
    quantizer: Any,
    layout: str,
    columnwise: bool,
    splits: Tensor,
    group: Tensor,
    columns: int,
    dtype: torch.dtype,
) -> Decoded:
    """Return an operand of rows as (T, ``columns``); ``group``: that of every row."""
    values, scale = quantizer._gemm_operand(numerics_for(buffers[0]), buffers, columnwise, dtype)
    values = (values.t() if columnwise else values)[:, :columns]
    if layout == "padded" or columnwise:
        values = values.index_select(0, padded_places(splits, group, ALIGNMENT[layout]))
    return Decoded(values, scale)


def weights_of_groups(
    buffers: list[Tensor],
    quantizer: Any,
    layout: str,
    columnwise: bool,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
) -> Decoded:
    """Return an operand of weights as (G, N, K)."""
    groups, rows, columns = shape
    numerics = numerics_for(buffers[0])
    if layout == "tensor":
        codes, scale = buffers
        values, _ = quantizer._gemm_operand(numerics, [codes.flatten(0, 1), scale], columnwise, dtype)
        values = values.view(codes.shape)
        return Decoded(values.transpose(1, 2) if columnwise else values, scale)
    values, _ = quantizer._gemm_operand(numerics, buffers, columnwise, dtype)
    values = (values.t() if columnwise else values).unflatten(0, (groups, -1))
    return Decoded(values[:, :rows, :columns], None)


def dequantized_rows(
    buffers: list[Tensor], quantizer: Any, layout: str, splits: Tensor, dtype: torch.dtype, shape: list[int]
) -> Tensor:
    """Return row-wise groups decoded to (T, K) of ``dtype``; zero for rows of no group."""
    group = group_of_row(splits, shape[0])
    if layout == "tensor":
        codes, scale = quantizer._gemm_operand(numerics_for(buffers[0]), buffers, False, torch.float32)
        decoded = (codes * F.pad(scale, (0, 1))[group].unsqueeze(1)).to(dtype)
    else:
        decoded = quantizer._decode(numerics_for(buffers[0]), buffers, False, dtype)[:, : shape[1]]
        decoded = decoded.index_select(0, padded_places(splits, group, ALIGNMENT[layout]))
    return torch.where((group < splits.shape[0]).unsqueeze(1), decoded, 0)
