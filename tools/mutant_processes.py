"""Processes of ``mutants.py``: forked from one that imported PyTorch and pytest, they import the package themselves."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
IDLE = 20
Work = Callable[[Path], Any]  # of the folder that has its copy of the package; returns what JSON can hold


def warm_up() -> None:
    """Import what a child need not import again. It must not start threads."""
    needed = "torch torch._dynamo torch._inductor torch.testing torch.distributed.fsdp numpy pytest _pytest.assertion"
    for name in (*needed.split(), "hypothesis", "ml_dtypes", "triton", "triton.language"):
        try:
            importlib.import_module(name)
        except ImportError:
            print(f"{name} is not installed", flush=True)
    importlib.import_module("torch").set_num_threads(1)
    gc.collect()
    gc.freeze()  # children need not look through it again


def run_all(
    tasks: Iterable[tuple[Any, float, Work]], folder: Path, jobs: int, end: float
) -> Iterator[tuple[Any, Any, float, Path]]:
    """Call each task's work in a child; yield the task's name, the result (None: it hung), seconds and its folder.

    The number in a task limits its CPU seconds, and four times that its seconds; more where other work has the cores.
    After ``end`` none begins.
    """
    running: dict[int, tuple[Any, float, float, Path]] = {}
    free, waiting = [folder / str(number) for number in range(jobs)], iter(tasks)
    while True:
        while free and time.monotonic() < end and (task := next(waiting, None)):
            name, seconds, work = task
            slot = free.pop()
            (slot / "result").unlink(missing_ok=True)
            if not (pid := os.fork()):
                _be_child(slot, seconds, work)
            running[pid] = name, time.monotonic(), 4 * seconds, slot
        if not running:
            return
        time.sleep(0.01)
        for pid, (name, begin, limit, slot) in list(running.items()):
            taken = time.monotonic() - begin
            if not os.waitpid(pid, os.WNOHANG)[0]:
                if taken < limit * load():
                    continue
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # ranks that it started
            del running[pid]
            free.append(slot)
            result = slot / "result"
            yield name, json.loads(result.read_text()) if result.exists() else None, taken, slot


def load() -> float:
    """Return how many processes want a core, at least 1."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def _be_child(slot: Path, seconds: float, work: Work) -> None:
    leave = os._exit
    try:
        os.setsid()
        _end_with_parent()
        if seconds < float("inf"):
            resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1, int(seconds) + 2))
        resource.setrlimit(resource.RLIMIT_DATA, (12 << 30, 12 << 30))
        log = os.open(slot / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(ROOT)
        sys.path[:0] = [str(slot / "src"), str(ROOT / "tests")]
        os.environ["PYTHONPATH"] = str(slot / "src")
        _fork_ranks()
        (slot / "unfinished").write_text(json.dumps(work(slot)))
        (slot / "unfinished").rename(slot / "result")
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        leave(0)


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def in_child(work: Callable[[], Any]) -> Any:
    """Return what ``work`` returns in a fork of this process; None if that is killed."""
    read, write = os.pipe()
    leave = os._exit
    if not (pid := os.fork()):
        try:
            _end_with_parent()
            os.write(write, json.dumps(work()).encode())
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            leave(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        os.waitpid(pid, 0)
        os.set_blocking(pipe.fileno(), False)  # ranks that it left behind hold the other end
        result = pipe.read()
    return json.loads(result) if result else None


def _fork_ranks() -> None:
    """Ranks run the mutant, need not import PyTorch again, and end when all of them wait for one another."""
    ranks = importlib.import_module("ranks")
    if ranks.start_method is not _fork:
        run = ranks.run_ranks
        ranks.start_method = _fork
        ranks.start_clock = _idle_clock

        def run_ranks(work: Any, folder: Path, world: int, seconds: int, *backend: str) -> Any:
            return run(work, folder, world, 10 * seconds, *backend)  # how long that is hangs on other work

        ranks.run_ranks = run_ranks


def _idle_clock(processes: Any) -> Callable[[], float]:
    """Return a clock that is at infinity when no process has computed for ``IDLE`` seconds, else at 0."""
    used, since, little = 0, time.monotonic(), 10 * len(processes)  # ticks: gloo looks around while it waits

    def clock() -> float:
        nonlocal used, since
        stats = [_stat(process.pid) for process in processes]
        now = sum(ticks for _, ticks in stats)
        if now - used > little or any(runs for runs, _ in stats):
            used, since = now, time.monotonic()
        return float("inf") if time.monotonic() - since > IDLE else 0.0

    return clock


def _stat(pid: int) -> tuple[bool, int]:
    """Return whether a thread of the process runs or waits for a core or a disk, and the CPU time of the process."""
    states, ticks = [], 0
    with contextlib.suppress(OSError):  # it has ended
        for thread in Path(f"/proc/{pid}/task").iterdir():
            states.append((thread / "stat").read_text().rpartition(") ")[2][0])
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
        ticks = int(fields[11]) + int(fields[12])
    return any(state in "RD" for state in states), ticks


def _fork() -> str:
    return "fork"


def run_tests(tests: list[str], file: str, change: tuple[int, int, str], slot: Path) -> tuple[int, str]:
    """What pytest returns of the tests with that change of the file, and the first test that fails."""
    path = slot / "src" / "narrowcast" / file
    start, end, new = change
    data = path.read_bytes()
    path.write_bytes(data[:start] + new.encode() + data[end:])
    sys.dont_write_bytecode = True
    first = tests[0].split("::")[0]  # to collect every file takes longer than to run its tests
    batches = (
        [test for test in tests if test.startswith(first)],
        [test for test in tests if first not in test],
    )
    for batch in filter(None, batches):
        killer = _Killer()
        if code := _run_pytest(["-x", *batch], killer):
            return code, killer.test
    return 0, ""


def _run_pytest(arguments: list[str], plugin: Any) -> int:
    pytest = importlib.import_module("pytest")
    options = ["-q", "--tb=short", "-p", "no:cacheprovider", "-p", "no:unraisableexception"]
    return int(pytest.main([*options, *arguments], plugins=[plugin]))


class _Killer:
    test = ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self.test:
            self.test = report.nodeid

    pytest_collectreport = pytest_runtest_logreport
