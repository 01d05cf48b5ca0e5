"""The work of `narrowcast plan`; `cli.commands` has its options."""

from __future__ import annotations

import json as jsons
import shlex
from typing import Any

import typer

from ..hardware import GIB, RESERVE, find_gpu
from ..words import follow_up, tell
from .estimate import Estimate, gib
from .layout import DoesNotFitError
from .layout import plan as search
from .models import find_model
from .remedies import remedies, roomier
from .show import TIGHT, described, duration, margin, parts, remarks


def plan(
    context: typer.Context, model: str, gpus: int, recipe: str, gpu: str, *, json: bool, **layout: Any
) -> int:
    """Run `narrowcast plan`; return its exit code.

    Args:
        layout: the further arguments of :func:`narrowcast_tools.plan.plan`.
    """
    try:
        result = search(model, gpus, recipe, gpu, **layout)
    except DoesNotFitError as error:
        told = f"{error}; {remedies(model, gpus, recipe, gpu, **layout)}"
        raise typer.BadParameter(told) from None
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if json:
        typer.echo(jsons.dumps({**result.as_json(), "gpu": gpu}, indent=1))
        return 0
    usable = RESERVE * find_gpu(gpu).memory / GIB
    memory = f"{gib(result.total_memory)} of {usable:.1f} usable per GPU"
    tell("fits", f"{result.model} in {recipe} on {_counted(gpus, gpu)}: {memory}")
    if result.total_memory > (1 - TIGHT) * usable * GIB:
        remedy = roomier(result, (1 - TIGHT) * usable * GIB, model, gpus, recipe, gpu, **layout)
        tell("tight", f"within {TIGHT:.0%} of what is usable, and may not suffice; {remedy}")
    plain = _in_bf16(result, model, gpus, gpu, **layout)
    beside = ", where no layout fits in bf16"
    if plain is not None:
        times = result.tokens_per_second / plain.tokens_per_second
        beside = f", {times:.2f} times bf16's {plain.tokens_per_second:,.0f}"
    step = f"{duration(result.step)} a step of {result.layout.batch:,} tokens"
    tell(
        "speed",
        f"{result.tokens_per_second:,.0f} tokens/s per GPU{'' if recipe == 'bf16' else beside}; {step}",
    )
    tell("how sure", f"an estimate: {margin(gpus, experts=bool(find_model(model).experts))}")
    tell("layout", described(result))
    if recipe != "bf16" and plain is not None:
        tell("bf16 layout", described(plain))
    for subject, text in parts(result).items():
        tell(subject, text)
    for text in remarks(gpus, layout["batch_size"]):
        tell("note", text)
    typer.echo(f"{follow_up(*shlex.split(context.obj)[1:], '--json')}   # all numbers, with MFU")
    return 0


def _counted(gpus: int, gpu: str) -> str:
    return f"{gpus:,} {gpu} {'GPU' if gpus == 1 else 'GPUs'}"


def _in_bf16(result: Estimate, model: str, gpus: int, gpu: str, **layout: Any) -> Estimate | None:
    """Return the best layout in bf16 on the same GPUs, with a batch of the same size; None if none fits."""
    layout |= {"saved_activations": None, "batch_size": result.layout.batch // result.layout.length}
    try:
        return search(model, gpus, "bf16", gpu, **layout)
    except ValueError:
        return None
