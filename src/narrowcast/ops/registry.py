"""Registry of fusions: functions that replace runs in a list of operations."""

from __future__ import annotations

from collections.abc import Callable

from .._checks import a_kind, is_one_of, shown
from .contract import FusibleOperation

FusionFunction = Callable[..., list[FusibleOperation]]
"""``function(ops, *, recipe) -> ops``; ``recipe`` is the one in force, or None."""


class Registry:
    """Fusion functions of each direction, in the order they run; ``version`` counts registrations."""

    def __init__(self) -> None:
        self.version = 0
        self.joint: list[FusionFunction] = []
        self.forward: list[FusionFunction] = []
        self.backward: list[FusionFunction] = []

    def add(self, functions: list[FusionFunction], function: FusionFunction, prepend: bool) -> None:
        """Register one function; every fuser fuses again.

        Raises:
            TypeError: it cannot be called.
        """
        if not callable(function):
            raise TypeError(f"a fusion is a function(ops, *, recipe) -> ops; got {a_kind(function)}")
        functions.insert(0 if prepend else len(functions), function)
        self.version += 1


REGISTRY = Registry()


def register_forward_fusion(func: FusionFunction, prepend: bool = False) -> None:
    """Register ``func(ops, *, recipe) -> ops``, which replaces runs of operations in the forward.

    Args:
        func: takes the list of operations and the current recipe or None; returns the list with
            :class:`~narrowcast.ops.FusedOperation` instead of the replaced operations, in their order.
        prepend: run before the registered functions instead of after them.
    Raises:
        TypeError: ``func`` is not callable. A list that does not cover the operations is a RuntimeError when fused.
    """
    REGISTRY.add(REGISTRY.forward, func, prepend)


def register_backward_fusion(func: FusionFunction, prepend: bool = False) -> None:
    """Register ``func(ops, *, recipe) -> ops``, which replaces runs of operations in the backward.

    It gets the operations that have a backward, in the order of the forward; otherwise as
    :func:`register_forward_fusion`.
    """
    REGISTRY.add(REGISTRY.backward, func, prepend)


def register_forward_backward_fusion(func: FusionFunction, prepend: bool = False) -> None:
    """Register ``func(ops, *, recipe) -> ops``, which replaces runs in both directions at once.

    These run first; the others find their results. Otherwise as :func:`register_forward_fusion`.
    """
    REGISTRY.add(REGISTRY.joint, func, prepend)


def unregister_fusion(func: FusionFunction) -> None:
    """Remove a registered fusion, in every direction.

    Raises:
        ValueError: it is not registered.
    """
    registered = (REGISTRY.joint, REGISTRY.forward, REGISTRY.backward)
    found = [functions for functions in registered if is_one_of(func, functions)]
    if not found:
        raise ValueError(f"{shown(func)} is not registered as a fusion; pass a function that is")
    for functions in found:
        functions.remove(func)
    REGISTRY.version += 1
