"""``moe_sort_chunks_by_index``: chunks of rows in another order, such as from "by rank" to "by expert"."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._checks import shape_of, tensor, typed
from ..functional import moe_positions
from .quantized import check_movable, is_quantized
from .rows import Reorder


def moe_sort_chunks_by_index(
    inp: Any, split_sizes: Tensor | Sequence[int], sorted_index: Tensor | Sequence[int]
) -> Any:
    """Put chunks of rows into another order; nothing is read back from the device.

    Args:
        inp: (R, K), as in :func:`moe_permute`; differentiable. Rows beyond the chunks stay where they are.
        split_sizes: (n,), rows of each chunk: an integer tensor, or a list.
        sorted_index: (n,), a permutation: which chunk comes first, second and so on.

    Returns:
        The rows (R, K); a quantized input keeps its format, row-wise only, in eager code.

    Errors are raised before any kernel runs.

    Raises:
        ValueError: no matrix, or sizes and order that are not integers, as many of one as of the other.
        TypeError: a quantized input whose rows share scales.
        RuntimeError: a quantized input in compiled code.
    """
    return Reorder.apply(inp, *_order(inp, split_sizes, sorted_index, "moe_sort_chunks_by_index"))


def moe_sort_chunks_by_index_with_probs(
    inp: Any, probs: Tensor, split_sizes: Tensor | Sequence[int], sorted_index: Tensor | Sequence[int]
) -> tuple[Any, Tensor]:
    """Put chunks of rows, and one number per row, into another order.

    Args:
        inp, split_sizes, sorted_index: as in :func:`moe_sort_chunks_by_index`.
        probs: (R,), dtype of 1, 2 or 4 bytes; differentiable.

    Returns:
        The rows (R, K) and their numbers (R,).

    Errors are raised before any kernel runs.

    Raises:
        ValueError: ``probs`` has another shape; else as in :func:`moe_sort_chunks_by_index`.
    """
    source, target = _order(inp, split_sizes, sorted_index, "moe_sort_chunks_by_index_with_probs")
    tensor("probs", probs)
    if probs.shape != inp.shape[:1]:
        raise ValueError(
            f"probs has shape {shape_of(probs)}; pass one number for each of {inp.shape[0]} rows"
        )
    moved = Reorder.apply(probs.unsqueeze(1), source, target)
    return Reorder.apply(inp, source, target), moved.squeeze(1)


def _order(
    inp: Any, split_sizes: Tensor | Sequence[int], sorted_index: Tensor | Sequence[int], name: str
) -> tuple[Tensor, Tensor]:
    """Return the source of every row of the result, and the destination of every row of the input."""
    if is_quantized(inp):
        check_movable(inp, name)
    else:
        tensor("inp", inp)
    if len(inp.shape) != 2:
        raise ValueError(f"{name} got an input of shape {shape_of(inp)}; pass rows (R, K)")
    sizes, order = _integers("split_sizes", split_sizes), _integers("sorted_index", sorted_index)
    if sizes.dim() != 1 or sizes.shape != order.shape or (sizes.is_floating_point() and len(sizes)):
        raise ValueError(
            f"split_sizes has shape {shape_of(sizes)} and sorted_index {shape_of(order)}; pass integers, one of "
            "each for every chunk"
        )
    sizes, order = (given.to(inp.device, torch.int64, non_blocking=True) for given in (sizes, order))
    row = torch.arange(inp.shape[0], device=inp.device)
    if sizes.shape[0] == 0:
        return row.int(), row.int()
    starts, moved = sizes.cumsum(0) - sizes, sizes[order]
    ends = moved.cumsum(0)
    place = torch.searchsorted(ends, row, right=True)
    known = place.clamp(max=sizes.shape[0] - 1)
    source = starts[order][known] + row - (ends - moved)[known]
    # sizes of more rows than there are must not make a kernel read elsewhere
    source = torch.where(place < sizes.shape[0], source, row).clamp(max=inp.shape[0] - 1)
    source = source.int()
    return source, moe_positions(source, inp.shape[0])


def _integers(label: str, given: Any) -> Tensor:
    """
    Raises:
        TypeError: no integers.
    """
    if isinstance(given, (list, tuple)) and all(isinstance(one, (int, torch.SymInt)) for one in given):
        return torch.as_tensor(given, dtype=torch.int64)
    if isinstance(given, Tensor):
        return given
    raise TypeError(f"{label} is {typed(given)}; pass integers, a tensor or a list")
