"""Products with thin matrices, as the adapters of LoRA have them, in fp32."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def add_product(bases: Sequence[Tensor], left: Tensor, right: Tensor) -> Tensor:
    """Return ``RN(sum(bases) + left @ right.T)`` in the dtype of the bases; product and sum are in fp32.

    Args:
        bases: (M, N) each.
        left: (M, r).
        right: (N, r).
    """
    total = left.float() @ right.float().t()
    for base in bases:
        total = total + base.float()
    return total.to(bases[0].dtype)


def products(wide: Tensor, right: Tensor, left: Tensor) -> list[Tensor]:
    """Return ``wide @ right`` (M, r), rounded to the dtype of ``wide``, and ``wide.T @ left`` (N, r) in fp32.

    Args:
        wide: (M, N).
        right: (N, r).
        left: (M, r).
    """
    return [(wide.float() @ right.float()).to(wide.dtype), wide.float().t() @ left.float()]
