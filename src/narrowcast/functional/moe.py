"""``narrowcast::moe_spread``, ``moe_collect`` and their kin: tokens to their experts, and back.

They know no autograd; ``narrowcast.moe`` makes each the other's backward.
"""

from __future__ import annotations

import torch

from ._library import always, define
from .numerics import computed_by

moe_spread = define(
    "moe_spread(Tensor x, Tensor positions, SymInt columns) -> Tensor",
    computed_by("moe", "spread"),
    lambda x, positions, columns: x.new_empty((positions.shape[0], x.shape[1])),
    lowered=always,
)
moe_positions = define(
    "moe_positions(Tensor row_map, SymInt rows) -> Tensor",
    computed_by("moe", "positions"),
    lambda row_map, rows: row_map.new_empty((rows,)),
    lowered=always,
)
moe_collect = define(
    "moe_collect(Tensor rows, Tensor row_map, Tensor? weights) -> Tensor",
    computed_by("moe", "collect"),
    lambda rows, row_map, weights: rows.new_empty((row_map.shape[0], rows.shape[1])),
    lowered=always,
)
moe_collect_coded = define(
    "moe_collect_coded(Tensor codes, Tensor scales, bool e5m2, Tensor row_map, Tensor? weights, ScalarType dtype) "
    "-> Tensor",
    computed_by("moe", "collect_coded"),
    lambda codes, scales, e5m2, row_map, weights, dtype: codes.new_empty(
        (row_map.shape[0], codes.shape[1]), dtype=dtype
    ),
    lowered=always,
)
moe_collect_backward = define(
    "moe_collect_backward(Tensor grad, Tensor rows, Tensor positions, Tensor weights, Tensor? scales=None, "
    "bool e5m2=False) -> (Tensor, Tensor)",
    computed_by("moe", "collect_backward", like=1),
    lambda grad, rows, positions, weights, scales=None, e5m2=False: (
        (rows if scales is None else grad).new_empty(rows.shape),
        rows.new_empty(rows.shape[0], dtype=torch.float32),
    ),
    lowered=always,
)
