"""Checks of what optimizers and list operations are called with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from .._checks import in_range, tensor


def checked_parameters(params: Any) -> list[Any]:
    """Return the parameters, groups or named parameters of an optimizer.

    Raises:
        TypeError: there are others among them, or none can be.
    """
    remedy = "pass model.parameters(), or a list of groups"
    if isinstance(params, (str, Tensor, dict)) or not isinstance(params, Iterable):
        raise TypeError(f"params is {params!r}, of type {type(params).__name__}; {remedy}")
    listed = list(params)
    for one in listed:
        if not isinstance(one, (Tensor, dict, tuple)):
            raise TypeError(f"params has {one!r}, of type {type(one).__name__}; {remedy}")
    return listed


def check_rate(label: str, value: Any) -> None:
    """Check a rate or another number of an optimizer; a tensor of one element is a number on the device.

    Raises:
        ValueError: it is negative or no number.
    """
    if not isinstance(value, Tensor):
        in_range(label, value, "use a number that is not negative")
    elif value.numel() != 1:
        raise ValueError(
            f"{label} is a tensor of shape {tuple(value.shape)}; use a number, or a tensor of one element"
        )


def check_lists(noop_flag: Any, tensor_lists: Any, least: int) -> None:
    """Check the flag and the lists of a list operation.

    Args:
        least: how many lists it reads.
    Raises:
        TypeError: no flag, or other lists.
    """
    tensor("noop_flag", noop_flag)
    if noop_flag.numel() != 1:
        raise ValueError(f"noop_flag has shape {tuple(noop_flag.shape)}; use one element")
    lists = tensor_lists if isinstance(tensor_lists, (list, tuple)) else ()
    fits = len(lists) >= least and all(isinstance(one, (list, tuple)) for one in lists)
    if not fits or not all(isinstance(x, Tensor) for one in lists for x in one):
        raise TypeError(
            f"tensor_lists is {tensor_lists!r}, of type {type(tensor_lists).__name__}; pass {least} or more lists of "
            "tensors"
        )
