"""Small histories under delayed scaling, in which mostly the order of calls is drawn.

The programs, their runs and their oracles are those of ``histories``. What is drawn here is cheap: narrow layers, no
other recipe but now and then, one program in eighty compiled. In its place come more orders of forwards and backwards,
checkpoints inside of checkpoints, calls that are stopped in the middle, and copies that train.
"""

from __future__ import annotations

import random

from .histories import (
    NEUTRAL,
    USES,
    draw_around_step,
    draw_autocasts,
    draw_edit,
    draw_inside,
    draw_outer,
    draw_written,
    is_reentrant,
    sums_in_another_order,
)
from .models import draw_layer, draw_recipe, draw_wrap
from .programs import Program

_CHECKPOINTS = (None, "torch", "torch reentrant", "ours", "ours reentrant", "torch whole")
_BETWEEN = ("no_grad", "evaluate", "inference", "dropped", "failed", *USES)
_WITH_WEIGHTS = ("linear", "lnlinear", "lnmlp", "grouped", "ops", "transformer")


def draw(rng: random.Random) -> Program:
    program: Program = {
        "seed": rng.randrange(10**6),
        "dtype": rng.choice(("float32",) * 5 + ("bfloat16",)),
        "features": rng.choice((16, 16, 32, 48, 17, 1)),
        "magnitude": rng.choice((1.0, 1.0, 0.01, 30.0)),
        "wander": rng.random() < 0.5,
        "rows": rng.choice((8, 16, 33)),
        "odd_rows": rng.random() < 0.2,
        "loss": rng.choice(("sum", "weighted", "square")),
        "recipe": _recipe(rng, 0.95),
        "how": rng.choice(("autocast", "set_recipe", "own")),
        "around": rng.random() < 0.15,
        "stored": rng.random() < 0.05,
        "preserve": rng.random() < 0.5,
        "replay": rng.random() < 0.3,
        "apart": rng.random() < 0.2,
        "large": rng.random() < 0.3,
        "optimizer": rng.choice(("SGD", "SGD", "AdamW", "AdamW fused", "FusedAdam", "FusedSGD")),
        "whole": _wrap(rng, 0.3),
        "blocks": [],
        "history": [],
        "calibrated": rng.random() < 0.1,
        "invariant": rng.random() < 0.05,
        "scaler": rng.choice((None,) * 6 + (2.0**8, 2.0**15)),
    }
    program["around"] &= program["how"] == "autocast"
    index = 0
    for _ in range(rng.choice((1, 1, 2, 2, 3))):
        layers = []
        for _ in range(rng.choice((1, 1, 2))):
            layers.append(_layer(rng, index))
            index += 1
        program["blocks"].append({"layers": layers, "wrap": _wrap(rng, 0.7)})
    first = program["blocks"][0]["layers"][0]
    if first["kind"] == "relu_":  # refused, of a leaf
        first["kind"] = "relu"
    if not any(layer["kind"] in _WITH_WEIGHTS for block in program["blocks"] for layer in block["layers"]):
        program["blocks"][0]["layers"][0] = {"kind": "linear", "bias": True}
    if rng.random() < 1 / 80:
        wraps = [draw_wrap(rng, 0.0) for _ in program["blocks"]]
        for block, wrap in zip(program["blocks"], wraps):
            block["wrap"] = wrap
    program["history"] = [_item(rng) for _ in range(rng.choice((2, 3, 4, 5)))]
    for item in program["history"]:
        if item.get("raises") and is_reentrant(program):
            item["still"] = (
                None  # a block in evaluation collects nothing before its recomputation, which never comes
            )
    once = not program["whole"] and not any(item.get("retain") for item in program["history"])
    for block in program["blocks"]:
        if block["wrap"] and once and rng.random() < 0.15:  # PyTorch refuses a second run of it
            block["wrap"] |= {"checkpoint": rng.choice(("torch selective", "ours selective")), "inner": None}
    if rng.random() < 0.3:
        draw_outer(rng, program)
    if rng.random() < 0.15:
        draw_autocasts(rng, program)
    elif rng.random() < 0.1:
        draw_written(rng, program)
    if rng.random() < 0.1:
        draw_inside(rng, program)
    if sums_in_another_order(program):  # bf16 would show nothing but the roundings of sums
        program["dtype"] = "float32"
    return program


def _recipe(rng: random.Random, delayed: float) -> Program:
    recipe = draw_recipe(rng, ("delayed",) if rng.random() < delayed else ("current", "none", "none"))
    if recipe["family"] == "delayed" and rng.random() < 0.2:
        recipe["options"]["margin"] = 1
    return recipe


def _layer(rng: random.Random, index: int) -> Program:
    layer = draw_layer(rng, index)
    if layer["kind"] == "transformer" and rng.random() < 0.7:  # costs as much as five others
        layer = {"kind": "linear", "bias": True}
    if "own" in layer:
        layer["own"] = _recipe(rng, 0.8)
    return layer


def _wrap(rng: random.Random, share: float) -> Program | None:
    if rng.random() > share:
        return None
    return {
        "compile": None,
        "fullgraph": False,
        "checkpoint": rng.choice(_CHECKPOINTS),
        "inner": rng.choice(_CHECKPOINTS) if rng.random() < 0.25 else None,
        "inside": False,
        "keywords": rng.random() < 0.3,
        "offload": rng.random() < 0.1,
    }


def _item(rng: random.Random) -> Program:
    do = rng.choices(
        (
            "step",
            "evaluate",
            "no_grad",
            "inference",
            "dropped",
            "edit",
            "neutral",
            "recipe",
            "freeze",
            "calibrate",
        ),
        (12, 1.5, 1.5, 0.5, 1, 1, 3, 0.5, 0.5, 0.3),
    )[0]
    item: Program = {"do": do}
    if do == "step":
        return item | _step(rng)
    if do in ("evaluate", "no_grad", "inference", "dropped"):
        item |= {"batch": rng.randrange(10**6), "flag": None}
    elif do == "edit":
        item |= draw_edit(rng)
    elif do == "neutral":
        item["way"] = rng.choice((*NEUTRAL, *USES))
    elif do == "recipe":
        item["recipe"] = _recipe(rng, 0.8)
    elif do == "freeze":
        item |= {"which": rng.randrange(8), "frozen": rng.random() < 0.5}
    return item


def _step(rng: random.Random) -> Program:
    batches = [rng.randrange(10**6) for _ in range(rng.choice((1, 1, 2, 2, 3)))]
    stopped = None
    if rng.random() < 0.1:
        backward = rng.random() < 0.5
        stopped = {
            "block": rng.randrange(3),
            "backward": backward,
            "interrupt": not backward and rng.random() < 0.5,
        }
    return {
        "batches": batches,
        "flags": [None for _ in batches],
        "order": rng.choice(("each", "fifo", "lifo", "joined", "1f1b")),
        "retain": rng.random() < 0.15,
        "update": rng.random() < 0.8,
        "parts": rng.random() < 0.15,
        "between": rng.choice(_BETWEEN) if rng.random() < 0.3 else None,
        "still": rng.randrange(3) if rng.random() < 0.1 else None,
        "raises": stopped,
        **draw_around_step(rng),
    }
