"""The commands `train`, `bench`, `plan`, `compare`, `generate`, `demo`, `presets` and `doctor`."""

from dataclasses import asdict, replace
from json import dumps
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from narrowcast._version import __version__

from ..bench.command import bench
from ..plan.command import plan
from . import options as o
from .atomic import writing_into
from .comparison import compare_runs, write_comparison
from .config import TrainConfig, override, require_compiler, require_graphs, resolve_device
from .data import Corpus, load_corpus
from .demo import CONFIG, QUICK, check_recipes, run_demo, write_results
from .doctor import examine
from .errors import SettingsError
from .folder import run_folder
from .generate import Answer, Choice, load_trained
from .pace import format_pace
from .presets import find_preset, presets_table
from .progress import Progress, format_duration, make_progress
from .ranks import Ranks, folder_of_all, joined, require_ranks
from .recipes import read_recipe_table, recipe_name
from .report import terminal_table
from .session import run_in, series
from .tokens import load_tokens

app = typer.Typer(
    name="narrowcast",
    help="Train a small Transformer in low precision, compare the recipes, check what this machine runs.",
    add_completion=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"narrowcast {__version__}")
        raise typer.Exit


@app.callback()
def program(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


@app.command()
def train(
    context: typer.Context,
    preset: o.Preset = "tiny",
    data: o.Data = None,
    tokenizer: o.TokenizerFile = None,
    recipe: o.Recipe = "bf16",
    recipe_table: o.RecipeTable = None,
    keep_bf16: o.KeepBf16 = "",
    out: o.RunFolder = None,
    resume: o.Resume = False,
    tensorboard: o.TensorBoard = False,
    parallel: o.Parallel = None,
    tp_size: o.TpSize = None,
    device: o.Device = "auto",
    seed: o.Seed = TrainConfig.seed,
    seeds: o.Seeds = 1,
    compile: o.Compile = False,
    by_block: o.ByBlock = False,
    graphs: o.Graphs = False,
    emulate: o.Emulate = False,
    recompute: o.Recompute = False,
    accumulate: o.Accumulate = TrainConfig.accumulate,
    steps: o.Steps = None,
    batch_size: o.BatchSize = None,
    seq_len: o.SeqLen = None,
    lr: o.LearningRate = None,
    warmup: o.Warmup = None,
    weight_decay: o.WeightDecay = None,
    clip: o.Clip = None,
    eval_every: o.EvalEvery = None,
    eval_batches: o.EvalBatches = None,
    save_every: o.SaveEvery = None,
    dim: o.Dim = None,
    layers: o.Layers = None,
    heads: o.Heads = None,
    kv_heads: o.KvHeads = None,
    hidden: o.Hidden = None,
    tie_embeddings: o.TieEmbeddings = None,
) -> None:
    """Train a small Llama-style model on text; with several recipes or seeds, compare them."""
    given = dict(context.params)
    start = find_preset(preset)
    tokens = load_tokens(tokenizer)
    model = override(start.model, **_taken(given, start.model), vocabulary=tokens.vocabulary)
    recipes = [recipe_name(word.strip()) for word in recipe.split(",")]
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
    check_recipes(config, recipes)
    configs = [replace(config, recipe=name, seed=seed + i) for name in recipes for i in range(_count(seeds))]
    kept: dict[str, Any] = {"tokenizer": tokens.content, "tensorboard": tensorboard}
    with joined(config, parallel, tp_size) as ranks, folder_of_all(out, ranks, resume=resume) as folder:
        progress = make_progress(Console(stderr=True), silent=not ranks.first)
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
            f"{result.steps} steps ({result.parameters:,} parameters{pace}, {format_duration(result.seconds)}); "
            f"run in {folder}"
        )


def _taken(given: dict[str, object], settings: object) -> dict[str, object]:
    """Return the options that are settings of a part."""
    return {name: value for name, value in given.items() if name in vars(settings)}


def _count(seeds: int) -> int:
    if seeds < 1:
        raise SettingsError(f"--seeds is {seeds}; it must be at least 1")
    return seeds


