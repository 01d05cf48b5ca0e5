"""Checks of arguments that several rooms share: each names the argument, the value received and what is accepted."""

from __future__ import annotations

import contextlib
import difflib
import math
import operator
import os
import re
from collections.abc import Collection, Container, Hashable, Iterable, Iterator, Sequence
from enum import Enum
from numbers import Integral, Real
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

_SHOWN = 60  # characters of a value in a message
_AN = re.compile("[AEIOaeio]|nd|[FHLMNRSX][A-Z0-9]")  # as it is spoken: an ndarray, an MXFP8Tensor, a Module
_FORMAT = re.compile(r"(?<![a-z0-9])(?:mx|nv)?(?:fp|float|int|bf|bfloat|nf)(?:4|6|8|16|32|64)(?![0-9])")
_NAME = 80  # of a text, which may be the name of a module


def shown(value: Any) -> str:
    """Return a value for a message in few characters: as Python writes it, or its type and size if that is long."""
    shape = getattr(value, "shape", None)
    many = (
        math.prod(shape) if isinstance(shape, tuple) else len(value) if isinstance(value, Collection) else 0
    )
    kind = type(value).__name__
    if isinstance(value, type):
        text = a_kind(value)
    elif isinstance(value, FunctionType):
        text = f"a function {value.__name__}"
    elif isinstance(value, Enum):
        text = f"{kind}.{value.name}"
    elif isinstance(value, str):
        text = repr(value if many <= _NAME else f"{value[: _NAME // 2]}...{value[-_NAME // 2 :]}")
    elif many <= _SHOWN and len(text := repr(value)) <= _SHOWN and "\n" not in text:
        pass
    elif isinstance(shape, tuple):
        text = f"{article(kind)} of shape {tuple(shape)} and {getattr(value, 'dtype', None)}"
    elif many > _SHOWN:
        text = f"{article(kind)} of {many}"
    else:
        text = repr(value).partition("\n")[0][:_SHOWN] + "..."
    return text


def shape_of(x: Any) -> tuple[int, ...]:
    """Return the shape of a tensor for a message; in a trace the sizes that it got, not the symbols for them."""
    return tuple(operator.index(size) for size in x.shape)


def article(name: str) -> str:
    """Return a name with its article: `an int`, `a list`, `an MXFP8Tensor`."""
    return f"{'an' if _AN.match(name) else 'a'} {name}"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: `1 step`, `2,000 steps`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def a_kind(value: Any) -> str:
    """Return the type of a value, with its article; a class by its name."""
    return f"the class {value.__name__}" if isinstance(value, type) else article(type(value).__name__)


def typed(value: Any) -> str:
    """Return a value as :func:`shown` does, with its type where that does not tell it."""
    text = shown(value)
    return text if text.startswith(a_kind(value)) else f"{text}, of type {type(value).__name__}"


def not_among(value: Any, choices: Iterable[Any]) -> str:
    """Return for a message a value that is not among the choices, the text that it looks like, and the choices."""
    known = {str(choice).lower(): choice for choice in choices}
    alike: list[str] = []
    if isinstance(value, str):
        fitting = of_number_format(value.lower(), known)
        alike = (
            fitting if _FORMAT.search(value.lower()) else difflib.get_close_matches(value.lower(), fitting, 1)
        )
    near = f"; the nearest: {', '.join(shown(known[one]) for one in alike)}" if alike else ""
    *others, last = [repr(one) if isinstance(one, str) else str(one) for one in known.values()]
    use = f"one of {', '.join(others)} or {last}" if others else last
    return f"{shown(value)}{near}; use {use}"


def of_number_format(value: str, names: Iterable[str]) -> list[str]:
    """Return the names that may be meant by ``value``: if it has a number format, those with the same format.

    Names of two formats are often one letter apart, and another format is no remedy. All are in lower case.
    """
    formats = set(_FORMAT.findall(value))
    return [name for name in names if not formats or formats & set(_FORMAT.findall(name))]


def some(names: Sequence[str]) -> str:
    """Return names for a message: the first, and how many more."""
    first, more = shown(names[0]) if names else "nothing", len(names) - 1
    return f"{first} and {more} more" if more > 0 else first


def is_one_of(value: Any, choices: Container[Any]) -> bool:
    """Return whether an option is among the choices; an array is not, and comparing one with them would raise."""
    return isinstance(value, Hashable) and value in choices


