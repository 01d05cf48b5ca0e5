"""Mutation testing: change one thing in a file where wrongness is silent, and see whether its tests notice.

``make mutants`` or ``python tools/mutants.py --jobs 2 --minutes 30``, with Python 3.12 or newer. A mutant of
``src/narrowcast/A/b.py`` is killed when a test of ``tests/A`` or a ``tests/*/test_b.py`` fails or hangs. A first run
records which lines each test executes; a mutant then runs the tests of its line alone, one case of every test function
first, up to the first failure. ``--out`` is added to: a run with the same seed goes on where another stopped, and
``--retry`` tries its survivors again. Mutants that change nothing are named in ``tools/equivalent_mutants.csv``, with
the reason, and are not run.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import copy
import csv
import gzip
import hashlib
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from mutant_processes import ROOT, lines_of_tests, run_all, run_tests, warm_up

PACKAGE = ROOT / "src" / "narrowcast"
EQUIVALENT = ROOT / "tools" / "equivalent_mutants.csv"
SILENT = (
    "reference/*.py", "quantizers/*.py", "tensors/*.py", "state/*.py", "autograd/*.py", "layers/*.py",
    "functional/kept_weights.py", "functional/replay.py", "attention/core.py", "attention/masks.py", "moe/*.py",
    "optimizers/*.py", "distributed/*.py",
)  # fmt: skip
COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
# Where else a room is tested: its base classes are, as the modules that they are the base of.
ELSEWHERE = {"layers": ("nn/test_linear*.py", "nn/test_grouped_linear.py", "nn/test_pa*.py")}
COLUMNS = ("room", "mutants", "killed", "hung", "survived", "no test", "percent")


class Mutant(NamedTuple):
    file: str  # in the package
    line: int
    text: str  # of that line
    change: str  # the old code, an arrow, the new code
    replaced: tuple[int, int, str]  # from which byte to which, by what

    def key(self) -> str:
        return hashlib.sha1("|".join((self.file, self.text, self.change)).encode()).hexdigest()[:16]


def mutants_of(file: str, source: str) -> Iterator[Mutant]:
    """Every mutant of the source, none of them in what only words a message, names a type or sizes a cache."""
    data, lines, tree = source.encode(), source.splitlines(), ast.parse(source)
    starts = [0]
    for line in data.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    quiet = {id(part) for node in ast.walk(tree) for root in _quiet(node) for part in ast.walk(root)}
    for node in ast.walk(tree):
        for target, new in () if id(node) in quiet else _changes(node):
            start = starts[target.lineno - 1] + target.col_offset
            end = starts[target.end_lineno - 1] + target.end_col_offset
            change = " ".join(data[start:end].decode().split()) + " => " + new
            new += "\n" * (target.end_lineno - target.lineno)  # later lines keep their numbers
            new = f"({new})" if isinstance(target, ast.expr) else new
            yield Mutant(file, target.lineno, lines[target.lineno - 1].strip(), change, (start, end, new))


def _quiet(node: Any) -> Iterator[ast.AST]:
    """What of a node is left alone."""
    yield from (part for name in ("annotation", "returns") if (part := getattr(node, name, None)))
    target = getattr(getattr(node, "targets", [None])[0], "id", "")
    value = getattr(node, "value", None)
    if (
        isinstance(node, (ast.Raise, ast.JoinedStr, ast.Assert, ast.Import, ast.ImportFrom))
        or (isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING")
        or (isinstance(node, ast.keyword) and node.arg in ("maxsize", "stacklevel", "slots"))
        or (isinstance(node, ast.Expr) and isinstance(value, ast.Constant))
        or target in ("__all__", "__slots__")
        or (target and node.col_offset == 0 and isinstance(value, ast.Subscript))  # a name for a type
        or (target and isinstance(value, ast.Call) and getattr(value.func, "id", "") == "TypeVar")
    ):
        yield node


def _changes(node: Any) -> Iterator[tuple[Any, str]]:
    """What to replace, and by which code."""

    def with_(**fields: Any) -> str:
        other = copy.copy(node)
        other.__dict__.update(fields)
        return ast.unparse(other)

    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        yield node, with_(ops=[COMPARISONS[type(node.ops[0])](), *node.ops[1:]])
    elif isinstance(node, (ast.BinOp, ast.AugAssign)) and type(node.op) in OPERATORS:
        if not isinstance(getattr(getattr(node, "left", None), "value", None), str):
            yield node, with_(op=OPERATORS[type(node.op)]())
    elif isinstance(node, ast.Constant) and type(node.value) is bool:
        yield node, str(not node.value)
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield node, repr(node.value + 1)
    elif isinstance(node, ast.BoolOp):
        yield node, with_(op=ast.And() if isinstance(node.op, ast.Or) else ast.Or())
    elif isinstance(node, (ast.If, ast.IfExp)):
        yield node.test, f"not ({ast.unparse(node.test)})"
    elif isinstance(node, ast.Return) and getattr(node.value, "value", node.value) is not None:
        yield node, "return None"
    if isinstance(node, (ast.Expr, ast.Assign, ast.AugAssign)):
        yield node, "pass"


def sample(count: int, seed: int) -> list[Mutant]:
    """The mutants to run. Whether one is drawn hangs on its own line, not on what changes elsewhere."""
    with EQUIVALENT.open() as file:
        named = {tuple(row[:3]) for row in csv.reader(file)}
    every: dict[str, Mutant] = {}
    for path in sorted({path for pattern in SILENT for path in PACKAGE.glob(pattern)}):
        for one in mutants_of(str(path.relative_to(PACKAGE)), path.read_text()):
            every.setdefault(one.key(), one)
    drawn = sorted(every, key=lambda key: hashlib.sha1(f"{seed}{key}".encode()).digest())[:count]
    kept = [every[key] for key in drawn if (every[key].file, every[key].text, every[key].change) not in named]
    print(
        f"{len(every)} mutants, {len(drawn)} drawn with seed {seed}, {len(drawn) - len(kept)} equivalent",
        flush=True,
    )
    return kept


def tests_for(file: str) -> set[str]:
    """The files of tests that mirror a file: those of its room and, where its name is not among them, of its name."""
    room, stem = file.split("/")[0], Path(file).stem.lstrip("_")
    own = list((ROOT / "tests" / room).glob("test_*.py"))
    of_name = list((ROOT / "tests").glob(f"*/test_{stem}.py"))
    elsewhere = [path for pattern in ELSEWHERE.get(room, ()) for path in (ROOT / "tests").glob(pattern)]
    paths = own + elsewhere + ([] if set(own) & set(of_name) else of_name)
    return {str(path.relative_to(ROOT)) for path in paths}


def record(store: Path, drawn: list[Mutant], folder: Path, jobs: int) -> dict[str, Any]:
    """Seconds and lines of the mutants' tests, recorded again where these or a room that they are for changed."""
    rooms: dict[str, set[str]] = defaultdict(set)
    for one in drawn:
        for test in tests_for(one.file):
            rooms[test].add(one.file.split("/")[0])
    now = {}
    for file in sorted(rooms):
        read = [
            ROOT / file,
            *(path for room in sorted(rooms[file]) for path in sorted((PACKAGE / room).glob("*.py"))),
        ]
        now[file] = hashlib.sha1(b"".join(path.read_bytes() for path in read)).hexdigest()
    known = json.loads(gzip.decompress(store.read_bytes())) if store.exists() else {}
    tasks = [
        (file, 1200.0, partial(lines_of_tests, file)) for file in now if known.get(file, [""])[0] != now[file]
    ]
    for file, tests, taken, _ in run_all(tasks, folder, jobs, float("inf")):
        known[file] = now[file], tests or {}
        print(f"recorded {len(tests or {})} tests of {file} in {taken:.0f} s", flush=True)
        store.write_bytes(gzip.compress(json.dumps(known).encode(), 1))
    return {file: known[file][1] for file in now}


