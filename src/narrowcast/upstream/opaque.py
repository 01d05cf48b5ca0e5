"""PyTorch's API for classes whose objects a graph holds as values, under the names of each release.

A quantizer crosses the compile boundary as a *value-opaque* operand: the compiler bakes the object into the graph
and guards on its equality. A release without the API, or with half of it, still imports and runs eagerly; compiled
code then raises.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.torch_version import TorchVersion

from .private import Absent, UpstreamError, entry, private

_FILE = "torch/_library/opaque_object.py"
_EAGER = "eager code runs; run the model without torch.compile on this release"
_API = entry("torch._library.opaque_object", follows=_FILE, without=_EAGER)


def _either(new: str, old: str, follows: str, fallback: Any) -> tuple[Any, bool]:
    """Return the object under one of two names, and whether it is the newer; the old one warns if both exist."""
    found = private(new, follows=follows, without=f"{old} is used", fallback=None, tried="2.14-")
    if found is not None:
        entry(old, follows=follows, without=f"{new} is used", falls_back=True, tried="2.11-2.13")
        return found, True
    return private(old, follows=follows, without=_EAGER, fallback=fallback, tried="2.11-2.13"), False


_register, _IS_NEW = _either(
    "torch._library.opaque_object.register_custom_class",
    "torch._library.opaque_object.register_opaque_type",
    _FILE,
    None,
)
Base: type = _either(
    "torch._custom_class_base.CustomClassBase",
    "torch._opaque_base.OpaqueBase",
    "torch/_custom_class_base.py; only 2.11 asks for the base",
    object,
)[0]
"""The base that PyTorch 2.11 asks of a class of values."""

_type_name = private("torch._library.opaque_object.get_opaque_type_name", without=_EAGER, fallback=None)
_MemberType = private("torch._library.opaque_object.MemberType", without=_EAGER)
_MEMBERS_ARE_NAMED = TorchVersion(torch.__version__) < "2.13"
"""Whether the compiler must be told of each member; later releases trace through members by themselves."""

AVAILABLE = _register is not None and _type_name is not None and not isinstance(_MemberType, Absent)
"""Whether the compiler takes classes as values."""


def missing() -> UpstreamError:
    """Return the error of compiled code on a release where :data:`AVAILABLE` is False."""
    parts = {f"{_API.name}.get_opaque_type_name": _type_name, f"{_API.name}.MemberType": _MemberType}
    lost = [name for name, part in parts.items() if not part]
    return _API.error(f"no {' and no '.join(lost)}" if lost else "")


def register_value_type(
    cls: type,
    makers: tuple[str, ...] = (),
    members: tuple[str, ...] = (),
    traced: tuple[str, ...] = (),
) -> bool:
    """Register exactly ``cls`` as a class of values.

    Args:
        cls: the class; needs ``__eq__``, ``__hash__`` and ``__fx_repr__``.
        makers: methods that make another value or describe this one; traced code runs them for real.
        members: other attributes and methods that traced code may use.
        traced: methods that the compiler traces through, with their tensor arguments.
    Returns:
        False when this PyTorch lacks the API or refuses the class; value semantics work in eager code all the same.
    """
    if not AVAILABLE:
        return False
    real = _MemberType.USE_REAL
    named = dict.fromkeys((*makers, *members) if _MEMBERS_ARE_NAMED else makers, real)
    if _MEMBERS_ARE_NAMED:
        named.update(dict.fromkeys(traced, _MemberType.INLINED))
    try:
        try:
            _register(cls, typ="constant" if _IS_NEW else "value", members=named)
        except RuntimeError:
            # raised for the second of two classes of one name (a notebook cell run again), which is known all the same
            if _type_name(cls) != f"{cls.__module__}.{cls.__qualname__}":
                raise
        _type_name(cls)  # operators name it in their schemas
    except (RuntimeError, TypeError, ValueError):  # a half-implemented API must not break the import
        return False
    return True


def register_base(cls: type) -> None:
    """Register the class that operators take quantizers as; where PyTorch refuses it, the API counts as absent."""
    global AVAILABLE
    AVAILABLE = register_value_type(cls)


def schema_type(cls: type) -> str:
    """Return the name of a registered class in an operator's schema; subclasses registered on their own pass it too."""
    return _type_name(cls)
