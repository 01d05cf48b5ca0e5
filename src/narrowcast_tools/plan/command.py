"""The work of `narrowcast plan`; `cli.commands` has its options."""

from __future__ import annotations

import json as jsons
from typing import Any

import typer
from rich.console import Console

from ..hardware import RATIO_ERROR, find_gpu
from .estimate import Estimate, gib
from .layout import plan as search
from .models import find_model
from .show import margin, remark, tables, terms, title


def plan(model: str, gpus: int, recipe: str, gpu: str, *, json: bool, **layout: Any) -> int:
    """Run `narrowcast plan`; return its exit code.

    Args:
        layout: the further arguments of :func:`narrowcast_tools.plan.plan`.
    """
    try:
        result = search(model, gpus, recipe, gpu, **layout)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if json:
        typer.echo(jsons.dumps({**result.as_json(), "gpu": gpu}, indent=1))
        return 0
    console = Console()
    console.print(title(result, gpu), highlight=False)
    if text := remark(gpus):
        console.print(text, highlight=False)
    for table in tables(result):
        console.print()
        console.print(table)
    console.print()
    for term in terms(result):
        console.print(term, highlight=False)
    off = margin(gpus, experts=bool(find_model(model).experts))
    above = ", which FP8 can exceed" if recipe != "bf16" else ""
    console.print(
        f"\n{result.tokens_per_second:,.0f} tokens/s/GPU, an estimate: {off}."
        f"\nMFU {result.mfu:.0%} of the bf16 peak{above}; {gib(result.total_memory)} of {gib(find_gpu(gpu).memory)}.",
        highlight=False,
    )
    if recipe != "bf16":
        console.print(_beside_bf16(result, model, gpus, gpu, **layout), highlight=False)
    console.print("next: --json prints all numbers; --tp-size and --pp-size fix a layout")
    return 0


def _beside_bf16(result: Estimate, model: str, gpus: int, gpu: str, **layout: Any) -> str:
    """Return what the best layout in bf16 does on the same GPUs, with a batch of the same size."""
    layout |= {"saved_activations": None, "batch_size": result.layout.batch // result.layout.length}
    try:
        plain = search(model, gpus, "bf16", gpu, **layout)
    except ValueError:
        return "In bf16 no layout fits these GPUs."
    times = result.tokens_per_second / plain.tokens_per_second
    return (
        f"bf16 on the same GPUs: {plain.tokens_per_second:,.0f} tokens/s/GPU, so this is {times:.2f} times as fast; "
        f"{RATIO_ERROR}."
    )
