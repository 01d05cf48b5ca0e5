"""Values: which fields make up a quantizer, which class a name means, and quantizers made again from the two."""

from __future__ import annotations

import enum
import typing
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ..functional.quantizer_value import CLASSES

if TYPE_CHECKING:
    from .quantizer import Quantizer

_FIELD_TYPES = (bool, int, float, str)
QUIET_FIELDS = ("internal", "optimize_for_gemm")
FLAGS_OF_ENCODING = {
    "_encode": ("_takes_sources", "_needs_amax", "_shares_amax", "_has_prologue", "_takes_groups"),
    "_encode_scaled": ("_takes_sources", "_has_prologue"),
}
SPELLINGS = (("_describe_buffers", "inner_tensor_specs"), ("_storage_metadata", "storage_metadata"))
"""Methods of quantizers that later versions of the upstream project call by another name."""


def value_fields(cls: type[Quantizer]) -> dict[str, type]:
    """Return annotated fields that make up a quantizer class's value, with their types, base class first.

    Raises:
        TypeError: a field is annotated with anything but bool, int, float, str or an enum.
    """
    names: list[str] = []
    for base in reversed(cls.__mro__):
        names.extend(name for name in base.__dict__.get("__annotations__", {}) if name not in names)
    hints = typing.get_type_hints(cls)
    fields = [
        name
        for name in names
        if typing.get_origin(hints[name]) is not ClassVar and hints[name] is not ClassVar
    ]
    for name in fields:
        hint = hints[name]
        if not (isinstance(hint, type) and issubclass(hint, (*_FIELD_TYPES, enum.Enum))):
            raise TypeError(
                f"{cls.__qualname__}.{name} is {hint}; a value field must be bool, int, float, str or enum"
            )
    return {name: hints[name] for name in fields}


def _rebuild_quantizer(cls: type[Quantizer], items: tuple[tuple[str, Any], ...]) -> Quantizer:
    """Return the quantizer of ``cls`` with these field values, made without its constructor."""
    quantizer = cls.__new__(cls)
    enums = cls.__dict__.get("_registered_enums", {})
    for name, value in items:
        object.__setattr__(quantizer, name, enums[name](value) if name in enums else value)
    quantizer._rebuild_derived_state()
    return quantizer


def class_identifier(cls: type[Quantizer]) -> str:
    """Return module and qualified name, with a number where another class has them already (a notebook cell run again).

    Of the library's own classes the package instead of the module: files of programs hold it, and modules move.
    """
    package, *inside = cls.__module__.split(".")
    module = package if inside and package == __name__.split(".")[0] else cls.__module__
    name = identifier = f"{module}:{cls.__qualname__}"
    number = 1
    while identifier in CLASSES:
        number += 1
        identifier = f"{name}#{number}"
    return identifier


def check_value(quantizer: Quantizer) -> None:
    """Check that a quantizer holds nothing that no value may hold.

    Raises:
        TypeError: it holds a process group or a tensor.
    """
    for name, held in vars(quantizer).items():
        if torch.distributed.is_available() and isinstance(held, torch.distributed.ProcessGroup):
            raise TypeError(
                f"{type(quantizer).__qualname__}.{name} holds a process group and cannot be used as a value; pass the "
                "group to each quantize call instead"
            )
        if isinstance(held, torch.Tensor):
            raise TypeError(
                f"{type(quantizer).__qualname__}.{name} holds a tensor and cannot be used as a value"
            )
