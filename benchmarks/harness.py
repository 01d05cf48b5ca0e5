"""What every benchmark shares: timing, the description of the machine, the table, the rows that are kept."""

from __future__ import annotations

import argparse
import csv
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import torch

import narrowcast as nc

RESULTS = Path(__file__).parent / "results"
FLUSHED_BYTES = 256 * 2**20  # more than the last-level cache of the GPUs at hand

Row = dict[str, object]


def parser(description: str | None) -> argparse.ArgumentParser:
    """Options that every benchmark takes."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--repeats", type=int, default=20, help="timed runs of each case (default 20)")
    options.add_argument("--save", action="store_true", help="append the rows to benchmarks/results/")
    options.add_argument(
        "--commit", default=_commit(), help="what the rows say was measured (default: ask git)"
    )
    return options


def time_ms(run: Callable[[], object], device: str, repeats: int) -> Row:
    """Median, 20th and 80th percentile in milliseconds, after three runs that are not counted."""
    for _ in range(3):
        run()
    timed = _time_cuda(run, repeats) if device == "cuda" else _time_cpu(run, repeats)
    fifths = statistics.quantiles(timed, n=5, method="inclusive")
    return {"p50_ms": statistics.median(timed), "p20_ms": fifths[0], "p80_ms": fifths[3]}


def _time_cpu(run: Callable[[], object], repeats: int) -> list[float]:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e3)
    return times


def _time_cuda(run: Callable[[], object], repeats: int) -> list[float]:
    flushed = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(repeats):
        flushed.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return times


def machine(device: str, commit: str) -> Row:
    """Columns that say where a row comes from."""
    name = (
        torch.cuda.get_device_name()
        if device == "cuda"
        else f"{_cpu_name()}, {torch.get_num_threads()} threads"
    )
    return {
        "device": name,
        "torch": torch.__version__,
        "triton": _version("triton"),
        "narrowcast": nc.__version__,
        "commit": commit,
    }


def report(stem: str, rows: list[Row], options: argparse.Namespace) -> None:
    """Print the rows as a table and, with ``--save``, append them to ``results/<stem>.csv``."""
    where = machine(options.device, options.commit)
    print(", ".join(f"{key} {value}" for key, value in where.items()))
    cells = [[_cell(value) for value in row.values()] for row in rows]
    widths = [max(map(len, column)) for column in zip(rows[0], *cells, strict=True)]
    for line in (list(rows[0]), *cells):
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
    if options.save:
        _append(RESULTS / f"{stem}.csv", [{**row, **where} for row in rows])


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _append(path: Path, rows: list[Row]) -> None:
    path.parent.mkdir(exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        if new:
            writer.writeheader()
        writer.writerows(rows)


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "none"


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, cwd=RESULTS.parent, capture_output=True, text=True)
    except OSError:  # no git on this machine
        return "unknown"
    return done.stdout.strip() or "unknown"
