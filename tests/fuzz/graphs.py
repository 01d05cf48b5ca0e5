"""Orders of calls as in ``orders``, of blocks that are compiled."""

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
    return program | {"odd_rows": rng.random() < 0.1}


def _compiled(rng: random.Random) -> Program:
    wrap = draw_wrap(rng, 0.02) or {"checkpoint": None, "inside": False, "fullgraph": True}
    return wrap | {"compile": wrap.get("compile") or "aot_eager"}
