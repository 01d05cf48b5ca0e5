"""The commands: names, options and help. Each is declared without a body, and its work is imported when it runs."""

from __future__ import annotations

import copy
import functools
import runpy
import shutil
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from ..bench.asked import ACCOUNT_MODEL, ACCOUNT_MODELS, HEADS, MODES, OPTIMIZERS, RECIPES, bench_settings
from ..hardware import BATCH, BATCH_PER_GPU, GPUS
from ..hardware import RECIPES as RATES
from ..train.asked import Choice, compare_settings, demo_settings, generate_settings, train_settings
from ..train.kept import PATHS, resumed_demo, resumed_train
from ..train.presets import DEMO, QUICK, QUICK_TIME
from ..words import as_typed
from . import options as o

NARROW = 72  # columns
_ALL, _HELP = "narrowcast.help-all", "narrowcast.help"


def _shown(params: list[Any]) -> list[Any]:
    """Return parameters for the help: without types of Python, and without `--no-...` of flags that are off.

    A narrow terminal has no column of values: they stand before the text.
    """
    narrow = shutil.get_terminal_size().columns < NARROW
    shown = [copy.copy(param) for param in params]
    for param in shown:
        if param.param_type_name == "argument":
            param.display_type_rich = lambda ctx: ""
            if param.required:  # Typer writes braces around it
                usage = param.metavar + ("..." if param.nargs == -1 else "")
                param.get_usage_pieces = lambda ctx, usage=usage: [usage]
        elif getattr(param, "is_flag", False):
            param.metavar = ""
            if param.default is False:
                param.secondary_opts = []
            elif narrow and param.secondary_opts:
                param.help, param.secondary_opts = f"{param.help} Off: {param.secondary_opts[0]}.", []
        elif narrow:
            param.help = f"{param.metavar}: {param.help}" if param.metavar else param.help
            param.metavar = ""
    return shown


def _show_examples(command: str | None) -> None:
    # no epilog, whose lines some releases of Typer join and others part
    typer.echo("\n".join([" Examples:", *(f"   {as_typed(line)}" for line in o.EXAMPLES[command or ""])]))


def values_of(param: Any, words: list[str]) -> list[str]:
    """Return the values that a command gives an option, in order; of a flag the options themselves."""
    values = []
    for word, following in zip(words, [*words[1:], ""]):
        name, equals, value = word.partition("=")
        if name in (*param.opts, *param.secondary_opts):
            values.append(name if param.is_flag else value if equals else following)
    return values


class _Command(TyperCommand):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given: list[Any]
        _, _, given = self.make_parser(ctx).parse_args(args=list(args))
        arguments = [param for param in given if param.param_type_name == "argument"]
        of_options = [value for param in {*given} - {*arguments} for value in values_of(param, args)]
        if arguments and args.count("") > of_options.count(""):
            raise typer.BadParameter(f"{arguments[0].metavar} is empty; give it a value")
        for param in given:
            # an empty path, as of an unset variable of a shell, would be the current folder
            if param.name in ("out", *PATHS) and "" in values_of(param, args):
                raise typer.BadParameter(f"{param.opts[0]} is empty; give it a path, or leave it out")
            if given.count(param) > 1 and len(values := dict.fromkeys(values_of(param, args))) > 1:
                first, *_, last = values
                if param.is_flag:
                    raise typer.BadParameter(f"{first} and {last} are both given; leave one of them out")
                raise typer.BadParameter(
                    f"{param.opts[0]} is given as {first!r:.60} and as {last!r:.60}; give it once"
                )
        return super().parse_args(ctx, args)

    def get_params(self, ctx: Any) -> list[Any]:
        params = super().get_params(ctx)
        return _shown(params) if _HELP in ctx.meta else params

    def format_help(self, ctx: Any, formatter: Any) -> None:
        ctx.meta[_HELP] = True
        super().format_help(ctx, formatter)
        _show_examples(self.name)


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
        params = super().get_params(ctx)
        return _shown(params) if _HELP in ctx.meta else params

    def format_help(self, ctx: Any, formatter: Any) -> None:
        ctx.meta[_HELP] = True
        super().format_help(ctx, formatter)
        _show_examples(self.name)


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
    resume: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None,
) -> Callable[[Callable[..., Any]], None]:
    """Declare a command by a function's name, options and docstring.

    Args:
        module: of narrowcast_tools; its function of the same name takes the options and does the work.
        cls: class of the command, which shows its help.
        check: refuses wrong values before the module is imported, and PyTorch with it.
        resume: returns the options under ``--resume``, which are those of the folder's run unless given.
    """

    def declare(declaration: Callable[..., Any]) -> None:
        @app.command(cls=cls)
        @functools.wraps(declaration)
        def run(**given: Any) -> Any:
            if resume is not None and given["resume"]:
                given.update(resume(given))
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


