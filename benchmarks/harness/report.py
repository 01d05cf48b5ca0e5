"""The command line of every benchmark, the table it prints and the rows it keeps."""

from __future__ import annotations

import argparse
import csv
import importlib.util
from collections.abc import Callable
from pathlib import Path

import torch

from narrowcast import kernels

from .machine import Row, commit, machine

RESULTS = Path(__file__).parents[1] / "results"


def parser(description: str | None) -> argparse.ArgumentParser:
    """Options that every benchmark takes."""
    options = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--repeats", type=int, default=20, help="timed runs of each case (default 20)")
    options.add_argument(
        "--save", action="store_true", help="append the rows to benchmarks/results/ and draw their plot"
    )
    options.add_argument(
        "--commit", default=commit(), help="what the rows say was measured (default: ask git)"
    )
    options.add_argument("--shapes", type=int, default=None, help="how many of the shapes, from the first on")
    options.add_argument("--only", default="", help="contenders whose name contains this")
    options.add_argument("--skip-compile", action="store_true", help="without the compiled peers")
    options.add_argument("--skip-gate", action="store_true", help="without the comparison with the reference")
    return options


def runs_on_gpu(chosen: argparse.Namespace) -> bool:
    """Whether there is something to measure; says so where there is not."""
    if chosen.device == "cuda" and kernels.AVAILABLE:
        return True
    print("this benchmark needs a CUDA device and Triton; nothing to measure here")
    return False


def report_on_gpu(
    stem: str, measure: Callable[[argparse.Namespace], list[Row]], chosen: argparse.Namespace
) -> None:
    """Measure and report, where there is a GPU."""
    if runs_on_gpu(chosen):
        torch.manual_seed(0)
        report(stem, measure(chosen), chosen)


def report(stem: str, rows: list[Row], options: argparse.Namespace) -> None:
    """Print the rows as a table and, with ``--save``, append them to ``results/<stem>.csv`` and draw their plot."""
    where = machine(options.device, options.commit)
    print(", ".join(f"{key} {value}" for key, value in where.items()))
    if not rows:
        print("no contender to measure")
        return
    columns = _columns(rows)
    cells = [[_cell(row.get(column, "")) for column in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    for line in (columns, *cells):
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
    if options.save:
        path = RESULTS / f"{stem}.csv"
        append(path, [{**row, **where} for row in rows])
        if importlib.util.find_spec("matplotlib"):
            from .plot import plot

            plot(path)


def append(path: Path, rows: list[Row]) -> None:
    """Append rows to a CSV file; columns that older or newer rows lack stay empty in those."""
    path.parent.mkdir(exist_ok=True)
    kept: list[Row] = []
    if path.exists():
        with path.open(newline="") as file:
            kept = [dict(row) for row in csv.DictReader(file)]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=_columns([*kept, *rows]), restval="")
        writer.writeheader()
        writer.writerows([*kept, *rows])


def _columns(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(column for row in rows for column in row))


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
