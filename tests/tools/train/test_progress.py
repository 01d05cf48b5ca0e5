"""Progress on terminals and elsewhere."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.text import Text

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
        "1,234 tok/s  3.0 GiB  MFU 41.4%",
        "2/2",
        "note: [not markup]",
    ):
        assert part in text


def test_each_run_has_one_line_of_its_own() -> None:
    """A bar that started again printed the finished lines of the earlier runs once more for each run."""
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    bar = make_progress(console)
    for seed in range(3):
        bar.begin(f"current, seed {seed}", done=0, total=2)
        bar.step(2, 4.321, Pace(1234.5))
        bar.end()
    written = Text.from_ansi(console.file.getvalue()).plain
    last = [line.split("\r")[-1] for line in written.splitlines() if line.strip()]
    assert [line.partition("━")[0].strip() for line in last] == [f"current, seed {seed}" for seed in range(3)]


@pytest.mark.parametrize(
    ("width", "speed"), [(80, "  34,558 tok/s"), (140, "  34,558 tok/s  3.0 GiB  MFU 41.4%")]
)
def test_the_bar_is_legible_at_every_width(width: int, speed: str) -> None:
    """rich would shorten a number to another one and an ellipsis; the fields that have no room are left out."""
    console = Console(file=io.StringIO(), force_terminal=True, width=width)
    bar = make_progress(console)
    bar.begin("delayed", done=0, total=240)
    bar.evaluated(0, 5.545)
    bar.step(60, 4.321, Pace(34558.0, 0.414, 3 * 2**30))
    bar.end()
    lines = Text.from_ansi(console.file.getvalue().replace("\r", "\n")).plain.splitlines()
    assert not any("…" in line for line in lines)
    last = lines[-1]
    assert last.startswith("delayed  ━") and len(last.rstrip()) <= width
    assert last.rstrip().endswith(f" 60/240 loss 4.321  held-out 5.545  left     -{speed}")


@pytest.mark.parametrize("width", [60, 72, 80, 100])
@pytest.mark.parametrize("title", ["delayed", "delayed, seed 0"])
@pytest.mark.parametrize("total", [300, 3000, 30000])
def test_a_bar_cuts_no_number_however_many_steps(width: int, title: str, total: int) -> None:
    """Of 3000 steps of several recipes a terminal of 80 columns had `195/30…`."""
    console = Console(file=io.StringIO(), force_terminal=True, width=width)
    bar = make_progress(console)
    bar.begin(title, done=0, total=total, place="run 2/7")
    bar.evaluated(0, 5.545)
    bar.step(195, 4.321, Pace(34558.0))
    bar.end()
    last = Text.from_ansi(console.file.getvalue().replace("\r", "\n")).plain.splitlines()[-1].rstrip()
    assert f"195/{total} loss 4.321  held-out 5.545" in last and "…" not in last and len(last) <= width
    assert ", run 2/7" in last or width < 80


def test_the_bar_says_what_is_done_while_there_is_no_loss() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    bar = Bar(console)

    def shown() -> str:
        bar._rich.refresh()
        written = Text.from_ansi(console.file.getvalue().replace("\r", "\n")).plain
        return (
            written.splitlines()[-1]
            .rstrip()
            .partition("/40 ")[2]
            .replace("  busy  0:00", "")
            .partition("  left")[0]
            .rstrip()
        )

    bar.begin("bf16", done=0, total=40)
    assert shown() == "loss -      evaluating"
    bar.evaluated(0, 5.545)
    assert shown() == "first step  held-out 5.545"
    bar.step(10, 4.5, Pace(0.0), evaluates=True)
    assert shown() == "loss 4.500  evaluating"
    bar.evaluated(10, 4.25)
    assert shown() == "loss 4.500  held-out 4.250"
    bar.end()
    bar.begin("bf16", done=10, total=40)
    assert shown() == "first step  held-out -"
    bar.end()


def test_a_pipe_gets_lines() -> None:
    console = Console(file=io.StringIO())
    assert isinstance(make_progress(console), Lines)


def test_evaluations_of_a_short_run_have_a_line_at_its_begin_and_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A demo of seven runs of seconds printed 35 lines into a pipe."""
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    console = Console(file=io.StringIO(), width=100)
    lines = Lines(console)
    lines.begin("current", done=0, total=40)
    for done in range(0, 41, 10):
        now += 1.2
        lines.evaluated(done, 2.25)
    printed = console.file.getvalue().splitlines()
    assert [line.split()[2] for line in printed] == ["0/40", "30/40", "40/40"]


def test_long_silences_are_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 1000, 4))
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(clock)))
    console = Console(file=io.StringIO(), width=100)
    lines = Lines(console)
    lines.begin("current", done=10, total=40)
    for done in range(11, 21):
        lines.step(done, 2.5, Pace(100.0))
    assert 1 < len(console.file.getvalue().splitlines()) < 6
    lines.evaluated(20, 2.25)
    lines.step(21, 2.5, Pace(100.0))
    now = console.file.getvalue()
    assert "step 20/40  loss 2.500  held-out 2.250  left  1:28     100 tok/s" in now
    lines.step(22, 2.5, Pace(100.0))
    lines.step(23, 2.5, Pace(100.0))
    last = console.file.getvalue().splitlines()[-1]
    assert "step 23/40  loss 2.500                  left  1:13     100 tok/s" in last, (
        "a held-out loss where it is new"
    )


