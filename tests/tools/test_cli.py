"""The command line: results, and one line with exit code 2 for everything the user can fix."""

from __future__ import annotations

import importlib
import inspect
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import typer

import narrowcast as nc
from narrowcast_tools import cli
from narrowcast_tools.cli import commands, main
from narrowcast_tools.cli.options import EXAMPLES, OFTEN
from narrowcast_tools.train import asked, doctor
from narrowcast_tools.train.atomic import write_json
from narrowcast_tools.train.checkpoint import load
from narrowcast_tools.train.config import ModelConfig, TrainConfig
from narrowcast_tools.train.demo import ALL_RECIPES
from narrowcast_tools.train.device import resolve_device
from narrowcast_tools.train.errors import SettingsError
from narrowcast_tools.train.loop import Run
from narrowcast_tools.train.names import ALIASES, RECIPES
from narrowcast_tools.train.presets import DEMO, QUICK
from narrowcast_tools.train.recipes import CHOICES
from narrowcast_tools.train.trainer import Trainer
from narrowcast_tools.words import as_typed, pip_install, program, torchrun

PROGRAM = shlex.join(program())
# fmt: off
TINY = [
    "--steps", "4", "--save-every", "2", "--eval-every", "2", "--eval-batches", "1", "--warmup", "1",
    "--batch-size", "2", "--seq-len", "16", "--dim", "32", "--layers", "1", "--heads", "2", "--kv-heads", "1",
    "--hidden", "48", "--device", "cpu",
]
# fmt: on


def tiny(*words: str) -> list[str]:
    """Return the words, and the options of `TINY` that they do not give."""
    given = {word.partition("=")[0] for word in words}
    kept = [(name, value) for name, value in zip(TINY[::2], TINY[1::2]) if name not in given]
    return [*chain.from_iterable(kept), *words]


@pytest.fixture
def text_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "text.txt"
    path.write_text("".join(f"line {i} of a text\n" for i in range(200)))
    return path


def tree(root: Path) -> dict[str, int]:
    return {str(p.relative_to(root)): p.stat().st_mtime_ns for p in root.rglob("*") if p.is_file()}


def train(text: Path, *words: str) -> int:
    data = [] if "--data" in words else ["--data", str(text)]
    return main(["train", *data, *tiny(*words)])


def fails_on_one_line(capsys: pytest.CaptureFixture, root: Path, words: list[str]) -> str:
    """Run a command that must fail with exit code 2, and return its line; nothing may be written."""
    before = tree(root)
    capsys.readouterr()
    assert main(words) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    lines = printed.err.splitlines()
    assert len(lines) == 1, printed.err
    assert lines[0].startswith("narrowcast: ")
    assert tree(root) == before
    return lines[0]


def test_a_terminal_breaks_a_long_error_between_words(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["train", "--recipe", "fp8"]
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    assert main(words) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) > 1 and max(map(len, lines)) <= 60 and " ".join(lines) == line


def test_a_terminal_does_not_break_a_command(
    text_file: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = Run._save

    def interrupted(run: Run, done: int) -> None:
        save(run, done)
        raise KeyboardInterrupt

    monkeypatch.setattr(Run, "_save", interrupted)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    assert train(text_file, "--keep-bf16", "blocks.0,  blocks.0") == 130
    *told, command = capsys.readouterr().err.partition("narrowcast: ")[2].splitlines()
    assert " ".join(told) == "interrupted at step 2 of 4; step 2 is saved; to continue:"
    words = shlex.split(command)
    assert words[-4:] == ["train", "--out", "runs/train-001", "--resume"]
    # A later run is not the one that the command continues.
    monkeypatch.undo()
    monkeypatch.chdir(text_file.parent)
    assert train(text_file) == 0
    later = tree(Path("runs/train-002"))
    assert main(words[words.index("train") :]) == 0
    assert tree(Path("runs/train-002")) == later and Path("runs/train-001/result.json").exists()
    monkeypatch.setattr(Run, "_save", interrupted)
    assert train(text_file, "--resume", "--steps", "6") == 130
    assert capsys.readouterr().err.endswith(" train --out runs/train-002 --resume\n")


@pytest.mark.parametrize("words", [["compare"], ["train", "--parallel", "fsdp"]], ids=" ".join)
def test_a_terminal_shows_the_command_of_an_error_on_a_line_of_its_own(
    words: list[str], text_file: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    assert main(words) == 2
    *_, before, command = capsys.readouterr().err.splitlines()
    assert before.endswith((" run:", " example:")) and words[0] in command and len(command) > 40


def test_train_writes_result_and_checkpoint(text_file: Path, capsys: pytest.CaptureFixture) -> None:
    assert train(text_file, "--recipe", "current", "--out", "run") == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("current: held-out loss ")
    first, second, third, picture, follow_up = printed.out.splitlines()
    assert picture == "picture: run/loss.png"
    assert follow_up.startswith("next: ") and follow_up.endswith(" generate run --prompt 'Once upon '")
    assert (
        first.endswith(" nats per byte after 4 steps")
        and " parameters, " in second
        and third == "  run in run"
    )
    assert max(map(len, [first, second])) <= 80 and "warmup" not in printed.err
    assert "step 4/4" in printed.err
    result = json.loads(Path("run/result.json").read_text())
    assert result["settings"]["recipe"] == "current"
    assert len(result["history"]["train"]) == 4
    assert result["held_out_loss"] == result["history"]["held_out"][-1][1]
    names = sorted(p.name for p in Path("run/checkpoints").iterdir())
    assert names == ["step-00000002", "step-00000004"]


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--recipe", "fp7"], ["'fp7'", "--recipe is", "use one of auto, bf16, delayed"]),
        (["--recipe", "auto,current"], ["'auto,current', and auto cannot be compared; give it alone, or"]),
        (["--lr", "-1"], ["--lr is -1; it must be above 0"]),
        (["--recipe", "mxfp8,"], ["--recipe is 'mxfp8,', where a name is missing; put one comma between"]),
        (["--recipe", ""], ["--recipe is empty; use auto, or one of bf16, delayed"]),
        (["--init", ""], ["--init is empty; give random, or the folder of a Llama"]),
        (["--tokenizer", ""], ["--tokenizer is empty; give it a path, or leave it out"]),
        (["--recipe-table="], ["--recipe-table is empty; give it a path, or leave it out"]),
        (["--parallel", "ddp"], ["--parallel is 'ddp'; use one of fsdp, tp or fsdp+tp"]),
        (
            ["--recipe-table", "nope.json"],
            ["--recipe-table is nope.json", "No such file", "give an existing"],
        ),
        (["--data", "absent.txt"], ["--data is absent.txt", "give an existing"]),
        (["--data", "empty.txt"], ["empty.txt holds no text; give", "--data"]),
        (["--data", "empty"], ["empty holds no text; give", "--data"]),
        (["--device", "cuda"], ["--device is cuda", "use --device cpu"]),
        (["--device", "abacus"], ["'abacus'", "auto, cpu or cuda"]),
        (["--steps", "0"], ["--steps is 0", "at least 1"]),
        (["--batch-size", "-4"], ["--batch-size is -4"]),
        (["--dim", "0"], ["--dim is 0"]),
        (["--heads", "3"], ["--dim is 32", "multiple of 6"]),
        (["--lr", "nan"], ["--lr is nan"]),
        (["--lr", "fast"], ["--lr is 'fast'; use a number"]),
        (["--steps", "2.5"], ["--steps is '2.5'; use a whole number"]),
        (["--steps=abc"], ["--steps is 'abc'; use a whole number"]),
        (["--speed", "9"], ["--speed", "--help"]),
        (
            ["--resume"],
            ["narrowcast: run does not exist; give the folder of a run", "; or leave --resume out"],
        ),
        (["--out", "text.txt"], ["--out is text.txt, and text.txt is a file; give --out another folder"]),
        (["--out", "text.txt/run"], ["--out is text.txt/run, and text.txt is a file; give --out another"]),
        (["--seed", str(2**64)], ["--seed is 18446744073709551616", "below 2^64"]),
        (["--preset", "7b"], ["'7b'; the nearest: '8b'; use one of tiny, 125m, 1b, 8b-slice"]),
        (["--accumulate", "3"], ["--accumulate is 3", "divide --batch-size 2"]),
        (["--keep-bf16", "lm_head"], ["narrowcast: --keep-bf16: 'lm_head' matches", "'lm_head' matches no"]),
        (["--recipe-table", "empty.txt"], ["--recipe-table empty.txt", "not JSON"]),
        (["--graphs"], ["--graphs", "--device is cpu", "leave --graphs out"]),
        (["--by-block"], ["--by-block", "add --compile"]),
        (["--seeds", "0"], ["--seeds is 0", "at least 1"]),
        (["--seeds", str(10**9)], ["--seeds is 1000000000", "at most 1000"]),
        (["--recipe", "bf16,fp7"], ["'fp7'"]),
        (["--recipe", "current,none,bf16"], ["--recipe names bf16 twice", "--seeds"]),
        (["--batch-size", str(10**12)], ["scores of a batch", "GiB", "lower --batch-size or --seq-len"]),
        (["--batch-size", str(10**30)], ["--batch-size is 1000", "below 2^63"]),
        (["--eval-batches", str(10**12)], ["held-out batches", "lower --eval-batches or --batch-size"]),
        (["--dim", str(4 * 10**12)], ["model with its optimizer", "lower --dim, --hidden or --layers"]),
        (["--layers", str(10**12)], ["model with its optimizer", "lower --dim, --hidden or --layers"]),
    ],
    ids=lambda value: " ".join(value) if value and value[0].startswith("--") else "",
)
def test_bad_settings(
    words: list[str],
    parts: list[str],
    text_file: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    Path("empty.txt").touch()
    Path("empty").mkdir()
    given = [] if "--out" in words else ["--out", "run"]
    given += [] if "--data" in words else ["--data", str(text_file)]
    command = ["train", *given, *tiny(*words)]
    line = fails_on_one_line(capsys, text_file.parent, command)
    assert all(part in line for part in parts), line
    assert not Path("run").exists()


@pytest.mark.parametrize("text", ["int", "integer", "integer range"])
def test_every_release_of_typer_asks_for_a_whole_number(text: str) -> None:
    error = typer.BadParameter(f"'2.5' is not a valid {text}.")
    error.param = SimpleNamespace(
        opts=["--steps"], secondary_opts=[], is_flag=False, get_error_hint=lambda *_: "'--steps'"
    )  # type: ignore[assignment]
    line = cli._what_is_wrong(error, ["train", "--steps", "2.5"])
    assert line == "--steps is '2.5'; use a whole number"


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["bake"], ["bake", "--help"]),
        (["demo", "--device", "cuda"], ["--device is cuda", "use --device cpu"]),
        (["demo", "--data", "absent"], ["absent", "--data"]),
        (["demo", "--steps", "-1"], ["--steps is -1"]),
        (["demo", "--write-docs", "page.html"], ["page.html", "--write-docs", ".md"]),
        (["compare"], [f"RUNS is missing; for example: {PROGRAM} compare runs/"]),
        (["compare", "absent"], ["absent does not exist; give the folder of a run"]),
        (["compare", "."], ["no finished run in .", "result.json"]),
        (["compare", ""], ["RUNS is empty; give it a value"]),
        (["generate", "--prompt", "", ""], ["RUN is empty; give it a value"]),
        (["doctor", "--now"], ["--now", "--help"]),
    ],
    ids=" ".join,
)
def test_bad_commands(
    words: list[str],
    parts: list[str],
    text_file: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    line = fails_on_one_line(capsys, text_file.parent, words)
    assert all(part in line for part in parts), line
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("train --seed 1 --seed=2", "--seed is given as '1' and as '2'; give it once"),
        ("plan --gpus 8 --recipe bf16 --gpus 16", "--gpus is given as '8' and as '16'; give it once"),
        ("train --compile --no-compile", "--compile and --no-compile are both given; leave one of them out"),
        ("train --recipe bf16, current ,mxfp8", "; write --recipe bf16,current,mxfp8, without a space"),
        ("train --recipe=bf16, current --seed 3", "; write --recipe=bf16,current, without a space"),
        ("bench tiny --mode eager, compiled", "; write --mode eager,compiled, without a space"),
        ("train --recipe bf16 current", "'current' belongs to no option of narrowcast train; did you mean"),
    ],
)
def test_an_option_given_twice_or_with_a_space_is_refused(
    words: str, told: str, text_file: Path, capsys: pytest.CaptureFixture
) -> None:
    """The last one won without a note, and the word after a space belonged to no option."""
    assert told in fails_on_one_line(capsys, text_file.parent, words.split())


