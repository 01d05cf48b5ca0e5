"""Ctrl-C and SIGTERM during a run: the step under way ends, the run is saved, and the command says how to go on."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}  # as shells report them


class Interrupted(Exception):
    """A run that a signal ended.

    Args:
        message: what is saved.
        resumable: whether the same command with `--resume` has something to continue.
        code: the exit code of the command.

    `folder` is that of the run; `run_folder` sets it.
    """

    folder: Path | None = None

    def __init__(self, message: str, *, resumable: bool, code: int = EXIT_CODES[signal.SIGINT]) -> None:
        super().__init__(message)
        self.resumable, self.code = resumable, code


class Stop:
    """Whether a signal asked the run to stop, and with which exit code."""

    def __init__(self) -> None:
        self.code: int | None = None


@contextmanager
def noticing(note: Callable[[str], None]) -> Iterator[Stop]:
    """Notice the first signal instead of ending the process; the second one raises KeyboardInterrupt.

    Args:
        note: prints a line for people.

    Yields:
        what was noticed; nothing outside the main thread, which alone receives signals.
    """
    stop = Stop()

    def notice(number: int, frame: FrameType | None) -> None:
        if stop.code is not None:
            raise KeyboardInterrupt
        stop.code = EXIT_CODES[signal.Signals(number)]
        with suppress(RuntimeError):  # the signal came while the same stream was being written
            note("stopping after this step; Ctrl-C again stops at once")

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, notice) for number in SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
