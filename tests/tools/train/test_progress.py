"""Progress on terminals and elsewhere."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from narrowcast_tools.train import progress
from narrowcast_tools.train.pace import Pace, format_pace
from narrowcast_tools.train.progress import Bar, Lines, format_duration, make_progress


def test_a_terminal_gets_a_bar() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=140)
    bar = make_progress(console)
    assert isinstance(bar, Bar)
    for title in ("bf16", "current"):  # several runs in a row, as the demo does
        bar.begin(title, done=0, total=2)
        bar.evaluated(0, 5.545)
        bar.step(2, 4.321, Pace(1234.5, 0.414, 3 * 2**30))
        bar.note("[not markup]")
        bar.end()
    text = console.file.getvalue()
    for part in (
        "bf16",
        "current",
        "4.321",
        "5.545",
        "1,234 tok/s  MFU 41.4%  3.0 GiB",
        "2/2",
        "note: [not markup]",
    ):
        assert part in text


def test_a_pipe_gets_lines() -> None:
    console = Console(file=io.StringIO())
    assert isinstance(make_progress(console), Lines)


def test_long_silences_are_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 1000, 4))
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(clock)))
    console = Console(file=io.StringIO())
    lines = Lines(console)
    lines.begin("current", done=10, total=40)
    for done in range(11, 21):
        lines.step(done, 2.5, Pace(100.0))
    assert 1 < len(console.file.getvalue().splitlines()) < 6


def test_formats() -> None:
    assert format_pace(Pace(0.0)) == ""
    assert format_pace(Pace(12345.6, None, 2**29)) == "12,346 tok/s  MFU unknown  0.5 GiB"
    assert [format_duration(s) for s in (0.4, 59.9, 60, 3725)] == ["0:00", "0:59", "1:00", "62:05"]
