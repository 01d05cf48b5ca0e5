"""The Markdown page of a demo run: every number in it comes from that run."""

import textwrap
from collections.abc import Sequence

from .config import TrainConfig
from .data import Corpus
from .machine import one_line
from .progress import format_duration
from .report import Row, judged, markdown_table, remarks


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
        picture: path of the picture, relative to the page.
    """
    model = config.model
    mode = "compiled" if config.compile else "eager"
    timed = config.device != "cpu"
    allowed = speed = ""
    if judged(rows):
        allowed = "A gap up to the allowed one counts as equal quality: 1% for FP8, 3% for 4 bits. "
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
            "The demo trains one small Transformer per recipe, from the same seed on the same batches. Every number "
            "below is from one run of this command:"
        ),
        f"```\n{command}\n```",
        _wrap(
            "`--quick` trains fewer steps: about a minute on two idle cores with AVX-512, several minutes without. "
            "Ctrl-C saves the current step and names the command that continues."
        ),
        markdown_table(rows, timed=timed),
        _wrap(
            f"The held-out loss is in nats per byte, after {config.steps} steps of {config.batch_size} sequences of "
            f"{config.seq_len} bytes. The gap compares it with bf16; a gap below zero is better than bf16. "
            f"{allowed}{speed}".strip()
        ),
        f"![Held-out loss per recipe and gap to bf16]({picture})",
        _wrap(_remarks(rows, timed=timed)),
        "\n".join(_wrap(f"- {fact}", indent="  ") for fact in facts),
    )
    return "\n\n".join(paragraphs) + "\n"


def _wrap(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 110, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _remarks(rows: Sequence[Row], *, timed: bool) -> str:
    missed = [row for row in rows if not row.within]
    verdict = "Every recipe met its allowed gap in this run."
    if missed:
        names = ", ".join(f"{row.title} ({row.gap_percent:+.2f}%)" for row in missed)
        verdict = f"Not every recipe met its allowed gap in this run: {names}."
    return " ".join([*([verdict] if judged(rows) else []), *remarks(rows, timed=timed)])
