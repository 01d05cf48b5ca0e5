"""A pytest session of ``mutants.py`` that forks: one process collects the tests, each mutant is a child of it.

A mutant that changes the body of a function replaces that function's code. Nothing is imported or collected again, so
it costs its tests alone. Lines that run while the package is imported are left to a new import.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import signal
import sys
import time
import types
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from mutant_processes import in_child, load

Items = dict[str, Any]  # pytest's items, by name
Key = tuple[str, int]  # of code in a file: its qualified name and first line
Functions = dict[tuple[str, str, int], list[types.FunctionType]]  # by file, and by the key of their code


class Session:
    """The collected tests of some files.

    Attributes:
        items: By name, in the order of their files.
        imported: The lines that ran until they were collected, as pairs of a file of the package and a number.
    """

    def __init__(self, package: Path) -> None:
        self.prefix = str(package) + "/"
        self.items: Items = {}
        self.seen: set[tuple[str, int]] = set()
        self.imported: set[tuple[str, int]] = set()
        self.functions: Functions = defaultdict(list)
        self.slot: Path | None = None  # while lines are recorded
        self.lines_of_fixtures: dict[Any, set[tuple[str, int]]] = {}
        self.seconds_of_fixtures: dict[Any, float] = {}
        self.fixtures_of_ranks: set[Any] = set()  # those that start processes

    def run(self, files: list[str], options: list[str], work: Callable[[Session], None]) -> int:
        """Collect the tests of the files and call ``work`` in place of running them."""
        self.work = work
        self._watch()
        options = ["-qs", "--tb=short", "-pno:cacheprovider", "-pno:unraisableexception", *options]
        return int(pytest.main([*options, *files], plugins=[self]))

    def pytest_runtestloop(self, session: Any) -> bool:
        self.items = {item.nodeid: item for item in session.items}
        self.imported = set(self.seen)
        sys.monitoring.set_events(sys.monitoring.COVERAGE_ID, 0)
        for one in gc.get_objects():
            if isinstance(one, types.FunctionType) and one.__code__.co_filename.startswith(self.prefix):
                self.functions[(one.__code__.co_filename, *_key(one.__code__))].append(one)
        gc.collect()
        gc.freeze()
        self.work(self)
        return True

    def cases(self, file: str, thin: bool) -> list[str]:
        """The tests of a file; ``thin``: as many cases of each function as hold each value of its parameters."""
        functions: dict[str, list[str]] = defaultdict(list)
        for name in self.items:
            if name.startswith(f"{file}::"):
                functions[name.split("[")[0]].append(name)
        if not thin:
            return [name for names in functions.values() for name in names]
        covering = importlib.import_module("covering").covering
        chosen = []
        for names in functions.values():
            calls = [getattr(self.items[name], "callspec", None) for name in names]
            rows = [tuple(map(id, call.params.values())) if call else (0,) for call in calls]
            chosen += [names[index] for index in covering(rows, 1)]
        return chosen

    def lines_of_tests(
        self, names: list[str], limit: float, limit_of_file: float, slot: Path
    ) -> dict[str, Any]:
        """Run the tests, one case of every function first, until ``limit_of_file`` seconds are over.

        Returns:
            seconds, executed lines, as the bits of a number, seconds of fixtures that other tests use, too, and whether
            processes are started, of each that ran; None where it did not pass in time.
        """
        _begin(slot)
        self.slot = slot
        leave = os._exit
        sys.monitoring.set_events(sys.monitoring.COVERAGE_ID, sys.monitoring.events.LINE)

        def leave_lines(code: int) -> None:  # how a rank ends
            (slot / f"rank{os.getpid()}").write_text(json.dumps(sorted(self.seen)))
            leave(code)

        os._exit = leave_lines  # type: ignore[assignment]
        signal.signal(signal.SIGPROF, _give_up)
        signal.signal(signal.SIGALRM, _give_up)
        tests: dict[str, Any] = {}
        names = in_turns(names)
        end = _cpu_seconds() + limit_of_file
        for name, after in zip(names, [*names[1:], ""]):
            if _cpu_seconds() > end:
                break
            self.seen.clear()
            sys.monitoring.restart_events()
            begin, before = _cpu_seconds(), sum(self.seconds_of_fixtures.values())
            of_children = _seconds_of_children()
            signal.setitimer(signal.ITIMER_PROF, limit)
            signal.setitimer(signal.ITIMER_REAL, 10 * limit * load())
            reports = self._run_test(name, after)
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)
            self._read_ranks()
            fixtures = _fixtures_of(self.items[name])
            shared = [self.lines_of_fixtures.get(one, set()) for one in fixtures]
            masks: Counter[str] = Counter()
            for file, number in self.seen.union(*shared):
                masks[file] += 1 << number
            once = round(sum(self.seconds_of_fixtures.get(one, 0.0) for one in fixtures), 3)
            own = _cpu_seconds() - begin - sum(self.seconds_of_fixtures.values()) + before
            lines = {file: hex(mask) for file, mask in masks.items()}
            starts = _seconds_of_children() > of_children or not self.fixtures_of_ranks.isdisjoint(fixtures)
            passed = all(report.passed for report in reports)
            tests[name] = (round(own, 3), lines, once, starts) if passed else None
        os._exit = leave
        return tests

    def _read_ranks(self) -> None:
        for rank in self.slot.glob("rank*") if self.slot else ():
            self.seen.update(map(tuple, json.loads(rank.read_text())))  # type: ignore[arg-type]
            rank.unlink()

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Any:
        """Lines and seconds of what runs for several tests count for each of them, not for the first alone."""
        if self.slot is None or fixturedef.scope == "function":
            return (yield)
        outside, begin, of_children = self.seen, _cpu_seconds(), _seconds_of_children()
        self.seen = set()
        sys.monitoring.restart_events()
        try:
            return (yield)
        finally:
            self._read_ranks()
            self.lines_of_fixtures[fixturedef] = self.seen
            self.seconds_of_fixtures[fixturedef] = _cpu_seconds() - begin
            if _seconds_of_children() > of_children:
                self.fixtures_of_ranks.add(fixturedef)
            self.seen = outside | self.seen
            sys.monitoring.restart_events()

    def run_mutant(
        self, tests: list[tuple[str, float, bool]], file: str, replaced: tuple[int, int, str], slot: Path
    ) -> Any:
        """Return 1 and the first test that fails with this change, 0, or -1 and the test that hangs.

        None if only a new import can show it. Tests that start processes run in a process where no other test has left
        a thread: ranks that are forked beside one may wait for each other forever.

        Args:
            tests: names, seconds, and whether they start processes.
        """
        path = Path(self.prefix) / file
        if not patch(path, replaced, self.functions):
            return [None, ""]
        _begin(slot)
        data, (start, end, new) = path.read_bytes(), replaced  # for processes that tests start
        (slot / "src" / "narrowcast" / file).write_bytes(data[:start] + new.encode() + data[end:])
        groups: dict[str, list[tuple[str, float]]] = {}
        for name, seconds, starts in sorted(tests, key=lambda test: test[2]):
            groups.setdefault(name.split("::")[0] if starts else "", []).append((name, seconds))
        for group in groups.values():
            code, name = in_child(lambda group=group: self._run_tests(group)) or (-1, group[0][0])
            if code:
                return [code, name]
        return [0, ""]

    def _run_tests(self, tests: list[tuple[str, float]]) -> tuple[int, str]:
        """Run tests until one fails. One that takes much more than its seconds ends the process: the mutant hangs."""
        for (name, seconds), (after, _) in zip(tests, [*tests[1:], ("", 0.0)]):
            used = time.process_time()
            hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
            resource.setrlimit(resource.RLIMIT_CPU, (min(int(used + 8 + 10 * seconds), hard), hard))
            signal.setitimer(signal.ITIMER_REAL, (80 + 40 * seconds) * load())
            if any(report.failed for report in self._run_test(name, after)):
                return 1, name
        return 0, ""

    def _run_test(self, name: str, after: str) -> list[Any]:
        runner = importlib.import_module("_pytest.runner")
        return runner.runtestprotocol(self.items[name], log=False, nextitem=self.items.get(after))

    def _watch(self) -> None:
        watch = sys.monitoring
        watch.use_tool_id(watch.COVERAGE_ID, "mutants")
        watch.register_callback(watch.COVERAGE_ID, watch.events.LINE, self._line)
        watch.set_events(watch.COVERAGE_ID, watch.events.LINE)

    def _line(self, code: Any, number: int) -> Any:
        if code.co_filename.startswith(self.prefix):
            self.seen.add((code.co_filename[len(self.prefix) :], number))
        return sys.monitoring.DISABLE


def in_turns(names: list[str]) -> list[str]:
    """The tests, one case of every function first, then a second one of each."""
    turns: Counter[str] = Counter()
    order = []
    for name in names:
        function = name.split("[")[0]
        order.append((turns[function], len(order), name))
        turns[function] += 1
    return [name for _, _, name in sorted(order)]


def _begin(slot: Path) -> None:
    folder = slot / "tmp"
    folder.mkdir(exist_ok=True)
    os.environ["PYTEST_DEBUG_TEMPROOT"] = str(folder)


def _fixtures_of(item: Any) -> list[Any]:
    """The definitions of fixtures that a test uses."""
    return [one for many in item._fixtureinfo.name2fixturedefs.values() for one in many]


def _cpu_seconds() -> float:
    """Of this process and of the ranks that it waited for: other work on the machine counts for nothing."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def _seconds_of_children() -> float:
    return sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])


