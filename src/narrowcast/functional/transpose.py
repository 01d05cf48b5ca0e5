"""``narrowcast::transpose_codes``: the transpose of one-byte codes."""

from __future__ import annotations

from torch import Tensor

from ._library import define
from .numerics import numerics_for


def _transpose(data: Tensor) -> Tensor:
    return numerics_for(data).float8.transpose(data)


def _transpose_fake(data: Tensor) -> Tensor:
    return data.new_empty((data.shape[-1], *data.shape[:-1]))


transpose_codes = define("transpose_codes(Tensor data) -> Tensor", _transpose, _transpose_fake)
"""Move the last dim of uint8 codes (*lead, K) to the front: (K, *lead), contiguous, never a view of ``data``."""