def test_the_same_value_twice_is_one(text_file: Path, capsys: pytest.CaptureFixture) -> None:
    words = ["--seed", "3", "--compile", "--compile", "--seed", "3", "--steps", "0"]
    assert "--steps is 0" in fails_on_one_line(capsys, text_file.parent, ["train", *words])


def test_a_program_is_named_as_its_shell_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The help said `narrowcast`, other lines the path; torchrun was on no path."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("python", "narrowcast", "torchrun"):
        (folder / name).touch(0o755)
    monkeypatch.setattr(sys, "argv", [str(folder / "narrowcast")])
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    for path, place in ((os.defpath, "bin/"), (f"{folder}:{os.defpath}", "")):
        monkeypatch.setenv("PATH", path)
        monkeypatch.chdir(tmp_path)
        assert as_typed("narrowcast demo --quick") == f"{place}narrowcast demo --quick"
        assert torchrun() == [f"{place}torchrun"]
        assert pip_install("x") == f"{place}python -m pip install x"
    (folder / "torchrun").unlink()
    assert torchrun() == ["python", "-m", "torch.distributed.run"]


def test_a_preset_gives_what_no_option_does(text_file: Path, capsys: pytest.CaptureFixture) -> None:
    Path("table.json").write_text('{"blocks.0.attention": {"type": "Float8CurrentScaling"}}')
    words = ["--preset", "125m", "--recipe", "mxfp8", "--accumulate", "2", "--recompute", "--out", "run"]
    assert (
        train(text_file, *words, "--keep-bf16", "blocks.0.feed_forward", "--recipe-table", "table.json") == 0
    )
    assert "MFU" not in capsys.readouterr().out
    result = json.loads(Path("run/result.json").read_text())
    settings = result["settings"]
    assert (settings["lr"], settings["steps"], settings["dim"]) == (6e-4, 4, 32)
    assert (settings["accumulate"], settings["recompute"]) == (2, True)
    assert "Float8CurrentScaling" in settings["recipe_table"]
    assert result["mfu"] is None
    assert result["peak_memory"] > 2**27


def test_sizes_that_stay_the_presets_are_told(text_file: Path, capsys: pytest.CaptureFixture) -> None:
    """A model with another --dim kept the width of the feed-forward layer in silence."""
    words = tiny("--data", str(text_file), "--recipe", "bf16", "--out", "run")
    at = words.index("--hidden")
    assert main(["train", *words[:at], *words[at + 2 :]]) == 0
    told = " ".join(capsys.readouterr().err.split())
    assert "; --dim 32, --layers 1, --heads 2, --kv-heads 1 and, from --preset tiny, --hidden 704 " in told
    assert main(["train", *words[:-1], "whole"]) == 0
    assert "from --preset" not in capsys.readouterr().err


