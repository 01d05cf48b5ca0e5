"""``narrowcast::add_product`` and ``thin_products``: an adapter's products with its thin matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from ._library import always, define
from .numerics import numerics_for


def _add_product(bases: list[Tensor], left: Tensor, right: Tensor) -> Tensor:
    thin = numerics_for(left).thin
    return thin.add_product([base.contiguous() for base in bases], left.contiguous(), right)  # type: ignore[no-any-return]


def _products(wide: Tensor, right: Tensor, left: Tensor) -> list[Tensor]:
    return numerics_for(wide).thin.products(wide.contiguous(), right, left.contiguous())  # type: ignore[no-any-return]


def _products_fake(wide: Tensor, right: Tensor, left: Tensor) -> list[Tensor]:
    (M, N), rank = wide.shape, right.shape[1]
    return [wide.new_empty((M, rank)), wide.new_empty((N, rank), dtype=torch.float32)]


add_product = define(
    "add_product(Tensor[] bases, Tensor left, Tensor right) -> Tensor",
    _add_product,
    lambda bases, left, right: bases[0].new_empty(bases[0].shape),
    inlined=always,
)
"""``RN(sum(bases) + left @ right.T)`` of (M, N), (M, r) and (N, r), contiguous, rounded once to the bases' dtype.

``left`` and ``right`` have one dtype.
"""

thin_products = define(
    "thin_products(Tensor wide, Tensor right, Tensor left) -> Tensor[]",
    _products,
    _products_fake,
    inlined=always,
)
"""``wide @ right`` (M, r) in the dtype of ``wide`` and ``wide.T @ left`` (N, r) in fp32; ``wide`` (M, N) is read once.

The operands have one dtype.
"""
