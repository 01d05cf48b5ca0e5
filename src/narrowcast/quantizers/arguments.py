"""Checks of quantizers' constructor arguments, and the form in which a field keeps them."""

from __future__ import annotations

import enum
import warnings
from collections.abc import Hashable
from typing import Any

import torch

from .._checks import shown
from .._tracing import users_level
from ..formats import DType

TORCH_DTYPES = {
    torch.uint8: DType.kByte,
    torch.int32: DType.kInt32,
    torch.float32: DType.kFloat32,
    torch.float16: DType.kFloat16,
    torch.bfloat16: DType.kBFloat16,
    torch.float8_e4m3fn: DType.kFloat8E4M3,
    torch.float8_e5m2: DType.kFloat8E5M2,
}
FP8_ELEMENTS = (DType.kFloat8E4M3, DType.kFloat8E5M2)


def to_dtype_enum(dtype: DType | torch.dtype | int) -> DType:
    """Return ``DType`` of an enum member, its integer, or a torch dtype.

    Raises:
        ValueError: nothing of the three.
    """
    if isinstance(dtype, torch.dtype):
        if dtype not in TORCH_DTYPES:
            raise ValueError(f"no quantized element type for {dtype}; use one of {list(TORCH_DTYPES)}")
        return TORCH_DTYPES[dtype]
    return DType(dtype if isinstance(dtype, Hashable) else shown(dtype))


def element_dtype_of(argument: str, dtype: DType | torch.dtype | int, *allowed: DType) -> DType:
    """Return element type given as the constructor's ``argument``.

    Raises:
        ValueError: none of the ``allowed`` ones.
    """
    # a torch dtype without codes is refused as it is
    element: Any = TORCH_DTYPES.get(dtype, dtype) if isinstance(dtype, torch.dtype) else to_dtype_enum(dtype)
    if element not in allowed:
        choices = " or ".join(f"DType.{choice.name}" for choice in allowed)
        raise ValueError(f"{argument} is {shown(element)}; use {choices}")
    return element


def fp8_dtype_of(dtype: DType | torch.dtype | int) -> DType:
    """Return FP8 element type.

    Raises:
        ValueError: not one of the two FP8 formats.
    """
    return element_dtype_of("fp8_dtype", dtype, *FP8_ELEMENTS)


def field_value(name: str, held: Any, value: Any, elements: tuple[DType, ...]) -> Any:
    """Return the new value of a field that holds ``held`` and is given ``value``: of the same type.

    Args:
        elements: the element types of the quantizer's format, if it says which.

    Raises:
        TypeError: a value of another type.
        ValueError: no member of the field's enum.
    """
    if isinstance(held, DType):
        return element_dtype_of(name, value, *elements) if elements else to_dtype_enum(value)
    if isinstance(held, enum.Enum):
        return type(held)(value)
    if isinstance(held, bool) and isinstance(value, int) and value in (0, 1):
        return bool(value)
    if isinstance(held, float) and type(value) is int:
        return float(value)
    if isinstance(held, (bool, int, float, str)) and type(value) is not type(held):
        raise TypeError(f"{name} is {shown(value)}; use a value of type {type(held).__name__}")
    return value


def warn_ignored(**arguments: Any) -> None:
    """Warn about deprecated constructor arguments that were given and have no effect."""
    given = [name for name, value in arguments.items() if value is not None]
    if given:
        warnings.warn(
            f"{', '.join(given)} no longer have an effect and are ignored",
            DeprecationWarning,
            stacklevel=users_level(),
        )
