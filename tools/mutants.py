"""Mutation testing: change one thing in a file where wrongness is silent, and see whether its tests notice.

``make mutants`` or ``python tools/mutants.py --jobs 2 --minutes 30``, with Python 3.12 or newer. A mutant of
``src/narrowcast/A/b.py`` is killed when a test of ``tests/A`` or a ``tests/*/test_b.py`` fails or hangs. A first run
records which lines each test executes; a mutant then runs the tests of its line alone, one case of every test function
first, up to the first failure. A process per directory collects the tests and forks for each mutant, which replaces the
code of a function; a change that runs on import is imported by a new process. Ranks that tests start are forked from
the mutant, too. ``--out`` is added to: a run with the same seed goes on where another stopped, and ``--retry`` tries
its survivors again. Mutants that change nothing are named in ``tools/equivalent_mutants.csv``, with the reason, and are
not run.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import copy
import csv
import gzip
import hashlib
import inspect
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

from mutant_processes import ROOT, run_all, run_tests, warm_up
from mutant_session import Session

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
# Where else a room is tested: references beside kernels, quantizers as operands of GEMMs, base classes as the modules
# that they are the base of.
ELSEWHERE = {
    "reference": (
        "kernels/test_batch_invariant.py",
        "kernels/test_grouped_quantize.py",
        "kernels/test_sources.py",
    ),
    "quantizers": ("functional/test_gemm*.py", "functional/test_grouped_gemm.py"),
    "tensors": ("quantizers/test_hybrid.py", "quantizers/test_described.py", "distributed/test_shard.py"),
    "autograd": (
        "nn/test_linear*.py",
        "nn/test_grouped_linear.py",
        "nn/test_layernorm*.py",
        "nn/test_tensor_parallel.py",
        "nn/test_batch_invariant.py",
        "nn/test_saved_activations.py",
        "convert/test_adapters.py",
        "functional/test_few_rows.py",
        "serving/test_forward_like.py",
        "ops/basic/test_grouped_linear.py",
        "ops/fused/test_grouped*.py",
        "ops/test_tensor_parallel.py",
    ),
    "state": ("layers/test_first_step.py", "layers/test_delayed.py", "layers/test_recomputation.py"),
    "layers": (
        "state/test_delayed_scaling.py",
        "nn/test_linear*.py",
        "nn/test_grouped_linear.py",
        "nn/test_pa*.py",
        "nn/test_torch_func.py",
        "nn/test_tensor_parallel.py",
        "state/test_replicas.py",
        "distributed/test_parallel_styles.py",
        "optimizers/test_weight_codes.py",
        "nn/test_batch_invariant.py",
        "distributed/test_shard.py",
    ),
}
# Of the tests of a room of which few files are silent, these alone.
ONLY = {"functional": ("kept_weights", "replay", "routes")}
WORDS = {-1: "hung", 0: "survived", 1: "killed"}
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
    own = [
        path for name in ONLY.get(room, ("*",)) for path in (ROOT / "tests" / room).glob(f"test_{name}.py")
    ]
    of_name = list((ROOT / "tests").glob(f"*/test_{stem}.py"))
    elsewhere = [path for pattern in ELSEWHERE.get(room, ()) for path in (ROOT / "tests").glob(pattern)]
    paths = own + elsewhere + ([] if set(own) & set(of_name) else of_name)
    return {str(path.relative_to(ROOT)) for path in paths}


class Room:
    """The mutants of a directory: their tests are collected once, in a process of its own.

    Its results are JSON lines in ``given.out``.
    """

    def __init__(
        self, name: str, drawn: list[Mutant], given: argparse.Namespace, end: float, folder: Path
    ) -> None:
        self.name, self.drawn, self.given, self.end, self.folder = name, drawn, given, end, folder
        files = {test for one in drawn for test in tests_for(one.file)}
        self.files = sorted(test for test in files if any(part in test for part in given.tests.split(",")))
        self.say = partial(print, file=os.fdopen(os.dup(1), "w"), flush=True)  # a child's own output is a log
        self.package = folder / "room/0/src/narrowcast"

    def run(self, slot: Path) -> list[str]:
        """Record lines, then run the mutants in place. Returns the keys of those that a new import is left to."""
        self.left: list[str] = []
        options = ["-m", self.given.marked] if self.given.marked else []
        session = Session(self.package)
        if session.run(self.files, options, self._run):
            self.say((slot / "log").read_text()[-5000:])
        return self.left

    def _run(self, session: Session) -> None:
        tests = self.record(session)
        self.say(f"{self.name}: {len(self.drawn)} mutants, {len(session.items)} tests, {len(tests)} recorded")
        tasks = []
        for one in self.drawn:
            chosen, seconds = choose(one, tests, self.given.budget)
            if not chosen and not self.given.tests:
                self.note(one, "no test")
            if not chosen:
                continue
            timed = [(name, tests[name][0] + tests[name][2], tests[name][3]) for name in chosen]
            tasks.append((one, 20 + 5 * seconds, partial(session.run_mutant, timed, one.file, one.replaced)))
        for one, result, taken, slot in run_all(tasks, self.folder, self.given.jobs, self.end):
            self.restore(one, slot)
            code, test = (-1, "") if result is None else result
            if code is None or (code == 0 and (one.file, one.line) in session.imported):
                self.left.append(one.key())
                continue
            self.note(one, WORDS[code], by=test, seconds=round(taken, 1))

    def record(self, session: Session) -> dict[str, Any]:
        """Seconds and lines of the room's tests, recorded again where these or the room changed."""
        store = self.given.map.with_suffix(f".{self.name}.gz")
        sources = b"".join(path.read_bytes() for path in sorted((self.package / self.name).glob("*.py")))
        known = json.loads(gzip.decompress(store.read_bytes())) if store.exists() else {}
        now = {}
        for file in self.files:
            for name in session.cases(file, self.given.thin):
                text = inspect.getsource(session.items[name].function).encode()
                now[name] = hashlib.sha1(sources + text).hexdigest()
        names: dict[str, list[str]] = defaultdict(list)
        for name in now:
            if known.get(name, [""])[0] != now[name]:
                names[name.split("::")[0]].append(name)
        tasks = [
            (
                file,
                float("inf"),
                partial(session.lines_of_tests, names[file], self.given.limit, self.given.limit_of_file),
            )
            for file in names
        ]
        for file, tests, taken, _ in run_all(tasks, self.folder, self.given.jobs, self.end):
            for name, row in (tests or {}).items():
                known[name] = now[name], row
            self.say(f"recorded {len(tests or {})} of {len(names[file])} tests of {file} in {taken:.0f} s")
            store.write_bytes(gzip.compress(json.dumps(known).encode(), 1))
        return {name: known[name][1] for name in now if name in known and known[name][1]}

    def run_anew(self, left: list[Mutant]) -> None:
        """Run mutants that change what runs on import, each in a process that imports the package itself."""
        store = self.given.map.with_suffix(f".{self.name}.gz")
        tests = {
            name: row[1] for name, row in json.loads(gzip.decompress(store.read_bytes())).items() if row[1]
        }
        tasks = []
        for one in left:
            chosen, seconds = choose(one, tests, self.given.budget)
            tasks.append((one, 30 + 5 * seconds, partial(run_tests, chosen, one.file, one.replaced)))
        for one, result, taken, slot in run_all(tasks, self.folder, self.given.jobs, self.end):
            self.restore(one, slot)
            code, test = (-1, "") if result is None else result
            self.note(one, WORDS[min(code, 1)], by=test or code, seconds=round(taken, 1))

    def restore(self, one: Mutant, slot: Path) -> None:
        shutil.copy2(self.package / one.file, slot / "src" / "narrowcast" / one.file)

    def note(self, one: Mutant, result: str, **rest: Any) -> None:
        with self.given.out.open("a") as out:
            print(json.dumps({"key": one.key(), "result": result, **one._asdict(), **rest}), file=out)
        if result in ("survived", "no test"):
            self.say(f"{result.upper()} {one.file}:{one.line} {one.change}")


