"""Mutation testing: change one thing in a file where wrongness is silent, and see whether its own tests notice.

``make mutants`` or ``python tools/mutants.py --count 40 --seed 1``. A mutant is a comparison, an operator, a number, a
condition, a returned value or a statement that is another; it is killed when the mirrored tests fail. Survivors are
printed with their line: each becomes a test, or is named as equivalent. Files and tests:
``src/narrowcast/A/b.py`` -> ``tests/A/test_b*.py``, or else those that name it most; then the rest of ``tests/A``.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "narrowcast"
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


def places(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Number of a node in ``ast.walk`` and what to do there. Nothing that only words a message, or a type."""
    quiet: set[int] = set()
    for node in ast.walk(tree):
        annotations = [getattr(node, name, None) for name in ("annotation", "returns")]
        inside = [one for one in annotations if isinstance(one, ast.AST)]
        if isinstance(node, (ast.Raise, ast.JoinedStr, ast.Assert, ast.Import, ast.ImportFrom)):
            inside.append(node)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            inside.append(node)
        quiet.update(id(one) for root in inside for one in ast.walk(root))
    for number, node in enumerate(ast.walk(tree)):
        if id(node) in quiet:
            continue
        if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
            yield number, "comparison"
        elif isinstance(node, (ast.BinOp, ast.AugAssign)) and type(node.op) in OPERATORS:
            if not isinstance(getattr(node, "left", None), ast.Constant) or not isinstance(
                node.left.value, str
            ):  # type: ignore[union-attr]
                yield number, "operator"
        elif isinstance(node, ast.Constant) and type(node.value) is bool:
            yield number, "bool"
        elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
            yield number, "number"
        elif isinstance(node, ast.BoolOp):
            yield number, "and/or"
        elif isinstance(node, (ast.If, ast.IfExp)):
            yield number, "condition"
        elif isinstance(node, ast.Return) and node.value is not None:
            if not (isinstance(node.value, ast.Constant) and node.value.value is None):
                yield number, "return None"
        elif isinstance(node, (ast.Expr, ast.Assign, ast.AugAssign)) and not _is_text(node):
            yield number, "drop"


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def mutate(tree: ast.Module, number: int, kind: str) -> tuple[str, int]:
    """The source with that one change, and its line."""
    tree = copy.deepcopy(tree)
    node: Any = list(ast.walk(tree))[number]
    line = node.lineno
    if kind == "comparison":
        node.ops[0] = COMPARISONS[type(node.ops[0])]()
    elif kind == "operator":
        node.op = OPERATORS[type(node.op)]()
    elif kind == "bool":
        node.value = not node.value
    elif kind == "number":
        node.value += 1
    elif kind == "and/or":
        node.op = ast.And() if isinstance(node.op, ast.Or) else ast.Or()
    elif kind == "condition":
        node.test = ast.UnaryOp(ast.Not(), node.test)
    elif kind == "return None":
        node.value = ast.Constant(None)
    else:
        _drop(tree, node)
    return ast.unparse(ast.fix_missing_locations(tree)), line


def _drop(tree: ast.Module, node: ast.AST) -> None:
    for owner in ast.walk(tree):
        for _, block in ast.iter_fields(owner):
            if isinstance(block, list) and node in block:
                block[block.index(node)] = ast.Pass()
                return


def tests_of(file: Path) -> list[str]:
    """The mirrored tests; where there are none, the three files that say the module's name most often."""
    folder = ROOT / "tests" / file.parent.relative_to(PACKAGE)
    stem = file.stem.lstrip("_")
    mirrored = sorted(folder.glob(f"test_{stem}*.py"))
    if not mirrored:
        every = {
            test: len(re.findall(rf"\b{stem}\b", test.read_text()))
            for test in (ROOT / "tests").rglob("test_*.py")
        }
        mirrored = sorted((test for test in every if every[test]), key=lambda test: -every[test])[:3]
    return [str(test.relative_to(ROOT)) for test in mirrored]


def wider_tests(file: Path, run: list[str]) -> list[str]:
    """What a survivor is tried with once more: the other tests of its folder."""
    folder = ROOT / "tests" / file.parent.relative_to(PACKAGE)
    tests = [str(test.relative_to(ROOT)) for test in sorted(folder.glob("test_*.py"))]
    return [test for test in tests if test not in run and "gpu" not in test]


def run_tests(tree: Path, tests: list[str], seconds: float) -> int | None:
    """What pytest returns of the tests on the package in ``tree``; None where it did not end."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree),
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.wait()
        return None


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=2000, help="mutants (default 2000)")
    parser.add_argument("--seed", type=int, default=0, help="of the sample (default 0)")
    parser.add_argument(
        "--seconds", type=float, default=300.0, help="limit of one run of tests (default 300)"
    )
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after so many")
    parser.add_argument("--only", default="", help="files whose path has this in it")
    arguments = parser.parse_args()
    files = sorted(
        {file for pattern in SILENT for file in PACKAGE.glob(pattern) if file.name != "__init__.py"}
    )
    files = [file for file in files if arguments.only in str(file)]
    trees = {file: ast.parse(file.read_text()) for file in files}
    every = [(file, number, kind) for file in files for number, kind in places(trees[file])]
    sample = random.Random(arguments.seed).sample(every, min(arguments.count, len(every)))
    counts = {"killed": 0, "survived": 0, "without tests": 0, "did not end": 0, "tests fail anyway": 0}
    times: dict[Path, float] = {}
    end = time.monotonic() + 60 * arguments.minutes
    print(
        f"{len(every)} places in {len(files)} files; {len(sample)} of them, seed {arguments.seed}", flush=True
    )
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        shutil.copytree(PACKAGE, tree / "narrowcast", ignore=shutil.ignore_patterns("__pycache__"))
        for file, number, kind in sample:
            if time.monotonic() > end:
                break
            tests, name = tests_of(file), file.relative_to(PACKAGE)
            target = tree / "narrowcast" / name
            source = file.read_text()
            if tests and file not in times:  # unparsed, without a change
                target.write_text(ast.unparse(trees[file]))
                begin = time.monotonic()
                passed = run_tests(tree, tests, arguments.seconds) == 0
                times[file] = time.monotonic() - begin if passed else -1.0
                target.write_text(source)
            if not tests or times[file] < 0:
                counts["tests fail anyway" if tests else "without tests"] += 1
                print(f"{'not run' if tests else 'NO TESTS'} {name}", flush=True)
                continue
            changed, line = mutate(trees[file], number, kind)
            target.write_text(changed)
            code = run_tests(tree, tests, min(arguments.seconds, 30 + 4 * times[file]))
            if code == 0 and wider_tests(file, tests):
                code = run_tests(tree, wider_tests(file, tests), arguments.seconds)
            target.write_text(source)
            result = "did not end" if code is None else "survived" if code == 0 else "killed"
            counts[result] += 1
            if result == "survived":
                print(f"SURVIVED {name}:{line} {kind}: {source.splitlines()[line - 1].strip()}", flush=True)
    run = counts["killed"] + counts["survived"] + counts["did not end"]
    share = 100 * (run - counts["survived"]) / max(run, 1)
    print(f"{run} mutants run, {share:.0f}% killed: " + ", ".join(f"{k} {v}" for k, v in counts.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
