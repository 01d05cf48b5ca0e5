"""The work of `train`, `compare`, `generate`, `demo` and `presets`; `cli.commands` has their options."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from narrowcast._checks import counted

from ..interrupt import Interrupted
from ..words import AUTO, follow_up, follow_up_again
from . import automatic
from .asked import Choice, demo_settings, generate_settings, require_graphs, taken, train_settings
from .atomic import writing_into
from .comparison import compare_runs, write_comparison
from .config import RANDOM, VOCABULARY, ModelConfig, TrainConfig, override, setting_of
from .data import Corpus, load_corpus
from .demo import check_recipes, run_demo, write_results
from .device import require_compiler, resolve_device
from .errors import SettingsError, TrainingError
from .folder import COMPARED, COMPARISON, LOSSES, demo_folder, require_unmixed, run_folder
from .generate import Answer, load_trained
from .kept import options_of
from .pace import format_pace
from .pretrained import shape_of
from .progress import Progress, format_duration, make_progress
from .ranks import Ranks, folder_of_all, joined, require_ranks
from .recipes import read_recipe_table
from .report import BASELINE, SHORTEST_JUDGED, Row, remarks, terminal_table, too_few
from .session import describe_runs, run_in, run_name, series
from .tokens import TOKENIZER, load_tokens

SIZES = ("dim", "layers", "heads", "kv_heads", "hidden")
CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
"""What a terminal would obey, and what it shows instead: a model of bytes may write any character."""


def train(
    context: typer.Context,
    *,
    data: Path | None,
    tokenizer: Path | None,
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
    config, recipes = train_settings(context.params)
    shape = config.model if init == RANDOM else shape_of(Path(init), config.model)
    if tokenizer is None and init != RANDOM and (Path(init) / TOKENIZER).exists():
        tokenizer = Path(init) / TOKENIZER
    tokens = load_tokens(tokenizer)
    vocabulary = tokens.vocabulary if shape.vocabulary == VOCABULARY else shape.vocabulary
    if tokens.vocabulary > vocabulary:
        raise SettingsError(
            f"--tokenizer has {tokens.vocabulary} tokens, and the model {vocabulary}; give the model's own tokenizer"
        )
    model = override(shape, **taken(context.params, shape), vocabulary=vocabulary)
    config = replace(
        config,
        model=model,
        recipe_table=read_recipe_table(recipe_table),
        device=resolve_device(device),
    )
    if graphs:
        require_graphs(config.device, compiled=compile, by_block=by_block)
    if compile:
        require_compiler(config.device)
    require_ranks(config, parallel, tp_size, command=context.obj)
    corpus = load_corpus(data, seq_len=config.seq_len, tokens=tokens)
    choice = ""
    if recipes == [AUTO]:
        config, choice = automatic.choose(config, alone=parallel is None)
        recipes = [config.recipe]
    check_recipes(config, recipes)
    configs = [replace(config, recipe=name, seed=seed + i) for name in recipes for i in range(seeds)]
    kept: dict[str, Any] = {"tokenizer": tokens.content, "tensorboard": tensorboard}
    kept["options"] = options_of(context)
    sizes = _sizes(context.params, model) if init == RANDOM else ""
    kept["intro"] = "; ".join(filter(None, (describe_runs(config, corpus, recipes, seeds), sizes, choice)))
    with joined(config, parallel, tp_size) as ranks, folder_of_all(out, ranks, resume=resume) as folder:
        progress = make_progress(Console(stderr=True), silent=not ranks.first)
        if not resume:
            require_unmixed(folder, several=len(configs) > 1)
        if len(configs) == 1:
            _train_one(
                folder, configs[0], corpus, progress, resume=resume, told=out is None, ranks=ranks, **kept
            )
            return
        if resume and not any((folder / run_name(config)).exists() for config in configs):
            raise SettingsError(
                f"{folder} has none of these runs to resume; give --out their folder, or leave --resume out"
            )
        if out is None:
            progress.note(f"the runs are in {folder}")
        diverged = series(folder, configs, corpus, progress, resume=resume, ranks=ranks, **kept)
        if not ranks.first:
            return
        try:
            _compare([folder], folder, context.obj)
        except SettingsError as error:  # the runs are there, and perhaps more are to come
            progress.note(f"not compared: {error}")
        except KeyboardInterrupt as error:
            raise Interrupted("interrupted while the runs were compared", resumable=True) from error
        if diverged:
            raise TrainingError(diverged)


def _sizes(given: Mapping[str, Any], model: ModelConfig) -> str:
    """Return which sizes stay those of the preset where some are given."""
    own = [name for name in SIZES if given[name] is not None]
    rest = [name for name in SIZES if given[name] is None]
    if not own or not rest:
        return ""
    words = [", ".join(setting_of(name, getattr(model, name)) for name in names) for names in (own, rest)]
    return f"{words[0]} and, from --preset {given['preset']}, {words[1]}"


def _train_one(
    folder: Path, config: TrainConfig, corpus: Corpus, progress: Progress, *, ranks: Ranks, **kept: Any
) -> None:
    result = run_in(folder, config, corpus, progress, ranks=ranks, **kept)
    if ranks.first:
        pace = f", {format_pace(result.pace, ', ')}" if result.pace.tokens_per_second else ""
        typer.echo(
            f"{config.recipe}: held-out loss {result.held_out_loss:.4f} nats per {corpus.unit} after "
            f"{counted(result.steps, 'step')}\n"
            f"  {result.parameters:,} parameters{pace}, time {format_duration(result.seconds)}\n"
            f"  run in {folder}\n"
            f"picture: {folder / LOSSES}\n"
            f"{follow_up('generate', folder, '--prompt', 'Once upon ')}"
        )


def compare(context: typer.Context, runs: list[Path], out: Path | None) -> None:
    """Run `narrowcast compare`."""
    with run_folder(out, resume=False, prefix=COMPARISON) as folder:
        require_unmixed(folder, several=True)
        _compare(runs, folder, context.obj)


def _compare(runs: list[Path], out: Path, command: str) -> None:
    comparison = compare_runs(runs)
    with writing_into(out):
        write_comparison(comparison, out, command=command)
    _show(comparison.rows, unit=comparison.unit, timed=comparison.timed, diverged=comparison.diverged)
    for note in comparison.notes:
        Console().print(note, highlight=False)
    typer.echo(f"picture: {out / LOSSES}\nnumbers: {out / 'summary.csv'}, {out / 'losses.csv'}")
    typer.echo(follow_up("generate", comparison.best, "--prompt", "Once upon "))


def _show(rows: Sequence[Row], *, timed: bool, unit: str = "byte", diverged: Sequence[dict] = ()) -> None:
    console = Console()
    console.print(terminal_table(rows, unit, timed=timed, diverged=diverged))
    for remark in remarks(rows, timed=timed):
        console.print(remark, highlight=False)


def generate(
    context: typer.Context,
    run: Path,
    *,
    prompt: str,
    tokens: int,
    samples: int,
    seed: int,
    device: str,
    compile: bool,
    graphs: bool,
    emulate: bool,
    **_: Any,
) -> None:
    """Run `narrowcast generate`."""
    choice, recipe = generate_settings(context.params)
    place = resolve_device(device)
    if graphs:
        require_graphs(place, compiled=compile)
    if compile:
        require_compiler(place)
    trained = load_trained(run, device=place, recipe=recipe, emulate=emulate)
    answer = Answer(trained, prompt, tokens, samples=samples)
    progress = make_progress(Console(stderr=True))
    for line in trained.passed_over:
        progress.note(line)
    if trained.config.init == RANDOM and (few := too_few(trained.step)):
        progress.note(f"{few} for text that can be read; train {SHORTEST_JUDGED} or more")
    if answer.remark:
        progress.note(answer.remark)
    begun = False
    try:
        for text in answer.texts(choice, seed=seed, compile=compile, graphs=graphs):
            typer.echo(text.translate(CONTROLS) if sys.stdout.isatty() else text, nl=False)
            begun = True
    finally:
        if begun:  # whatever comes next has a line of its own
            typer.echo()
    progress.note(answer.pace)
    option, value = ("--samples", 4) if samples == 1 else ("--seed", seed + 1)
    if choice.greedy:
        option, value = (
            ("--top-k", Choice.top_k) if choice.temperature else ("--temperature", Choice.temperature)
        )
    other = "or --recipe bf16, to compute in bf16" * ((recipe or trained.config.recipe) != BASELINE)
    typer.echo(follow_up_again(context.obj, option, value, other), err=True)


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
    config = replace(demo_settings(context.params), device=resolve_device(device))
    out = demo_folder(out, quick=quick)
    if compile:
        require_compiler(config.device)
    progress = make_progress(Console(stderr=True))
    corpus = load_corpus(data, seq_len=config.seq_len)
    check_recipes(config)
    with run_folder(out, resume=resume):
        finished = run_demo(config, corpus, progress, out, resume=resume, options=options_of(context))
        try:
            with writing_into(out):
                write_results(finished, out, command=context.obj, document=write_docs)
        except KeyboardInterrupt as error:
            raise Interrupted("interrupted while the results were written", resumable=True) from error
    _show(finished.rows, timed=config.device != "cpu")
    typer.echo(f"picture: {out / LOSSES}\nnumbers: {out / COMPARED}")
    typer.echo(follow_up("train", "--recipe", "bf16,current", *(() if data is None else ("--data", data))))