def choose(one: Mutant, tests: dict[str, Any], budget: float) -> tuple[list[str], float]:
    """Tests that execute its line, else its file (it is traced, or runs on import), else all; the seconds they take.

    Fixtures of a file that several of its tests use cost once.
    """
    files = tests_for(one.file)
    every = [
        (seconds, test, int(lines.get(one.file, "0"), 16), once)
        for test, (seconds, lines, once, _) in tests.items()
        if test.split("::")[0] in files
    ]
    of_file = [row for row in every if row[2]] or every
    of_line = [row for row in of_file if row[2] >> one.line & 1]
    mirrored = f"/test_{Path(one.file).stem.lstrip('_')}"
    turns: Counter[str] = Counter()
    order: list[tuple[int, bool, float, str, float]] = []
    for seconds, test, _, once in sorted(of_line or of_file):
        function = test.split("[")[0]
        order.append((turns[function], mirrored not in test, seconds + once, test, once))
        turns[function] += 1  # one case of every function first
    chosen, total, made = [], 0.0, set()
    for _, _, seconds, test, once in sorted(order):
        fixtures = test.split("::")[0], once
        seconds -= once if fixtures in made else 0.0
        if total + seconds <= budget or not chosen:
            chosen.append(test)
            total += seconds
            made.add(fixtures)
            if len(chosen) == 1 and once:  # whatever it costs: others that use it are not left out for that
                budget += once
    files = list(dict.fromkeys(test.split("::")[0] for test in chosen))  # fixtures of a file are made once
    return sorted(chosen, key=lambda test: files.index(test.split("::")[0])), total


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
    add("--thin", action="store_true", help="of every test function, run cases that hold each value once")
    add("--limit", type=float, default=60.0, help="seconds of a test that is run (default 60)")
    add(
        "--limit-of-file",
        type=float,
        default=1e9,
        help="stop recording a file of tests after so many seconds",
    )
    add("--marked", default="", help="which tests are run, as pytest -m takes it")
    add("--tests", default="", help="of the files of tests, these alone: state/test_autocast,kernels/")
    add("--retry", action="store_true", help="run the survivors of --out again, nothing else")
    add(
        "--unchanged", action="store_true", help="run the tests of every file without a change: all must pass"
    )
    add(
        "--out", type=Path, default=ROOT / "build/mutants.jsonl", help="a JSON line per mutant is added there"
    )
    add(
        "--map",
        type=Path,
        default=ROOT / "build/mutants_map.gz",
        help="which test executes which line, a file per room",
    )
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
    survivors = {key for key, row in rows.items() if row["result"] in ("survived", "no test")}
    left = [one for one in drawn if (one.key() in survivors if given.retry else one.key() not in rows)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ.update(
            CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="1", OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE",
            TORCHINDUCTOR_COMPILE_THREADS="1", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1",
            HYPOTHESIS_STORAGE_DIRECTORY=f"{name}/hypothesis",
        )  # fmt: skip
        warm_up()
        shutil.copytree(PACKAGE, folder / "room/0/src/narrowcast")
        compileall.compile_dir(folder / "room/0/src", quiet=1)
        for number in range(given.jobs):
            shutil.copytree(folder / "room/0", folder / str(number))
        for place in dict.fromkeys(pattern.split("/")[0] for pattern in SILENT):
            of_room = [one for one in left if one.file.startswith(f"{place}/")]
            if of_room and time.monotonic() < end:
                room = Room(place, of_room, given, end, folder)
                for _, keys, _, slot in run_all([(place, float("inf"), room.run)], folder / "room", 1, end):
                    if keys is None:
                        print((slot / "log").read_text()[-5000:])
                    room.run_anew([one for one in of_room if one.key() in (keys or ())])
    rows = {row["key"]: row for row in map(json.loads, given.out.read_text().splitlines())}
    summarize([rows[one.key()] for one in drawn if one.key() in rows], given.csv)
    return 0


if __name__ == "__main__":
    sys.exit(main())
