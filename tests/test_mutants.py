"""Mutants are code that compiles, has the same lines, and differs in one place that is no message."""

from __future__ import annotations

import runpy
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[1] / "tools"
SOURCE = '''"""A module."""
__all__ = ["f"]
def f(x: list[1] = (2), *, deep=True):
    """Of 3."""
    if (x < 4 and
            deep):
        raise ValueError(f"{x + 5} of 6")
    y = x * 7
    y += 8
    return y
'''
IMPORTED = """
def f(x, z=10):
    return x + 1
def make(start):
    def held(x):
        return start + x
    return held
held = make(2)
class C:
    deep = True
    def method(self, x):
        return list(4 * y for y in [x])
"""


@pytest.fixture(scope="module")
def tool() -> dict:
    sys.path.insert(0, str(TOOLS))
    try:
        return runpy.run_path(str(TOOLS / "mutants.py"))
    finally:
        sys.path.remove(str(TOOLS))


def test_mutants_of_a_source(tool):
    mutants = list(tool["mutants_of"]("a.py", SOURCE))
    changes = {mutant.change for mutant in mutants}
    assert changes == {
        "2 => 3", "True => False", "x < 4 and deep => x < 4 or deep", "x < 4 => x <= 4", "4 => 5",
        "x < 4 and deep => not (x < 4 and deep)", "y = x * 7 => pass", "x * 7 => x // 7", "7 => 8", "y += 8 => y -= 8",
        "y += 8 => pass", "8 => 9", "return y => return None",
    }  # fmt: skip
    for mutant in mutants:
        start, end, new = mutant.replaced
        changed = SOURCE[:start] + new + SOURCE[end:]
        compile(changed, "a.py", "exec")
        assert changed.count("\n") == SOURCE.count("\n") and changed != SOURCE
        assert SOURCE.splitlines()[mutant.line - 1].strip() == mutant.text


def test_tests_that_execute_the_line_come_first_a_case_of_each_function_at_a_time(tool):
    one = tool["Mutant"]("state/b.py", 3, "", "", (0, 0, ""))
    tool["choose"].__globals__["tests_for"] = lambda file: ["t"]
    rows = {
        "t::test_x[1]": (0.1, {"state/b.py": hex(0b1000)}, 0.0, False),
        "t::test_x[2]": (0.2, {"state/b.py": hex(0b1010)}, 0.0, False),
        "t::test_y": (5.0, {"state/b.py": hex(0b1000)}, 0.0, False),
        "t::test_other_line": (0.1, {"state/b.py": hex(0b0110)}, 0.0, False),
        "t::test_other_file": (0.1, {"state/a.py": hex(0b1000)}, 0.0, False),
    }
    chosen = tool["choose"](one, rows, 20.0)[0]
    assert chosen == ["t::test_x[1]", "t::test_y", "t::test_x[2]"]
    assert tool["choose"](one, rows, 1.0)[0] == ["t::test_x[1]", "t::test_x[2]"]
    of_file = tool["choose"](one._replace(line=9), rows, 20.0)[0]  # what runs on import only
    assert set(of_file) == {"t::test_x[1]", "t::test_x[2]", "t::test_y", "t::test_other_line"}


def test_a_fixture_that_tests_share_costs_once(tool):
    one = tool["Mutant"]("state/b.py", 3, "", "", (0, 0, ""))
    tool["choose"].__globals__["tests_for"] = lambda file: ["t", "u"]
    lines = {"state/b.py": hex(0b1000)}
    rows = {f"t::test_{name}": (0.5, lines, 30.0, True) for name in "abc"}
    assert tool["choose"](one, rows, 8.0) == ([*rows], 31.5)  # nothing else executes the line
    rows["u::test_alone"] = (0.5, lines, 0.0, False)
    assert tool["choose"](one, rows, 8.0) == (["u::test_alone"], 0.5)
    assert tool["choose"](one, rows, 31.5) == (["u::test_alone", "t::test_a", "t::test_b"], 31.5)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads what Linux tells of processes")
def test_processes_that_wait_for_one_another_are_idle_and_those_that_compute_are_not(tool, monkeypatch):
    processes = sys.modules["mutant_processes"]
    monkeypatch.setattr(processes, "IDLE", 0.2)
    for code, end in (("import time; time.sleep(60)", float("inf")), ("while True: pass", 0.0)):
        with subprocess.Popen([sys.executable, "-Sc", code]) as process:
            try:
                clock = processes._idle_clock([process])
                deadline = time.monotonic() + (1.0 if end == 0.0 else 30.0)
                while clock() < 1.0 and time.monotonic() < deadline:
                    time.sleep(0.05)
                assert clock() == end
            finally:
                process.kill()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="code has no qualified name")
@pytest.mark.parametrize(
    "old, new, values",
    [
        ("x + 1", "x - 1", (0, 3, [4])),
        ("start + x", "start - x", (2, 1, [4])),  # of a function that another has made
        ("4 * y", "5 * y", (2, 3, [5])),
        ("", "", (2, 3, [4])),
        ("start + x", "x", None),  # a variable of the function around it less
        ("z=10", "z=11", None),  # runs where the function is made
        ("deep = True", "deep = False", None),
    ],
)
def test_a_function_is_changed_where_it_is(tool, tmp_path, old, new, values):
    path = tmp_path / "b.py"
    path.write_text(IMPORTED)
    module: dict = {}
    exec(compile(IMPORTED, str(path), "exec"), module)
    functions = defaultdict(list)
    for one in (module["f"], module["make"], module["held"], module["C"].method):
        functions[str(path), one.__code__.co_qualname, one.__code__.co_firstlineno].append(one)
    start = IMPORTED.index(old)
    patch = sys.modules[tool["Session"].__module__].patch
    assert patch(path, (start, start + len(old), new), functions) == (values is not None)
    if values:
        assert (module["f"](1), module["held"](1), module["C"]().method(1)) == values


def test_files_that_mirror(tool):
    tests = tool["tests_for"]("state/recompute.py")
    assert "tests/state/test_recompute.py" in tests and "tests/layers/test_recomputation.py" in tests
    assert not any(test.startswith("tests/tensors/") for test in tests)
    assert tool["tests_for"]("functional/replay.py") == {
        f"tests/functional/test_{name}.py" for name in ("kept_weights", "replay", "routes")
    }
    assert "tests/kernels/test_adam.py" in tool["tests_for"]("reference/adam.py")
    assert "tests/nn/test_grouped_linear.py" in tool["tests_for"]("layers/grouped_layer.py")