def test_a_bar_counts_the_seconds_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that compiles was silent for a minute."""
    now = [0.0]
    console = Console(file=io.StringIO(), force_terminal=True, width=100, get_time=lambda: now[0])
    bar = Bar(console)
    bar.begin("bf16", done=0, total=40)
    bar.evaluated(0, 5.545)
    now[0] = 75.0
    bar._rich.refresh()
    assert "first step  held-out 5.545  busy  1:15" in Text.from_ansi(console.file.getvalue()).plain
    bar.step(1, 4.5, Pace(0.0))
    bar.end()
    last = Text.from_ansi(console.file.getvalue().replace("\r", "\n")).plain.splitlines()[-1]
    assert last.rstrip().endswith("loss 4.500  held-out 5.545  left     -")


def test_the_time_left_is_that_of_timed_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step compiles: it alone once said that hours were left."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    console = Console(file=io.StringIO())
    lines = Lines(console)
    lines.begin("bf16", done=0, total=10, place="run 1/3")
    for done, seconds in ((1, 100.0), (2, 110.0), (3, 120.0)):
        now[0] = seconds
        lines.step(done, 2.5, Pace(0.0))
    first, second, third = console.file.getvalue().splitlines()
    assert all(line.endswith("loss 2.500                  left     -, run 1/3") for line in (first, second))
    assert third.endswith("step  3/10  loss 2.500                  left  1:10, run 1/3")


def test_figures_stand_in_columns_of_80_and_an_evaluated_step_has_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    console = Console(file=io.StringIO(), width=80)
    lines = Lines(console)
    lines.begin("delayed, seed 0", done=0, total=240, place="run 2/2")
    lines.evaluated(0, 5.545)
    for done in range(8, 12):
        now[0] += 11.0
        lines.step(done, 2.5, Pace(34558.0, 0.414, 3 * 2**30), evaluates=done == 10)
        if done == 10:
            lines.evaluated(done, 3.055)
    assert console.file.getvalue().splitlines() == [
        "delayed, seed 0  step   0/240  loss -      held-out 5.545  left     -, run 2/2",
        "delayed, seed 0  step   8/240  loss 2.500                  left     -, run 2/2",
        "delayed, seed 0  step   9/240  loss 2.500                  left     -, run 2/2",
        "delayed, seed 0  step  10/240  loss 2.500  held-out 3.055  left 42:10, run 2/2",
        "delayed, seed 0  step  11/240  loss 2.500                  left 41:59, run 2/2",
    ]


def test_a_line_has_as_much_of_the_speed_as_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    for width, told in (
        (80, "  34,558 tok/s"),
        (90, "  34,558 tok/s  3.0 GiB"),
        (100, "  34,558 tok/s  3.0 GiB  MFU 41.4%"),
    ):
        console = Console(file=io.StringIO(), width=width)
        lines = Lines(console)
        lines.begin("bf16", done=0, total=300)
        for done in (1, 2, 3):
            now[0] += 2.0
            lines.step(done, 2.5, Pace(34558.0, 0.414, 3 * 2**30), evaluates=done == 3)
        lines.evaluated(3, 3.055)
        assert (
            console.file.getvalue()
            == f"bf16     step   3/300  loss 2.500  held-out 3.055  left  9:54{told}\n"
        )


def test_the_bar_has_the_place_of_its_run() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=90)
    bar = make_progress(console)
    bar.begin("delayed", done=0, total=240, place="run 2/7")
    for done in range(0, 240, 5):
        bar.step(done, 4.321, Pace(34558.0))
    bar.end()
    last = Text.from_ansi(console.file.getvalue().replace("\r", "\n")).plain.splitlines()[-1]
    assert last.startswith("delayed  ━") and ", run 2/7" in last and "…" not in last


def test_every_line_of_a_command_has_the_columns_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The speed came and went, and a time stood elsewhere in each run."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    plain, shown = (
        Console(file=io.StringIO(), width=110),
        Console(file=io.StringIO(), force_terminal=True, width=120),
    )
    for output in (Lines(plain), Bar(shown)):
        for number, title in enumerate(("bf16", "delayed", "current"), 1):
            output.begin(title, done=0, total=300, place=f"run {number}/3")
            output.evaluated(0, 5.545)
            for done in (1, 2, 100, 200, 300):
                now[0] += 5000.0
                output.step(done, 2.5, Pace(34558.0, None, 2**30), evaluates=True)
                output.evaluated(done, 3.055)
            output.end()
    lines = plain.file.getvalue().splitlines()
    assert len(lines) == 18 and max(map(len, lines)) <= 110
    text = Text.from_ansi(shown.file.getvalue().replace("\r", "\n")).plain
    bars = [line for line in text.splitlines() if "━" in line]
    for told in (lines, bars):
        for word in ("loss ", "held-out ", "left ", ", run ", " tok/s", " GiB"):
            assert len({line.index(word) for line in told if word in line}) == 1, word
    assert "left 5h36m, run 1/3" in lines[3]


def test_formats() -> None:
    assert format_pace(Pace(0.0)) == ""
    assert format_pace(Pace(12345.6, None, 2**29)) == "12,346 tok/s  0.5 GiB"
    assert [format_duration(s) for s in (0.4, 59.9, 60, 3725)] == ["0:00", "0:59", "1:00", "62:05"]
