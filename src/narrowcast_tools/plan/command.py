"""The command `narrowcast plan`."""

from __future__ import annotations

import json as jsons
from typing import Annotated

import typer
from rich.console import Console

from .estimate import gib
from .hardware import find_gpu
from .layout import BATCH, BATCH_PER_GPU
from .layout import plan as search
from .show import tables, title


def plan(
    model: Annotated[str, typer.Option(help="8b, 70b, 405b (Llama 3) or 671b (DeepSeek-V3).")] = "8b",
    gpus: Annotated[int, typer.Option(help="GPUs, 8 to a host.")] = 8,
    recipe: Annotated[str, typer.Option(help="bf16, delayed, current or block.")] = "current",
    gpu: Annotated[str, typer.Option(help="h100, h200 or h800.")] = "h200",
    batch: Annotated[
        int | None,
        typer.Option(
            help="Tokens of a step, over all GPUs.",
            show_default=f"{BATCH_PER_GPU:,} per GPU, at most {BATCH:,}",
        ),
    ] = None,
    length: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 8192,
    tp: Annotated[int, typer.Option(help="Ranks of tensor parallelism; 0 searches.")] = 0,
    pp: Annotated[int, typer.Option(help="Ranks of the pipeline; 0 searches.")] = 0,
    ep: Annotated[int, typer.Option(help="Ranks of expert parallelism; 0 searches.")] = 0,
    recompute: Annotated[
        bool | None, typer.Option(help="Recompute every layer.", show_default="searched")
    ] = None,
    fp8_gather: Annotated[
        bool | None, typer.Option(help="Gather weights quantized.", show_default="with FP8")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print numbers as JSON: bytes and seconds.")] = False,
) -> int:
    """Estimate memory, traffic and time of a training step on many GPUs; nothing runs."""
    try:
        result = search(
            model,
            gpus,
            recipe,
            gpu,
            batch=batch,
            length=length,
            tp=tp,
            pp=pp,
            ep=ep,
            recompute=recompute,
            fp8_gather=fp8_gather,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if json:
        typer.echo(jsons.dumps({**result.as_json(), "gpu": gpu}, indent=1))
        return 0
    console = Console()
    console.print(title(result, gpu), highlight=False)
    for table in tables(result):
        console.print()
        console.print(table)
    console.print(
        f"\n{result.tokens_per_second:,.0f} tokens/s/GPU, MFU {result.mfu:.0%} of the bf16 peak, "
        f"{gib(result.total_memory)} of {gib(find_gpu(gpu).memory)}. An estimate: docs/scaling.md says how far off.",
        highlight=False,
    )
    return 0
