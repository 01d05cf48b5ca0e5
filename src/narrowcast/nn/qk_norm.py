"""Norms of queries and keys, over the channels of each head."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from .._checks import is_one_of, not_among
from ..autograd import NormSettings, normalize
from ..layers import refuse_script
from .norm import LayerNorm, RMSNorm

QK_NORMS = ("L2Normalization", "RMSNorm", "LayerNorm")


class HeadL2Norm(nn.Module):
    """``y = x / sqrt(sum(x**2) + eps)`` over the last dim, with fp32 statistics and no parameters.

    Takes (*lead, d) in fp32, bf16 or fp16. It runs as the RMS norm it is: eps / d instead of eps, and 1 / sqrt(d) as
    every weight.
    """

    is_l2_normalization = True
    """For ``isinstance(norm, ops.L2Normalization)``, which Transformer Engine's users ask."""

    __prepare_scriptable__ = refuse_script

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.size, self.eps = size, float(eps)

    def forward(self, inp: Tensor) -> Tensor:
        """Normalize (*lead, d); same shape and dtype."""
        weight = torch.full((self.size,), 1.0 / math.sqrt(self.size), dtype=torch.float32, device=inp.device)
        return normalize(inp, weight, None, NormSettings("RMSNorm", self.eps / self.size, False))

    def extra_repr(self) -> str:
        """Return options, as printed by the module."""
        return f"{self.size}, eps={self.eps}"


def qk_norms(
    kind: str | None, size: int, eps: float, dtype: torch.dtype, place: torch.device
) -> tuple[nn.Module | None, nn.Module | None]:
    """Return the norms of queries and keys of ``size`` channels; both None without.

    Raises:
        ValueError: ``kind`` is neither None nor one of ``QK_NORMS``.
    """
    if kind is None:
        return None, None
    if is_one_of(kind, ("L2Normalization",)):
        norm = HeadL2Norm(size, eps)  # has no parameters: one is enough for both
        return norm, norm
    if not is_one_of(kind, QK_NORMS):
        raise ValueError(f"qk_norm_type is {not_among(kind, (None, *QK_NORMS))}")
    norm_class = RMSNorm if kind == "RMSNorm" else LayerNorm
    return (
        norm_class(size, eps, dtype=dtype, device=place),
        norm_class(size, eps, dtype=dtype, device=place),
    )