def test_several_recipes_and_seeds_are_compared(text_file: Path, capsys: pytest.CaptureFixture) -> None:
    words = ["--recipe", "bf16,current", "--seeds", "2", "--out", "c"]
    runs = {"bf16-0", "bf16-1", "current-0", "current-1"}
    assert train(text_file, *words) == 0
    told = capsys.readouterr()
    printed, err = told.out, " ".join(told.err.split())
    assert (
        "in 4 runs: bf16, current, 2 seeds each bf16, seed 0 step 0/4" in err
        and "bf16, seed 0     step 0/4" in told.err
        and ", run 4/4" in told.err
    )
    *written, follow_up = printed.splitlines()[-3:]
    assert written == ["picture: c/loss.png", "numbers: c/summary.csv, c/losses.csv"]
    losses = {run: json.loads(Path(f"c/{run}/result.json").read_text())["held_out_loss"] for run in runs}
    assert follow_up.endswith(f" generate c/{min(losses, key=losses.__getitem__)} --prompt 'Once upon '")
    assert "FP8 current" in printed and ", mean of 2 seeds, lowest to highest" in printed
    assert "4 steps are too few to rank recipes: losses differ by chance; take 240 or more." in printed
    files = {"loss.png", "losses.csv", "summary.csv", "results.json"}
    assert {path.name for path in Path("c").iterdir()} == runs | files
    assert len(Path("c/losses.csv").read_text().splitlines()) == 1 + 4 * 3
    # One that was cut short goes on, the others are left alone; a further recipe joins them.
    Path("c/current-1/result.json").unlink()
    before = tree(Path("c/bf16-0"))
    assert train(text_file, "--recipe", "current,mxfp8", "--seeds", "2", "--out", "c", "--resume") == 0
    assert "note: c/current-0 is finished" in capsys.readouterr().err
    assert tree(Path("c/bf16-0")) == before
    words = ["train", "--data", str(text_file), *TINY, "--out", "c", "--resume"]
    line = fails_on_one_line(capsys, text_file.parent, [*words, "--recipe", "bf16,nvfp4", "--seed", "7"])
    assert "c has none of these runs to resume; give --out their folder, or leave --resume out" in line
    line = fails_on_one_line(capsys, text_file.parent, [*words, "--recipe", "bf16", "--seeds", "1"])
    names = "bf16-0, bf16-1, current-0, current-1, mxfp8-0, mxfp8-1"
    assert (
        f"c holds 6 runs: {names}; give the folder of one, such as c/bf16-0, or repeat the --recipe" in line
    )
    summary = Path("c/summary.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in summary[1:]] == ["bf16"] * 2 + ["current"] * 2 + ["mxfp8"] * 2
    line = fails_on_one_line(capsys, text_file.parent, ["generate", "."])
    assert (
        ". holds 6 runs: c/bf16-0, c/bf16-1," in line and "; give the folder of one, such as c/bf16-0" in line
    )
    assert main(["compare", "c/bf16-0", "c/mxfp8-1", "--out", "d"]) == 0
    assert len(Path("d/summary.csv").read_text().splitlines()) == 3
    capsys.readouterr()
    assert train(text_file, "--recipe", "nvfp4,block", "--warmup", "5") == 0
    told = " ".join(capsys.readouterr().err.split())
    assert "note: the runs are in runs/train-001 " in told
    assert (
        told.count("note: --warmup 5 is longer than --steps 4: the learning rate never reaches --lr 0.001")
        == 1
    )
    assert "note: not compared: no bf16 run among them" in told


def test_where_a_run_diverges_the_others_go_on(
    text_file: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All others stopped, and the error named neither the run nor --clip."""
    step = Trainer.step

    def diverging(trainer: Trainer, index: int) -> torch.Tensor:
        run = trainer.config.recipe, trainer.config.seed, index
        return step(trainer, index) * (torch.nan if run == ("current", 1, 2) else 1)

    monkeypatch.setattr(Trainer, "step", diverging)
    monkeypatch.setenv("COLUMNS", "300")
    words = ["--recipe", "bf16,current,mxfp8", "--seeds", "2", "--out"]
    assert train(text_file, *words, "c") == 1
    printed = capsys.readouterr()
    remedy = "lower --lr (0.001) or --clip (1.0), or raise --warmup (1)"
    told = (
        f"note: current, seed 1, diverged in c/current-1: the loss is nan at step 3; {remedy}; the other runs"
    )
    assert told in printed.err and "interrupted" not in printed.out
    told = f"narrowcast: 1 of 6 runs diverged, c/current-1 at step 3; {remedy}, and give --out another folder"
    assert printed.err.splitlines()[-1] == told
    assert sorted(path.parent.name for path in Path("c").rglob("result.json")) == [
        *("bf16-0", "bf16-1", "current-0", "mxfp8-0", "mxfp8-1")
    ]
    assert re.search(r"^FP8 current \(current\), seed 1 +diverged at step 3 *$", printed.out, re.MULTILINE)
    assert json.loads(Path("c/results.json").read_text())["diverged"] == [
        {"recipe": "current", "seed": 1, "step": 3}
    ]
    assert main(["compare", "c"]) == 0
    assert "diverged at step 3" in capsys.readouterr().out
    monkeypatch.setattr(Trainer, "step", step)
    assert train(text_file, *words, "c", "--resume") == 0
    assert "diverged" not in capsys.readouterr().out and not list(Path("c").rglob("diverged.json"))


def test_a_run_alone_says_what_to_train_and_its_text_that_it_is_noise(
    text_file: Path, capsys: pytest.CaptureFixture
) -> None:
    assert train(text_file, "--recipe", "bf16", "--out", "run") == 0
    assert main(["compare", "run", "--out", "c"]) == 0
    told = capsys.readouterr().out
    assert "picture: run/loss.png" in told and Path("run/loss.png").read_bytes().startswith(b"\x89PNG")
    assert "One recipe, nothing to compare; train another with --recipe." in told
    assert "gap" not in told and "CPU emulates" not in told and Path("c/loss.png").exists()
    assert main(["compare", "run"]) == main(["compare", "run"]) == 0
    assert sorted(path.name for path in Path("runs").iterdir()) == ["comparison-001", "comparison-002"]
    assert Path("runs/comparison-002/loss.png").exists(), "the second one replaced the first"
    capsys.readouterr()
    assert main(["compare", "run", "text.txt"]) == 2, "a file that is no run was passed over"
    assert "no finished run in text.txt; give folders that hold a result.json" in capsys.readouterr().err
    assert main(["compare", "run", "--out", "run"]) == 2
    assert "run holds a single run; give --out another folder for several" in capsys.readouterr().err
    assert main(["generate", "run", "--tokens", "2", "--device", "cpu"]) == 0
    told = " ".join(capsys.readouterr().err.split())
    assert "note: 4 steps are too few for text that can be read; train 240 or more" in told


def test_fewer_steps_shorten_the_warmup_and_a_resumed_run_keeps_its_own(
    text_file: Path, capsys: pytest.CaptureFixture
) -> None:
    shape = tiny("--steps", "--warmup")[:-2]
    words = ["train", "--data", str(text_file), *shape, "--recipe"]
    for recipes, out, runs in (
        ("bf16", "one", ("one",)),
        ("bf16,mxfp8", "two", ("two/bf16-0", "two/mxfp8-0")),
    ):
        warmups = {}
        for more in (["--steps", "13"], ["--steps", "26", "--resume"]):
            assert main([*words, recipes, "--out", out, *more]) == 0
            results = [json.loads(Path(run, "result.json").read_text()) for run in runs]
            assert {result["settings"]["steps"] for result in results} == {int(more[1])}
            warmups[more[1]] = [result["settings"]["warmup"] for result in results]
        assert warmups == {steps: [2] * len(runs) for steps in ("13", "26")}
    told = " ".join(capsys.readouterr().err.split())
    assert "--warmup" not in told and "extended from 13 to 26 steps" in told
    line = fails_on_one_line(
        capsys, text_file.parent, [*words, "bf16", "--out", "one", "--resume", "--warmup", "3"]
    )
    assert "--warmup 3 differs from the run in one, which has --warmup 2; leave it out to resume it" in line


def test_presets_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU was sent to 125m, which takes it days."""
    monkeypatch.setenv("PATH", str(tmp_path))
    for preset in ("tiny", "125m"):
        assert main(["presets"]) == 0
        told = capsys.readouterr().out
        assert "8b-slice" in told and told.endswith(f" train --preset {preset}\n")
        (tmp_path / "nvidia-smi").touch(0o755)


def test_resume_from_another_configuration(text_file: Path, capsys: pytest.CaptureFixture) -> None:
    assert train(text_file, "--out", "run") == 0
    start = ["train", "--data", str(text_file), "--out", "run", "--resume"]
    line = fails_on_one_line(capsys, text_file.parent, [*start, *tiny("--seed", "7")])
    assert "--seed 7 differs from the run in run, which has --seed 0; leave it out to resume it, or" in line
    words = tiny("--seed", "7", "--lr", "3e-4", "--hidden", "64")
    line = fails_on_one_line(capsys, text_file.parent, [*start, *words])
    assert "--seed 7, --lr 0.0003 and --hidden 64 differ from the run in run, which has --seed 0" in line
    line = fails_on_one_line(capsys, text_file.parent, [*start, *tiny("--batch-size", "0")])
    assert "--batch-size is 0; it must be at least 1" in line
    line = fails_on_one_line(capsys, text_file.parent, [*start, "--preset", "125m"])
    assert "--preset 125m differs from the run in run, which has --preset tiny; leave it out" in line
    Path("run/options.json").unlink()  # as a run of an earlier version
    most = ["--lr", "1", "--clip", "2", "--hidden", "64", "--layers", "2", "--weight-decay", "0"]
    line = fails_on_one_line(capsys, text_file.parent, [*start, *tiny("--seed", "7", *most)])
    assert "with --lr 1.0, --weight-decay 0.0, --clip 2.0, --seed 7 and 2 more; its run has" in line
    assert train(text_file, "--out", "run", "--resume") == 0
    words = ["train", "--data", str(text_file), *tiny("--out", "run", "--resume", "--steps", "3")]
    told = "it has 4 steps, and --steps is 3; give --steps more than 4, or another --out"
    assert told in fails_on_one_line(capsys, text_file.parent, words)


def test_a_resumed_run_takes_the_options_that_its_folder_keeps(
    text_file: Path, capsys: pytest.CaptureFixture
) -> None:
    """Every option had to be given again."""
    more = ["--recipe", "bf16,current", "--seeds", "2", "--keep-bf16", "head", "--clip", "inf"]
    assert train(text_file, *more, "--out", "c") == 0
    results = {path: path.read_bytes() for path in Path("c").glob("*/result.json")}
    assert len(results) == 4 and main(["train", "--out", "c", "--resume"]) == 0
    assert {path: path.read_bytes() for path in results} == results
    assert main(["train", "--out", "c", "--resume", "--recipe", "current,mxfp8"]) == 0
    assert Path("c/mxfp8-1/result.json").exists(), "more recipes join the others"
    assert main(["train", "--out", "c/current-1", "--resume", "--steps", "6"]) == 0
    settings = json.loads(Path("c/current-1/result.json").read_text())["settings"]
    told = [settings[name] for name in ("recipe", "seed", "keep_bf16", "clip", "dim", "steps")]
    assert told == ["current", 1, "head", math.inf, 32, 6]


def test_resuming_a_finished_run_keeps_its_result(text_file: Path, capsys: pytest.CaptureFixture) -> None:
    assert train(text_file, "--out", "run") == 0
    before = tree(text_file.parent)
    assert train(text_file, "--out", "run", "--resume") == 0
    assert "note: the run has all its steps; --steps above 4 trains it further\n" in capsys.readouterr().err
    assert tree(text_file.parent) == before
    report = Path("run/result.json")
    report.unlink()
    assert train(text_file, "--out", "run", "--resume") == 0
    assert report.exists()


def test_a_second_run_does_not_overwrite_the_first(text_file: Path, capsys: pytest.CaptureFixture) -> None:
    assert train(text_file, "--out", "run") == 0
    words = ["train", "--data", str(text_file), *TINY, "--out", "run"]
    line = fails_on_one_line(capsys, text_file.parent, words)
    assert "add --resume" in line


def test_one_run_and_several_do_not_share_a_folder(text_file: Path, capsys: pytest.CaptureFixture) -> None:
    """The comparison then took the one run for another of its own, and failed after the training."""
    assert train(text_file, "--out", "one") == train(text_file, "--seeds", "2", "--out", "two") == 0
    Path("two/results.json").unlink()  # as where the runs were interrupted
    Path("compared").mkdir()
    Path("compared/results.json").write_text("{}")
    words = ["train", "--data", str(text_file), *TINY, "--out"]
    for folder in ("two", "compared"):
        line = fails_on_one_line(capsys, text_file.parent, [*words, folder, "--recipe", "current"])
        assert f"{folder} holds several runs or a comparison; give --out another folder for one" in line
    line = fails_on_one_line(capsys, text_file.parent, [*words, "one", "--recipe", "bf16,current"])
    assert "one holds a single run; give --out another folder for several" in line


def test_more_steps_extend_a_run(
    text_file: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    assert train(text_file, "--out", "run") == 0
    first = json.loads(Path("run/result.json").read_text())
    capsys.readouterr()
    assert train(text_file, "--out", "run", "--resume", "--steps", "6") == 0
    notes = capsys.readouterr().err
    assert (
        "note: extended from 4 to 6 steps: from step 4 on, the learning rate is that of a run of 6" in notes
    )
    second = json.loads(Path("run/result.json").read_text())
    assert second["settings"]["steps"] == 6
    assert second["history"]["train"][:4] == first["history"]["train"]
    assert len(second["history"]["train"]) == 6
    assert [step for step, _ in second["history"]["held_out"]] == [0, 2, 4, 6]


def test_a_run_without_a_folder_gets_the_next_one(text_file: Path, capsys: pytest.CaptureFixture) -> None:
    words = ["train", "--data", str(text_file), *TINY, "--resume"]
    assert "no run to resume in runs; give --out" in fails_on_one_line(capsys, text_file.parent, words)
    assert train(text_file) == train(text_file) == 0
    assert sorted(path.name for path in Path("runs").iterdir()) == ["train-001", "train-002"]
    assert "note: the run is in runs/train-002" in capsys.readouterr().err
    told = "runs/nope does not exist; give the folder of a run, such as runs/train-002, runs/train-001"
    for command in ("generate", "compare"):
        assert told in fails_on_one_line(capsys, text_file.parent, [command, "runs/nope"])
    before = tree(Path("runs/train-001"))
    assert train(text_file, "--resume", "--steps", "6") == 0
    assert "run in runs/train-002" in capsys.readouterr().out
    assert tree(Path("runs/train-001")) == before
    assert train(text_file, "--steps", "0") == 2
    assert sorted(path.name for path in Path("runs").iterdir()) == ["train-001", "train-002"]


def test_a_folder_of_text_is_told(text_file: Path, capsys: pytest.CaptureFixture) -> None:
    folder = Path("texts")
    folder.mkdir()
    (folder / "a.txt").write_text(text_file.read_text())
    (folder / "picture.png").write_bytes(b"\0\1")
    assert train(folder, "--out", "run") == 0
    size = text_file.stat().st_size
    expected = f"note: text: 1 files, {size:,} bytes of texts; skipped 1 binary"
    assert expected in capsys.readouterr().err.splitlines()


def test_no_room_for_the_result_is_one_line(
    text_file: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("narrowcast_tools.train.session.write_json", full)
    assert train(text_file, "--out", "run") == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert line == (
        "narrowcast: cannot write into run: No space left on device; make room, or give --out another folder"
    )


KILLED_TRAINING = """
import os, signal, sys
from narrowcast_tools import cli
from narrowcast_tools.train import atomic
publish = atomic.publish

def killed(temporary, final):
    if final.name == "step-00000004":
        os.kill(os.getpid(), signal.SIGKILL)
    publish(temporary, final)

atomic.publish = killed
cli.main(sys.argv[1:])
"""


@pytest.mark.parametrize("recipe", ["delayed", pytest.param("nvfp4", marks=pytest.mark.requested)])
def test_killed_during_a_save_and_resumed_is_the_same_run(recipe: str, text_file: Path) -> None:
    words = ["train", "--data", str(text_file), *tiny("--steps", "6", "--recipe", recipe)]
    # Sums of several threads may differ in the last bit from those of one.
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}

    def in_a_process(program: list[str], *more_words: str) -> int:
        command = [sys.executable, *program, *words, "--out", "killed", *more_words]
        return subprocess.run(command, env=environment, capture_output=True, timeout=300).returncode

    assert in_a_process(["-c", KILLED_TRAINING]) == -signal.SIGKILL
    assert Path("killed/.lock").exists(), "a killed run leaves its lock's file, which nobody holds"
    names = sorted(p.name for p in Path("killed/checkpoints").iterdir())
    assert names[0].startswith(".tmp-")
    assert names[1:] == ["step-00000002"]
    assert in_a_process(["-m", "narrowcast"], "--resume") == 0
    assert main([*words, "--out", "whole"]) == 0
    for name in ("model.safetensors", "training.safetensors"):
        contents = [Path(run, "checkpoints/step-00000006", name).read_bytes() for run in ("killed", "whole")]
        assert contents[0] == contents[1], name
    histories = [json.loads(Path(run, "result.json").read_text())["history"] for run in ("killed", "whole")]
    assert histories[0] == histories[1]


@pytest.mark.parametrize("name, expected", [("NO_SETTING", "2000"), ("OMP_WAIT_POLICY", None)])
def test_threads_wait_in_a_short_loop_unless_told_otherwise(
    name: str, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside another program the demo was twelve times as slow: its threads waited for each other in a loop."""
    for one in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.setenv(one, "")  # so that it is put back
        monkeypatch.delenv(one)
    monkeypatch.setenv(name, "PASSIVE")
    assert main(["--version"]) == 0
    assert os.environ.get("GOMP_SPINCOUNT") == expected


def test_an_interrupt_before_a_run_is_one_line(
    text_file: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("narrowcast_tools.train.session.Run", interrupt)
    assert train(text_file, "--out", "run") == 130
    told = "narrowcast: interrupted before the first step, so nothing was saved; "
    told += "run the command again, without --resume"
    assert capsys.readouterr().err.strip().splitlines() == [told]
    assert not Path("run").exists()
    assert train(text_file, "--recipe", "bf16,current", "--out", "run") == 130
    assert capsys.readouterr().err.strip().splitlines() == [told]


@pytest.mark.parametrize("at", ["current", "first result", "cleared memory", "comparison"])
def test_an_interrupt_between_runs_names_the_command_that_continues(
    at: str, text_file: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(config: TrainConfig, *arguments: object, **options: object) -> Run:
        if at == config.recipe:
            raise KeyboardInterrupt
        return Run(config, *arguments, **options)  # type: ignore[arg-type]

    def stop(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("narrowcast_tools.train.session.Run", interrupt)

    def stop_after(path: Path, content: object) -> None:
        write_json(path, content)
        if path.name == "result.json":
            raise KeyboardInterrupt

    if at == "first result":
        monkeypatch.setattr("narrowcast_tools.train.session.write_json", stop_after)
    if at == "cleared memory":
        memory = SimpleNamespace(collect=lambda: Path("run/bf16-0").exists() and stop())
        monkeypatch.setattr("narrowcast_tools.train.session.gc", memory)
    if at == "comparison":
        monkeypatch.setattr("narrowcast_tools.train.commands.compare_runs", stop)
    assert train(text_file, "--recipe", "bf16,current", "--out", "run") == 130
    told = capsys.readouterr().err.splitlines()[-1]
    where = "while the runs were compared" if at == "comparison" else "before current-0"
    assert told.startswith(f"narrowcast: interrupted {where}; to continue: ") and told.endswith(" --resume")
    monkeypatch.undo()
    monkeypatch.chdir(text_file.parent)
    assert train(text_file, "--recipe", "bf16,current", "--out", "run", "--resume") == 0


def test_what_follows_an_interrupted_text_has_a_line_of_its_own(
    text_file: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def texts(*arguments: object, **options: object) -> Iterator[str]:
        yield "some "
        raise KeyboardInterrupt

    assert train(text_file, "--out", "run") == 0
    capsys.readouterr()
    monkeypatch.setattr("narrowcast_tools.train.commands.Answer.texts", texts)
    assert main(["generate", "run"]) == 130
    printed = capsys.readouterr()
    assert printed.out == "some \n" and printed.err.splitlines()[-1] == "narrowcast: interrupted"


SIGNALLED_TRAINING = """
import os, sys
from narrowcast_tools import cli
from narrowcast_tools.train.trainer import Trainer
step, number, at = Trainer.step, int(sys.argv[1]), int(sys.argv[2])

def signalled(trainer, index):
    if index == at:
        os.kill(os.getpid(), number)
    return step(trainer, index)

Trainer.step = signalled
sys.exit(cli.main(sys.argv[3:]))
"""


def run_signalled(number: int, at: int, words: list[str]) -> tuple[int, str]:
    """Run a command whose step `at` gets a signal; return its exit code and its last line."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    command = [sys.executable, "-c", SIGNALLED_TRAINING, str(int(number)), str(at), *words]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert "note: stopping after this step; Ctrl-C again stops at once" in ended.stderr
    return ended.returncode, ended.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    "number, code", [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.requested)]
)
def test_an_interrupted_run_is_saved_and_names_the_command_that_continues_it(
    number: int, code: int, text_file: Path, capsys: pytest.CaptureFixture
) -> None:
    words = ["train", "--data", str(text_file), *tiny("--recipe", "delayed", "--save-every", "100")]
    ended, line = run_signalled(number, 1, [*words, "--out", "cut"])
    told, _, command = line.partition("; to continue: ")
    assert (ended, told) == (code, "narrowcast: interrupted at step 2 of 4; step 2 is saved")
    assert command.endswith(" --out cut --resume")
    assert subprocess.run(command, shell=True, timeout=300, capture_output=True).returncode == 0
    assert main([*words, "--out", "whole"]) == 0
    histories = [json.loads(Path(run, "result.json").read_text())["history"] for run in ("cut", "whole")]
    assert histories[0] == histories[1]


def test_an_interruption_names_the_run_of_several(
    text_file: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the second of two runs it said "at step 2 of 4", as if there was one."""
    save = Run._save

    def interrupted(run: Run, done: int) -> None:
        save(run, done)
        if run.config.recipe == "current":
            raise KeyboardInterrupt

    monkeypatch.setattr(Run, "_save", interrupted)
    assert train(text_file, "--recipe", "bf16,current") == 130
    told = "narrowcast: run 2/2, current-0: interrupted at step 2 of 4; step 2 is saved; to continue: "
    assert told in capsys.readouterr().err


def test_the_time_of_a_resumed_run_is_that_of_all_its_parts(
    text_file: Path, capsys: pytest.CaptureFixture
) -> None:
    assert train(text_file, "--out", "run") == 0
    (checkpoint,) = Path("run/checkpoints").glob("*4")
    before = load(checkpoint).meta["seconds"]
    assert 0 < before <= json.loads(Path("run/result.json").read_text())["seconds"]
    assert train(text_file, "--out", "run", "--resume", "--steps", "6") == 0
    assert re.search(r", time [\d:]+$", capsys.readouterr().out, re.MULTILINE)
    assert json.loads(Path("run/result.json").read_text())["seconds"] > before


def test_a_large_model_on_a_cpu_is_told_before_it_is_made(
    text_file: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A preset for GPUs trained for minutes a step without a word."""
    monkeypatch.setattr("narrowcast_tools.train.session.Run", lambda *a, **k: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["train", "--preset", "1b", "--device", "cpu"])
    assert "a step has 51 trillion operations: a CPU takes a minute or more" in capsys.readouterr().err


def test_an_interrupted_run_without_checkpoints_says_that_nothing_is_saved(text_file: Path) -> None:
    words = ["train", "--data", str(text_file), *tiny("--save-every", "0", "--out", "run")]
    told = "narrowcast: interrupted at step 3 of 4; nothing is saved with --save-every 0"
    assert run_signalled(signal.SIGINT, 2, words) == (130, told)
    assert main(words) == 0, "the same command starts again"
    code, line = run_signalled(signal.SIGINT, 2, [*words[:-1], "runs", "--seeds", "2"])
    several = told.replace("narrowcast: ", "narrowcast: run 1/2, bf16-0: ")
    assert (code, line.partition("; to continue: ")[0]) == (130, several)
    assert main([*words[:-1], "runs", "--seeds", "2", "--resume"]) == 0, "a series keeps its finished runs"


# fmt: off
SMALL_DEMO = {"steps": 4, "eval_every": 2, "eval_batches": 1, "save_every": 2, "batch_size": 2, "seq_len": 16,
              "model": ModelConfig(dim=32, layers=1, heads=2, kv_heads=1, hidden=48)}
# fmt: on


def test_the_quick_demo_goes_on_where_it_was_interrupted(
    text_file: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setattr(asked, "QUICK", replace(QUICK, **SMALL_DEMO))
    words = ["demo", "--quick", "--data", str(text_file), "--device", "cpu"]
    step, trained = Run._save, []

    def interrupted(run: Run, done: int) -> None:
        step(run, done)
        trained.append((run.config.recipe, done))
        if len(trained) == 3:  # bf16 is finished, the next recipe half done
            raise KeyboardInterrupt

    monkeypatch.setattr(Run, "_save", interrupted)
    absent = "runs/demo-quick holds no interrupted demo to resume; leave --resume out to begin one"
    assert absent in fails_on_one_line(capsys, text_file.parent, [*words, "--resume"])
    Path("runs/demo-quick").mkdir(parents=True)
    Path("runs/demo-quick/results.json").write_text("{}")
    assert main(words) == 130
    *notes, line = capsys.readouterr().err.splitlines()
    replaced = "note: at its end this demo replaces the earlier results in runs/demo-quick; --out keeps both"
    assert replaced in notes, "it replaced them without a word"
    assert line.startswith("narrowcast: run 2/7, delayed-0: interrupted at step 2 of 4; step 2 is saved; to ")
    assert line.endswith("-m narrowcast demo --quick --data " + f"{text_file} --device cpu --resume")
    line = fails_on_one_line(capsys, text_file.parent, words)
    assert "holds an interrupted demo with 1 of " in line
    assert "add --resume to continue it, or give --out another folder" in line
    line = fails_on_one_line(capsys, text_file.parent, [*words, "--resume", "--seed", "4"])
    assert "--seed 4 differs from the run in runs/demo-quick/unfinished, which has --seed 0; leave it" in line
    monkeypatch.setattr(Run, "_save", lambda run, done: (_ for _ in ()).throw(KeyboardInterrupt))
    monkeypatch.setenv("NARROWCAST_DEMO", "make demo DEMO_ARGS=")
    assert main([*words, "--resume"]) == 130
    told = capsys.readouterr().err.splitlines()[-1].partition("; to continue: ")[2]
    assert told == f"make demo DEMO_ARGS='--quick --data {text_file} --device cpu --resume'"
    monkeypatch.setattr(Run, "_save", interrupted)
    assert main([*words, "--resume"]) == 0
    done = [(name, at) for name in ALL_RECIPES for at in (2, 4)]
    assert trained == done
    printed = capsys.readouterr()
    assert "runs/demo-quick/bf16" not in printed.out and "FP8 128-block (block)" in printed.out
    follow_up = printed.out.splitlines()[-1]
    assert follow_up.endswith(f" train --recipe bf16,current --data {text_file}"), "a comparison needs bf16"
    assert "FP8 row-wise (rowwise)" in printed.out and "FP8 current " in printed.out
    assert "note: trains 1 block of width 32 (" in printed.err
    assert f"4 steps of 32 bytes of {text_file}, in {len(ALL_RECIPES)} runs: bf16" in printed.err
    folder = Path("runs/demo-quick")
    assert sorted(path.name for path in folder.iterdir()) == ["loss.png", "results.json"]
    assert absent in fails_on_one_line(capsys, text_file.parent, [*words, "--resume"])
    resumed = json.loads((folder / "results.json").read_text())["runs"]
    assert main([*words, "--out", "whole"]) == 0
    whole = json.loads(Path("whole/results.json").read_text())["runs"]
    assert [run["held_out"] for run in resumed] == [run["held_out"] for run in whole]


VERDICT = "verdict      this machine can train" + (
    "" if nc.is_fp8_available() else ", by emulation only: it shows losses, and no recipe is faster than bf16"
)


def test_doctor_answers_first_what_works_what_is_wrong_and_what_to_do(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == VERDICT
    answers, details = (dict(line.split(maxsplit=1) for line in part) for part in split(lines))
    assert {"native", "wrong", "to"} <= answers.keys() and len(lines) <= 20
    tried = ", ".join(answers.get(kind, "") for kind in ("native", "untested", "emulated"))
    assert {name for name in tried.split(", ") if name} == set(CHOICES)
    assert {"python", "torch", "narrowcast", "device"} <= details.keys()
    if not torch.cuda.is_available():
        assert answers["wrong"] == "nothing"
        assert answers["limits"].startswith("no GPU with FP8") and "an NVIDIA GPU with FP8" in answers["to"]


def split(lines: list[str]) -> tuple[list[str], list[str]]:
    """Return the lines before and after the blank one."""
    blank = lines.index("")
    return lines[:blank], lines[blank + 1 :]


def test_lines_for_people_have_80_columns_where_there_is_no_terminal(
    text_file: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What continues a line stands below its text."""
    monkeypatch.delenv("COLUMNS", raising=False)
    main(["doctor"])
    lines = capsys.readouterr().out.splitlines()
    assert VERDICT.startswith(lines[0]) and lines[1].startswith(" " * 13) and len(VERDICT) > 80
    assert train(Path("text.txt"), "--out", "run") == 0
    assert train(Path("text.txt"), "--out", "run", "--resume", "--steps", "6") == 0
    told = capsys.readouterr().err.splitlines()
    first = next(at for at, line in enumerate(told) if line.startswith("note: extended from 4 to 6 steps"))
    assert told[first + 1].startswith("  ")
    assert max(map(len, lines + told)) <= 80


def test_doctor_tells_programs(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["healthy"] is True and report["answers"]["wrong"] == ["nothing"]
    assert [f["subject"] for f in report["findings"]][:3] == ["python", "torch", "narrowcast"]
    monkeypatch.setattr(doctor, "OLDEST_TORCH", "99.0.0")
    assert main(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["healthy"] is False and report["answers"]["wrong"][0].startswith("torch: ")
    assert [f["subject"] for f in report["findings"] if f["broken"]] == ["torch"]


@pytest.mark.parametrize("words", [["doctor", "--json"], ["presets"], ["--help"]], ids=" ".join)
def test_a_reader_that_has_enough_gets_no_traceback(words: list[str]) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "narrowcast", *words]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdout.close()  # type: ignore[union-attr]
        told = process.stderr.read().decode()  # type: ignore[union-attr]
    assert process.returncode in (0, 1, 141) and "BrokenPipe" not in told and "Traceback" not in told


@pytest.mark.parametrize(
    ("build", "fix"), [(None, "install a CUDA build of torch"), ("13.0", "check the driver")]
)
def test_no_cuda_device_has_two_reasons(build: str | None, fix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", build)
    with pytest.raises(SettingsError, match=rf"--device is cuda, but .*; use --device cpu, or {fix}"):
        resolve_device("cuda")


def test_version(capsys: pytest.CaptureFixture) -> None:
    for option in ("--version", "-V"):
        assert main([option]) == 0
        assert capsys.readouterr().out == f"narrowcast {nc.__version__}\n"


def test_doctor_tells_what_is_broken(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "OLDEST_TORCH", "99.0.0")
    assert main(["doctor"]) == 1
    assert "too old, install torch 99.0 or newer" in capsys.readouterr().out


def test_help(capsys: pytest.CaptureFixture) -> None:
    assert main(["train", "--help-all"]) == 0
    printed = capsys.readouterr().out
    for option in ("--data", "--recipe", "--resume", "--compile", "--emulate", "--device"):
        assert option in printed
    assert main([]) == 0
    assert "doctor" in capsys.readouterr().out
    assert main(["demo", "--help"]) == 0
    assert "--write-docs" not in capsys.readouterr().out, "it writes this package's own page"


@pytest.mark.parametrize("option", ["--help", "--help-all"])
def test_help_can_be_read_in_60_columns(
    option: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Columns of names and values left 20 columns for the text, in stairs of one word a line."""
    monkeypatch.setenv("COLUMNS", "60")
    for name in NAMES if option == "--help" else ["train"]:
        assert main([name, option]) == 0
        told = capsys.readouterr().out
        assert "…" not in told
        lines = told.partition(" Examples:")[0].splitlines()
        assert max(map(len, lines)) <= 60
        begins = [match.end() for line in lines if (match := re.match(r"│ (\* +)?--\S+ +(-\w +)?", line))]
        assert begins and max(begins) <= 31, (name, max(begins))
    assert option == "--help" or "Off: --no-tie-embeddings." in " ".join(told.replace("│", " ").split())


WITHOUT_PYTORCH = """
import sys
from narrowcast_tools.cli import main
code = main(sys.argv[1:])
print([name for name in sys.modules if name.split(".")[0] in ("torch", "narrowcast", "numpy", "matplotlib")])
sys.exit(code)
"""
NAMES = [one.name or str(one.callback.__name__) for one in cli.app.registered_commands if one.callback]


@pytest.mark.parametrize(
    ("words", "code", "answer"),
    [
        ([], 0, "Usage: narrowcast [OPTIONS] COMMAND"),
        (["--help"], 0, "First: narrowcast doctor, then narrowcast demo"),
        (["bench", "--help"], 0, "Any of delayed, current, block,"),
        (["--version"], 0, f"narrowcast {nc.__version__}"),
        *(([name, "--help"], 0, f"Usage: narrowcast {name}") for name in NAMES),
        (["help"], 0, "First: narrowcast doctor, then narrowcast demo"),
        (["help", "train"], 0, "Usage: narrowcast train"),
        (["train", "help"], 0, "Usage: narrowcast train"),
        (["generate", "help"], 0, "Usage: narrowcast generate"),
        (["help", "trian"], 2, f"no command 'trian'; the nearest: 'train'; {PROGRAM} --help lists all"),
        (["generate", "-h"], 0, "Usage: narrowcast generate [OPTIONS] RUN "),
        (["compare", "-h"], 0, "Usage: narrowcast compare [OPTIONS] RUNS... "),
        (["-h"], 0, "Usage: narrowcast [OPTIONS] COMMAND"),
        (["train", "-h"], 0, "Usage: narrowcast train"),
        (["presets"], 0, "8b-slice"),
        (["bake"], 2, f"no command 'bake'; {PROGRAM} --help lists all"),
        (["trian"], 2, f"no command 'trian'; the nearest: 'train'; {PROGRAM} --help lists all"),
        (["train", "--speed", "9"], 2, "narrowcast: train has no option --speed; "),
        (
            ["train", "--stpes", "9"],
            2,
            f"no option --stpes; the nearest: --steps; {PROGRAM} train --help-all lists all",
        ),
        (["train", "--recipe"], 2, f"--recipe has no value; {PROGRAM} train --help-all says: auto, bf16, "),
        (["train", "--data"], 2, "narrowcast train --help-all says: Text file or folder of text files\n"),
        (["compare"], 2, f"the argument RUNS is missing; for example: {PROGRAM} compare runs/train-001 runs"),
        (["generate"], 2, f"the argument RUN is missing; for example: {PROGRAM} generate runs/train-001 --p"),
        (
            ["presets", "all"],
            2,
            "narrowcast: presets takes no names and shows all; leave 'all' out\n",
        ),
        (
            ["plan", "70b", "8"],
            2,
            f"'70b 8' belongs to no option of narrowcast plan; {PROGRAM} plan --help lists all",
        ),
        (
            ["generate", "run", "--temp", "0"],
            2,
            f"no option --temp; the nearest: --temperature; {PROGRAM} generate",
        ),
        *(
            ([command, old, "1"], 2, f"narrowcast: {command} has no option {old}; the nearest: {new}; ")
            for command, old, new in (
                ("plan", "--length", "--seq-len"),
                ("plan", "--batch", "--batch-size"),
                ("plan", "--tp", "--tp-size"),
                ("bench", "--recipes", "--recipe"),
                ("bench", "--head", "--head-recipe"),
                ("train", "--learning-rate", "--lr"),
                ("train", "--no-compil", "--no-compile"),
                ("train", "--model", "--preset"),
                ("train", "--epochs", "--steps"),
            )
        ),
        (["demo", "--steps", "many"], 2, "--steps is 'many'; use a whole number"),
        (["plan", "--gpu", "b200"], 2, "--gpu is 'b200'; use one of h100, h200 or h800"),
        (["train", "--help-all"], 0, "--kv-heads"),
        (["train", "--steps", "0"], 2, "--steps is 0; it must be at least 1"),
        (
            ["train", "--recipe", "fp8"],
            2,
            "--recipe is 'fp8'; for FP8 use 'current'; use one of auto, bf16, ",
        ),
        (["train", "--head-recipe", "fp7"], 2, "--head-recipe is 'fp7'; use one of bf16, "),
        (
            ["train", "t.txt"],
            2,
            "'t.txt' belongs to no option of narrowcast train; did you mean --data t.txt?",
        ),
        (["train", "125m"], 2, "did you mean --preset 125m?"),
        (["demo", "t.txt"], 2, "did you mean --data t.txt?"),
        (["plan", "70b"], 2, "did you mean --model 70b?"),
        (["plan", "h100"], 2, "did you mean --gpu h100?"),
        (["generate", "r", "--prompt", "Once", "upon"], 2, "several words in quotes, as --prompt 'Once upon"),
        (
            ["train", "--data", "https://a.b/c.txt"],
            2,
            "--data is https://a.b/c.txt, an address; download it first",
        ),
        (
            ["train", "--init", "https://a.b/c"],
            2,
            "--init is https://a.b/c, which is an address; download it first",
        ),
        (["train", "--tokenizer", "https://a.b/c"], 2, "cannot be read (an address; download it first)"),
        (["plan", "--model", "https://a.b/config.json"], 2, "cannot be read (an address; download it first)"),
        (["train", "--preset", "8_slice"], 2, "--preset is '8_slice'; the nearest: '8b-slice'; use one of"),
        (["train", "--preset", "tiny2"], 2, "--preset is 'tiny2'; the nearest: 'tiny'; use one of"),
        (["plan", "--model", "meta-llama/Llama-3.1-70B"], 2, "; the nearest: '70b'; use one of"),
        (["train", "--preset", "125M"], 2, "--preset is '125M'; the nearest: '125m'; use one of tiny"),
        (["train", "--optimizer", "sgd"], 2, "--optimizer is 'sgd'; use one of adamw, "),
        (["train", "--device", "gpu"], 2, "--device is 'gpu'; for a GPU use 'cuda'; use one of auto, cpu"),
        (["train", "--parallel", "ddp"], 2, "--parallel is 'ddp'; use one of fsdp, tp or fsdp+tp"),
        (
            ["train", "--heads", "3"],
            2,
            "--heads is 3; with the preset's --dim 256 and --kv-heads 2 use 2, 4, 8, 16, 32, 64 or 128\n",
        ),
        (
            ["train", "--heads", "3", "--kv-heads", "1"],
            2,
            "--heads is 3; with the preset's --dim 256 use 1, 2, 4",
        ),
        (["train", "--kv-heads", "3"], 2, "--kv-heads is 3; with the preset's --heads 4 use 1, 2 or 4\n"),
        (
            ["train", "--dim", "36"],
            2,
            "--dim is 36; it must be a multiple of 8 (twice --heads 4, rotary pairs)",
        ),
        (
            ["train", "--resume", "--out", "nope"],
            2,
            "narrowcast: nope does not exist; give the folder of a run",
        ),
        (["train", "--seeds", "0"], 2, "--seeds is 0, the runs to compare per recipe"),
        (["train", "--data", "absent.txt"], 2, "--data is absent.txt, where no file or folder is"),
        (["demo", "--steps", "0"], 2, "--steps is 0; it must be at least 1"),
        (["demo", "--write-docs", "page"], 2, "--write-docs is page; give it a file that ends in .md"),
        (["generate", "run", "--temperature", "-1"], 2, "--temperature is -1; it must be 0 or more"),
        (["generate", "run", "--recipe", "int8"], 2, "--recipe is 'int8'; use one of bf16, "),
        (["generate", "run", "--tokens", "0"], 2, "--tokens is 0; it must be at least 1"),
        (["generate", "run", "--seed", "-1"], 2, "--seed is -1; it must be 0 or more"),
        (["generate", "run", "--prompt", ""], 2, "--prompt is empty; give it some text"),
        (["generate", "run", "--graphs"], 2, "--compile is not given; add --compile"),
        (["generate", "absent"], 2, "absent does not exist; give the folder of a run of narrowcast train"),
        (["generate", __file__], 2, "is a file; give the folder of a run"),
        (["bench", "some"], 2, "SUITE is 'some'; use one of layers, models, all, tiny or account"),
        (["bench", "tiny", "--recipe", "fp7"], 2, "--recipe is 'fp7'; use one of delayed"),
        (["bench", "layers", "--only", "Conv"], 2, "--only is 'Conv', which no work of suite 'layers' has"),
        (["bench", "--device", "tpu"], 2, "--device is 'tpu'; use one of auto, cpu or cuda"),
        (["bench", "--minutes", "nan"], 2, "--minutes is nan; use 0 or more"),
        (["bench", "--resume"], 2, "--resume needs --out, the folder with"),
        (["bench", "--minutes", "-3"], 2, "--minutes is -3; use 0 or more"),
        (["bench", "--device", "gpu"], 2, "--device is 'gpu'; for a GPU use 'cuda'"),
        (
            ["bench", "account", "--device", "cpu"],
            2,
            "the device is cpu; run it on a GPU, or bench tiny here",
        ),
        (["bench", "account", "--only", "x"], 2, "narrowcast: bench account takes no --only; leave it out\n"),
        (["compare", "absent"], 2, "absent does not exist; give the folder of a run of narrowcast train"),
        (["train", "--graphs"], 2, "--compile is not given; add --compile"),
        (["train", "--graphs", "--compile", "--device", "cpu"], 2, "--device is cpu; leave --graphs out"),
        (["train", "--by-block"], 2, "--compile is not given; add --compile"),
        (
            ["train", "--recipe-table", "no.json"],
            2,
            "--recipe-table is no.json, which cannot be read (No such",
        ),
        (["train", "--tokenizer", "no.json"], 2, "--tokenizer is no.json, which cannot be read (No such"),
        (["train", "--init", "no"], 2, "--init is no, which does not exist; give random, or the folder of a"),
        (["train", "--init", str(Path(__file__).parent)], 2, "which has no config.json; give random, or the"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_help_and_wrong_options_are_answered_without_pytorch(
    words: list[str], code: int, answer: str
) -> None:
    """Importing torch takes seconds."""
    environment = {**os.environ, "COLUMNS": "80", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", WITHOUT_PYTORCH, *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stderr
    assert answer in done.stdout + done.stderr
    assert "<bool>" not in done.stdout
    assert "…" not in done.stdout, "the help leaves something out at 80 columns"
    printed = done.stdout.replace(f"{sys.executable} -m narrowcast", "narrowcast")
    assert all(len(line) <= 80 for line in printed.splitlines()[:-1])
    if words and words[-1] in ("-h", "--help", "--help-all"):
        assert "<str>" not in done.stdout, "say what the option takes"
        assert "Examples:" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("line", list(chain(*EXAMPLES.values())))
def test_the_examples_of_the_help_are_right(
    line: str, text_file: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command gets what it takes, and its values pass the check before the work."""
    for run in ("runs/train-001", "runs/train-002"):
        Path(run, "checkpoints").mkdir(parents=True)
        Path(run, "result.json").touch()
    program, name, *_ = words = shlex.split(line, comments=True)
    done = []
    work = SimpleNamespace(**{name: lambda **given: done.append(given)})
    monkeypatch.setattr(commands, "import_module", lambda module: work)
    assert program == "narrowcast" and main(words[1:]) == 0, capsys.readouterr().err
    assert done or name == "doctor" or "--help" in words
    assert main([*words[1:], "--no-such", "1"]) == 2


def test_every_command_has_examples_and_at_most_fifteen_options() -> None:
    group = typer.main.get_command(cli.app)
    assert list(EXAMPLES) == ["narrowcast", *group.commands]  # type: ignore[attr-defined]
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        assert all(f"narrowcast {name}" in line for line in EXAMPLES[name][:1])
        shown = [one for one in command.params if not one.hidden and (name != "train" or one.name in OFTEN)]
        assert len(shown) <= 15, name


def test_the_help_of_train_fits_a_screen_and_names_the_one_that_has_all() -> None:
    environment = {**os.environ, "COLUMNS": "80", "PYTHONPATH": os.pathsep.join(sys.path)}
    shown = {}
    for option in ("--help", "--help-all"):
        command = [sys.executable, "-c", WITHOUT_PYTORCH, "train", option]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        shown[option] = done.stdout.splitlines()[:-1]
    assert len(shown["--help"]) <= 45
    assert any("--help-all" in line and "all options" in line for line in shown["--help"])
    assert not any("--kv-heads" in line for line in shown["--help"])
    (train,) = (
        one for one in cli.app.registered_commands if one.callback and one.callback.__name__ == "train"
    )
    for name in set(inspect.signature(train.callback).parameters) - {"context"}:  # type: ignore[arg-type]
        assert any(f"--{name.replace('_', '-')} " in line for line in shown["--help-all"]), name


def test_what_the_help_states_is_what_the_trainer_has() -> None:
    assert tuple(CHOICES) == RECIPES
    aliases = {one: name for one, (name, preset) in nc.recipe.ALIASES.items() if not preset}
    assert aliases | {"none": "bf16"} == ALIASES
    assert TrainConfig.seed == DEMO.seed and TrainConfig.accumulate == 1


@pytest.mark.parametrize("name", NAMES)
def test_a_command_takes_the_options_that_it_declares(name: str) -> None:
    (declared,) = (
        one.callback for one in cli.app.registered_commands if one.callback and one.callback.__name__ == name
    )
    room = {
        "bench": "bench.command",
        "plan": "plan.command",
        "doctor": "train.doctor",
        "presets": "cli.presets",
    }.get(name, "train.commands")
    work = getattr(importlib.import_module(f"narrowcast_tools.{room}"), name)
    given = dict.fromkeys(inspect.signature(declared).parameters)
    given.pop("help_all", None)  # is answered before the work
    inspect.signature(work).bind(**given)
    if name == "plan":
        given = {key: None for key in given if key not in ("json", "context")}
        inspect.signature(importlib.import_module("narrowcast_tools.plan").plan).bind(**given)


def test_a_command_without_a_package_of_the_extra(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "MISSING", "typer")
    assert main(["--help"]) == 2
    assert "the package typer is missing" in capsys.readouterr().err


# Of each package a process of its own, which begins with the library imported.
WITHOUT_PACKAGES = """
import os, sys, narrowcast
for package in sys.argv[2:]:
    if not os.fork():
        sys.modules[package] = None
        from narrowcast_tools import cli
        code = cli.main([sys.argv[1]])
        sys.stdout.flush()
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == (0 if sys.argv[1] == "doctor" else 2), package
"""
PACKAGES = ["typer", "rich", "matplotlib", "safetensors"]


@pytest.mark.parametrize("command", ["train", "doctor"])
def test_a_missing_extra_is_one_line_and_doctor_needs_none(command: str) -> None:
    words = [
        sys.executable,
        "-c",
        WITHOUT_PACKAGES,
        command,
        *(PACKAGES if command == "train" else PACKAGES[:1]),
    ]
    environment = {**os.environ, "COLUMNS": "300"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    if command == "doctor":
        assert done.stdout.splitlines()[0] == VERDICT
        return
    assert done.stderr.splitlines() == [
        f"narrowcast: the package {package} is missing, which commands need; in the clone, run: "
        f"{pip_install('.[train]')}"
        for package in PACKAGES
    ]
    assert done.stdout == ""


def test_doctor_says_that_pytorch_is_missing() -> None:
    code = "import sys; sys.modules['torch'] = None; from narrowcast_tools.cli import main; sys.exit(main(['doctor']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines() == [
        f"narrowcast: PyTorch is missing, which everything needs; run: {pip_install('torch')}"
    ]


@pytest.mark.parametrize(
    "start", [["-m", "narrowcast"], ["-c", "from narrowcast_tools.cli import main; main()"]]
)
def test_both_starts_are_silent_without_numpy(start: list[str], tmp_path: Path) -> None:
    """The module imports PyTorch before the command line runs, and printed PyTorch's warning."""
    (tmp_path / "numpy.py").write_text("raise ModuleNotFoundError('no numpy', name='numpy')")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}
    words = [sys.executable, *start, "doctor"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stderr == "" and done.stdout.startswith("verdict ")


def test_functions_of_the_library_are_no_commands() -> None:
    assert all(callable(getattr(nc, name)) for name in cli.LIBRARY)
    assert not cli.LIBRARY & {
        one.callback.__name__ for one in commands.app.registered_commands if one.callback
    }
