"""Groups decoded on the device: rows in the order of their groups, weights as (G, N, K); nothing reads the splits.

Layouts are those of ``grouped_quantize``. Groups after groups in the split layout have no place that the host does not
compute.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..formats import padded_rows
from .numerics import numerics_for

ALIGNMENT = {"tensor": 128, "padded": 128, "split": 1}
"""Rows that groups are padded to, by layout; of the tensor layout in the transposed codes."""


class Decoded(NamedTuple):
    """Values that are exact in their dtype, and the scale that waits for the product, or None.

    ``scale``: of every row, (T, 1); of other operands of each group, (G, 1), or of its lines, (G, lines).
    """

    values: Tensor
    scale: Tensor | None


def group_of_row(splits: Tensor, rows: int) -> Tensor:
    """Return the group of every row, int64 (rows,); the number of groups for rows of none."""
    return torch.searchsorted(splits.cumsum(0), torch.arange(rows, device=splits.device), right=True)


def blocks_of_groups(x: Tensor, splits: Tensor | None) -> Tensor:
    """Return int64 (3, P / 128), for every 128 rows of padded groups: their group, its first 128 rows, its rows.

    Args:
        x: rows (T, K), or weights (G, N, K) without ``splits``.
    """
    alignment = ALIGNMENT["padded"]
    if splits is None:
        each = (x.shape[1] + alignment - 1) // alignment
        group = torch.arange(x.shape[0], device=x.device).repeat_interleave(each)
        return torch.stack([group, group * each, torch.full_like(group, x.shape[1])])
    sizes = (splits + (alignment - 1)) // alignment
    ends = sizes.cumsum(0)
    blocks = padded_rows(x.shape[0], splits.shape[0], alignment) // alignment
    group = torch.searchsorted(ends, torch.arange(blocks, device=x.device), right=True)
    return torch.stack(
        [group, F.pad(ends - sizes, (0, 1))[group], F.pad(splits, (0, 1))[group].to(torch.int64)]
    )


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
    splits: Tensor,
    group: Tensor,
    columns: int,
    dtype: torch.dtype,
) -> Decoded:
    """Return a row-wise operand of rows as (T, ``columns``); ``group``: that of every row."""
    values, scale = quantizer._gemm_operand(numerics_for(buffers[0]), buffers, False, dtype)
    values = values[:, :columns]
    if layout == "tensor":
        return Decoded(values, _of_rows(scale, group))
    places = padded_places(splits, group, ALIGNMENT[layout])
    values = values.index_select(0, places)
    if scale is None or scale.dim() == 2:
        return Decoded(values, None if scale is None else scale.index_select(0, places))
    return Decoded(values, _of_rows(scale, group))


def _of_rows(scale: Tensor, group: Tensor) -> Tensor:
    """Return the scale of every row's group (T, 1), 0 for rows of none."""
    return F.pad(scale, (0, 1))[group].unsqueeze(1)


def padded_rows_of_groups(
    buffers: list[Tensor], quantizer: Any, groups: int, columns: int, dtype: torch.dtype
) -> Decoded:
    """Return a column-wise operand of rows as (P, ``columns``), groups padded as they are in both layouts."""
    values, scale = quantizer._gemm_operand(numerics_for(buffers[0]), buffers, True, dtype)
    return Decoded(values.t()[:, :columns], None if scale is None else scale.view(groups, -1))


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
        return Decoded(values.transpose(1, 2) if columnwise else values, scale.view(groups, 1))
    values, scale = quantizer._gemm_operand(numerics, buffers, columnwise, dtype)
    values = (values.t() if columnwise else values).unflatten(0, (groups, -1))
    if scale is not None:
        scale = scale.view(groups, -1)[:, : columns if columnwise else rows]
    return Decoded(values[:, :rows, :columns], scale)


def dequantized_weights(
    buffers: list[Tensor], quantizer: Any, layout: str, dtype: torch.dtype, shape: list[int]
) -> Tensor:
    """Return row-wise weights decoded to (G, N, K) of ``dtype``."""
    groups, rows, columns = shape
    numerics = numerics_for(buffers[0])
    if layout == "tensor":
        codes, scale = buffers
        of_rows = scale.repeat_interleave(rows)
        values = numerics.dequantize.float8_rows(
            codes.flatten(0, 1), of_rows, quantizer._element_format(), dtype
        )
        return values.view(shape)  # type: ignore[no-any-return]
    if quantizer._takes_groups and quantizer._spans_rows():  # an amax for each group
        *codes, amax = buffers
        buffers = [*codes, amax.repeat_interleave(codes[0].shape[0] // groups)]
    values = quantizer._decode(numerics, buffers, False, dtype).unflatten(0, (groups, -1))
    return values[:, :rows, :columns].contiguous()  # type: ignore[no-any-return]


def dequantized_rows(
    buffers: list[Tensor], quantizer: Any, layout: str, splits: Tensor, dtype: torch.dtype, shape: list[int]
) -> Tensor:
    """Return row-wise groups decoded to (T, K) of ``dtype``; zero for rows of no group."""
    group = group_of_row(splits, shape[0])
    if layout == "tensor":
        codes, scale = quantizer._gemm_operand(numerics_for(buffers[0]), buffers, False, torch.float32)
        decoded = (codes * F.pad(scale, (0, 1))[group].unsqueeze(1)).to(dtype)
    else:
        if quantizer._takes_groups and quantizer._spans_rows():  # an amax for each group
            *codes, amax = buffers
            blocks = blocks_of_groups(codes[0].new_empty((shape[0], 0)), splits)[0]
            buffers = [*codes, F.pad(amax, (0, 1))[blocks].repeat_interleave(ALIGNMENT[layout])]
        decoded = quantizer._decode(numerics_for(buffers[0]), buffers, False, dtype)[:, : shape[1]]
        decoded = decoded.index_select(0, padded_places(splits, group, ALIGNMENT[layout]))
    return torch.where((group < splits.shape[0]).unsqueeze(1), decoded, 0)
