"""The commands `train`, `demo`, `presets` and `doctor`."""

from dataclasses import asdict, replace
from json import dumps
from pathlib import Path
from typing import Annotated, Optional

import typer
from rich.console import Console

from .._version import __version__
from .atomic import write_json, writing_into
from .config import TrainConfig, compared_fields, override, require_compiler, resolve_device
from .data import Corpus, load_corpus
from .demo import CONFIG, check_recipes, run_demo, write_results
from .doctor import examine
from .errors import SettingsError
from .folder import run_folder
from .history import RunResult
from .loop import Run
from .machine import describe
from .pace import format_pace
from .presets import PRESETS, find_preset, presets_table
from .progress import format_duration, make_progress
from .recipes import CHOICES, read_recipe_table
from .report import terminal_table

app = typer.Typer(
    name="narrowcast",
    help="Train a small Transformer in low precision, compare the recipes, check what this machine runs.",
    add_completion=False,
)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"narrowcast {__version__}")
        raise typer.Exit


@app.callback()
def program(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


# Typer reads annotations at run time and, in its older releases, not the `X | None` of newer Pythons.
Data = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(help="Text file, or folder of text files; left out: the Python standard library's sources."),
]
RunFolder = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(
        help="Folder of the run: checkpoints and result.json; left out: the next runs/train-NNN, "
        "with --resume the last one.",
        show_default=False,
    ),
]
Document = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(help="Also write the result as a Markdown page, with its picture in assets/ beside it."),
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Compile = Annotated[bool, typer.Option("--compile/--no-compile", help="Use torch.compile(fullgraph=True).")]
Emulate = Annotated[
    bool,
    typer.Option(
        "--emulate/--no-emulate", help="On a GPU: run recipes it has no kernels for, by exact dequantization."
    ),
]
Word = Optional[str]  # noqa: UP045
Count = Optional[int]  # noqa: UP045
Real = Optional[float]  # noqa: UP045
Flag = Optional[bool]  # noqa: UP045
OF_PRESET = "preset's"
SHAPES = ", ".join(
    f"{name}: {c.model.layers} layers of {c.model.dim}/{c.model.hidden}" for name, c in PRESETS.items()
)


def _preset_option(text: str = "", *names: str) -> typer.models.OptionInfo:
    return typer.Option(*names, help=text or None, show_default=OF_PRESET)


