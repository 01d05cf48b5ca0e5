"""Checks of arguments that several rooms share: each names the argument, the value received and what is accepted."""

from __future__ import annotations

import math
import operator
from numbers import Real
from typing import Any

from torch import Tensor


def positive(**sizes: Any) -> None:
    """Check sizes by name.

    Raises:
        ValueError: one that is no positive whole number.
    """
    for label, size in sizes.items():
        try:
            fits = operator.index(size) >= 1
        except TypeError:
            fits = False
        if not fits:
            raise ValueError(f"{label} is {size!r}; use a positive number, a whole one")


def in_range(label: str, value: Any, accepted: str, *, below: float = math.inf) -> None:
    """Check a number of 0 or more.

    Args:
        label: the argument's name.
        value: what was received; a NaN is refused.
        accepted: for the message: what is accepted.
        below: the bound that it stays below.

    Raises:
        ValueError: the value is no number in the range.
    """
    if not isinstance(value, Real) or not 0 <= float(value) < below:
        raise ValueError(f"{label} is {value!r}; {accepted}")


def tensor(label: str, value: Any) -> None:
    """Check an input.

    Raises:
        TypeError: the value is no tensor.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{label} is {value!r}, of type {type(value).__name__}; give a tensor")


def function(label: str, value: Any) -> None:
    """Check what will be called.

    Raises:
        TypeError: the value is no function.
    """
    if not callable(value):
        raise TypeError(f"{label} is {value!r}; use a function or None")
