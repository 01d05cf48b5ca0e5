"""The work of `train`, `compare`, `generate`, `demo` and `presets`; `cli.commands` has their options."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from narrowcast._checks import counted, shown

from . import automatic
from .atomic import writing_into
from .comparison import compare_runs, write_comparison
from .config import (
    RANDOM,
    VOCABULARY,
    TrainConfig,
    override,
    require_compiler,
    require_graphs,
    resolve_device,
)
from .data import Corpus, load_corpus
from .demo import CONFIG, QUICK, check_recipes, run_demo, with_steps, write_results
from .errors import SettingsError
from .folder import run_folder
from .generate import Answer, Choice, load_trained
from .pace import format_pace
from .presets import find_preset
from .pretrained import shape_of
from .progress import Progress, format_duration, make_progress
from .ranks import Ranks, folder_of_all, joined, require_ranks
from .recipes import read_recipe_table, recipe_name
from .report import Row, remarks, terminal_table
from .session import COMPARED, describe_runs, run_in, series
from .tokens import TOKENIZER, load_tokens

MOST_SEEDS = 1000


def train(
    context: typer.Context,
    *,
    preset: str,
    data: Path | None,
    tokenizer: Path | None,
    recipe: str,
    recipe_table: Path | None,
    out: Path | None,
    resume: bool,
    tensorboard: bool,
    parallel: str | None,
    tp_size: int | None,
    device: str,
    seed: int,
    seeds: int,
    compile: bool,
    by_block: bool,
    graphs: bool,
    seq_len: int | None,
    init: str,
    **settings: Any,
) -> None:
    """Run `narrowcast train`: one run, or one for each recipe and seed and their comparison."""
    given, seeds = dict(context.params), _count(seeds)
    start = find_preset(preset)
    shape = start.model if init == RANDOM else shape_of(Path(init), start.model)
    if tokenizer is None and init != RANDOM and (Path(init) / TOKENIZER).exists():
        tokenizer = Path(init) / TOKENIZER
    tokens = load_tokens(tokenizer)
    vocabulary = tokens.vocabulary if shape.vocabulary == VOCABULARY else shape.vocabulary
    if tokens.vocabulary > vocabulary:
        raise SettingsError(
            f"--tokenizer has {tokens.vocabulary} tokens, and the model {vocabulary}; give the model's own tokenizer"
        )
    model = override(shape, **_taken(given, shape), vocabulary=vocabulary)
    automatically, choice = recipe.strip() == automatic.AUTO, ""
    words = [word.strip() for word in recipe.split(",")]
    if "" in words:
        raise SettingsError(
            f"--recipe is {shown(recipe)}, with nothing beside a comma; give names between commas"
        )
    recipes = ["bf16"] if automatically else [recipe_name(word, "--recipe", automatic.AUTO) for word in words]
    for at, name in enumerate(recipes):
        if name in recipes[:at]:
            raise SettingsError(
                f"--recipe names {name} twice; name it once, and give --seeds for more runs of it"
            )
    config = override(
        start,
        **{
            **_taken(given, start),
            "model": model,
            "recipe": recipes[0],
            "recipe_table": read_recipe_table(recipe_table),
            "device": resolve_device(device),
        },
    )
    if graphs:
        require_graphs(config.device, compiled=compile, by_block=by_block)
    if compile:
        require_compiler(config.device)
    elif by_block:
        raise SettingsError("--by-block says how to compile, and --compile is not given; add --compile")
    require_ranks(config, parallel, tp_size, command=context.obj)
    corpus = load_corpus(data, seq_len=config.seq_len, tokens=tokens)
    if automatically:
        config, choice = automatic.choose(config, alone=parallel is None)
        recipes = [config.recipe]
    check_recipes(config, recipes)
    configs = [replace(config, recipe=name, seed=seed + i) for name in recipes for i in range(seeds)]
    kept: dict[str, Any] = {"tokenizer": tokens.content, "tensorboard": tensorboard}
    kept["intro"] = describe_runs(config, corpus, recipes, seeds)
    with joined(config, parallel, tp_size) as ranks, folder_of_all(out, ranks, resume=resume) as folder:
        progress = make_progress(Console(stderr=True), silent=not ranks.first)
        if choice:
            progress.note(choice)
        if len(configs) == 1:
            _train_one(folder, config, corpus, progress, resume=resume, told=out is None, ranks=ranks, **kept)
            return
        series(folder, configs, corpus, progress, resume=resume, ranks=ranks, **kept)
        if not ranks.first:
            return
        try:
            _compare([folder], folder, context.obj)
        except SettingsError as error:  # the runs are there, and perhaps more are to come
            progress.note(f"not compared: {error}")


def _train_one(
    folder: Path, config: TrainConfig, corpus: Corpus, progress: Progress, *, ranks: Ranks, **kept: Any
) -> None:
    result = run_in(folder, config, corpus, progress, ranks=ranks, **kept)
    if ranks.first:
        pace = f", {format_pace(result.pace, ', ')}" if result.pace.tokens_per_second else ""
        typer.echo(
            f"{config.recipe}: held-out loss {result.held_out_loss:.4f} nats per {corpus.unit} after "
            f"{counted(result.steps, 'step')} ({result.parameters:,} parameters{pace}, "
            f"{format_duration(result.seconds)}); run in {folder}"
        )


def _taken(given: dict[str, object], settings: object) -> dict[str, object]:
    """Return the options that are settings of a part."""
    return {name: value for name, value in given.items() if name in vars(settings)}


def _count(seeds: int) -> int:
    if not 1 <= seeds <= MOST_SEEDS:
        raise SettingsError(
            f"--seeds is {seeds}, the runs to compare per recipe; it must be at least 1 and at most {MOST_SEEDS}"
        )
    return seeds


def compare(context: typer.Context, runs: list[Path], out: Path) -> None:
    """Run `narrowcast compare`."""
    with run_folder(out, resume=False):
        _compare(runs, out, context.obj)


def _compare(runs: list[Path], out: Path, command: str) -> None:
    comparison = compare_runs(runs)
    with writing_into(out):
        write_comparison(comparison, out, command=command)
    _show(comparison.rows, unit=comparison.unit, timed=comparison.timed)
    typer.echo(f"picture: {out / 'loss.png'}   numbers: {out / 'summary.csv'}, {out / 'losses.csv'}")


def _show(rows: Sequence[Row], *, timed: bool, unit: str = "byte") -> None:
    console = Console()
    console.print(terminal_table(rows, unit, timed=timed))
    for remark in remarks(rows, timed=timed):
        console.print(remark, highlight=False)


def generate(
    run: Path,
    *,
    prompt: str,
    tokens: int,
    temperature: float,
    top_k: int,
    samples: int,
    seed: int,
    recipe: str | None,
    device: str,
    compile: bool,
    graphs: bool,
    emulate: bool,
) -> None:
    """Run `narrowcast generate`."""
    choice = Choice(temperature, top_k)
    place = resolve_device(device)
    if graphs:
        require_graphs(place, compiled=compile)
    if compile:
        require_compiler(place)
    name = None if recipe is None else recipe_name(recipe)
    trained = load_trained(run, device=place, recipe=name, emulate=emulate)
    answer = Answer(trained, prompt, tokens, samples=samples)
    progress = make_progress(Console(stderr=True))
    if answer.remark:
        progress.note(answer.remark)
    for text in answer.texts(choice, seed=seed, compile=compile, graphs=graphs):
        typer.echo(text, nl=False)
    typer.echo()
    progress.note(answer.pace)


def demo(
    context: typer.Context,
    *,
    data: Path | None,
    quick: bool,
    out: Path | None,
    resume: bool,
    write_docs: Path | None,
    device: str,
    compile: bool,
    emulate: bool,
    steps: int | None,
    seed: int,
) -> None:
    """Run `narrowcast demo`."""
    start = QUICK if quick else CONFIG
    config = override(
        start if steps is None else with_steps(start, steps),
        device=resolve_device(device),
        compile=compile,
        emulate=emulate,
        seed=seed,
    )
    out = out or Path("runs/demo-quick" if quick else "runs/demo")
    if write_docs is not None and write_docs.suffix != ".md":
        raise SettingsError(f"--write-docs is {write_docs}; give it a file that ends in .md")
    if compile:
        require_compiler(config.device)
    progress = make_progress(Console(stderr=True))
    corpus = load_corpus(data, seq_len=config.seq_len)
    check_recipes(config)
    with run_folder(out, resume=resume):
        finished = run_demo(config, corpus, progress, out, resume=resume)
        with writing_into(out):
            write_results(finished, out, command=context.obj, document=write_docs)
    _show(finished.rows, timed=config.device != "cpu")
    typer.echo(f"picture: {out / 'loss.png'}   numbers: {out / COMPARED}")