@app.command()
def train(
    preset: Annotated[
        str, typer.Option(help=f"Shape, batch and schedule. {SHAPES}. All of it: narrowcast presets.")
    ] = "tiny",
    data: Data = None,
    recipe: Annotated[str, typer.Option(help=f"none (the same as bf16), {', '.join(CHOICES)}.")] = "bf16",
    recipe_table: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            help="JSON file from patterns of layer names to recipes, laid over --recipe, "
            "as nc.recipe.recipes_to_json writes it.",
            show_default=False,
        ),
    ] = None,
    keep_bf16: Annotated[
        str,
        typer.Option(
            help="Patterns of layers that stay in bfloat16, such as 'blocks.0,blocks.11,head' or 'blocks.*.attention'."
        ),
    ] = "",
    out: RunFolder = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue the run in --out; repeat its other options. More or fewer --steps move the schedule's end.",
        ),
    ] = False,
    device: Device = "auto",
    compile: Compile = False,
    emulate: Emulate = False,
    recompute: Annotated[
        bool,
        typer.Option(
            "--recompute/--no-recompute",
            help="Activation checkpointing: keep only the input of each block, run it again in the backward.",
        ),
    ] = False,
    steps: Annotated[Count, _preset_option()] = None,
    batch_size: Annotated[Count, _preset_option("Sequences per step.")] = None,
    accumulate: Annotated[
        int, typer.Option(help="Parts that a step's batch is run in: less memory, the same step.")
    ] = TrainConfig.accumulate,
    seq_len: Annotated[Count, _preset_option("Tokens per sequence.")] = None,
    lr: Annotated[Real, _preset_option("Peak learning rate.")] = None,
    warmup: Annotated[Count, _preset_option("Steps of linear warmup, before the cosine.")] = None,
    weight_decay: Annotated[Real, _preset_option()] = None,
    clip: Annotated[Real, _preset_option("Largest gradient norm.")] = None,
    seed: Annotated[int, typer.Option()] = TrainConfig.seed,
    eval_every: Annotated[Count, _preset_option("Steps between evaluations.")] = None,
    eval_batches: Annotated[Count, _preset_option("Batches per evaluation.")] = None,
    save_every: Annotated[Count, _preset_option("Steps between checkpoints.")] = None,
    dim: Annotated[Count, _preset_option("Width of the model.")] = None,
    layers: Annotated[Count, _preset_option()] = None,
    heads: Annotated[Count, _preset_option("Query heads.")] = None,
    kv_heads: Annotated[Count, _preset_option("Key and value heads.")] = None,
    hidden: Annotated[Count, _preset_option("Width of the feed-forward layer.")] = None,
    tie_embeddings: Annotated[
        Flag,
        _preset_option("Share the embedding with the head.", "--tie-embeddings/--no-tie-embeddings"),
    ] = None,
) -> None:
    """Train a small Llama-style model on bytes of text."""
    start = find_preset(preset)
    shape = {"dim": dim, "layers": layers, "heads": heads, "kv_heads": kv_heads, "hidden": hidden}
    config = override(
        start,
        model=override(start.model, **shape, tie_embeddings=tie_embeddings),
        recipe=recipe,
        recipe_table=read_recipe_table(recipe_table),
        keep_bf16=keep_bf16,
        emulate=emulate,
        device=resolve_device(device),
        compile=compile,
        recompute=recompute,
        steps=steps,
        batch_size=batch_size,
        accumulate=accumulate,
        seq_len=seq_len,
        lr=lr,
        warmup=warmup,
        weight_decay=weight_decay,
        clip=clip,
        seed=seed,
        eval_every=eval_every,
        eval_batches=eval_batches,
        save_every=save_every,
    )
    if compile:
        require_compiler(config.device)
    corpus = load_corpus(data, seq_len=config.seq_len)
    progress = make_progress(Console(stderr=True))
    with run_folder(out, resume=resume) as folder:
        run = Run(config, corpus, progress, folder / "checkpoints", resume=resume)
        if out is None:
            progress.note(f"the run is in {folder}")
        if corpus.remark:
            progress.note(corpus.remark)
        result = run.train()
        report = folder / "result.json"
        if run.first_step < config.steps or not report.exists():  # resuming a finished run measures no speed
            with writing_into(folder):
                write_json(report, _summary(config, corpus, result))
    speed = f", {format_pace(result.pace, ', ')}" if result.pace.tokens_per_second else ""
    typer.echo(
        f"{config.recipe}: held-out loss {result.held_out_loss:.4f} nats per byte after {result.steps} steps "
        f"({result.parameters:,} parameters{speed}, {format_duration(result.seconds)}); run in {folder}"
    )


def _summary(config: TrainConfig, corpus: Corpus, result: RunResult) -> dict[str, object]:
    return {
        "machine": describe(config.device),
        "data": {"source": corpus.source, "digest": corpus.digest},
        "settings": dict(compared_fields(config)),
        "parameters": result.parameters,
        "held_out_loss": result.held_out_loss,
        "tokens_per_second": result.pace.tokens_per_second,
        "mfu": result.pace.mfu,
        "peak_memory": result.pace.memory,
        "seconds": result.seconds,
        "history": result.history.to_json(),
    }


@app.command()
def demo(
    context: typer.Context,
    data: Data = None,
    out: Annotated[Path, typer.Option(help="Folder for loss.png and results.json.")] = Path("runs/demo"),
    write_docs: Document = None,
    device: Device = "auto",
    compile: Compile = False,
    emulate: Emulate = False,
    steps: Annotated[int, typer.Option()] = CONFIG.steps,
    seed: Annotated[int, typer.Option()] = CONFIG.seed,
) -> None:
    """Train every recipe on the same text and show table and picture of their losses."""
    config = replace(
        CONFIG, device=resolve_device(device), compile=compile, emulate=emulate, steps=steps, seed=seed
    )
    if write_docs is not None and write_docs.suffix != ".md":
        raise SettingsError(f"--write-docs is {write_docs}; give it a file that ends in .md")
    if compile:
        require_compiler(config.device)
    progress = make_progress(Console(stderr=True))
    corpus = load_corpus(data, seq_len=config.seq_len)
    check_recipes(config)
    with run_folder(out, resume=False):
        if corpus.remark:
            progress.note(corpus.remark)
        finished = run_demo(config, corpus, progress)
        with writing_into(out):
            write_results(finished, out, command=context.obj, document=write_docs)
    Console().print(terminal_table(finished.rows))
    typer.echo(f"picture: {out / 'loss.png'}   numbers: {out / 'results.json'}")


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
