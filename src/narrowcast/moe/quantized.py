"""Rows of quantized tensors: moved as the bytes they are, with their scales."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from .._checks import a_kind
from .._tracing import refuse_in_graphs
from ..tensors import QuantizedTensorStorage


def is_quantized(x: Any) -> bool:
    """Return whether ``x`` is a quantized tensor or a storage."""
    return isinstance(x, QuantizedTensorStorage)


def check_movable(x: Any, name: str) -> None:
    """Refuse what ``name`` cannot move row by row.

    Raises:
        RuntimeError: in traced code.
        TypeError: rows of that format share scales, or there are no row-wise data.
    """
    refuse_in_graphs(
        f"{name} got a quantized tensor in compiled code; pass it in high precision and quantize its result"
    )
    layout = x._quantizer._format_layout()
    if layout.scale_group[0] > 1 or not x.get_usages()["rowwise"]:
        raise TypeError(
            f"{name} got {a_kind(x)} whose rows have no scales of their own; quantize it row-wise with one "
            "scale per tensor or per block of a row, or pass x.dequantize()"
        )


def move_rows(x: Any, rows: int, move: Callable[[Tensor], Tensor]) -> Any:
    """Return ``x`` with its rows moved, its format kept; row-wise only.

    Args:
        x: a quantized matrix that :func:`check_movable` accepts.
        rows: of the result.
        move: gives, for a plain matrix of as many rows as ``x``, one of ``rows`` rows.
    """
    shape = (rows, x.shape[1])
    buffers: dict[str, Tensor | None] = {argument: None for _, argument in x._FLATTEN_TENSOR_BUFFERS}
    for buffer in x._quantizer._format_layout().buffers:
        values = getattr(x, buffer.attribute)
        if values is None or not buffer.of_direction(False):
            continue
        sizes = [extent.size for extent in buffer.shape]
        if sizes[0] in ("lead", "M"):
            values = _fitted(move(values[: x.shape[0]]), buffer.sizes(shape))
        elif sizes[-1] == "M":
            columns = move(values[:, : x.shape[0]].t().contiguous()).t()
            values = _fitted(columns, buffer.sizes(shape)).contiguous()
        buffers[buffer.argument] = values  # a scale of the whole tensor stays
    quantizer = x._quantizer.with_usage(rowwise=True, columnwise=False)
    return type(x)(shape=shape, quantizer=quantizer, fake_dtype=x.dtype, **buffers)


def _fitted(values: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Return zeros appended to rows and columns."""
    return F.pad(values, (0, sizes[1] - values.shape[1], 0, sizes[0] - values.shape[0]))
