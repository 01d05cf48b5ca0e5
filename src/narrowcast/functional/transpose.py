"""``narrowcast::transpose_codes``: the transpose of one-byte codes."""

from __future__ import annotations

from ._library import define
from .numerics import computed_by

_transpose = computed_by("float8", "transpose")

transpose_codes = define(
    "transpose_codes(Tensor data, Tensor? after=None) -> Tensor",
    lambda data, after=None: _transpose(data),
    lambda data, after=None: data.new_empty((data.shape[-1], *data.shape[:-1])),
    inlined=lambda data, after=None: after is None,
)
"""Move the last dim of uint8 codes (*lead, K) to the front: (K, *lead), contiguous, never a view of ``data``.

Args:
    after: any tensor; a graph transposes only once it is there. With a gradient, a graph's forward keeps no
        transpose of a weight for its backward.
"""
