"""The command `bench`: every contender gets a row, what fails says why, and the files hold what the table shows."""

from __future__ import annotations

import csv
import importlib
import itertools
import re
from pathlib import Path
from typing import Any

import bench_worker
import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.text import Annotation
from torch import nn

from narrowcast_tools import cli
from narrowcast_tools.bench import show
from narrowcast_tools.bench.asked import works
from narrowcast_tools.bench.measure import Contender, Result, contenders
from narrowcast_tools.bench.measure import measure as run
from narrowcast_tools.bench.worker import Worker
from narrowcast_tools.bench.works import build, step_of
from narrowcast_tools.schemes import LETTERS


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """One step counts, and nothing is compiled."""
    module = importlib.import_module("narrowcast_tools.bench.measure")
    monkeypatch.setattr(module, "_rounds", lambda step, device: [step() or 2.0])
    monkeypatch.setitem(module.MODES, "compiled", lambda module: module)


def test_a_run_on_a_cpu(quick: None, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    words = ["bench", "tiny", "--device", "cpu", "--recipe", "block", "--out", str(tmp_path)]
    words += ["--seconds", "0"]
    assert cli.main(words) == 0
    shown = capsys.readouterr().out
    assert (
        "narrowcast bench tiny: cpu, emulated, torch" in shown
        and "peak MiB" not in shown
        and "Linear 32x64->64" in shown
    )
    rows = list(csv.DictReader((tmp_path / "bench.csv").open()))
    own = [row for row in rows if row["contender"] in ("bf16", "block")]
    assert len(own) == 4 * 4 and all(row["ms"] == "2.0" and row["share"] == "1.0" for row in own)
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that were saved."""
    figures: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: figures.append(self) or save(self, *a, **k))
    return figures


@pytest.mark.parametrize(("memory", "panels"), [(None, 1), (5.0, 2)])
def test_the_picture_has_no_empty_panel(memory: float | None, panels: int, drawn: list[Figure]) -> None:
    show.picture([Result("Linear", "bf16", "compiled", 2.0, 1.0, memory, "")], "narrowcast bench")
    assert len(drawn[0].axes) == panels


@pytest.mark.filterwarnings("error")
def test_the_picture_states_its_finding_and_groups_its_bars(drawn: list[Figure]) -> None:
    """Its title was the command, and the name of a group stood before its first bar only, in letters of 7 points."""
    results = [
        Result(work, name, mode, 2.0 * share, share, None, "")
        for work in ("Linear 32x64->64", "grouped 8x(4096->14336), 8192 rows")
        for name, mode, share in (
            ("bf16", "compiled", 1.0),
            ("current", "eager", 2.5),
            ("nvfp4, FusedAdam, head in current", "compiled", 1.25),
        )
    ]
    failed = Result("Linear 32x64->64", "TE current", "eager", None, None, None, "not installed")
    show.picture([*results, failed], "narrowcast bench tiny: cpu")
    (figure,) = drawn
    assert figure.get_suptitle() == "Fastest in every group is bf16 (compiled)", "bf16 was left out"
    assert figure.get_supxlabel() == "Shorter is better. narrowcast bench tiny: cpu"
    (axes,) = figure.axes
    labels = [text.get_text().replace("\n", " ") for text in axes.get_yticklabels()]
    each = ["bf16, compiled", "current, eager", "nvfp4, FusedAdam, head in current, compiled"]
    assert labels == 2 * each
    told = {text.get_text().strip() for text in axes.texts}
    assert {"1.00 (2.00 ms)", "2.50 (5.00 ms)", "1.25 (2.50 ms)", "Linear 32x64->64"} < told, (
        "ratios and ms alike"
    )
    assert axes.get_title(loc="left") == "Time (compiled bf16: 1)", "eager bars are divided by it, too"
    places = axes.get_yticks()
    groups = [child.xy[1] for child in axes.get_children() if isinstance(child, Annotation)]
    assert groups[0] < places[0] < places[2] < groups[1] < places[3], "each name is above its bars"
    assert groups[1] - groups[0] > 1.5 * len(each), "room between groups"
    assert all(text.get_size() >= LETTERS for text in (*axes.texts, *axes.get_yticklabels()))
    box, edge = figure.get_tightbbox(), 2 / 72
    assert -edge <= box.x0 and box.x1 <= figure.get_figwidth() + edge
    faster = [results[0], results[1]._replace(ms=1.6, share=0.8)]
    show.picture(faster, "narrowcast bench")
    title = "Fastest is current (eager): 0.80 times compiled bf16's time"
    assert drawn[1].get_suptitle().replace("\n", " ") == title
    show.picture(faster, "narrowcast bench", emulated=True)
    title = "Fastest on this CPU is current (eager): 0.80 times compiled bf16's time"
    assert drawn[2].get_suptitle().replace("\n", " ") == title, "a disclaimer was the title"
    assert "its times say nothing of a GPU's" in drawn[2].get_supxlabel().replace("\n", " ")
    assert not drawn[2].axes[0].lines, "the line at 1 struck numbers and names out"
    unlike = [*faster, *(one._replace(work="grouped", share=share) for one, share in zip(faster, (1.0, 1.2)))]
    show.picture(unlike, "narrowcast bench")
    title = "Time of a step as a multiple of compiled bf16's"
    assert drawn[3].get_suptitle() == title, "the fastest on average is not the fastest in every group"
    alike = [*faster, *(one._replace(work="grouped", share=share) for one, share in zip(faster, (1.0, 0.7)))]
    show.picture(alike, "narrowcast bench")
    title = "Fastest in every group is current (eager): 0.70 to 0.80 times compiled bf16's time"
    assert drawn[4].get_suptitle().replace("\n", " ") == title


@pytest.mark.filterwarnings("error")
def test_a_picture_of_what_failed_draws_without_a_warning(drawn: list[Figure]) -> None:
    show.picture(
        [Result("Linear", "bf16", "compiled", None, None, None, "out of memory")], "narrowcast bench"
    )
    assert drawn[0].get_suptitle() == "No step was measured"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["some"], "SUITE is 'some'; use one of layers, models, all, tiny or account"),
        (["tiny", "--only", "Conv"], "--only is 'Conv', which no work of suite 'tiny' has in its name"),
        (
            ["--device", "cpu", "--only", "Conv"],
            "--only is 'Conv', which no work of suite 'tiny' has in its name",
        ),
        (["tiny", "--recipe", "fp7"], "--recipe is 'fp7'; use one of delayed"),
        (
            ["tiny", "--recipe", "curent"],
            "--recipe is 'curent'; the nearest: 'current'; use one of delayed",
        ),
        (["tiny", "--recipe", "fp8"], "--recipe is 'fp8'; for FP8 use 'current'; use one of delayed"),
        (["tiny", "--mode", ""], "--mode is ''; use one of eager, compiled or graphs"),
        (["tiny", "--mode", "fast"], "--mode is 'fast'; use one of eager, compiled or graphs"),
        (
            ["tiny", "--optimizer", "Adam"],
            "--optimizer is 'Adam'; the nearest: 'AdamW'; use one of AdamW or FusedAdam",
        ),
        (
            ["tiny", "--head-recipe", "delayed"],
            "--head-recipe is 'delayed'; use one of bf16, current or block",
        ),
        (["tiny", "--device", "tpu"], "--device is 'tpu'"),
        (["models", "--model", "1b"], "--model is of bench account alone; leave it out"),
        (["tiny", "--in-parts"], "--in-parts is of bench account alone; leave it out"),
        (["account", "--minutes", "3"], "bench account takes no --minutes; leave it out"),
    ],
)
def test_errors(words: list[str], message: str, capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["bench", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_folder_with_results_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A second run wrote over the first one's results."""
    for suite, name, more in (("tiny", "bench.csv", ", or add --resume"), ("account", "account.csv", "")):
        path = tmp_path / name
        path.write_text("an earlier run")
        assert cli.main(["bench", suite, "--device", "auto", "--out", str(tmp_path)]) == 2
        told = f"{path} is of an earlier run; give --out another folder{more}\n"
        assert capsys.readouterr().err == f"narrowcast: {told}" and path.read_text() == "an earlier run"


def test_bf16_has_a_row_in_each_mode() -> None:
    """With `--mode eager` the only bf16 was compiled, and the heading did not say so."""
    plain = [one.mode for one in contenders(["current"], ["eager", "graphs"], True) if one.name == "bf16"]
    assert plain == ["eager", "graphs"]
    every = [one.mode for one in contenders(["current"], ["eager", "graphs", "compiled"], True)]
    assert every[:3] == ["compiled", "eager", "graphs"], "the first one is what others are compared with"
    results = [
        Result("Linear", "bf16", "compiled", 2.0, 1.0, None),
        Result("Linear", "bf16", "eager", 3.0, 1.5, None),
    ]
    assert [column.header for column in show.table(results, "").columns][-1] == "time over compiled bf16"
    assert [column.header for column in show.table(results[1:], "").columns][-1] == "time over eager bf16"


def test_what_fails_is_a_row(quick: None) -> None:
    def fails(module: nn.Module) -> Any:
        raise RuntimeError("no such kernel\nand more")

    (work, *_) = works("tiny")
    result = run(work, Contender("broken", "eager", None, fails), "cpu")
    assert result == Result(work.name, "broken", "eager", None, None, None, "RuntimeError: no such kernel")


def test_resume_keeps_what_was_measured(
    quick: None, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time over after the first row: it is there, the others say so, and a second run measures those alone."""
    module = importlib.import_module("narrowcast_tools.bench.command")
    words = ["bench", "tiny", "--device", "cpu", "--only", "Linear", "--recipe", "current", "--seconds", "0"]
    words += ["--out", str(tmp_path)]
    clock = itertools.count(step=40.0)
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))
    assert cli.main([*words, "--minutes", "1"]) == 0
    first = list(csv.DictReader((tmp_path / "bench.csv").open()))
    assert [row["ms"] for row in first[:3]] == ["2.0", "", ""] and first[1][
        "note"
    ] == "not started within 1 min"
    monkeypatch.undo()
    monkeypatch.setattr(
        importlib.import_module("narrowcast_tools.bench.measure"), "_rounds", lambda *_: [3.0, 4.0, 2.5]
    )
    monkeypatch.setitem(
        importlib.import_module("narrowcast_tools.bench.measure").MODES, "compiled", lambda m: m
    )
    assert cli.main([*words, "--resume"]) == 0
    second = list(csv.DictReader((tmp_path / "bench.csv").open()))
    assert [row["ms"] for row in second[:3]] == ["2.0", "3.0", "3.0"] and second[1]["share"] == "1.5"
    assert [(row["low"], row["high"]) for row in second[:2]] == [("2.0", "2.0"), ("2.5", "4.0")]
    assert "3.000 ms (2.500..4.000)" in capsys.readouterr().out
    assert cli.main([*words[:-2], "--resume"]) == 2
    assert "--resume needs --out" in capsys.readouterr().err


def test_an_interrupted_run_names_the_files_that_it_wrote(
    quick: None,
    drawn: list[Figure],
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran = []

    def interrupted(self: Worker, work: Any, contender: Contender, index: int) -> Result:
        ran.append(contender.name)
        if len(ran) == 2:
            raise KeyboardInterrupt
        return Result(work.name, contender.name, contender.mode, 2.0, None, None)

    monkeypatch.setattr(Worker, "run", interrupted)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["bench", "--device", "cpu", "--only", "Linear", "--out", "o"]) == 130
    printed, line = capsys.readouterr()
    assert re.search("^narrowcast: interrupted after 1 of .* measurements; to continue: .* --resume$", line)
    assert "bench tiny: " in printed.splitlines()[0] and "measurements, at most 300 s each" in printed
    assert "; about 10 s each if compiled" in printed.splitlines()[0]
    assert re.search(
        r"^Linear 32x64->64\n  \[1/\d+, \d+ s, \d+ s left\] bf16, compiled: 2.000 ms$", printed, re.MULTILINE
    )
    assert "compiled bf16" in printed and "wrote o/bench.csv and o/bench.png" in printed
    (figure,) = drawn
    assert re.fullmatch(r"Partial: 1 of \d+ measurements", figure.get_suptitle()), (
        "it had no group that was not finished"
    )
    assert all(len(line) <= 80 for line in printed.splitlines() if "s left" in line)
    ran[:] = ["bf16"]
    assert cli.main(["bench", "--device", "cpu", "--only", "Linear"]) == 130
    printed, line = capsys.readouterr()
    assert "contender" not in printed, "no table without rows"
    assert re.search(r"^narrowcast: interrupted after 0 of \d+ measurements$", line)


def test_a_long_line_keeps_a_time_and_its_unit_together(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 80 columns it read "4.043", and "ms" on the next line."""
    monkeypatch.setattr(
        Worker, "run", lambda self, work, one, index: Result(work.name, one.name, one.mode, 4.043, 1, 2)
    )
    monkeypatch.setenv("COLUMNS", "50")
    assert cli.main(["bench", "tiny", "--device", "cpu", "--only", "grouped", "--recipe", "current"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "    4.043 ms, 2 MiB" in lines and max(map(len, lines[:6])) <= 50


def test_lines_and_table_of_bench_fit_80_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each line was two, and the table folded the names of works."""
    monkeypatch.setattr(
        Worker,
        "run",
        lambda self, work, one, index: Result(work.name, one.name, one.mode, 4.0, 1, None, "", 3.2, 5.1),
    )
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main(["bench", "tiny", "--device", "cpu", "--recipe", "current", "--out", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line) for line in lines if not line.startswith(("next:", "wrote"))) <= 80
    measured = [line for line in lines if "s left]" in line]
    assert len(measured) == 16 and all(line.endswith("4.000 ms (3.200..5.100)") for line in measured)
    assert [line.rstrip() for line in lines].count("grouped 2x(64->64), 32 rows") == 2
    assert lines[-1].endswith("train --recipe bf16,current"), "it named the demo, which came before"


def test_a_cpu_is_not_told_that_it_has_no_cuda(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """PyTorch's warning stood between the lines of bench and of train --compile."""
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    importlib.import_module("torch.utils.cpp_extension")._find_cuda_home()
    assert not caplog.records


def test_what_hangs_or_crashes_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """It costs its seconds and no more, and the next contender has a new process."""
    monkeypatch.setattr(
        importlib.import_module("narrowcast_tools.bench.worker"), "_serve", bench_worker.crashes_then_hangs
    )
    (work, *_) = works("tiny")
    contender = Contender("bad", "eager", None)
    with Worker(([], [], True, "AdamW", "bf16"), "cpu", 20.0) as worker:
        assert worker.run(work, contender, 0).note == "the process ended with code 7"
        worker.chosen, worker.seconds = (["hang"], [], True, "AdamW", "bf16"), 0.2
        assert worker.run(work, contender, 1).note == "not done within 0.2 s"
        assert worker._process.exitcode is not None


def test_contenders_do_the_same_work() -> None:
    """Plain PyTorch and our layers take the same steps: gradients in the same shapes."""
    for work in works("tiny"):
        sizes = []
        for contender in contenders(["block"], ["eager"], True, "FusedAdam", "current"):
            if contender.name in ("bf16", "block, FusedAdam, head in current"):
                module = contender.prepare(build(work, contender.layers, "cpu", contender.head))
                step_of(work, module, module, "cpu", contender.optimizer)()
                sizes.append(sum(p.numel() for p in module.parameters()))
        assert sizes[0] == sizes[1], work.name
