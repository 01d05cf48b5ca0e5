"""``narrowcast::moe_spread``, ``moe_collect`` and their kin: tokens to their experts, and back.

They know no autograd; ``narrowcast.moe`` makes each the other's backward.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._library import always, define
from .numerics import numerics_for

moe_spread = define(
    "moe_spread(Tensor x, Tensor positions, SymInt columns) -> Tensor",
    lambda x, positions, columns: numerics_for(x).moe.spread(x, positions, columns),
    lambda x, positions, columns: x.new_empty((positions.shape[0], x.shape[1])),
    inlined=always,
)
moe_positions = define(
    "moe_positions(Tensor row_map, SymInt rows) -> Tensor",
    lambda row_map, rows: numerics_for(row_map).moe.positions(row_map, rows),
    lambda row_map, rows: row_map.new_empty((rows,)),
    inlined=always,
)
moe_collect = define(
    "moe_collect(Tensor rows, Tensor row_map, Tensor? weights) -> Tensor",
    lambda rows, row_map, weights: numerics_for(rows).moe.collect(rows, row_map, weights),
    lambda rows, row_map, weights: rows.new_empty((row_map.shape[0], rows.shape[1])),
    inlined=always,
)


def _backward_fake(grad: Tensor, rows: Tensor, positions: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    return rows.new_empty(rows.shape), rows.new_empty((rows.shape[0],), dtype=torch.float32)


moe_collect_backward = define(
    "moe_collect_backward(Tensor grad, Tensor rows, Tensor positions, Tensor weights) -> (Tensor, Tensor)",
    lambda grad, rows, positions, weights: numerics_for(rows).moe.collect_backward(
        grad, rows, positions, weights
    ),
    _backward_fake,
    inlined=always,
)
