"""Train the demo's model with every recipe, eager and compiled, and compare the final held-out losses.

Runs of a recipe have the same seed and the same batches. Training amplifies any difference in rounding, so a third run,
eager with initial weights scaled by 1 + 1e-5, shows how far the final loss moves by that alone. The script fails where
a compiled run ends further from the eager one than the table of tolerances allows.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch
from harness import Row, parser, report
from rich.console import Console

from narrowcast.testing import TOLERANCES
from narrowcast_tools.train.config import ModelConfig, TrainConfig
from narrowcast_tools.train.data import load_corpus
from narrowcast_tools.train.loop import Run
from narrowcast_tools.train.progress import make_progress
from narrowcast_tools.train.recipes import CHOICES

SIZES = {
    "cpu": TrainConfig(steps=20, batch_size=4, seq_len=64, eval_every=10, eval_batches=2, warmup=5),
    "cuda": TrainConfig(
        steps=200,
        batch_size=32,
        seq_len=512,
        lr=3e-4,
        warmup=30,
        eval_every=100,
        eval_batches=16,
        model=ModelConfig(dim=1024, layers=4, heads=16, kv_heads=4, hidden=2816),
    ),
}


def measure(options: argparse.Namespace) -> list[Row]:
    base = replace(SIZES[options.device], device=options.device)
    corpus, progress = load_corpus(None, seq_len=base.seq_len), make_progress(Console(stderr=True))
    rows: list[Row] = []
    for name, choice in CHOICES.items():
        native, _ = choice.availability()
        losses: dict[str, float] = {}
        for mode in ("eager", "perturbed", "compiled"):
            torch.compiler.reset()
            config = replace(base, recipe=name, compile=mode == "compiled", emulate=not native)
            run = Run(config, corpus, progress, folder=None)
            if mode == "perturbed":
                _perturb(run)
            result = run.train()
            losses[mode] = result.held_out_loss
            row: Row = {"recipe": name, "mode": mode, "native": "yes" if native else "no"}
            row |= {"steps": config.steps, "tokens_per_step": config.batch_size * config.seq_len}
            row |= {"parameters": result.parameters, "held_out_loss": result.held_out_loss}
            row |= {"from_eager": abs(losses[mode] - losses["eager"]) / losses["eager"]}
            row |= {"tokens_per_second": result.pace.tokens_per_second}
            rows.append(row)
    return rows


@torch.no_grad()
def _perturb(run: Run) -> None:
    for parameter in run.trainer.model.parameters():
        parameter.mul_(1 + 1e-5)


def check(rows: list[Row]) -> None:
    allowed = TOLERANCES["training_loss"].relative
    far = [row for row in rows if row["mode"] == "compiled" and float(str(row["from_eager"])) > allowed]
    assert not far, f"compiled runs that end more than {allowed:.1%} from the eager ones: {far}"


def main() -> None:
    options = parser(__doc__).parse_args()
    rows = measure(options)
    report("train", rows, options)
    check(rows)


if __name__ == "__main__":
    main()