@app.command()
def compare(
    context: typer.Context,
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, or folders that hold some.")],
    out: Annotated[
        Path, typer.Option(help="Folder for loss.png, losses.csv, summary.csv and results.json.")
    ] = Path("runs/comparison"),
) -> None:
    """Compare finished runs of train: a table, a picture with the spread over seeds, and the numbers."""
    with run_folder(out, resume=False):
        _compare(runs, out, context.obj)


def _compare(runs: list[Path], out: Path, command: str) -> None:
    comparison = compare_runs(runs)
    with writing_into(out):
        write_comparison(comparison, out, command=command)
    Console().print(terminal_table(comparison.rows, unit=comparison.unit))
    typer.echo(f"picture: {out / 'loss.png'}   numbers: {out / 'summary.csv'}, {out / 'losses.csv'}")


@app.command()
def generate(
    run: Annotated[Path, typer.Argument(help="Folder of a run of train, or of one of its checkpoints.")],
    prompt: Annotated[str, typer.Option(help="Text to continue.", show_default="a line's end")] = "\n",
    tokens: Annotated[int, typer.Option(help="Tokens to make.")] = 100,
    temperature: Annotated[
        float, typer.Option(help="Below 1 likelier tokens, above 1 rarer ones; 0 takes the likeliest.")
    ] = Choice.temperature,
    top_k: Annotated[
        int, typer.Option(help="Draw from so many of the likeliest tokens; 0 draws from all.")
    ] = Choice.top_k,
    samples: Annotated[int, typer.Option(help="Continuations that are made together.")] = 1,
    seed: Annotated[int, typer.Option(help="Of the drawing.")] = 0,
    recipe: Annotated[
        str | None, typer.Option(help="Recipe in place of the run's, such as bf16.", show_default="the run's")
    ] = None,
    device: o.Device = "auto",
    compile: o.Compile = False,
    graphs: o.Graphs = False,
    emulate: o.Emulate = False,
) -> None:
    """Continue a text with a trained model, token by token, keeping keys and values in a cache."""
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


@app.command()
def demo(
    context: typer.Context,
    data: o.Data = None,
    quick: Annotated[
        bool, typer.Option("--quick", help=f"{QUICK.steps} steps: half a minute on two CPU cores.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for loss.png and results.json.",
            show_default="runs/demo, with --quick runs/demo-quick",
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue an interrupted demo; repeat its other options.")
    ] = False,
    write_docs: o.Document = None,
    device: o.Device = "auto",
    compile: o.Compile = False,
    emulate: o.Emulate = False,
    steps: Annotated[
        int | None,
        typer.Option(
            help="Optimizer steps per recipe.", show_default=f"{CONFIG.steps}, with --quick {QUICK.steps}"
        ),
    ] = None,
    seed: o.Seed = CONFIG.seed,
) -> None:
    """Train each recipe that GPUs run natively on the same text; show table and picture of their losses."""
    config = override(
        QUICK if quick else CONFIG,
        device=resolve_device(device),
        compile=compile,
        emulate=emulate,
        steps=steps,
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
    Console().print(terminal_table(finished.rows))
    typer.echo(f"picture: {out / 'loss.png'}   numbers: {out / 'results.json'}")


app.command()(bench)
app.command()(plan)


@app.command()
def presets() -> None:
    """Show what each --preset of train sets."""
    Console().print(presets_table())


@app.command()
def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON, for programs.")] = False,
) -> int:
    """Show what this machine runs natively, what it emulates, and the versions found."""
    findings = []
    for finding in examine():
        findings.append(finding)
        if not json:  # one by one: the later ones take a while
            typer.echo(f"{finding.subject:<12} {finding.text}")
    healthy = not any(finding.broken for finding in findings)
    if json:
        typer.echo(dumps({"healthy": healthy, "findings": [asdict(f) for f in findings]}, indent=1))
    else:
        typer.echo(f"{'verdict':<12} {'this machine can train' if healthy else 'something above is broken'}")
    return 0 if healthy else 1
