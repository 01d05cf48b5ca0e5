"""Finished runs side by side: what is read, what is refused, what is written."""

from __future__ import annotations

import csv
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure

from narrowcast_tools.train import session
from narrowcast_tools.train.comparison import compare_runs, write_comparison
from narrowcast_tools.train.config import TrainConfig
from narrowcast_tools.train.data import Corpus
from narrowcast_tools.train.errors import SettingsError
from narrowcast_tools.train.progress import Progress
from narrowcast_tools.train.session import run_in, series


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shelf")


@pytest.fixture
def runs(config: TrainConfig, corpus: Corpus, progress: Progress, tmp_path: Path, shelf: Path) -> Path:
    """A copy, for this test, of runs that the first test has trained."""
    trained = shelf / "runs"
    if not trained.exists():
        config = replace(config, steps=2)
        configs = [replace(config, recipe=name, seed=seed) for name in ("bf16", "nvfp4") for seed in (0, 1)]
        series(trained, configs, corpus, progress, resume=False)
    return Path(shutil.copytree(trained, tmp_path / "runs"))


def changed(run: Path, **settings: object) -> None:
    path = run / "result.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "settings": {**content["settings"], **settings}}))


def test_what_is_written_is_what_was_measured(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    feet: list[str] = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *a, **k: feet.append(self.get_supxlabel()) or save(self, *a, **k)
    )
    comparison = compare_runs([runs])
    assert [row.seeds for row in comparison.rows] == [[0, 1], [0, 1]]
    write_comparison(comparison, runs, command="narrowcast compare runs")
    summary = list(csv.DictReader((runs / "summary.csv").open()))
    for line in summary:
        content = json.loads((runs / f"{line['recipe']}-{line['seed']}" / "result.json").read_text())
        assert float(line["held-out loss"]) == pytest.approx(content["held_out_loss"], abs=1e-6)
        assert (line["steps"], line["mode"], line["MFU of bf16 peak"]) == ("2", "eager", "")
    gaps = [float(line["gap to bf16, %"]) for line in summary[2:]]
    assert gaps == pytest.approx(comparison.rows[1].seed_gaps, abs=1e-3)
    losses = list(csv.DictReader((runs / "losses.csv").open()))
    assert len(losses) == 4 * 2
    results = json.loads((runs / "results.json").read_text())
    assert "seed" not in results["settings"]
    assert results["recipes"][1]["seeds"] == [0, 1]
    assert (runs / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert results["machine"].partition(",")[0] not in feet[0]
    told = f"bytes of {results['data']['source']}"
    assert "".join(feet[0].split()).endswith(told.replace(" ", "")), "a long path is wrapped"


def test_layers_apart_are_a_row_of_their_own(runs: Path) -> None:
    changed(runs / "nvfp4-1", keep_bf16="blocks.0", head_recipe="current")
    titles = [row.title for row in compare_runs([runs]).rows]
    assert titles == ["bf16", "NVFP4", "NVFP4 (bf16: blocks.0, head: FP8 current)"]


def test_what_cannot_be_compared_is_refused(runs: Path, tmp_path: Path) -> None:
    changed(runs / "nvfp4-0", head_recipe="current")
    with pytest.raises(SettingsError, match=r"no bf16 run among them .*--recipe bf16"):
        compare_runs([runs / "nvfp4-0", runs / "nvfp4-1"])
    changed(runs / "nvfp4-0", head_recipe="bf16")
    with pytest.raises(SettingsError, match=r"absent does not exist; give the folder of a run"):
        compare_runs([tmp_path / "absent"])
    changed(runs / "nvfp4-1", seed=0)
    with pytest.raises(SettingsError, match=r"nvfp4-0.* and .*nvfp4-1.* are the same recipe and seed"):
        compare_runs([runs])
    changed(runs / "nvfp4-1", seed=1, lr=1.0)
    with pytest.raises(SettingsError, match=r"bf16-0.* with --lr 0.002 and .*nvfp4-1.* with --lr 1.0"):
        compare_runs([runs])
    changed(runs / "nvfp4-1", clip=2.0)
    told = r"bf16-0.* with --lr 0.002, --clip 1.0 and .*nvfp4-1.* with --lr 1.0, --clip 2.0; compare"
    with pytest.raises(SettingsError, match=told):
        compare_runs([runs])


def test_a_damaged_result_names_the_file_what_is_wrong_and_the_remedy(runs: Path) -> None:
    """The message was Python's: "Expecting value: line 1 column 1 (char 0)"."""
    path = runs / "nvfp4-1" / "result.json"
    whole = json.loads(path.read_text())
    machine = {name: value for name, value in whole.items() if name != "machine"}
    for text, why in (
        ("", "it is cut short or no JSON"),
        ("{}", "it lacks settings"),
        (json.dumps(machine), "it lacks machine"),
        (json.dumps({**whole, "history": 3}), "a value is not what narrowcast train writes"),
        ("[]", "a value is not what narrowcast train writes"),
    ):
        path.write_text(text)
        told = f"{path} is damaged: {why}; leave its folder out, or train the run again"
        with pytest.raises(SettingsError, match=re.escape(told)):
            compare_runs([runs])


@pytest.mark.parametrize("names", [["nvfp4-0"], ["nvfp4-0", "nvfp4-1"]])
def test_one_recipe_without_bf16_is_drawn(names: list[str], runs: Path, tmp_path: Path) -> None:
    """It was refused, as if there were others to compare with bf16."""
    comparison = compare_runs([runs / name for name in names])
    (row,) = comparison.rows
    assert row.seeds == list(range(len(names))) and row.gap_percent == 0
    write_comparison(comparison, tmp_path, command="")
    assert (tmp_path / "loss.png").exists() and (tmp_path / "summary.csv").exists()


def test_an_interrupted_run_is_compared_up_to_its_last_evaluation(
    config: TrainConfig, corpus: Corpus, progress: Progress, tmp_path: Path
) -> None:
    """It was left out without a word, and alone it was no run."""
    config = replace(config, steps=4, eval_every=1, save_every=1)
    series(
        tmp_path, [replace(config, recipe=name) for name in ("bf16", "nvfp4")], corpus, progress, resume=False
    )
    whole, cut = tmp_path / "bf16-0", tmp_path / "nvfp4-0"
    (cut / "result.json").unlink()
    shutil.rmtree(cut / "checkpoints" / "step-00000004")
    comparison = compare_runs([whole, cut])
    assert comparison.notes == [f"{cut} was interrupted at step 3 of 4; all are compared at step 3"]
    assert [row.held_out[-1][0] for row in comparison.rows] == [3, 3]
    losses = json.loads((whole / "result.json").read_text())["history"]["held_out"]
    assert comparison.rows[0].held_out_loss == losses[3][1] and comparison.results[0].steps == 3
    below = compare_runs([tmp_path])
    assert [row.recipe for row in below.rows] == ["bf16"]
    assert below.notes == [
        f"{cut} was interrupted at step 3 of 4; give its own folder to compare up to there"
    ]
    shutil.rmtree(cut / "checkpoints" / "step-00000003")
    (cut / "checkpoints").mkdir(exist_ok=True)
    assert compare_runs([whole, cut]).notes == [
        f"{cut} was interrupted before its first checkpoint; continue it with --resume"
    ]
    shutil.rmtree(whole)
    with pytest.raises(SettingsError, match=r"no finished run: .*nvfp4-0 was interrupted before its first"):
        compare_runs([tmp_path])


def test_a_series_goes_on(runs: Path, config: TrainConfig, corpus: Corpus, progress: Progress) -> None:
    """Finished runs are left alone, unless they are to be longer."""
    times = {path: path.stat().st_mtime_ns for path in runs.rglob("result.json")}
    short = replace(config, steps=2)
    series(runs, [short, replace(short, seed=1)], corpus, progress, resume=True)
    assert {path: path.stat().st_mtime_ns for path in runs.rglob("result.json")} == times
    series(runs, [replace(config, steps=4)], corpus, progress, resume=True)
    assert json.loads((runs / "bf16-0" / "result.json").read_text())["settings"]["steps"] == 4


def test_runs_without_checkpoints(
    config: TrainConfig, corpus: Corpus, progress: Progress, tmp_path: Path
) -> None:
    """Finished ones are left alone all the same; an earlier result is not overwritten unasked."""
    light = replace(config, steps=2, save_every=0)
    series(tmp_path, [light], corpus, progress, resume=False)
    report = tmp_path / "bf16-0" / "result.json"
    assert not list(tmp_path.rglob("step-*"))
    before = report.stat().st_mtime_ns
    series(tmp_path, [light], corpus, progress, resume=True)
    assert report.stat().st_mtime_ns == before
    with pytest.raises(SettingsError, match=r"result\.json is of an earlier run; give --out another folder"):
        series(tmp_path, [light], corpus, progress, resume=False)
    series(tmp_path, [replace(light, steps=3)], corpus, progress, resume=True)
    assert json.loads(report.read_text())["settings"]["steps"] == 3


def test_every_run_has_its_place_among_all(
    config: TrainConfig, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time of all runs took recipes to be equally slow: it rose and fell by a half from run to run."""
    told = []
    monkeypatch.setattr(session, "run_in", lambda *args, place, **kept: told.append(place))
    configs = [replace(config, recipe=name, steps=100) for name in ("bf16", "current", "nvfp4")]
    series(tmp_path, configs, corpus, Progress(), resume=False)
    series(tmp_path, configs[:1], corpus, Progress(), resume=False)
    assert told == ["run 1/3", "run 2/3", "run 3/3", ""]


def test_compiling_is_announced(
    config: TrainConfig, corpus: Corpus, progress: Progress, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A minute passed in silence."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    for compile in (False, True):
        run_in(
            tmp_path / str(compile),
            replace(config, compile=compile),
            corpus,
            progress,
            resume=False,
            told=False,
        )
        written = " ".join(progress._console.file.getvalue().split())
        assert ("--compile compiles in the first evaluation and in the first step" in written) == compile


def test_a_text_that_is_drawn_more_than_once_is_told(
    config: TrainConfig, corpus: Corpus, progress: Progress, tmp_path: Path
) -> None:
    assert corpus.repeated(len(corpus.train)) == ""
    run_in(
        tmp_path,
        replace(config, batch_size=2048, eval_batches=1, steps=1),
        corpus,
        progress,
        resume=False,
        told=False,
    )
    assert "bytes to train on, and the run draws 32,768: each" in progress._console.file.getvalue()
