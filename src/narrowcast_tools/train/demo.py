"""The demo: one small model, one text, every recipe."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from . import machine
from .atomic import write_bytes, write_json
from .config import ModelConfig, TrainConfig, compared_fields
from .data import Corpus
from .document import compose
from .loop import Run
from .picture import draw
from .progress import Progress
from .recipes import CHOICES, EMULATED, build_recipe
from .report import Row, compare, rows_to_json

# Sized so that six eager runs take well under four minutes on two CPU cores and still learn visibly. The learning
# rate is below the fastest one: there, a change of the last bit moves the final loss by as much as a recipe does.
CONFIG = TrainConfig(
    steps=240,
    batch_size=8,
    seq_len=128,
    lr=1e-3,
    warmup=40,
    eval_every=30,
    eval_batches=8,
    model=ModelConfig(dim=128, layers=2, heads=4, kv_heads=2, hidden=352),
)
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
    config: TrainConfig, corpus: Corpus, progress: Progress, recipes: Sequence[str] = ALL_RECIPES
) -> Demo:
    """Train one run per recipe, from the same seed on the same batches; bf16 must be among them."""
    results = []
    for name in recipes:
        torch.compiler.reset()  # graphs of the recipes before would count towards the compiler's limit
        results.append(Run(replace(config, recipe=name), corpus, progress, folder=None).train())
    return Demo(compare(results), config, corpus, results[0].parameters)


def write_results(demo: Demo, folder: Path, *, command: str, document: Path | None) -> None:
    """Write `results.json` and `loss.png`, and the Markdown page if asked.

    Args:
        command: the command line, to be repeated by readers.
        document: path of the page; its picture goes into `assets/` beside it. None writes no page.
    """
    facts = machine.describe(demo.config.device)
    corpus = demo.corpus
    settings = {name: value for name, value in compared_fields(demo.config) if name != "recipe"}
    data = {"source": corpus.source, "files": corpus.files, "digest": corpus.digest}
    picture = draw(
        demo.rows,
        subtitle=f"{demo.parameters:,} parameters, bytes of {corpus.source}. {machine.one_line(facts)}",
    )
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "command": command,
        "machine": facts,
        "data": data,
        "parameters": demo.parameters,
        "settings": settings,
        "runs": rows_to_json(demo.rows),
    }
    write_json(folder / "results.json", content)
    write_bytes(folder / "loss.png", picture)
    if document is not None:
        _write_document(demo, facts, picture, command, document)


def _write_document(
    demo: Demo, facts: dict[str, str | int], picture: bytes, command: str, path: Path
) -> None:
    assets = path.parent / "assets"
    assets.mkdir(parents=True, exist_ok=True)
    write_bytes(assets / f"{path.stem}.png", picture)
    text = compose(
        demo.rows,
        config=demo.config,
        corpus=demo.corpus,
        parameters=demo.parameters,
        machine=facts,
        command=command,
        picture=f"assets/{path.stem}.png",
    )
    write_bytes(path, text.encode())
