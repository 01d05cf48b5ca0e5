"""The options of the commands: what they are called, and what `--help` says of them."""

from pathlib import Path
from typing import Annotated

import typer

from ..plan.hardware import OPTIMIZERS
from ..train.config import TrainConfig
from ..train.names import ALIASES, MODES, RECIPES, TP_SIZE
from ..train.presets import PRESETS
from ..words import DEVICES

SEED = TrainConfig.seed
OF_PRESET = "preset's"
SCHEDULE, MODEL, SPEED = "Batch and schedule", "Shape of the model", "Memory and speed"


def _option(
    text: str, *names: str, panel: str | None = None, default: bool | str = True
) -> typer.models.OptionInfo:
    return typer.Option(*names, help=text, rich_help_panel=panel, show_default=default)


def _of_preset(text: str, panel: str, *names: str) -> typer.models.OptionInfo:
    return _option(text, *names, panel=panel, default=OF_PRESET)


Data = Annotated[
    Path | None,
    _option("Text file, or folder of text files; default: the Python standard library's sources."),
]
RunFolder = Annotated[
    Path | None,
    _option(
        "Folder of the run: checkpoints and result.json; default: the next runs/train-NNN, "
        "with --resume the last one.",
        default=False,
    ),
]
Document = Annotated[Path | None, typer.Option(hidden=True)]
"""A Markdown page of the result, with its picture in assets/ beside it: that of this package's pages."""
Parallel = Annotated[
    str | None,
    _option(
        f"Under torchrun: {', '.join(MODES)}. One run in all its processes; default: one process.",
        default=False,
    ),
]
TpSize = Annotated[
    int | None,
    _option(f"Processes that split each block, with --parallel fsdp+tp; default: {TP_SIZE}.", default=False),
]
Device = Annotated[str, _option(f"One of {', '.join(DEVICES)}.")]
Preset = Annotated[
    str, _option(f"Shape, batch and schedule: {', '.join(PRESETS)}. Numbers: narrowcast presets.")
]
Recipe = Annotated[
    str,
    _option(
        "auto (FP8 current for layers that it makes faster on this GPU, bf16 for the rest), "
        f"{', '.join(RECIPES)}; {', '.join(f'{alias} is {name}' for alias, name in ALIASES.items())}; "
        "or several of these, separated by commas, to compare."
    ),
]
RecipeTable = Annotated[
    Path | None,
    _option(
        "JSON file of recipes by pattern of layer names, overrides --recipe; nc.recipe.recipes_to_json "
        "writes it.",
        default=False,
    ),
]
HeadRecipe = Annotated[str, _option("Recipe of the output head, one of --recipe's.")]
KeepBf16 = Annotated[
    str,
    _option(
        "Patterns of layers that stay in bfloat16, such as 'blocks.0,blocks.11' or 'blocks.*.attention'."
    ),
]
TokenizerFile = Annotated[
    Path | None,
    _option("A tokenizer.json of the package tokenizers; default: tokens are bytes.", default=False),
]
TensorBoard = Annotated[
    bool, _option("Also write TensorBoard's files into the run's folder.", "--tensorboard/--no-tensorboard")
]
Resume = Annotated[
    bool,
    _option(
        "Continue the run in --out; repeat its other options. More or fewer --steps move the schedule's end.",
        "--resume",
    ),
]
Seed = Annotated[int, _option("Decides weights, batches and stochastic rounding.")]
Seeds = Annotated[int, _option("Runs to compare per recipe: seeds --seed, --seed + 1 and so on.")]

Compile = Annotated[
    bool, _option("Use torch.compile, with fullgraph=True.", "--compile/--no-compile", panel=SPEED)
]
ByBlock = Annotated[
    bool,
    _option(
        "With --compile: compile one block and reuse it for all, in a fraction of the time.",
        "--by-block/--no-by-block",
        panel=SPEED,
    ),
]
Graphs = Annotated[
    bool,
    _option("Replay CUDA graphs of the compiled step; with --compile.", "--graphs/--no-graphs", panel=SPEED),
]
Emulate = Annotated[
    bool,
    _option(
        "On a GPU: emulate recipes without native GEMMs, by exact dequantization.",
        "--emulate/--no-emulate",
        panel=SPEED,
    ),
]
Recompute = Annotated[
    bool | None,
    _of_preset(
        "Activation checkpointing: keep only the input of each block and recompute it in the backward.",
        SPEED,
        "--recompute/--no-recompute",
    ),
]
Accumulate = Annotated[int | None, _of_preset("Microbatches per step: less memory, the same step.", SPEED)]
Optimizer = Annotated[
    str | None,
    _of_preset(
        f"{', '.join(OPTIMIZERS)}. adamw keeps everything in float32; the others have bfloat16 weights, "
        "fused-bf16 and fused-int8 with fp32 masters, fused-stochastic rounded at random.",
        SPEED,
    ),
]
ChunkedLoss = Annotated[
    bool | None,
    _of_preset(
        "Compute the loss in chunks of the vocabulary, without storing the scores.",
        SPEED,
        "--chunked-loss/--no-chunked-loss",
    ),
]
SavedActivations = Annotated[
    str | None,
    _of_preset("fp8: inputs of norms and activations are kept in codes, under a recipe.", SPEED),
]
StepInBackward = Annotated[
    bool | None,
    _of_preset(
        "Step each block's parameters when the backward has their gradients, and drop these; with --clip inf.",
        SPEED,
        "--step-in-backward/--no-step-in-backward",
    ),
]
Init = Annotated[
    str, _option("random, or a folder of a Llama that Transformers saved: its shape, weights and tokenizer.")
]

Steps = Annotated[int | None, _of_preset("Optimizer steps; the cosine ends there.", SCHEDULE)]
BatchSize = Annotated[int | None, _of_preset("Sequences per step.", SCHEDULE)]
SeqLen = Annotated[int | None, _of_preset("Tokens per sequence.", SCHEDULE)]
LearningRate = Annotated[float | None, _of_preset("Peak learning rate.", SCHEDULE)]
Warmup = Annotated[int | None, _of_preset("Steps of linear warmup, before the cosine.", SCHEDULE)]
WeightDecay = Annotated[float | None, _of_preset("AdamW's, on matrices only.", SCHEDULE)]
Clip = Annotated[float | None, _of_preset("Largest gradient norm.", SCHEDULE)]
EvalEvery = Annotated[int | None, _of_preset("Steps between evaluations.", SCHEDULE)]
EvalBatches = Annotated[int | None, _of_preset("Batches per evaluation.", SCHEDULE)]
SaveEvery = Annotated[
    int | None, _of_preset("Steps between checkpoints, and one at the end; 0 for none.", SCHEDULE)
]

Dim = Annotated[int | None, _of_preset("Width of the model.", MODEL)]
Layers = Annotated[int | None, _of_preset("Blocks.", MODEL)]
Heads = Annotated[int | None, _of_preset("Query heads.", MODEL)]
KvHeads = Annotated[int | None, _of_preset("Key and value heads.", MODEL)]
Hidden = Annotated[int | None, _of_preset("Width of the feed-forward layer.", MODEL)]
TieEmbeddings = Annotated[
    bool | None,
    _of_preset("Share the embedding with the head.", MODEL, "--tie-embeddings/--no-tie-embeddings"),
]

# What `train --help` shows; `--help-all` shows the rest, too.
OFTEN = {
    *("preset", "data", "recipe", "out", "resume", "device", "seeds", "compile"),
    *("steps", "batch_size", "seq_len", "lr", "help_all", "help"),
}
