"""``narrowcast::encode_int8_rows`` and ``decode_int8_rows``: int8 codes of rows with a scale each."""

from __future__ import annotations

import torch
from torch import Tensor

from ._library import always, define
from .numerics import computed_by


def _fake(x: Tensor) -> list[Tensor]:
    return [
        x.new_empty(x.shape, dtype=torch.int8),
        x.new_empty((*x.shape[:-1], 1), dtype=torch.float32),
    ]


encode_int8_rows = define(
    "encode_int8_rows(Tensor x) -> Tensor[]", computed_by("int8_rows", "encode"), _fake, lowered=always
)
"""Codes of the shape of ``x`` and scales (*lead, 1), contiguous; see ``reference.int8_rows.encode``."""

decode_int8_rows = define(
    "decode_int8_rows(Tensor codes, Tensor scales, ScalarType dtype) -> Tensor",
    computed_by("int8_rows", "decode"),
    lambda codes, scales, dtype: codes.new_empty(codes.shape, dtype=dtype),
    lowered=always,
)
"""``reference.int8_rows.decode`` of what :data:`encode_int8_rows` returned, contiguous."""
