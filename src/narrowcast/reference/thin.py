"""Products with thin matrices, as the adapters of LoRA have them, in fp32."""

from __future__ import annotations

from torch import Tensor


def add_product(base: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Return ``RN(base + left @ right.T)`` in the dtype of ``base``; the product and the sum are in fp32.

    Args:
        base: (M, N).
        left: (M, r).
        right: (N, r).
    """
    return (base.float() + left.float() @ right.float().t()).to(base.dtype)


def products(wide: Tensor, right: Tensor | None, left: Tensor | None) -> list[Tensor]:
    """Return ``wide @ right`` (M, r), rounded to the dtype of ``wide``, and ``wide.T @ left`` (N, r) in fp32.

    Args:
        wide: (M, N).
        right: (N, r), or None for the second product alone.
        left: (M, r), or None for the first alone.
    """
    made = [] if right is None else [(wide.float() @ right.float()).to(wide.dtype)]
    return made if left is None else [*made, wide.float().t() @ left.float()]
