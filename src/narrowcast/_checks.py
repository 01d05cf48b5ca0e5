"""Checks of arguments that several rooms share: each names the argument, the value received and what is accepted."""

from __future__ import annotations

import math
import operator
import os
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor, nn

_SHOWN = 80  # characters of a value in a message


def shown(value: Any) -> str:
    """Return a value for a message: on one line, or its type and shape if that would be long."""
    text = repr(value)
    if len(text) <= _SHOWN and "\n" not in text:
        return text
    shape = getattr(value, "shape", None)
    return f"a {type(value).__name__}" + (
        f" of shape {tuple(shape)}" if shape is not None else f" ({text[:30]}...)"
    )


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
            raise ValueError(f"{label} is {shown(size)}; use a positive number, a whole one")


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
        raise ValueError(f"{label} is {shown(value)}; {accepted}")


def tensor(label: str, value: Any) -> None:
    """Check an input.

    Raises:
        TypeError: the value is no tensor.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{label} is {shown(value)}, of type {type(value).__name__}; give a tensor")


def tensors(**values: Any) -> None:
    """Check inputs by name.

    Raises:
        TypeError: one that is no tensor.
    """
    for label, value in values.items():
        tensor(label, value)


def flags(**values: Any) -> None:
    """Check options that are on or off, by name; None is off. A text such as "no" would count as on.

    Raises:
        TypeError: one is neither.
    """
    for label, value in values.items():
        if value is not None and not isinstance(value, Integral) and type(value).__module__ != "numpy":
            raise TypeError(f"{label} is {shown(value)}, of type {type(value).__name__}; use True or False")


def whole(**values: Any) -> None:
    """Check whole numbers by name.

    Raises:
        TypeError: one is no whole number.
    """
    for label, value in values.items():
        if not isinstance(value, (Integral, torch.SymInt)):
            raise TypeError(f"{label} is {shown(value)}, of type {type(value).__name__}; use a whole number")


def numbers(**values: Any) -> None:
    """Check numbers by name.

    Raises:
        TypeError: one is no number, or a tensor.
    """
    for label, value in values.items():
        if not isinstance(value, (Real, torch.SymFloat, torch.SymInt)):
            raise TypeError(f"{label} is {shown(value)}, of type {type(value).__name__}; use a number")


def text(**values: Any) -> None:
    """Check texts by name; None is none.

    Raises:
        TypeError: one is no text.
    """
    for label, value in values.items():
        if value is not None and not isinstance(value, str):
            raise TypeError(f"{label} is {shown(value)}, of type {type(value).__name__}; use a text or None")


def path(label: str, value: Any) -> None:
    """Check the name of a file or folder.

    Raises:
        TypeError: the value is none.
    """
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"{label} is {shown(value)}, of type {type(value).__name__}; pass a path")


def optimizer(label: str, value: Any) -> None:
    """Check an optimizer; None is none.

    Raises:
        TypeError: the value is no optimizer.
    """
    if value is not None and not isinstance(value, torch.optim.Optimizer):
        raise TypeError(
            f"{label} is {shown(value)}, of type {type(value).__name__}; pass a torch.optim.Optimizer or None"
        )


def module(label: str, value: Any) -> None:
    """Check a model.

    Raises:
        TypeError: the value is no module.
    """
    if not isinstance(value, nn.Module):
        raise TypeError(f"{label} is {shown(value)}, of type {type(value).__name__}; pass a torch.nn.Module")


def function(label: str, value: Any) -> None:
    """Check what will be called.

    Raises:
        TypeError: the value is no function.
    """
    if not callable(value):
        raise TypeError(f"{label} is {shown(value)}; use a function or None")
