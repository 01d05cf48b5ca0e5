"""Writes the tables of ``docs/fine-tune-one-gpu.md`` from ``narrowcast_tools.plan``; nothing runs on a GPU.

python docs/fine_tune_tables.py
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from narrowcast_tools.hardware import RESERVE
from narrowcast_tools.plan import MODELS, OPTIMIZERS, Layout, held

PAGE = Path(__file__).resolve().parent / "fine-tune-one-gpu.md"
GIB = 2**30
MEMORY = {"24 GB": 23, "48 GB": 47, "80 GB": 78, "141 GB": 139}
"""GiB that a program can hold, of the cards' names; those of 80 and 141 GB are the planner's H100 and H200."""
LENGTH = 8192


class Setup(NamedTuple):
    """What is trained how: recipe, who keeps the state, and options of the layout."""

    name: str
    recipe: str
    optimizer: str
    options: dict[str, bool]


INSIDE = {"step_in_backward": True}
CODES = {**INSIDE, "saved_fp8": True}
CHUNKS = {**CODES, "chunked_loss": True}
SETUPS = (
    Setup("bf16, AdamW in fp32", "bf16", "adamw", {}),
    Setup("bf16, AdamW in bf16", "bf16", "adamw-bf16", {}),
    Setup("current, AdamW in bf16", "current", "adamw-bf16", {}),
    Setup("current, fp32 masters, moments in 8 bits", "current", "fused-int8", {}),
    Setup("current, rounded at random, moments in 8 bits", "current", "fused-stochastic", {}),
    Setup("the same, steps in the backward", "current", "fused-stochastic", INSIDE),
    Setup("the same, saved activations in FP8", "current", "fused-stochastic", CODES),
    Setup("the same, loss in chunks: `--preset 8b`", "current", "fused-stochastic", CHUNKS),
    Setup("the same, recomputing layers", "current", "fused-stochastic", {**CHUNKS, "recompute": True}),
)


def layout_of(setup: Setup, length: int = LENGTH) -> Layout:
    """One sequence a step."""
    return Layout(1, length, length, state=OPTIMIZERS[setup.optimizer], **setup.options)


def peak(setup: Setup, layers: int, length: int = LENGTH) -> float:
    """GiB that a step of so many layers of the 8B shape holds."""
    model = replace(MODELS["8b"], layers=layers)
    return sum(held(model, layout_of(setup, length), setup.recipe).values()) / GIB


def parts() -> str:
    """What a step of the 8B model holds, by part, and which cards hold it."""
    rows = [
        "| | weights, state | gradients | activations | logits, or a layer | peak, GiB | fits |",
        "| --- | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for setup in SETUPS:
        memory = {
            name: size / GIB for name, size in held(MODELS["8b"], layout_of(setup), setup.recipe).items()
        }
        fixed, grads = memory["parameter shards"] + memory["optimizer state"], memory["gradient shards"]
        ends, total = memory["logits, or a layer's gradients"], sum(memory.values())
        fits = next((card for card, size in MEMORY.items() if total <= RESERVE * size), "-")
        cells = fixed, grads, memory["activations"], ends, total
        rows.append(f"| {setup.name} | " + " | ".join(f"{cell:.1f}" for cell in cells) + f" | {fits} |")
    return "\n".join(rows)


def largest() -> str:
    """The longest sequence and the largest number of layers that fit each card."""
    rows = [
        "| | " + " | ".join(MEMORY) + " |",
        "| --- " + "| --- " * len(MEMORY) + "|",
    ]
    for setup in (SETUPS[1], SETUPS[3], SETUPS[7], SETUPS[8]):
        cells = []
        for size in MEMORY.values():
            fitting = [2**k for k in range(9, 19) if peak(setup, 32, 2**k) <= RESERVE * size]
            layers = max((n for n in range(1, 33) if peak(setup, n) <= RESERVE * size), default=0)
            cells.append(f"8B, {fitting[-1]:,} tokens" if fitting else f"{layers or 'none'} of 32 layers")
        name = {7: "`--preset 8b`", 8: "the same, recomputing layers"}.get(SETUPS.index(setup), setup.name)
        rows.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def page() -> str:
    """The page with the tables that the planner gives now."""
    text = PAGE.read_text()
    for name, table in (("parts", parts()), ("largest", largest())):
        mark = f"<!-- {name}: docs/fine_tune_tables.py -->"
        before, after = text.split(mark + "\n")
        text = f"{before}{mark}\n{table}\n\n" + after.split("\n\n", 1)[1]
    return text


if __name__ == "__main__":
    PAGE.write_text(page())