def _give_up(*_: Any) -> None:
    pytest.fail("takes too long to be recorded")


def patch(path: Path, replaced: tuple[int, int, str], functions: Functions) -> bool:
    """Give the functions of an imported file the code that they have with the change; False if that is not all."""
    data = path.read_bytes()
    start, end, new = replaced
    old = compile(data, str(path), "exec", dont_inherit=True)
    changed = compile(data[:start] + new.encode() + data[end:], str(path), "exec", dont_inherit=True)
    try:
        pairs = list(_functions(old, changed))
        counts = Counter(_key(one) for one, _, _ in pairs)
        for one, other, outermost in pairs:
            if not _same(one, other, deep=True):
                holders = functions.get((str(path), *_key(one)), [])
                if (outermost and not holders) or (holders and counts[_key(one)] > 1):
                    return False
                for function in holders:
                    function.__code__ = other
    except ValueError:  # a module or class itself differs, or a function has other free variables
        return False
    return True


def _key(code: types.CodeType) -> Key:
    return code.co_qualname, code.co_firstlineno


def _functions(
    old: types.CodeType, new: types.CodeType, outermost: bool = True
) -> Iterator[tuple[types.CodeType, types.CodeType, bool]]:
    """Functions before and after, and whether they are in no other; raises where a module or a class itself differs."""
    if old.co_flags & 1:  # CO_OPTIMIZED: a function
        yield old, new, outermost
        outermost = False
    elif not _same(old, new, deep=False):
        raise ValueError(f"{old.co_qualname} itself differs")
    for one, other in zip(_inner(old), _inner(new)):
        yield from _functions(one, other, outermost)


def _inner(code: types.CodeType) -> list[types.CodeType]:
    return [one for one in code.co_consts if isinstance(one, types.CodeType)]


def _same(old: types.CodeType, new: types.CodeType, deep: bool) -> bool:
    plain = [[one for one in code.co_consts if not isinstance(one, types.CodeType)] for code in (old, new)]
    return (
        old.co_code == new.co_code
        and repr(plain[0]) == repr(plain[1])
        and old.co_names == new.co_names
        and old.co_varnames == new.co_varnames
        and old.co_freevars == new.co_freevars
        and len(_inner(old)) == len(_inner(new))
        and (not deep or all(_same(one, other, True) for one, other in zip(_inner(old), _inner(new))))
    )
