"""The options of the commands: what they are called, and what `--help` says of them."""

from pathlib import Path
from typing import Annotated

import typer

from ..hardware import OPTIMIZERS
from ..train.config import TrainConfig
from ..train.names import MODES, RECIPES, TP_SIZE
from ..train.presets import PRESETS
from ..words import DEVICES

SEED = TrainConfig.seed
OF_PRESET = "preset's"
SCHEDULE, MODEL, MEMORY = "Batch, optimizer and schedule", "Shape of the model", "Memory"


def _option(
    text: str,
    *names: str,
    panel: str | None = None,
    default: bool | str = True,
    value: str | None = None,
) -> typer.models.OptionInfo:
    """Declare an option. ``value``: what the help shows for its value, instead of a type of Python."""
    return typer.Option(*names, help=text, rich_help_panel=panel, show_default=default, metavar=value)


def _of_preset(text: str, panel: str, *names: str, value: str | None = None) -> typer.models.OptionInfo:
    return _option(text, *names, panel=panel, default=OF_PRESET, value=value)


Data = Annotated[
    Path | None,
    _option("Text file or folder of text files.", default="Python's own source files"),
]
RunFolder = Annotated[
    Path | None,
    _option(
        "Folder of the run, for checkpoints and result.json.",
        default="the next runs/train-NNN, with --resume the last",
    ),
]
Document = Annotated[Path | None, typer.Option(hidden=True)]
"""A Markdown page of the result, with its picture in assets/ beside it: that of this package's pages."""
Parallel = Annotated[
    str | None,
    _option("Split one run over the processes of torchrun.", default="one process", value="|".join(MODES)),
]
TpSize = Annotated[
    int | None,
    _option("Processes that split each block, with --parallel fsdp+tp.", default=str(TP_SIZE)),
]
Device = Annotated[str, _option("auto prefers a GPU.", value="|".join(DEVICES))]
Preset = Annotated[
    str,
    _option(
        f"Shape and schedule: {', '.join(PRESETS)}. narrowcast presets shows their numbers.",
        value="<preset>",
    ),
]
Recipe = Annotated[
    str,
    _option(
        f"auto, {', '.join(RECIPES)}. auto uses current where it is faster on this GPU, and bf16 elsewhere. "
        "Separate several by commas to compare them. narrowcast presets says what each is.",
        value="<recipe>",
    ),
]
RecipeTable = Annotated[
    Path | None,
    _option(
        "JSON file of recipes by patterns of layer names. It overrides --recipe. nc.recipe.recipes_to_json "
        "writes it.",
        default=False,
    ),
]
HeadRecipe = Annotated[str, _option("Recipe of the output head.", value="<recipe>")]
KeepBf16 = Annotated[
    str,
    _option(
        "Layers that stay in bf16: 'blocks.0,blocks.11' are two blocks, 'blocks.*.attention' is every attention.",
        value="<patterns>",
    ),
]
TokenizerFile = Annotated[
    Path | None,
    _option("A tokenizer.json of the package tokenizers.", default="tokens are bytes"),
]
TensorBoard = Annotated[bool, _option("Also write files for TensorBoard.", "--tensorboard/--no-tensorboard")]
Resume = Annotated[
    bool,
    _option(
        "Continue the run in --out, with its options. Another --steps moves the end of the schedule.",
        "--resume",
    ),
]
Seed = Annotated[int, _option("Sets weights, batches and stochastic rounding.")]
Seeds = Annotated[int, _option("Runs per recipe, with different seeds.")]

