"""``narrowcast::transpose_codes``: the transpose of one-byte codes."""

from __future__ import annotations

from torch import Tensor

from ._library import define
from .numerics import computed_by

_transpose = computed_by("float8", "transpose")


def _fake(data: Tensor, after: Tensor | None = None, stacked: bool = False) -> Tensor:
    begin = int(stacked)
    return data.new_empty((*data.shape[:begin], data.shape[-1], *data.shape[begin:-1]))


transpose_codes = define(
    "transpose_codes(Tensor data, Tensor? after=None, bool stacked=False) -> Tensor",
    lambda data, after=None, stacked=False: _transpose(data, stacked),
    _fake,
    lowered=lambda data, after=None, stacked=False: after is None,
)
"""Move the last dim of uint8 codes (*lead, K) to the front: (K, *lead), contiguous, never a view of ``data``.

Args:
    stacked: they are (G, *lead, K), and become (G, K, *lead).
    after: any tensor; a graph transposes only once it is there. With a gradient, a graph's forward keeps no
        transpose of a weight for its backward.
"""
