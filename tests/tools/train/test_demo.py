"""The demo writes what it shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from narrowcast_tools.train import demo as demos
from narrowcast_tools.train.config import TrainConfig
from narrowcast_tools.train.data import Corpus
from narrowcast_tools.train.demo import (
    ALL_RECIPES,
    check_recipes,
    run_demo,
    write_results,
)
from narrowcast_tools.train.errors import SettingsError
from narrowcast_tools.train.presets import DEMO, DEMO_TIME, QUICK_TIME, with_steps
from narrowcast_tools.train.progress import Progress


def test_results_picture_and_page(
    config: TrainConfig, corpus: Corpus, progress: Progress, tmp_path: Path
) -> None:
    finished = run_demo(config, corpus, progress, tmp_path / "demo")
    page = tmp_path / "docs" / "first-light.md"
    write_results(finished, tmp_path / "demo", command="narrowcast demo", document=page)
    results = json.loads((tmp_path / "demo" / "results.json").read_text())
    assert [run["recipe"] for run in results["runs"]] == list(ALL_RECIPES)
    assert results["settings"]["steps"] == config.steps
    assert "recipe" not in results["settings"]
    assert {"cpu", "cores", "torch", "python"} <= results["machine"].keys()
    picture = (tmp_path / "demo" / "loss.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    for scheme in ("light", "dark"):
        told = (page.parent / "assets" / f"first-light-{scheme}.svg").read_text()
        assert "emulated on a CPU" in told
    assert '<img src="assets/first-light-light.svg"' in page.read_text()
    for run in results["runs"]:
        assert f"{run['held_out_loss']:.4f}" in page.read_text()
    assert not list(tmp_path.rglob(".tmp-*"))


def test_no_page_unless_asked(
    config: TrainConfig, corpus: Corpus, progress: Progress, tmp_path: Path
) -> None:
    finished = run_demo(config, corpus, progress, tmp_path / "demo", recipes=["bf16", "block"])
    write_results(finished, tmp_path / "demo", command="narrowcast demo", document=None)
    assert sorted(p.name for p in (tmp_path / "demo").iterdir()) == ["loss.png", "results.json"]


def test_recipes_are_checked_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def refuse(name: str, **arguments: object) -> None:
        asked.append(name)
        if name == "nvfp4":
            raise SettingsError("no")

    monkeypatch.setattr(demos, "build_recipe", refuse)
    with pytest.raises(SettingsError):
        check_recipes(DEMO)
    assert asked == list(ALL_RECIPES)


def test_the_schedule_fits_into_the_steps() -> None:
    assert with_steps(DEMO, DEMO.steps) == DEMO
    short = with_steps(DEMO, 30)
    assert short.warmup < short.steps / 4 and short.eval_every == 3
    with pytest.raises(SettingsError, match="--steps is 0"):
        with_steps(DEMO, 0)


def test_the_pages_state_the_times_of_the_demo() -> None:
    root = Path(__file__).parents[3]
    for name, times in (
        ("README.md", (DEMO_TIME, QUICK_TIME)),
        ("docs/first-light.md", (DEMO_TIME, QUICK_TIME)),
        ("docs/train.md", (QUICK_TIME,)),
    ):
        text = " ".join((root / name).read_text().split())
        assert all(time in text for time in times), name
