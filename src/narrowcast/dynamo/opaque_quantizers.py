"""Registration of quantizer classes as compile-time values."""

from __future__ import annotations

import enum
from typing import Any

from .._checks import shown
from ..quantizers import VALUE_QUANTIZERS, Quantizer
from ..quantizers.value import value_fields
from ..upstream import opaque

# what operands and TensorProto use of a quantizer in traced code
_MAKERS = ("_half", "_value_text", "_without_reduction", "copy", "replace", "with_usage")
_TRACED = (
    "_assemble",
    "_buffers_of",
    "_check_input",
    "_quantize_detached",
    "_reduced_buffers",
    "_reduction_group",
    "_seal",
    "_seed",
    "quantize",
)
_MEMBERS = (
    "_undescribed",
    "_buffer_table",
    "_check_shape",
    "_describe_buffers",
    "_is_current",
    "_is_delayed",
    "_is_stochastic",
    "_joins",
    "_layout",
    "_minimum_rank",
    "_resolve_storage_cls",
    "_result_name",
    "_shares_amax",
    "_spans_rows",
    "_storage_class",
    "_storage_metadata",
    "_storage_name",
    "_storage_scalars",
    "_te_compile_value_opaque",
    "_tensor_class",
    "alloc_tensors",
    "create_metadata",
    "get_usages",
    "make_empty",
    "with_amax_reduction",
)


def register_value_opaque_quantizer(cls: type) -> type:
    """Give exactly this quantizer class value semantics and register it with the compiler. Idempotent.

    Usable as a class decorator. Where PyTorch lacks the opaque-object API or refuses the class, value semantics apply
    all the same, and compiled code runs what uses it outside its graphs.

    Raises:
        TypeError: not a quantizer class, or an annotated field that is no bool, int, float, str or enum.
    """
    if not (isinstance(cls, type) and issubclass(cls, Quantizer)):
        raise TypeError(f"{shown(cls)} is not a Quantizer class")
    if "_registered_fields" in cls.__dict__:
        return cls
    fields = value_fields(cls)
    cls._registered_fields = tuple(fields)
    cls._registered_enums = {name: kind for name, kind in fields.items() if issubclass(kind, enum.Enum)}
    cls._te_compile_value_opaque = opaque.register_value_type(cls, _MAKERS, (*fields, *_MEMBERS), _TRACED)
    return cls


def is_value_opaque_quantizer(quantizer: Any) -> bool:
    """Return whether the compiler knows the exact class of this quantizer as a value; traceable."""
    return getattr(quantizer, "_te_compile_value_opaque", False)


for _cls in VALUE_QUANTIZERS:
    register_value_opaque_quantizer(_cls)
