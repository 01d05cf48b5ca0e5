"""The command `narrowcast bench`."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from .._version import __version__
from .measure import Result, contenders, measure
from .show import picture, table, write_csv
from .works import works


def bench(
    suite: Annotated[str, typer.Argument(help="layers, models, all, or tiny: a check in seconds.")] = "all",
    only: Annotated[str, typer.Option(help="Works whose name contains this.")] = "",
    recipes: Annotated[str, typer.Option(help="Recipes, with commas between.")] = "delayed,current,block",
    modes: Annotated[str, typer.Option(help="Of eager, compiled, graphs, with commas.")] = "eager,compiled",
    device: Annotated[str, typer.Option(help="cuda or cpu; default: the GPU where there is one.")] = "",
    out: Annotated[Path | None, typer.Option(help="Folder for bench.csv and bench.png.")] = None,
) -> int:
    """Time layers and training steps beside bf16, and beside torchao, Transformer Engine and Liger where installed."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cuda", "cpu") or (device == "cuda" and not torch.cuda.is_available()):
        raise typer.BadParameter(f"--device is {device!r}; use cuda with a GPU that torch sees, or cpu")
    try:
        chosen = works(suite, only)
        running = list(contenders(_words(recipes), _words(modes), emulate=device == "cpu"))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    machine = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu, emulated",
        "torch": torch.__version__,
        "narrowcast": __version__,
        "date": f"{datetime.now():%Y-%m-%d}",
    }
    results: list[Result] = []
    console = Console()
    for work in chosen:
        baseline: float | None = None
        for contender in running:
            with console.status(f"{work.name}: {contender.name}, {contender.mode}"):
                result = measure(work, contender, device, baseline)
            if contender.name == "bf16":
                baseline, result = result.ms, result._replace(share=None if result.ms is None else 1.0)
            results.append(result)
            console.print(
                f"{result.work}: {result.contender}, {result.mode}: {_told(result)}", highlight=False
            )
            if out is not None:  # after each, so that an interrupted run leaves what it has
                out.mkdir(parents=True, exist_ok=True)
                write_csv(results, out / "bench.csv", machine)
    title = "narrowcast bench · " + " · ".join(machine.values())
    console.print(table(results, title))
    if out is not None:
        (out / "bench.png").write_bytes(picture(results, title))
        typer.echo(f"wrote {out / 'bench.csv'} and {out / 'bench.png'}")
    return 0


def _told(result: Result) -> str:
    memory = "" if result.memory is None else f", {result.memory:,.0f} MiB"
    return result.note if result.ms is None else f"{result.ms:.3f} ms{memory}"


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]
