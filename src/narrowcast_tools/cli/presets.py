"""The work of ``presets``: the trainer's presets in numbers, which a test computes, so that PyTorch is not needed."""

import shutil

import typer
from rich.console import Console

from ..tables import make_table
from ..words import follow_up, tell

TABLE = (
    ("", "tiny", "125m", "1b", "8b-slice", "8b"),
    ("layers", "4", "12", "16", "4", "32"),
    ("width", "256", "768", "2048", "4096", "4096"),
    ("hidden", "704", "2048", "8192", "14336", "14336"),
    ("heads/KV", "4/2", "12/12", "32/8", "32/8", "32/8"),
    ("parameters", "3.1M", "85.3M", "974.2M", "874.5M", "8,030.3M"),
    ("state, GiB", "0.05", "1.27", "14.52", "13.03", "30.85"),
    ("peak, GiB", "0.1", "3.3", "20.4", "14.6", "66.4"),
    ("batch x tokens", "8x128", "8x1024", "4x2048", "4x2048", "1x8192"),
    ("TFLOP/step", "0.02", "4.65", "51.15", "44.58", "421.65"),
    ("steps", "300", "1500", "1000", "1000", "1000"),
    ("peak lr", "0.001", "0.0006", "0.0003", "0.0003", "1e-05"),
    ("warmup", "40", "100", "100", "100", "20"),
    ("weight decay", "0.1", "0.1", "0.1", "0.1", "0.1"),
    ("clip", "1", "1", "1", "1", "inf"),
    ("eval every", "25", "100", "100", "100", "100"),
    ("eval batches", "8", "8", "4", "4", "4"),
    ("save every", "100", "500", "500", "500", "0"),
)
RECIPES = {
    "bf16": "the baseline: nothing is quantized",
    "delayed": "FP8, a scale per tensor from the maxima of earlier steps",
    "current": "FP8, a scale per tensor from its own maximum",
    "rowwise": "FP8, a scale per row of each operand",
    "mxfp8": "FP8, a power-of-two scale per 32 values",
    "block": "FP8, a scale per 128 values, of weights per 128x128",
    "nvfp4": "4 bits, an FP8 scale per 16 values and one per tensor",
    "mxfp6": "6 bits, a power-of-two scale per 32 values; emulated everywhere",
    "mxfp4": "4 bits, a power-of-two scale per 32 values; emulated everywhere",
}
"""What each ``--recipe`` of ``train`` quantizes to."""


def presets() -> None:
    """Run `narrowcast presets`: the table, and the words that ``--recipe`` takes."""
    names, *rows = TABLE
    table = make_table(names, "what each --preset sets; an option overrides its number")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
    tell("state", "weights, gradients and optimizer; 8b frees each layer's gradients in the backward")
    tell("peak", "what narrowcast plan expects of a step in bf16 on one GPU; eager code holds more")
    tell("optimizer", "adamw with fp32 weights; 8b: fused-stochastic with bf16 weights")
    tell("8b also", "--chunked-loss --saved-activations fp8 --step-in-backward")
    typer.echo("\nwhat each --recipe of train computes the GEMMs in")
    for name, text in RECIPES.items():
        tell(name, text)
    gpu = shutil.which("nvidia-smi")  # PyTorch, which knows, takes seconds to import
    typer.echo(follow_up("train", "--preset", "125m" if gpu else "tiny"))