@_command("train.commands", _LongCommand, train_settings, resumed_train)
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
    chunked_loss: o.ChunkedLoss = None,
    saved_activations: o.SavedActivations = None,
    step_in_backward: o.StepInBackward = None,
    steps: o.Steps = None,
    batch_size: o.BatchSize = None,
    seq_len: o.SeqLen = None,
    accumulate: o.Accumulate = None,
    optimizer: o.Optimizer = None,
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
    """Train a small Llama-style model on text. With several recipes or seeds, compare them."""


@_command("train.commands", check=compare_settings)
def compare(
    context: typer.Context,
    runs: Annotated[
        list[Path], typer.Argument(help="Folders of runs, or their parent folders.", metavar="RUNS")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for loss.png, losses.csv, summary.csv and results.json.",
            show_default="the next runs/comparison-NNN",
        ),
    ] = None,
) -> None:
    """Compare runs of train: a table, a picture with the spread over seeds, and CSV files."""


@_command("train.commands", check=generate_settings)
def generate(
    context: typer.Context,
    run: Annotated[
        Path,
        typer.Argument(help="Folder of a run of train, or of one of its checkpoints.", metavar="RUN"),
    ],
    prompt: Annotated[
        str, typer.Option(help="Text to continue.", show_default="newline", metavar="<text>")
    ] = "\n",
    tokens: Annotated[int, typer.Option(help="Tokens to generate.")] = 100,
    temperature: Annotated[
        float, typer.Option(help="Below 1 favors likely tokens, above 1 rare ones. 0: always the likeliest.")
    ] = Choice.temperature,
    top_k: Annotated[
        int, typer.Option(help="Sample from this many of the likeliest tokens. 0: from all.")
    ] = Choice.top_k,
    samples: Annotated[int, typer.Option(help="Continuations to generate, all at once.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    recipe: Annotated[
        str | None,
        typer.Option(
            help="Recipe to use instead of the run's.", show_default="the run's", metavar="<recipe>"
        ),
    ] = None,
    device: o.Device = "auto",
    compile: o.Compile = False,
    graphs: o.Graphs = False,
    emulate: o.Emulate = False,
) -> None:
    """Continue a text with a model that train made."""


@_command("train.commands", check=demo_settings, resume=resumed_demo)
def demo(
    context: typer.Context,
    data: o.Data = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help=f"Train {QUICK.steps} steps: about {QUICK_TIME} on a CPU core with AVX-512."
        ),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for loss.png and results.json.",
            show_default="runs/demo, runs/demo-quick with --quick",
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue an interrupted demo, with its options.")
    ] = False,
    write_docs: o.Document = None,
    device: o.Device = "auto",
    compile: o.Compile = False,
    emulate: o.Emulate = False,
    steps: Annotated[
        int | None,
        typer.Option(
            help="Optimizer steps per recipe.", show_default=f"{DEMO.steps}, {QUICK.steps} with --quick"
        ),
    ] = None,
    seed: o.Seed = o.SEED,
) -> None:
    """Train one small model in bf16 and in six low-precision recipes, and compare the losses.

    The recipes are delayed, current, rowwise, mxfp8, block and nvfp4.

    A CPU emulates them. A GPU needs --emulate for those that it does not run natively.
    """


