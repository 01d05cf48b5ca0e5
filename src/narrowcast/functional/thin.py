"""``narrowcast::add_product`` and ``thin_products``: an adapter's products with its thin matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from ._library import always, define
from .numerics import numerics_for


def _add_product(base: Tensor, left: Tensor, right: Tensor) -> Tensor:
    thin = numerics_for(base).thin
    return thin.add_product(base.contiguous(), left.contiguous(), right)  # type: ignore[no-any-return]


def _products(wide: Tensor, right: Tensor | None, left: Tensor | None) -> list[Tensor]:
    thin = numerics_for(wide).thin
    return thin.products(wide.contiguous(), right, None if left is None else left.contiguous())  # type: ignore[no-any-return]


def _products_fake(wide: Tensor, right: Tensor | None, left: Tensor | None) -> list[Tensor]:
    (M, N), made = wide.shape, []
    if right is not None:
        made.append(wide.new_empty((M, right.shape[1])))
    if left is not None:
        made.append(wide.new_empty((N, left.shape[1]), dtype=torch.float32))
    return made


add_product = define(
    "add_product(Tensor base, Tensor left, Tensor right) -> Tensor",
    _add_product,
    lambda base, left, right: base.new_empty(base.shape),
    inlined=always,
)
"""``RN(base + left @ right.T)`` of (M, N), (M, r) and (N, r), contiguous, with one rounding to the dtype of ``base``.

``left`` and ``right`` have one dtype.
"""

thin_products = define(
    "thin_products(Tensor wide, Tensor? right, Tensor? left) -> Tensor[]",
    _products,
    _products_fake,
    inlined=always,
)
"""``wide @ right`` (M, r) in the dtype of ``wide`` and ``wide.T @ left`` (N, r) in fp32.

If an operand is None, only the other product. The operands have one dtype; ``wide`` (M, N) is read once.
"""
