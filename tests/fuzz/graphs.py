"""Orders of calls as in ``orders``, of blocks that are compiled and read their scales as graphs on a GPU do."""

from __future__ import annotations

import random

from . import orders
from .models import draw_wrap
from .programs import Program


def draw(rng: random.Random) -> Program:
    program = orders.draw(rng)
    for block in program["blocks"]:
        block["wrap"] = _compiled(rng)
    program["whole"] = _compiled(rng) if rng.random() < 0.2 else None
    for item in program["history"]:
        item.pop("still", None)  # a graph without gradients of a block in evaluation records no scales
    return program | {"gpu_scales": True, "odd_rows": rng.random() < 0.1}


def _compiled(rng: random.Random) -> Program:
    wrap = draw_wrap(rng, 0.02) or {"checkpoint": None, "inside": False, "fullgraph": True}
    return wrap | {"compile": wrap.get("compile") or "aot_eager"}