@_command("bench.command", check=bench_settings)
def bench(
    context: typer.Context,
    suite: Annotated[
        str,
        typer.Argument(
            help="layers, models, all (both of these), tiny (a check of the program), or account (where the "
            "time of one step goes; needs a GPU).",
            show_default="all; on a CPU tiny",
            metavar="SUITE",
        ),
    ] = "",
    model: Annotated[
        str | None,
        typer.Option(
            help="With account: the model. 8b-slice is four layers of the 8B shape.",
            metavar="|".join(ACCOUNT_MODELS),
            show_default=ACCOUNT_MODEL,
        ),
    ] = None,
    only: Annotated[
        str, typer.Option(help="Run only benchmarks whose name contains this.", metavar="<text>")
    ] = "",
    recipe: Annotated[
        str,
        typer.Option(help=f"Any of {', '.join(RECIPES)}, separated by commas.", metavar="<recipe>"),
    ] = "delayed,current,block",
    mode: Annotated[
        str,
        typer.Option(help=f"Any of {', '.join(MODES)}, separated by commas.", metavar="<mode>"),
    ] = "eager,compiled",
    in_parts: Annotated[
        bool,
        typer.Option(
            "--in-parts", help="With account: compile four blocks at a time, in a quarter of the time."
        ),
    ] = False,
    optimizer: Annotated[
        str,
        typer.Option(
            help="Optimizer of models with a recipe: PyTorch's fused AdamW, or narrowcast's FusedAdam.",
            metavar="|".join(OPTIMIZERS),
        ),
    ] = "AdamW",
    head_recipe: Annotated[
        str,
        typer.Option(help="Recipe of the output head in models with a recipe.", metavar="|".join(HEADS)),
    ] = "bf16",
    device: o.Device = "auto",
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the results as CSV, and for a picture."),
    ] = None,
    seconds: Annotated[
        int, typer.Option(help="Most seconds for one measurement, compilation included. 0: no limit.")
    ] = 300,
    minutes: Annotated[
        float,
        typer.Option(help="Start no measurement after this many minutes.", show_default="no limit"),
    ] = 0.0,
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep the results in --out and measure the rest.")
    ] = False,
) -> None:
    """Time layers and training steps, and compare them with bf16 and with other packages.

    The other packages are torchao, Transformer Engine and Liger, if they are installed.
    """


_BATCH, _PARALLEL, _MEMORY, _SEARCHED = "Batch", "Parallel layout", "Memory", "searched"


@_command("plan.command")
def plan(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Option(
            help="8b, 70b or 405b (Llama 3), 671b (DeepSeek-V3), or the path of a config.json of Transformers.",
            metavar="<model>",
        ),
    ] = "8b",
    recipe: Annotated[str, typer.Option(help=f"Recipe: {', '.join(RATES)}.", metavar="<recipe>")] = "current",
    gpus: Annotated[int, typer.Option(help="Number of GPUs. A host has 8.", metavar="<count>")] = 8,
    gpu: Annotated[str, typer.Option(help="Kind of GPU.", metavar="|".join(GPUS))] = "h200",
    optimizer: Annotated[
        str,
        typer.Option(help=f"{', '.join(o.OPTIMIZERS)}. train --help-all explains them.", metavar="<name>"),
    ] = "adamw",
    batch_size: Annotated[
        int | None,
        typer.Option(
            help="Sequences per step, over all GPUs.",
            show_default=f"{BATCH_PER_GPU:,} tokens per GPU, in all at most {BATCH:,}",
            rich_help_panel=_BATCH,
        ),
    ] = None,
    seq_len: Annotated[int, typer.Option(help="Tokens per sequence.", rich_help_panel=_BATCH)] = 8192,
    tp_size: Annotated[
        int,
        typer.Option(help="Ranks of tensor parallelism.", show_default=_SEARCHED, rich_help_panel=_PARALLEL),
    ] = 0,
    pp_size: Annotated[
        int,
        typer.Option(help="Ranks of the pipeline.", show_default=_SEARCHED, rich_help_panel=_PARALLEL),
    ] = 0,
    ep_size: Annotated[
        int,
        typer.Option(help="Ranks of expert parallelism.", show_default=_SEARCHED, rich_help_panel=_PARALLEL),
    ] = 0,
    recompute: Annotated[
        bool | None,
        typer.Option(
            help="Recompute every layer in the backward.", show_default=_SEARCHED, rich_help_panel=_MEMORY
        ),
    ] = None,
    saved_activations: Annotated[
        str | None,
        typer.Option(
            help="Keep the inputs of norms and activations in FP8.",
            show_default="bf16",
            metavar="fp8",
            rich_help_panel=_MEMORY,
        ),
    ] = None,
    chunked_loss: Annotated[
        bool,
        typer.Option("--chunked-loss", help="Compute the loss without all logits.", rich_help_panel=_MEMORY),
    ] = False,
    step_in_backward: Annotated[
        bool,
        typer.Option(
            "--step-in-backward",
            help="Update each layer in the backward and free its gradients.",
            rich_help_panel=_MEMORY,
        ),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, in bytes and seconds.")] = False,
) -> None:
    """Estimate memory, traffic and time of a training step on many GPUs. Nothing runs on a GPU."""


@_command("cli.presets")
def presets() -> None:
    """Show the numbers that each --preset of train sets, and what each --recipe is."""


@_command("train.doctor")
def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what works on this machine, what is wrong, and what to do. Then list versions and GPU tests."""
