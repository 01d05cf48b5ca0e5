"""Train the demo's model with every recipe, eager and compiled, and compare the final held-out losses.

Each pair of runs has the same seed and the same batches, so its losses differ only by what the compiler does around
the quantized operators; the script fails where they differ by more than the table of tolerances allows.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch
from harness import Row, parser, report
from rich.console import Console

from narrowcast.testing import TOLERANCES
from narrowcast.train.config import ModelConfig, TrainConfig
from narrowcast.train.data import load_corpus
from narrowcast.train.loop import Run
from narrowcast.train.progress import make_progress
from narrowcast.train.recipes import CHOICES

SIZES = {
    "cpu": TrainConfig(steps=20, batch_size=4, seq_len=64, eval_every=10, eval_batches=2, warmup=5),
    "cuda": TrainConfig(
        steps=200,
        batch_size=32,
        seq_len=512,
        lr=1e-3,
        warmup=30,
        eval_every=50,
        eval_batches=8,
        model=ModelConfig(dim=1024, layers=4, heads=16, kv_heads=4, hidden=2816),
    ),
}


def measure(options: argparse.Namespace) -> list[Row]:
    base = replace(SIZES[options.device], device=options.device)
    corpus, progress = load_corpus(None, seq_len=base.seq_len), make_progress(Console(stderr=True))
    rows: list[Row] = []
    for name, choice in CHOICES.items():
        native, _ = choice.availability()
        losses = {}
        for mode in ("eager", "compiled"):
            torch.compiler.reset()
            config = replace(base, recipe=name, compile=mode == "compiled", emulate=not native)
            result = Run(config, corpus, progress, folder=None).train()
            losses[mode] = result.held_out_loss
            row: Row = {"recipe": name, "mode": mode, "native": "yes" if native else "no"}
            row |= {"steps": config.steps, "tokens_per_step": config.batch_size * config.seq_len}
            row |= {"parameters": result.parameters, "held_out_loss": result.held_out_loss}
            row |= {"difference": abs(losses[mode] - losses["eager"]) / losses["eager"]}
            row |= {"tokens_per_second": result.tokens_per_second}
            rows.append(row)
        allowed = TOLERANCES["training_loss"].relative
        difference = abs(losses["compiled"] - losses["eager"]) / losses["eager"]
        assert difference <= allowed, f"{name}: compiled and eager losses {losses} differ by {difference:.3%}"
    return rows


def main() -> None:
    options = parser(__doc__).parse_args()
    report("train", measure(options), options)


if __name__ == "__main__":
    main()
