"""The work of `narrowcast bench`; `cli.commands` has its options."""

from __future__ import annotations

import time
from datetime import datetime
from pathlib import Path

import torch
import typer
from rich.console import Console

from narrowcast._version import __version__

from .measure import Result, contenders
from .show import picture, read_csv, table, write_csv
from .worker import Worker
from .works import works


def bench(
    suite: str,
    *,
    only: str,
    recipes: str,
    modes: str,
    device: str,
    out: Path | None,
    seconds: int,
    minutes: float,
    resume: bool,
) -> int:
    """Run `narrowcast bench`; return its exit code."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cuda", "cpu") or (device == "cuda" and not torch.cuda.is_available()):
        raise typer.BadParameter(f"--device is {device!r}; use cuda with a GPU that torch sees, or cpu")
    if seconds < 0 or minutes < 0:
        raise typer.BadParameter(f"--seconds is {seconds} and --minutes {minutes}; use 0 or more")
    if resume and out is None:
        raise typer.BadParameter("--resume needs --out, the folder with the results to go on from")
    words = _words(recipes), _words(modes), device == "cpu"
    try:
        chosen = works(suite, only)
        running = list(contenders(*words))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    machine = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu, emulated",
        "torch": torch.__version__,
        "narrowcast": __version__,
        "date": f"{datetime.now():%Y-%m-%d}",
    }
    title = (
        f"narrowcast bench {suite}: {machine['device']}, torch {machine['torch']}, "
        f"narrowcast {machine['narrowcast']}, {machine['date']}"
    )
    known = read_csv(out / "bench.csv", machine) if resume and out is not None else {}
    results: list[Result] = []
    console, start = Console(), time.monotonic()
    try:
        with Worker(words, device, seconds) as worker:
            for work in chosen:
                baseline: float | None = None
                for index, contender in enumerate(running):
                    named = work.name, contender.name, contender.mode
                    result = known.get(named)
                    if result is None and minutes and time.monotonic() - start > 60 * minutes:
                        result = Result(*named, None, None, None, f"not started within {minutes:g} min")
                    elif result is None:
                        with console.status(", ".join(named)):
                            result = worker.run(work, contender, index)
                    baseline = result.ms if contender.name == "bf16" else baseline
                    share = None if baseline is None or result.ms is None else result.ms / baseline
                    results.append(result._replace(share=share))
                    done = f"{len(results)}/{len(chosen) * len(running)}, {time.monotonic() - start:.0f} s"
                    console.print(
                        f"[{done}] {', '.join(named)}: {_told(result)}", highlight=False, markup=False
                    )
                    if out is not None:  # after each, so that an interrupted run leaves what it has
                        out.mkdir(parents=True, exist_ok=True)
                        write_csv(results, out / "bench.csv", machine)
                if out is not None:
                    (out / "bench.png").write_bytes(picture(results, title))
    except KeyboardInterrupt:
        console.print("interrupted; what was measured until then:")
    console.print(table(results, title))
    if out is not None:
        console.print(f"wrote {out / 'bench.csv'} and {out / 'bench.png'}", highlight=False)
    return 0


def _told(result: Result) -> str:
    memory = "" if result.memory is None else f", {result.memory:,.0f} MiB"
    return result.note if result.ms is None else f"{result.ms:.3f} ms{memory}"


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]
