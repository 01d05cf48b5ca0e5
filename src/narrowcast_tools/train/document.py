"""The Markdown page of a demo run: every number in it comes from that run."""

import shlex
import textwrap
from collections.abc import Sequence

from ..colors import in_both_schemes
from .config import TrainConfig
from .data import Corpus
from .machine import one_line
from .presets import DEMO_TIME, QUICK_TIME
from .progress import format_duration
from .report import Row, markdown_table, remarks

SEEDS = (
    "[Several seeds](performance.md#does-the-loss-suffer) judge a recipe by those of bf16: `narrowcast train --recipe "
    "bf16,current --seeds 3`."
)


def compose(
    rows: Sequence[Row],
    *,
    config: TrainConfig,
    corpus: Corpus,
    parameters: int,
    machine: dict[str, str | int],
    command: str,
    picture: str,
) -> str:
    """Return the page.

    Args:
        machine: what `machine.describe` returned.
        command: the command line that made the page.
        picture: path of the picture relative to the page, without its scheme and ending.
    """
    model = config.model
    largest = max(abs(row.gap_percent) for row in rows)
    mode = "compiled" if config.compile else "eager"
    timed = config.device != "cpu"
    speed = ""
    if timed:
        total = format_duration(sum(row.seconds for row in rows))
        speed = f"A token is a byte; its speed excludes evaluation and the first step. All runs took {total}."
    facts = (
        f"**Machine:** {one_line(machine)}.",
        f"**Model:** {parameters:,} parameters: {model.layers} blocks of width {model.dim}, {model.heads} query heads "
        f"and {model.kv_heads} key-value heads, SwiGLU of width {model.hidden}, rotary positions, RMSNorm. Parameters "
        "are float32, products bfloat16 or the recipe's format; the output head stays in bfloat16.",
        f"**Text:** {corpus.source}: {corpus.files:,} files, {len(corpus.train):,} bytes to train on and "
        f"{len(corpus.held_out):,} held out (every tenth block); digest `{corpus.digest}`.",
        f"**Training:** AdamW, peak learning rate {config.lr:g}, {config.warmup} steps of warmup, cosine decay, "
        f"gradient norm clipped at {config.clip:g}, seed {config.seed}, {mode}.",
    )
    paragraphs = (
        "# First training run",
        _wrap(
            "The demo trains one small Transformer per recipe, from the same seed on the same batches. All numbers "
            "below are from one run of this command:"
        ),
        f"```sh\n{_for_readers(command)}\n```",
        _wrap(
            f"It takes about {DEMO_TIME} of a CPU core with AVX-512, `--quick` {QUICK_TIME} with fewer and smaller "
            "steps; without AVX-512 several times as long. Ctrl-C saves the current step and names the command that "
            "continues."
        ),
        markdown_table(rows, timed=timed),
        _wrap(
            f"The held-out loss is in nats per byte, after {config.steps} steps of {config.batch_size} sequences of "
            f"{config.seq_len} bytes. The gap compares it with bf16; a gap below zero is better than bf16. "
            f"{SEEDS} {speed}".strip()
        ),
        in_both_schemes(picture, "Loss by step, and each recipe's gap to bf16's at the end", phone=True),
        _wrap(" ".join([f"No gap is larger than {largest:.2f}%.", *remarks(rows, timed=timed)])),
        "\n".join(_wrap(f"- {fact}", indent="  ") for fact in facts),
    )
    return "\n\n".join(paragraphs) + "\n"


def _for_readers(command: str) -> str:
    """Return the command without the option that writes this page."""
    words = iter(shlex.split(command))
    kept = []
    for word in words:
        if word == "--write-docs":
            next(words, None)
        elif not word.startswith("--write-docs="):
            kept.append(word)
    return shlex.join(kept)


def _wrap(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 110, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
