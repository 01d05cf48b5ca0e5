"""PyTorch's opaque-object API behind one guard.

A quantizer crosses the compile boundary as a *value-opaque* operand: the compiler bakes the object into the graph
and guards on its equality. The API is young, so a build of PyTorch without it, or with half of it, still imports and
runs eagerly; ``AVAILABLE`` says which of the two this is.
"""

from __future__ import annotations

import torch
from torch.torch_version import TorchVersion

try:
    from torch._library import opaque_object
    from torch._library.opaque_object import MemberType, get_opaque_type_name, register_opaque_type
    from torch._opaque_base import OpaqueBase

    AVAILABLE = True
except (ImportError, AttributeError):
    OpaqueBase = object  # type: ignore[assignment,misc]
    AVAILABLE = False

__all__ = ["AVAILABLE", "OpaqueBase", "register_base", "register_value_type", "schema_type"]


def register_value_type(
    cls: type,
    makers: tuple[str, ...] = (),
    members: tuple[str, ...] = (),
    traced: tuple[str, ...] = (),
) -> bool:
    """Register exactly ``cls`` as a value-opaque type.

    Args:
        cls: the class; needs ``__eq__``, ``__hash__`` and ``__fx_repr__``.
        makers: methods that make another value or describe this one; traced code runs them for real.
        members: other attributes and methods that traced code may use.
        traced: methods that the compiler traces through, with their tensor arguments.
    Returns:
        False when this PyTorch lacks the API or refuses the class; value semantics work in eager all the same.
    """
    if not AVAILABLE:
        return False
    # From 2.13 on the compiler traces through members by itself; before, it must be told of each.
    old = TorchVersion(torch.__version__) < "2.13"
    named = {name: MemberType.USE_REAL for name in ((*makers, *members) if old else makers)}
    if old:
        named.update({name: MemberType.INLINED for name in traced})
    try:
        try:
            register_opaque_type(cls, typ="value", members=named)
        except RuntimeError:
            # raised for the second of two classes of one name (a notebook cell run again), which is known all the same
            if cls not in getattr(opaque_object, "_OPAQUE_TYPES", ()):
                raise
        get_opaque_type_name(cls)  # operators name it in their schemas
    except (RuntimeError, TypeError):  # a half-implemented API must not break the import
        return False
    return True


def register_base(cls: type) -> None:
    """Register the class that operators take quantizers as; where PyTorch refuses it, the API counts as absent."""
    global AVAILABLE
    AVAILABLE = register_value_type(cls)


def schema_type(cls: type) -> str:
    """Name of an opaque class in an operator schema; subclasses registered on their own pass it too."""
    return get_opaque_type_name(cls)
