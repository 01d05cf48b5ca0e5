"""Transformer Engine's functions that return a recipe's element types of forward and backward tensors."""

from __future__ import annotations

from typing import Any

import torch

from .._checks import shown
from ..formats import DType
from ..quantizers.arguments import TORCH_DTYPES
from ..recipe import Format, Recipe

TE_DTYPE_TO_TORCH = {element: dtype for dtype, element in TORCH_DTYPES.items()}


def _format_of(recipe: Any, kind: str) -> Format:
    """
    Raises:
        TypeError: no recipe, or one without such a format.
    """
    chosen = getattr(recipe, kind, None) if isinstance(recipe, Recipe) else None
    if not isinstance(chosen, Format):
        raise TypeError(f"{shown(recipe)} has no {kind}; pass a recipe that has, such as MXFP8BlockScaling()")
    return chosen


def get_fp8_te_dtype(fp8_recipe: Recipe, fprop_tensor: bool = True) -> DType:
    """Return FP8 element type of a recipe's forward tensors, or of its gradients.

    Args:
        fp8_recipe: with ``fp8_format``.
        fprop_tensor: of the forward.
    Raises:
        TypeError: a recipe without ``fp8_format``.
    """
    chosen = _format_of(fp8_recipe, "fp8_format")
    backward = chosen is Format.E5M2 or (chosen is Format.HYBRID and not fprop_tensor)
    return DType.kFloat8E5M2 if backward else DType.kFloat8E4M3


def get_fp8_torch_dtype(fp8_recipe: Recipe, fprop_tensor: bool = True) -> torch.dtype:
    """Return the same as PyTorch's dtype."""
    return TE_DTYPE_TO_TORCH[get_fp8_te_dtype(fp8_recipe, fprop_tensor)]


def get_fp8_max(fp8_recipe: Recipe, fprop_tensor: bool = True) -> float:
    """Return the largest value of that type: 448 or 57344."""
    return torch.finfo(get_fp8_torch_dtype(fp8_recipe, fprop_tensor)).max


def get_fp4_te_dtype(fp4_recipe: Recipe) -> DType:
    """Return FP4 element type of a recipe, E2M1.

    Raises:
        TypeError: a recipe without ``fp4_format``.
    """
    _format_of(fp4_recipe, "fp4_format")
    return DType.kFloat4E2M1


def canonicalize_dtype(dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype itself; None: PyTorch's default."""
    return torch.get_default_dtype() if dtype is None else dtype