def choose(one: Mutant, tests: dict[str, Any], budget: float) -> tuple[list[str], float]:
    """Tests that execute its line, else its file (it is traced, or runs on import), else all; the seconds they take."""
    every = [
        (seconds, test, int(lines.get(one.file, "0"), 16))
        for file in tests_for(one.file)
        for test, (seconds, lines) in tests[file].items()
    ]
    of_file = [row for row in every if row[2]] or every
    of_line = [row for row in of_file if row[2] >> one.line & 1]
    mirrored = f"/test_{Path(one.file).stem.lstrip('_')}"
    turns: Counter[str] = Counter()
    order: list[tuple[int, bool, float, str]] = []
    for seconds, test, _ in sorted(of_line or of_file):
        function = test.split("[")[0]
        order.append((turns[function], mirrored not in test, seconds, test))
        turns[function] += 1  # one case of every function first
    chosen, total = [], 0.0
    for _, _, seconds, test in sorted(order):
        if total + seconds <= budget or not chosen:
            chosen.append(test)
            total += seconds
    return chosen, total


def summarize(rows: list[dict[str, Any]], out: Path | None) -> None:
    """Print counts per room and of all; ``out``: write them as CSV, with the machine."""
    rooms: dict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        for room in (row["file"].split("/")[0], "~ all"):
            rooms[room][row["result"]] += 1
    table = [COLUMNS]
    for room, counts in sorted(rooms.items()):
        share = 1 - (counts["survived"] + counts["no test"]) / counts.total()
        table.append((room, counts.total(), *(counts[name] for name in COLUMNS[2:6]), f"{100 * share:.1f}"))
    for row in table:
        print("{:14}{:>9}{:>9}{:>9}{:>9}{:>9}{:>9}".format(*row))
    if out:
        machine = f"{platform.machine()} with {os.cpu_count()} cores", sys.modules["torch"].__version__
        with out.open("w") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow((*COLUMNS, "machine", "torch", "python", "date"))
            writer.writerows((*row, *machine, platform.python_version(), date.today()) for row in table[1:])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--count", type=int, default=2000, help="mutants of the sample (default 2000)")
    add("--seed", type=int, default=0, help="of the sample (default 0)")
    add("--jobs", type=int, default=1, help="processes at a time (default 1)")
    add("--minutes", type=float, default=1e9, help="stop after so many")
    add("--hours", type=float, default=1e9, help="stop after so many")
    add("--only", default="", help="of the sample, these alone: reference/,state/autocast.py:12")
    add("--budget", type=float, default=20.0, help="seconds of tests that a mutant runs (default 20)")
    add("--retry", action="store_true", help="run the survivors of --out again")
    add(
        "--unchanged", action="store_true", help="run the tests of every file without a change: all must pass"
    )
    add(
        "--out", type=Path, default=ROOT / "build/mutants.jsonl", help="a JSON line per mutant is added there"
    )
    add("--map", type=Path, default=ROOT / "build/mutants_map.gz", help="which test executes which line")
    add("--csv", type=Path, help="write the counts there, too")
    given = parser.parse_args()
    end = time.monotonic() + min(60 * given.minutes, 3600 * given.hours)
    only = tuple(given.only.split(","))
    drawn = [one for one in sample(given.count, given.seed) if f"{one.file}:{one.line}".startswith(only)]
    if given.unchanged:
        drawn = [
            one._replace(text="", change="", replaced=(0, 0, ""))
            for one in {o.file: o for o in drawn}.values()
        ]
    for path in (given.out, given.map):
        path.parent.mkdir(parents=True, exist_ok=True)
    given.out.touch()
    rows = {row["key"]: row for row in map(json.loads, given.out.read_text().splitlines())}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ.update(
            CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="1", OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE",
            TORCHINDUCTOR_COMPILE_THREADS="1", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1",
            HYPOTHESIS_STORAGE_DIRECTORY=f"{name}/hypothesis",
        )  # fmt: skip
        warm_up()
        shutil.copytree(PACKAGE, folder / "0/src/narrowcast")
        compileall.compile_dir(folder / "0/src", quiet=1)
        for number in range(1, given.jobs):
            shutil.copytree(folder / "0", folder / str(number))
        tests = record(given.map, drawn, folder, given.jobs)
        again = {key for key, row in rows.items() if given.retry and row["result"] in ("survived", "no test")}
        left = [one for one in drawn if one.key() not in rows or one.key() in again]
        chosen = {one: choose(one, tests, given.budget) for one in left}
        tasks = [
            (one, 20 + 5 * seconds, partial(run_tests, names, one.file, one.replaced))
            for one, (names, seconds) in chosen.items()
            if names
        ]
        with given.out.open("a") as out:

            def note(one: Mutant, result: str, **rest: Any) -> None:
                rows[one.key()] = {"key": one.key(), "result": result, **one._asdict(), **rest}
                print(json.dumps(rows[one.key()]), file=out, flush=True)
                if result in ("survived", "no test"):
                    print(f"{result.upper()} {one.file}:{one.line} {one.change}", flush=True)

            for one, (names, _) in chosen.items():
                if not names:
                    note(one, "no test")
            for one, result, taken, slot in run_all(tasks, folder, given.jobs, end):
                shutil.copy2(PACKAGE / one.file, slot / "src" / "narrowcast" / one.file)
                code, test = result or (-1, "")
                word = "hung" if result is None else "killed" if code else "survived"
                note(one, word, by=test or code, tests=len(chosen[one][0]), seconds=round(taken, 1))
    summarize([rows[one.key()] for one in drawn if one.key() in rows], given.csv)
    return 0


if __name__ == "__main__":
    sys.exit(main())
