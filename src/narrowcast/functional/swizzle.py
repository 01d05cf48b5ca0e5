"""``narrowcast::swizzle_scales`` and its inverse: scales in the order a block-scaled tensor-core GEMM reads them."""

from __future__ import annotations

import torch
from torch import Tensor

from ._library import define
from .numerics import computed_by


def _fake(scales: Tensor) -> Tensor:
    return torch.empty_like(scales, memory_format=torch.contiguous_format)


swizzle_scales = define(
    "swizzle_scales(Tensor scales) -> Tensor",
    computed_by("swizzle", "swizzle_scales"),
    _fake,
)
"""Reorder compact scales, uint8 (R, C) with R a multiple of 128 and C of 4.

Raises:
    ValueError: another shape.
"""
unswizzle_scales = define(
    "unswizzle_scales(Tensor scales) -> Tensor",
    computed_by("swizzle", "unswizzle_scales"),
    _fake,
)
"""Undo :data:`swizzle_scales`."""
