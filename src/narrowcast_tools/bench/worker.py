"""A process that measures, so that what takes too long or crashes costs one row of the table and not the run."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from .asked import Work
from .measure import Contender, Result, contenders, measure

SECONDS_TO_END = 5

Chosen = tuple[Sequence[str], Sequence[str], bool, str, str]
"""Arguments of ``contenders``, which makes the same list in every process."""


class Worker:
    """Runs contenders one after the other in one process, and in a new one after an accident.

    Args:
        chosen: which contenders.
        device: "cuda" or "cpu".
        seconds: that one may take on a work, compiling included; 0 for any time, which needs no process.
    """

    def __init__(self, chosen: Chosen, device: str, seconds: float) -> None:
        self.chosen, self.device, self.seconds = chosen, device, seconds
        self._process: Any = None
        self._pipe: Connection | None = None

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        if self._pipe is not None and error is None:
            self._pipe.close()  # ends the process, which cleans up after the compiler
            self._process.join(SECONDS_TO_END)
        self._end()

    def run(self, work: Work, contender: Contender, index: int) -> Result:
        """Measure a contender, the list's ``index``. What fails, crashes or takes too long says so in its result."""
        if self.seconds == 0:
            return measure(work, contender, self.device)
        pipe = self._start()
        try:
            pipe.send((work, index))
            if pipe.poll(self.seconds):
                return pipe.recv()
            note = f"not done within {self.seconds:g} s"
        except (EOFError, OSError):
            self._process.join(1)
            note = f"the process ended with code {self._process.exitcode}"
        self._end()
        return Result(work.name, contender.name, contender.mode, None, None, None, note)

    def _start(self) -> Connection:
        if self._pipe is None:
            context = multiprocessing.get_context("spawn")  # a fork could not use CUDA
            self._pipe, other = context.Pipe()
            self._process = context.Process(target=_serve, args=(other, self.chosen, self.device))
            before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # is inherited: this process ends that one
            self._process.start()
            signal.signal(signal.SIGINT, before)
            other.close()
        return self._pipe

    def _end(self) -> None:
        if self._pipe is None:
            return
        self._pipe.close()
        self._process.kill()
        self._process.join()
        self._pipe = None


def _serve(pipe: Connection, chosen: Chosen, device: str) -> None:
    running = list(contenders(*chosen))
    while True:
        try:
            work, index = pipe.recv()
        except EOFError:
            return
        pipe.send(measure(work, running[index], device))
