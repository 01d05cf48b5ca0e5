"""The work of `narrowcast plan`; `cli.commands` has its options."""

from __future__ import annotations

import json as jsons
from typing import Any

import typer
from rich.console import Console

from .estimate import gib
from .hardware import ERROR, find_gpu
from .layout import plan as search
from .show import remark, tables, title


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
    console.print(
        f"\n{result.tokens_per_second:,.0f} tokens/s/GPU, MFU {result.mfu:.0%} of the bf16 peak, "
        f"{gib(result.total_memory)} of {gib(find_gpu(gpu).memory)}. An estimate: "
        f"{ERROR}.",
        highlight=False,
    )
    return 0
