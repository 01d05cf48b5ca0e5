"""Gate and linear channels of gated activations, in two halves or in alternating blocks."""

from __future__ import annotations

from torch import Tensor

from ..._checks import positive, shape_of, tensor


def interleave_glu_tensor(tensor: Tensor, interleave_size: int) -> Tensor:
    """Return rows of a gated layer's weight or bias from two halves into alternating blocks.

    Args:
        tensor: (2F, ...), the gate's rows first.
        interleave_size: rows per block; must divide F.
    Returns:
        a new tensor of the same shape: a block of gate rows, a block of linear rows, and so on.
    Raises:
        ValueError: the block size is not positive, or the rows do not divide into pairs of blocks.
    """
    _check_rows(tensor, interleave_size)
    blocks = tensor.unflatten(0, (2, -1, interleave_size))
    return blocks.transpose(0, 1).flatten(0, 2)


def deinterleave_glu_tensor(tensor: Tensor, interleave_size: int) -> Tensor:
    """Return the inverse of :func:`interleave_glu_tensor`, with the same arguments and errors."""
    _check_rows(tensor, interleave_size)
    blocks = tensor.unflatten(0, (-1, 2, interleave_size))
    return blocks.transpose(0, 1).flatten(0, 2)


def channels_to_halves(x: Tensor, glu_interleave_size: int | None) -> Tensor:
    """Return the input of a gated activation (*lead, 2F) as the kernels take it: all gates, then all linear channels.

    Raises:
        ValueError: the last dim does not divide into pairs of blocks.
    """
    if glu_interleave_size is None:
        return x
    _check_blocks("input", x, -1, glu_interleave_size)
    return x.unflatten(-1, (-1, 2, glu_interleave_size)).transpose(-3, -2).flatten(-3)


def channels_from_halves(x: Tensor, glu_interleave_size: int | None) -> Tensor:
    """Return the inverse of :func:`channels_to_halves`."""
    if glu_interleave_size is None:
        return x
    return x.unflatten(-1, (2, -1, glu_interleave_size)).transpose(-3, -2).flatten(-3)


def checked_interleave_size(size: int | None) -> int | None:
    """Return the option ``glu_interleave_size``.

    Raises:
        ValueError: it is not positive.
    """
    if size is not None:
        positive(glu_interleave_size=size)
    return size


def _check_rows(value: Tensor, size: int) -> None:
    positive(interleave_size=size)
    tensor("tensor", value)
    _check_blocks("tensor", value, 0, size)


def _check_blocks(what: str, x: Tensor, dim: int, size: int) -> None:
    if x.dim() == 0 or x.shape[dim] % (2 * size):
        raise ValueError(
            f"{what} has shape {shape_of(x)}; with blocks of {size} its "
            f"{'first' if dim == 0 else 'last'} dim must be a multiple of {2 * size}"
        )
