"""The work of `narrowcast plan`; `cli.commands` has its options."""

from __future__ import annotations

import json as jsons
from typing import Any

import typer
from rich.console import Console

from ..hardware import find_gpu
from ..words import tell
from .estimate import Estimate, gib
from .layout import plan as search
from .models import find_model
from .show import described, margin, remark, tables, terms


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
    memory = f"{gib(result.total_memory)} of {gib(find_gpu(gpu).memory)} per GPU"
    tell("fits", f"{result.model} in {recipe} on {_counted(gpus, gpu)}: {memory}")
    tell("speed", f"{_speed(result)}; {result.step:,.1f} s a step of {result.layout.batch:,} tokens")
    if recipe != "bf16":
        tell("than bf16", _beside_bf16(result, model, gpus, gpu, **layout))
    tell("how sure", f"an estimate: {margin(gpus, experts=bool(find_model(model).experts))}")
    tell("layout", described(result))
    if text := remark(gpus):
        tell("note", text)
    console = Console()
    for table in tables(result):
        console.print()
        console.print(table)
    console.print()
    for term in terms(result):
        console.print(term, highlight=False)
    typer.echo("next: try other --gpus or --recipe; --json prints all numbers, with MFU")
    return 0


def _counted(gpus: int, gpu: str) -> str:
    return f"{gpus:,} {gpu} {'GPU' if gpus == 1 else 'GPUs'}"


def _speed(result: Estimate) -> str:
    return f"{result.tokens_per_second:,.0f} tokens/s per GPU"


def _beside_bf16(result: Estimate, model: str, gpus: int, gpu: str, **layout: Any) -> str:
    """Return what the best layout in bf16 does on the same GPUs, with a batch of the same size."""
    layout |= {"saved_activations": None, "batch_size": result.layout.batch // result.layout.length}
    try:
        plain = search(model, gpus, "bf16", gpu, **layout)
    except ValueError:
        return "in bf16 no layout fits these GPUs"
    times = result.tokens_per_second / plain.tokens_per_second
    return f"{times:.2f} times as fast; bf16 on the same GPUs: {_speed(plain)}"
