"""``narrowcast::add_product`` and ``thin_products``: an adapter's products with its thin matrices."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import kernels
from ._library import QUANTIZER, always, define
from .gemm import COLUMNWISE, gemm, gemm_directions
from .numerics import numerics_for
from .quantizer_value import QuantizerValue


def _add_product(bases: list[Tensor], left: Tensor, right: Tensor) -> Tensor:
    numerics = numerics_for(left).low_rank_products
    return numerics.add_product([base.contiguous() for base in bases], left.contiguous(), right)  # type: ignore[no-any-return]


def _products(wide: Tensor, right: Tensor, left: Tensor) -> list[Tensor]:
    return numerics_for(wide).low_rank_products.products(wide.contiguous(), right, left.contiguous())  # type: ignore[no-any-return]


def _products_fake(wide: Tensor, right: Tensor, left: Tensor) -> list[Tensor]:
    (M, N), rank = wide.shape, right.shape[1]
    return [wide.new_empty((M, rank)), wide.new_empty((N, rank), dtype=torch.float32)]


add_product = define(
    "add_product(Tensor[] bases, Tensor left, Tensor right) -> Tensor",
    _add_product,
    lambda bases, left, right: bases[0].new_empty(bases[0].shape),
    lowered=always,
)
"""``RN(sum(bases) + left @ right.T)`` of (M, N), (M, r) and (N, r), contiguous, rounded once to the bases' dtype.

``left`` and ``right`` have one dtype.
"""

thin_products = define(
    "thin_products(Tensor wide, Tensor right, Tensor left) -> Tensor[]",
    _products,
    _products_fake,
    lowered=always,
)
"""``wide @ right`` (M, r) in the dtype of ``wide`` and ``wide.T @ left`` (N, r) in fp32; ``wide`` (M, N) is read once.

The operands have one dtype.
"""


def multiplies_with_product(device: torch.device) -> bool:
    """Return whether :data:`gemm_with_product` adds both products in one kernel on this device."""
    return device.type == "cuda" and kernels.AVAILABLE and bool(kernels.low_rank_products.has_gemm(device))


def _gemm_with_product(
    kind: str,
    left: list[Tensor],
    left_quantizer: QuantizerValue,
    right: list[Tensor],
    right_quantizer: QuantizerValue,
    thin_left: Tensor,
    thin_right: Tensor,
    dtype: torch.dtype,
    rows: int,
    columns: int,
    fast_accumulation: bool,
    emulate: bool,
) -> Tensor:
    directions = COLUMNWISE[kind]
    if left[0].is_cuda and not emulate and kernels.AVAILABLE:
        a = left_quantizer._native_operand(left, directions[0])
        b = right_quantizer._native_operand(right, directions[1])
        if a is not None and b is not None and a.scaling == b.scaling == "tensor":
            out = kernels.low_rank_products.gemm(
                a.data, a.scale, b.data, b.scale, thin_left, thin_right, dtype, fast_accumulation
            )
            if out is not None and out.shape == (rows, columns):
                return out  # type: ignore[no-any-return]
    operands = left, left_quantizer, right, right_quantizer
    out = gemm(kind, *operands, None, dtype, rows, columns, fast_accumulation, emulate)
    return _add_product([out], thin_left, thin_right)


def _gemm_with_product_fake(kind: str, left: list[Tensor], *arguments: Any) -> Tensor:
    gemm_directions(kind)
    dtype, rows, columns = arguments[5:8]
    return left[0].new_empty((rows, columns), dtype=dtype)


gemm_with_product = define(
    f"gemm_with_product(str kind, Tensor[] left, {QUANTIZER} left_quantizer, Tensor[] right, "
    f"{QUANTIZER} right_quantizer, Tensor thin_left, Tensor thin_right, ScalarType dtype, SymInt rows, SymInt columns, "
    "bool fast_accumulation, bool emulate) -> Tensor",
    _gemm_with_product,
    _gemm_with_product_fake,
)
"""Multiply two quantized operands and add a product of thin matrices: ``left @ right.T + thin_left @ thin_right.T``.

On Hopper, per-tensor FP8 adds both in fp32 and rounds once. Elsewhere the first product is rounded before the sum.

Args:
    kind, left, right, dtype, rows, columns, fast_accumulation, emulate: as :data:`gemm` takes them.
    thin_left: (rows, r); thin_right: (columns, r), of any strides; bf16 or fp16.
"""
