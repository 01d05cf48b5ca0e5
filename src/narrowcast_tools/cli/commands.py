"""The commands: names, options and help. Each is declared without a body, and its work is imported when it runs."""

from __future__ import annotations

import functools
import runpy
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from ..bench.asked import MODES, RECIPES, bench_settings
from ..plan.layout import BATCH, BATCH_PER_GPU
from ..train.asked import Choice, compare_settings, demo_settings, generate_settings, train_settings
from ..train.presets import DEMO, QUICK, QUICK_TIME
from . import options as o


def _without_types_of_flags(params: list[Any]) -> list[Any]:
    """Return parameters whose help shows no type for options without a value."""
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
    return params


class _Command(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types_of_flags(super().get_params(ctx))


_ALL = "narrowcast.help-all"


class _LongCommand(_Command):
    """A command whose `--help` shows the options of `options.OFTEN`, and whose `--help-all` shows every option."""

    def get_params(self, ctx: Any) -> list[Any]:
        params = super().get_params(ctx)
        for param in params:
            param.hidden = _ALL not in ctx.meta and param.name not in o.OFTEN
        return params


def _show_all_options(context: typer.Context, wanted: bool) -> None:
    if wanted:
        context.meta[_ALL] = True
        typer.echo(context.get_help())
        raise typer.Exit


class _Group(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types_of_flags(super().get_params(ctx))


app = typer.Typer(
    name="narrowcast",
    cls=_Group,
    help="Train a small Transformer in low precision, compare recipes, check this machine. "
    "First: narrowcast doctor, then narrowcast demo --quick.",
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _command(
    module: str,
    cls: type[TyperCommand] = _Command,
    check: Callable[[Mapping[str, Any]], object] | None = None,
) -> Callable[[Callable[..., Any]], None]:
    """Declare a command by a function's name, options and docstring.

    Args:
        module: of narrowcast_tools; its function of the same name takes the options and does the work.
        cls: class of the command, which shows its help.
        check: refuses wrong values before the module is imported, and PyTorch with it.
    """

    def declare(declaration: Callable[..., Any]) -> None:
        @app.command(cls=cls)
        @functools.wraps(declaration)
        def run(**given: Any) -> Any:
            if check is not None:
                check(given)
            if "context" in given:  # whose paths are text in typer 0.27
                given["context"].params.update((name, given[name]) for name in given["context"].params)
            return getattr(import_module(f"narrowcast_tools.{module}"), declaration.__name__)(**given)

    return declare


def _show_version(wanted: bool) -> None:
    if wanted:
        library = find_spec("narrowcast")  # importing the library would load PyTorch
        assert library is not None and library.origin is not None
        version = runpy.run_path(str(Path(library.origin).with_name("_version.py")))["__version__"]
        typer.echo(f"narrowcast {version}")
        raise typer.Exit


@app.callback()
def _program(
    version: Annotated[
        bool, typer.Option("--version", "-V", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


@_command("train.commands", _LongCommand, train_settings)
def train(
    context: typer.Context,
    preset: o.Preset = "tiny",
    init: o.Init = "random",
    data: o.Data = None,
    tokenizer: o.TokenizerFile = None,
    recipe: o.Recipe = "auto",
    recipe_table: o.RecipeTable = None,
    head_recipe: o.HeadRecipe = "bf16",
    keep_bf16: o.KeepBf16 = "",
    out: o.RunFolder = None,
    resume: o.Resume = False,
    tensorboard: o.TensorBoard = False,
    parallel: o.Parallel = None,
    tp_size: o.TpSize = None,
    device: o.Device = "auto",
    seed: o.Seed = o.SEED,
    seeds: o.Seeds = 1,
    compile: o.Compile = False,
    by_block: o.ByBlock = False,
    graphs: o.Graphs = False,
    emulate: o.Emulate = False,
    recompute: o.Recompute = None,
    accumulate: o.Accumulate = None,
    optimizer: o.Optimizer = None,
    chunked_loss: o.ChunkedLoss = None,
    saved_activations: o.SavedActivations = None,
    step_in_backward: o.StepInBackward = None,
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
    help_all: Annotated[
        bool,
        typer.Option(
            "--help-all",
            callback=_show_all_options,
            is_eager=True,
            expose_value=False,
            help="Show all options and exit.",
        ),
    ] = False,
) -> None:
    """Train a small Llama-style model on text; with several recipes or seeds, compare them."""


@_command("train.commands", check=compare_settings)
def compare(
    context: typer.Context,
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, or their parent folders.")],
    out: Annotated[
        Path, typer.Option(help="Folder for loss.png, losses.csv, summary.csv and results.json.")
    ] = Path("runs/comparison"),
) -> None:
    """Compare finished runs of train: a table, a picture with the spread over seeds, and the numbers."""


@_command("train.commands", check=generate_settings)
def generate(
    context: typer.Context,
    run: Annotated[Path, typer.Argument(help="Folder of a training run or of one of its checkpoints.")],
    prompt: Annotated[str, typer.Option(help="Text to continue.", show_default="newline")] = "\n",
    tokens: Annotated[int, typer.Option(help="Tokens to generate.")] = 100,
    temperature: Annotated[
        float, typer.Option(help="Below 1 favors likely tokens, above 1 rare ones; 0 takes the likeliest.")
    ] = Choice.temperature,
    top_k: Annotated[
        int, typer.Option(help="Sample from this many of the likeliest tokens; 0: from all.")
    ] = Choice.top_k,
    samples: Annotated[int, typer.Option(help="Continuations, generated together.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    recipe: Annotated[
        str | None, typer.Option(help="Recipe in place of the run's, such as bf16.", show_default="the run's")
    ] = None,
    device: o.Device = "auto",
    compile: o.Compile = False,
    graphs: o.Graphs = False,
    emulate: o.Emulate = False,
) -> None:
    """Continue a text with a trained model, token by token, keeping keys and values in a cache."""


@_command("train.commands", check=demo_settings)
def demo(
    context: typer.Context,
    data: o.Data = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help=f"{QUICK.steps} steps: about {QUICK_TIME} of a CPU core with AVX-512."),
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
            help="Optimizer steps per recipe.", show_default=f"{DEMO.steps}, with --quick {QUICK.steps}"
        ),
    ] = None,
    seed: o.Seed = o.SEED,
) -> None:
    """Train each recipe that GPUs run natively on the same text; show table and picture of their losses."""


@_command("bench.command", check=bench_settings)
def bench(
    context: typer.Context,
    suite: Annotated[
        str,
        typer.Argument(
            help="layers, models, all, or tiny: a check in seconds; account: where a step's time goes, on a GPU.",
            show_default="all, on a CPU tiny",
        ),
    ] = "",
    model: Annotated[
        str, typer.Option(help="Model of account: small, 8b-4 (four layers of the 8B shape), 1b.")
    ] = "1b",
    only: Annotated[str, typer.Option(help="Run only benchmarks whose name contains this.")] = "",
    recipes: Annotated[
        str, typer.Option(help=f"Any of {', '.join(RECIPES)}, separated by commas.")
    ] = "delayed,current,block",
    modes: Annotated[
        str, typer.Option(help=f"Any of {', '.join(MODES)}, separated by commas.")
    ] = "eager,compiled",
    in_parts: Annotated[
        bool, typer.Option("--in-parts", help="With account: compile four blocks of the model at a time.")
    ] = False,
    optimizer: Annotated[
        str, typer.Option(help="Of models under a recipe: AdamW, which is PyTorch's fused one, or FusedAdam.")
    ] = "AdamW",
    head: Annotated[
        str, typer.Option(help="Head of models under a recipe: bf16, current or block.")
    ] = "bf16",
    device: o.Device = "auto",
    out: Annotated[Path | None, typer.Option(help="Folder for bench.csv and bench.png.")] = None,
    seconds: Annotated[
        int,
        typer.Option(help="Seconds per contender and benchmark, with compilation; 0: no limit."),
    ] = 300,
    minutes: Annotated[float, typer.Option(help="Minutes after which nothing starts; 0: no limit.")] = 0.0,
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep the rows of bench.csv in --out and measure the rest.")
    ] = False,
) -> None:
    """Time layers and training steps beside bf16, and beside torchao, Transformer Engine and Liger if installed."""


@_command("plan.command")
def plan(
    model: Annotated[
        str,
        typer.Option(
            help="8b, 70b, 405b (Llama 3), 671b (DeepSeek-V3), or the path of a model's config.json, with the names "
            "that Transformers has."
        ),
    ] = "8b",
    gpus: Annotated[int, typer.Option(help="GPUs, 8 per host.")] = 8,
    recipe: Annotated[str, typer.Option(help="bf16, delayed, current or block.")] = "current",
    gpu: Annotated[str, typer.Option(help="h100, h200 or h800.")] = "h200",
    batch: Annotated[
        int | None,
        typer.Option(
            help="Tokens per step, over all GPUs.",
            show_default=f"{BATCH_PER_GPU:,} per GPU, at most {BATCH:,}",
        ),
    ] = None,
    length: Annotated[int, typer.Option(help="Tokens per sequence.")] = 8192,
    tp: Annotated[int, typer.Option(help="Ranks of tensor parallelism; 0 searches.")] = 0,
    pp: Annotated[int, typer.Option(help="Ranks of the pipeline; 0 searches.")] = 0,
    ep: Annotated[int, typer.Option(help="Ranks of expert parallelism; 0 searches.")] = 0,
    recompute: Annotated[
        bool | None, typer.Option(help="Recompute every layer.", show_default="searched")
    ] = None,
    fp8_gather: Annotated[
        bool | None, typer.Option(help="Gather weights quantized.", show_default="with FP8")
    ] = None,
    optimizer: Annotated[
        str,
        typer.Option(help="adamw (fp32), adamw-bf16; FusedAdam: fused-bf16, fused-int8 or fused-stochastic."),
    ] = "adamw",
    saved_activations: Annotated[
        str | None, typer.Option(help="fp8: norms and activations keep codes.")
    ] = None,
    chunked_loss: Annotated[
        bool, typer.Option("--chunked-loss", help="Loss without whole logits: linear_cross_entropy.")
    ] = False,
    step_in_backward: Annotated[
        bool,
        typer.Option("--step-in-backward", help="Step a layer's weights as soon as it has its gradients."),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print numbers as JSON: bytes and seconds.")] = False,
) -> None:
    """Estimate memory, traffic and time of a training step on many GPUs; nothing runs."""


@_command("cli.presets")
def presets() -> None:
    """Show what each --preset of train sets."""


@_command("train.doctor")
def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Show what works on this machine, what is wrong and what to do; then versions and GPU tests."""