Compile = Annotated[bool, _option("Use torch.compile, with fullgraph=True.", "--compile/--no-compile")]
ByBlock = Annotated[
    bool,
    _option(
        "With --compile: compile one block and reuse it for all, in a fraction of the time.",
        "--by-block/--no-by-block",
    ),
]
Graphs = Annotated[
    bool,
    _option(
        "With --compile: replay the compiled step as CUDA graphs.",
        "--graphs/--no-graphs",
    ),
]
Emulate = Annotated[
    bool,
    _option(
        "On a GPU: emulate recipes that it does not run natively. A CPU always emulates.",
        "--emulate/--no-emulate",
    ),
]
Recompute = Annotated[
    bool | None,
    _of_preset(
        "Activation checkpointing: keep each block's input and recompute the rest in the backward.",
        MEMORY,
        "--recompute/--no-recompute",
    ),
]
Accumulate = Annotated[
    int | None, _of_preset("Microbatches per step. More need less memory, for the same step.", SCHEDULE)
]
Optimizer = Annotated[
    str | None,
    _of_preset(
        f"{', '.join(OPTIMIZERS)}. adamw keeps everything in fp32, the others have bf16 weights. "
        "fused-bf16 and fused-int8 also keep fp32 masters. fused-stochastic rounds at random.",
        SCHEDULE,
        value="<name>",
    ),
]
ChunkedLoss = Annotated[
    bool | None,
    _of_preset(
        "Compute the loss in chunks, without storing all logits.",
        MEMORY,
        "--chunked-loss/--no-chunked-loss",
    ),
]
SavedActivations = Annotated[
    str | None,
    _of_preset("Keep the inputs of norms and activations in FP8 for the backward.", MEMORY, value="fp8"),
]
StepInBackward = Annotated[
    bool | None,
    _of_preset(
        "Update a block as soon as its gradients are known, then free them. Needs --clip inf.",
        MEMORY,
        "--step-in-backward/--no-step-in-backward",
    ),
]
Init = Annotated[
    str,
    _option(
        "Start from random weights, or from the shape, weights and tokenizer of a Llama that Transformers saved.",
        value="random|<folder>",
    ),
]

Steps = Annotated[int | None, _of_preset("Optimizer steps.", SCHEDULE)]
BatchSize = Annotated[int | None, _of_preset("Sequences per step.", SCHEDULE)]
SeqLen = Annotated[int | None, _of_preset("Tokens per sequence.", SCHEDULE)]
LearningRate = Annotated[float | None, _of_preset("Peak learning rate.", SCHEDULE)]
Warmup = Annotated[
    int | None,
    _of_preset("Steps of linear warmup. A cosine follows. Fewer --steps shorten the preset's.", SCHEDULE),
]
WeightDecay = Annotated[float | None, _of_preset("Weight decay, on matrices only.", SCHEDULE)]
Clip = Annotated[float | None, _of_preset("Largest gradient norm. inf: do not clip.", SCHEDULE)]
EvalEvery = Annotated[
    int | None, _of_preset("Steps between evaluations. Fewer --steps shorten the preset's.", SCHEDULE)
]
EvalBatches = Annotated[int | None, _of_preset("Batches per evaluation.", SCHEDULE)]
SaveEvery = Annotated[
    int | None, _of_preset("Steps between checkpoints. The end has one, too. 0: none.", SCHEDULE)
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

EXAMPLES = {
    "narrowcast": (
        "narrowcast doctor         # what works on this machine",
        "narrowcast demo --quick   # a first comparison of recipes",
        "narrowcast train --help   # the options of a command",
    ),
    "train": (
        "narrowcast train --preset tiny",
        "narrowcast train --data text.txt --recipe bf16,current --seeds 3",
    ),
    "compare": ("narrowcast compare runs/train-001 runs/train-002",),
    "generate": (
        'narrowcast generate runs/train-001 --prompt "Once upon "',
        "narrowcast generate runs/train-001 --samples 4 --recipe bf16",
    ),
    "demo": ("narrowcast demo --quick", "narrowcast demo --data text.txt --steps 100 --out runs/mine"),
    "bench": (
        "narrowcast bench tiny --device cpu   # a check of the program, some minutes",
        "narrowcast bench models --only small --recipe current --out bench",
        "narrowcast bench account --model small   # where the time of a step goes",
    ),
    "plan": (
        "narrowcast plan --model 70b --gpus 256 --gpu h100",
        "narrowcast plan --model 8b --gpus 8 --recipe bf16 --no-recompute --json",
    ),
    "presets": ("narrowcast presets", "narrowcast train --preset tiny"),
    "doctor": ("narrowcast doctor", "narrowcast doctor --json   # for a bug report or a script"),
}
"""What the help of each command ends with."""