def is_whole(value: object, least: int, most: int) -> bool:
    """Return whether a value is a whole number of a range, its ends included."""
    return isinstance(value, int) and least <= value <= most


def positive(**sizes: Any) -> None:
    """Check sizes by name.

    Raises:
        TypeError: one is no whole number.
        ValueError: one is below 1, or True.
    """
    for label, size in sizes.items():
        try:
            fits = not isinstance(size, bool) and operator.index(size) >= 1
        except TypeError:
            raise TypeError(f"{label} is {typed(size)}; use a positive whole number") from None
        if not fits:
            raise ValueError(f"{label} is {shown(size)}; use a positive whole number")


def in_range(label: str, value: Any, accepted: str, *, below: float = math.inf) -> None:
    """Check a number of 0 or more.

    Args:
        label: the argument's name.
        value: what was received; a NaN is refused.
        accepted: for the message: what is accepted.
        below: the bound that it stays below.

    Raises:
        TypeError: the value is no number.
        ValueError: the value is not in the range.
    """
    if not isinstance(value, Real):
        raise TypeError(f"{label} is {typed(value)}; {accepted}")
    if not 0 <= float(value) < below:
        raise ValueError(f"{label} is {shown(value)}; {accepted}")


def tensor(label: str, value: Any) -> None:
    """Check an input.

    Raises:
        TypeError: the value is no tensor, or one that is not dense: no kernel reads those.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{label} is {typed(value)}; give a tensor")
    if value.is_nested:
        raise TypeError(
            f"{label} is a nested tensor; give x.to_padded_tensor(0.0), or x.values() of a jagged x"
        )
    if value.layout is not torch.strided:
        raise TypeError(f"{label} is {value.layout}; give x.to_dense()")


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
        a_scalar = type(value).__module__ == "numpy" and value.shape == ()
        if value is not None and not isinstance(value, Integral) and not a_scalar:
            raise TypeError(f"{label} is {typed(value)}; use True or False")


def whole(**values: Any) -> None:
    """Check whole numbers by name.

    Raises:
        TypeError: one is no whole number.
    """
    for label, value in values.items():
        if not isinstance(value, (Integral, torch.SymInt)):
            raise TypeError(f"{label} is {typed(value)}; use a whole number")


def numbers(**values: Any) -> None:
    """Check numbers by name.

    Raises:
        TypeError: one is no number, or a tensor.
    """
    for label, value in values.items():
        if not isinstance(value, (Real, torch.SymFloat, torch.SymInt)):
            raise TypeError(f"{label} is {typed(value)}; use a number")


def text(**values: Any) -> None:
    """Check texts by name; None is none.

    Raises:
        TypeError: one is no text.
    """
    for label, value in values.items():
        if value is not None and not isinstance(value, str):
            raise TypeError(f"{label} is {typed(value)}; use a text or None")


def path(label: str, value: Any) -> None:
    """Check the name of a file or folder.

    Raises:
        TypeError: the value is none.
    """
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"{label} is {typed(value)}; pass a path")


@contextlib.contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Name the path that the user gave where the system refuses to write, not one that was derived from it.

    Raises:
        OSError: of the class and number that the system raised.
    """
    try:
        yield
    except OSError as error:
        if error.strerror is None:  # a message of our own
            raise
        told = type(error)(
            f"cannot write {shown(os.fspath(path))} ({error.strerror}); give a path in a folder that exists and is "
            "writable"
        )
        told.errno = error.errno
        raise told from error


def optimizer(label: str, value: Any) -> None:
    """Check an optimizer; None is none.

    Raises:
        TypeError: the value is no optimizer.
    """
    if value is not None and not isinstance(value, torch.optim.Optimizer):
        raise TypeError(f"{label} is {typed(value)}; pass a torch.optim.Optimizer or None")


def module(label: str, value: Any) -> None:
    """Check a model.

    Raises:
        TypeError: the value is no module.
    """
    if not isinstance(value, nn.Module):
        made = f", as {value.__name__}(...) makes" if isinstance(value, type) else ""
        raise TypeError(f"{label} is {typed(value)}; pass a torch.nn.Module{made}")


def function(label: str, value: Any, example: str) -> None:
    """Check what will be called; ``example``: an argument that fits, for the message.

    Raises:
        TypeError: the value is no function.
    """
    if not callable(value):
        raise TypeError(f"{label} is {typed(value)}; pass what can be called, such as {example}")
