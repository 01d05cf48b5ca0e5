"""Linear layers whose weight another module reads in its own code: a converted layer would not be called there."""

from __future__ import annotations

import ast
import functools
import inspect
import operator
import textwrap
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, NamedTuple

from torch import nn

_MULTIPLIES_NOTHING = ("init", "load", "merge", "reset", "resize", "save", "tie")
"""Parts of the names of methods that read weights to make, share or store them."""

_ABOUT = (
    "device",
    "dim",
    "dtype",
    "is_cuda",
    "is_meta",
    "layout",
    "ndim",
    "numel",
    "requires_grad",
    "shape",
    "size",
)
"""Attributes of a weight that are not its values."""


class _Read(NamedTuple):
    """One place in a class's code that reads ``self.path.weight``.

    ``conditions``: the tests of the ``if``s around it, with the outcome under which the place is reached.
    """

    path: str
    conditions: tuple[tuple[ast.expr, bool], ...]


def weight_readers(model: nn.Module) -> dict[int, str]:
    """Return the name of the class that reads a module's weight itself, by the id of that module.

    Code under an ``if`` counts unless the attributes of the reading module rule it out: ``self.config.slices > 1``.
    """
    readers: dict[int, str] = {}
    for module in model.modules():
        for read in _reads(type(module)):
            if all(_outcome(test, module) in (None, wanted) for test, wanted in read.conditions):
                try:
                    held = operator.attrgetter(read.path)(module)
                except AttributeError:
                    continue
                readers.setdefault(id(held), type(module).__name__)
    return readers


@functools.lru_cache(maxsize=1024)
def _reads(cls: type[nn.Module]) -> tuple[_Read, ...]:
    found: list[_Read] = []
    names: set[str] = set()
    for base in cls.__mro__:
        # of PyTorch's own, the encoder layer reads weights in its fast path without gradients, which receipts note
        own = base.__module__.partition(".")[0] in ("torch", "narrowcast", "builtins")
        if own and base is not nn.MultiheadAttention:
            continue
        for name, function in vars(base).items():
            function = inspect.unwrap(function) if callable(function) else function
            if isinstance(function, FunctionType) and name not in names:
                code = function.__code__
                if "super" not in code.co_names:  # else the method that this one replaces runs, too
                    names.add(name)
                if "weight" in code.co_names and not any(part in name for part in _MULTIPLIES_NOTHING):
                    found += _reads_in(function)
    return tuple(found)


def _reads_in(function: FunctionType) -> Iterator[_Read]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):  # no source: a compiled module, or a notebook's that is gone
        return
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        path = _path(node)
        if path.endswith(".weight") and isinstance(node.ctx, ast.Load) and _reads_values(parents[node]):  # type: ignore[attr-defined]
            yield _Read(path.removesuffix(".weight"), tuple(_conditions(node, parents)))


def _path(node: ast.AST) -> str:
    """Return "a.b" for ``self.a.b``; "" for other expressions."""
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join(reversed(names)) if isinstance(node, ast.Name) and node.id == "self" else ""


def _reads_values(user: ast.AST) -> bool:
    """Return whether the expression around a weight may read its values."""
    if isinstance(user, ast.Attribute):
        return user.attr not in _ABOUT
    asks = isinstance(user, ast.Call) and isinstance(user.func, ast.Name)
    return not (asks and user.func.id in ("getattr", "hasattr", "isinstance"))  # type: ignore[attr-defined]


def _conditions(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> Iterator[tuple[ast.expr, bool]]:
    while node in parents:
        child, node = node, parents[node]
        if isinstance(node, (ast.If, ast.IfExp)) and child is not node.test:
            yield node.test, child is node.body or (isinstance(node.body, list) and child in node.body)


def _outcome(test: ast.expr, module: nn.Module) -> bool | None:
    """Return what a test of a module's attributes and constants gives; None if that is not known before the call."""
    if isinstance(test, ast.BoolOp):
        parts, decides = [_outcome(part, module) for part in test.values], isinstance(test.op, ast.Or)
        if decides in parts:
            return decides
        return None if None in parts else not decides
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = _outcome(test.operand, module)
        return None if inner is None else not inner
    try:
        if isinstance(test, ast.Compare):
            (compare,), (right,) = test.ops, test.comparators
            return bool(_COMPARISONS[type(compare)](_value(test.left, module), _value(right, module)))
        return bool(_value(test, module))
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}


def _value(node: ast.expr, module: nn.Module) -> Any:
    """Return a constant or an attribute of a module.

    Raises:
        ValueError: it is neither, or changes between calls.
    """
    if isinstance(node, ast.Constant):
        return node.value
    path = _path(node)
    if path in ("", "training"):
        raise ValueError
    return operator.attrgetter(path)(module)
