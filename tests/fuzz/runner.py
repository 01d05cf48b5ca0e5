"""Runs suites in turns until the time is over, and reports."""

from __future__ import annotations

import copy
import gc
import json
import platform
import random
import shlex
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

import narrowcast as nc

from . import programs
from .draw import Draw

Drawn = Callable[[random.Random], programs.Program]
LIMIT = 600  # seconds of a case
SHRINK = 20.0  # seconds that making a failure smaller may take


@dataclass
class Suite:
    """One kind of attack: its share of the time, and what it has found.

    A figure of a case is a number whose largest value is reported; ``Skip`` raised by a case ends the suite. A suite of
    programs has ``draw``, which makes one of a seed, and its case takes the program; what one refuses is counted.
    """

    name: str
    case: Callable[..., dict[str, float]]
    weight: float
    draw: Drawn | None = None
    cases: int = 0
    seconds: float = 0.0
    figures: dict[str, float] = field(default_factory=dict)
    failures: list[dict[str, str]] = field(default_factory=list)
    skipped: str = ""
    seen: dict[str, int] = field(default_factory=dict)
    said: dict[str, int] = field(default_factory=dict)


class Skip(Exception):
    """What the machine lacks for a suite."""


def run_case(suite: Suite, seed: int, device: str, effort: float) -> bool:
    """Run one case and keep what it says; whether it passed."""
    if suite.draw is not None:
        program = suite.draw(random.Random(f"{suite.name} {seed}"))
        return run_program(suite, program, f"--suite {suite.name} --seed {seed} --cases 1", str(seed))
    draw = Draw(suite.name, seed, device, effort)
    begin = time.perf_counter()
    try:
        figures = suite.case(draw)
    except Skip as reason:
        suite.skipped = str(reason)
        return True
    except Exception as error:
        repro = f"python -m tests.fuzz --device {device} --suite {suite.name} --seed {seed} --cases 1"
        _keep(suite, str(seed), ", ".join(draw.notes), error, repro)
        return False
    finally:
        _end_of_case(suite, begin)
    for name, value in figures.items():
        suite.figures[name] = max(suite.figures.get(name, value), value)
    return True


def run_program(suite: Suite, program: programs.Program, arguments: str, seed: str = "") -> bool:
    """Run a program; the first failure of its kind is made smaller. Whether it passed."""
    begin, shrunk = time.perf_counter(), 0.0
    try:
        error = outcome(suite, program)
        if error is None:
            return True
        kind = programs.signature(error)
        suite.seen[kind] = suite.seen.get(kind, 0) + 1
        if suite.seen[kind] > 1:
            return False
        start = time.perf_counter()
        small = program
        if SHRINK and programs.error_of_the_device() is None:
            small = programs.shrink(program, lambda one: _fails_as(suite, one, kind), SHRINK)
        shrunk = time.perf_counter() - start  # is not the suite's share
        _keep(suite, seed, json.dumps(small), error, f"python -m tests.fuzz {arguments}")
        return False
    finally:
        _end_of_case(suite, begin + shrunk)


def outcome(suite: Suite, program: programs.Program) -> BaseException | None:
    """What a program fails with; what it does not say, as one from before there was a choice, is None."""
    if suite.draw is not None:
        program = {**dict.fromkeys(suite.draw(random.Random(0))), **program}
    if programs.is_something_in_force():
        gc.collect()  # the error of the case before holds it
    try:
        with programs.limit(LIMIT):
            for name in suite.case(copy.deepcopy(program)) or ():
                suite.said[name] = suite.said.get(name, 0) + 1
    except programs.Invalid:
        suite.said["says nothing"] = suite.said.get("says nothing", 0) + 1
    except (Exception, programs.Slow) as error:
        return error
    return programs.error_of_the_device()


def _fails_as(suite: Suite, program: programs.Program, kind: str) -> bool:
    try:
        with programs.limit(60):
            suite.case(copy.deepcopy(program))
    except (Exception, programs.Slow) as error:
        return programs.signature(error) == kind
    return False


def _end_of_case(suite: Suite, begin: float) -> None:
    suite.cases += 1
    suite.seconds += time.perf_counter() - begin
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


def _keep(suite: Suite, seed: str, drawn: str, error: BaseException, repro: str) -> None:
    suite.failures.append(
        {
            "seed": seed,
            "case": str(suite.cases),
            "drawn": drawn,
            "error": f"{type(error).__name__}: {error}",
            "kind": programs.signature(error),
            "traceback": "".join(traceback.format_exception(error)),
            "repro": repro,
        }
    )
    print(f"FAILED {suite.name} seed {seed}: {type(error).__name__}: {str(error)[:400]}", file=sys.stderr)
    print(f"  {programs.signature(error)}", file=sys.stderr)
    print(f"  drawn: {drawn}\n  {repro}", file=sys.stderr, flush=True)


def run(
    suites: list[Suite], *, device: str, minutes: float, seed: int, cases: int | None, effort: float
) -> None:
    """Run the suites: so many cases of each, or for so many minutes, the one that is furthest behind its share next.

    A GPU that raises for good ends the run: no case says anything on it.
    """
    if cases is not None:
        for suite in suites:
            for index in range(cases):
                if not suite.skipped and programs.error_of_the_device() is None:
                    run_case(suite, seed + index, device, effort)
        return
    end = time.monotonic() + 60 * minutes
    said = time.monotonic()
    while time.monotonic() < end and programs.error_of_the_device() is None:
        open_suites = [suite for suite in suites if not suite.skipped]
        if not open_suites:
            return
        suite = min(open_suites, key=lambda one: one.seconds / one.weight)
        run_case(suite, seed + suite.cases, device, effort)
        if time.monotonic() - said > 60:
            said = time.monotonic()
            done = ", ".join(f"{one.name} {one.cases}" for one in suites)
            print(f"{(end - said) / 60:.0f} minutes left: {done}", flush=True)


def machine(device: str) -> dict[str, str]:
    """What the run ran on."""
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    try:
        import triton

        compiler = triton.__version__
    except ImportError:
        compiler = "none"
    return {
        "device": name,
        "torch": torch.__version__,
        "triton": compiler,
        "python": platform.python_version(),
        "narrowcast": nc.__version__,
    }


def report(suites: list[Suite], device: str, out: Path | None) -> None:
    """The table, and the same as JSON."""
    rows = [
        (
            suite.name,
            str(suite.cases),
            str(len(suite.failures)),
            f"{suite.seconds:.0f}",
            suite.skipped
            or ", ".join(f"{name} {value:.4g}" for name, value in sorted(suite.figures.items())),
        )
        for suite in suites
    ]
    header = ("suite", "cases", "failed", "seconds", "largest figures")
    where = machine(device)
    title = ", ".join(f"{name} {value}" for name, value in where.items())
    try:
        from rich.console import Console
        from rich.table import Table

        table = Table(*header, title=title)
        for row in rows:
            table.add_row(*row)
        Console().print(table)
    except ImportError:
        widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
        print(title)
        for row in [header, *rows]:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)))
    for suite in suites:
        for failure in suite.failures:
            print(f"{suite.name}: {failure['error'][:200]}\n  {failure['drawn']}\n  {failure['repro']}")
    if out is not None:
        document = {"machine": where, "command": shlex.join(sys.argv)}
        kept = [
            {name: value for name, value in asdict(suite).items() if name not in ("case", "draw")}
            for suite in [Suite(**{**vars(suite), "case": None, "draw": None}) for suite in suites]  # type: ignore[arg-type]
        ]
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps({**document, "suites": kept}, indent=1) + "\n")
        print(f"written to {out}")
