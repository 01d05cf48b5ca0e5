"""``narrowcast::transpose_codes``: the transpose of one-byte codes."""

from __future__ import annotations

from ._library import always, define
from .numerics import computed_by

transpose_codes = define(
    "transpose_codes(Tensor data) -> Tensor",
    computed_by("float8", "transpose"),
    lambda data: data.new_empty((data.shape[-1], *data.shape[:-1])),
    inlined=always,
)
"""Move the last dim of uint8 codes (*lead, K) to the front: (K, *lead), contiguous, never a view of ``data``."""
