"""``narrowcast::transpose_codes``: the transpose of one-byte codes."""

from __future__ import annotations

from ._library import always, define
from .numerics import numerics_for

transpose_codes = define(
    "transpose_codes(Tensor data) -> Tensor",
    lambda data: numerics_for(data).float8.transpose(data),
    lambda data: data.new_empty((data.shape[-1], *data.shape[:-1])),
    inlined=always,
)
"""Move the last dim of uint8 codes (*lead, K) to the front: (K, *lead), contiguous, never a view of ``data``."""
