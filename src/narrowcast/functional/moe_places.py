"""``narrowcast::moe_departures`` and ``moe_arrivals``: where a mixture's rows lie on both sides of its exchange."""

from __future__ import annotations

import torch

from ._library import always, define
from .numerics import computed_by

moe_departures = define(
    "moe_departures(Tensor routing_map, SymInt ranks, SymInt capacity, SymInt rows) -> (Tensor, Tensor, Tensor)",
    computed_by("moe_places", "departures"),
    lambda routing_map, ranks, capacity, rows: (
        routing_map.new_empty(routing_map.shape, dtype=torch.int32),
        routing_map.new_empty((ranks * capacity,), dtype=torch.int32),
        routing_map.new_empty(routing_map.shape[1:], dtype=torch.int64),
    ),
    lowered=always,
)
moe_arrivals = define(
    "moe_arrivals(Tensor received, SymInt capacity, SymInt rows, SymInt places, SymInt alignment) "
    "-> (Tensor, Tensor, Tensor)",
    computed_by("moe_places", "arrivals"),
    lambda received, capacity, rows, places, alignment: (
        received.new_empty((rows,), dtype=torch.int32),
        received.new_empty((places,), dtype=torch.int32),
        received.new_empty(received.shape[1:]),
    ),
    lowered=always,
)
