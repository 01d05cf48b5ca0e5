"""The demo: one small model, one text, every recipe."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from narrowcast._checks import counted

from ..schemes import write_widths
from . import machine
from .atomic import write_bytes, write_json
from .comparison import compare_runs
from .config import TrainConfig, compared_fields
from .data import Corpus
from .document import compose
from .errors import SettingsError, TrainingError
from .folder import COMPARED, LOSSES, RESULT, UNFINISHED
from .picture import caption, draw, figure
from .progress import Progress
from .recipes import CHOICES, EMULATED, build_recipe
from .report import Row, rows_to_json
from .session import describe_runs, series

ALL_RECIPES = tuple(name for name in CHOICES if name not in EMULATED)


@dataclass(frozen=True)
class Demo:
    """A finished demo: the comparison, the settings and the text that its runs share, and the size of the model."""

    rows: list[Row]
    config: TrainConfig
    corpus: Corpus
    parameters: int


def check_recipes(config: TrainConfig, recipes: Sequence[str] = ALL_RECIPES) -> None:
    """Check before the first step that every recipe runs here.

    Raises:
        SettingsError: one does not.
    """
    for name in recipes:
        build_recipe(name, device=config.device, emulate=config.emulate)


def run_demo(
    config: TrainConfig,
    corpus: Corpus,
    progress: Progress,
    folder: Path,
    recipes: Sequence[str] = ALL_RECIPES,
    *,
    resume: bool = False,
    options: Mapping[str, Any] | None = None,
) -> Demo:
    """Train one run per recipe, from the same seed on the same batches.

    Args:
        folder: of the demo. The runs are in `UNFINISHED` below it until `write_results` removes them.
        recipes: names; bf16 must be among them.
        resume: keep the finished runs of an interrupted demo, and continue the others from their checkpoints.
        options: of the command, which the runs keep for `--resume`.

    Raises:
        SettingsError: `folder` holds an interrupted demo and `resume` is off, or none and it is on; and as `Run`.
        TrainingError: as `Run`.
    """
    runs = folder / UNFINISHED
    if resume and not runs.exists():
        raise SettingsError(
            f"{folder} holds no interrupted demo to resume; leave --resume out to begin one, or give --out its folder"
        )
    if runs.exists() and not resume:
        finished = sum((runs / f"{name}-{config.seed}" / RESULT).exists() for name in recipes)
        raise SettingsError(
            f"{folder} holds an interrupted demo with {finished} of {counted(len(recipes), 'run')} finished; "
            "add --resume to continue it, or give --out another folder"
        )
    if (folder / COMPARED).exists():
        progress.note(f"at its end this demo replaces the earlier results in {folder}; --out keeps both")
    configs = [replace(config, recipe=name) for name in recipes]
    intro = describe_runs(config, corpus, recipes)
    if diverged := series(runs, configs, corpus, progress, resume=resume, intro=intro, options=options):
        raise TrainingError(diverged)
    comparison = compare_runs([runs / f"{name}-{config.seed}" for name in recipes])
    return Demo(comparison.rows, config, corpus, comparison.results[0].parameters)


def write_results(demo: Demo, folder: Path, *, command: str, document: Path | None) -> None:
    """Write `results.json` and `loss.png`, and the Markdown page if asked; remove the runs.

    Args:
        command: the command line, to be repeated by readers.
        document: path of the page; its picture goes into `assets/` beside it. None writes no page.
    """
    facts = machine.describe(demo.config.device)
    corpus = demo.corpus
    settings = {name: value for name, value in compared_fields(demo.config) if name != "recipe"}
    data = {"source": corpus.source, "files": corpus.files, "digest": corpus.digest}
    text = f"bytes of {corpus.source}"
    told = caption(demo.rows, parameters=demo.parameters, text=text, timed="gpu" in facts)
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "command": command,
        "machine": facts,
        "data": data,
        "parameters": demo.parameters,
        "settings": settings,
        "runs": rows_to_json(demo.rows),
    }
    write_json(folder / COMPARED, content)
    write_bytes(folder / LOSSES, draw(demo.rows, subtitle=told))
    if document is not None:
        _write_document(demo, facts, told, command, document)
    shutil.rmtree(folder / UNFINISHED, ignore_errors=True)


def _write_document(demo: Demo, facts: dict[str, str | int], subtitle: str, command: str, path: Path) -> None:
    assets = path.parent / "assets"
    assets.mkdir(parents=True, exist_ok=True)
    write_widths(lambda wide: figure(demo.rows, subtitle=subtitle, wide=wide), assets, path.stem)
    text = compose(
        demo.rows,
        config=demo.config,
        corpus=demo.corpus,
        parameters=demo.parameters,
        machine=facts,
        command=command,
        picture=f"assets/{path.stem}",
    )
    write_bytes(path, text.encode())
