"""Train the demo's model with moments and weights in several formats, over seeds, and compare the held-out losses.

A seed decides initial weights and batches, so runs of one seed differ by the optimizer alone. How far seeds differ says
what a difference means.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import torch
from harness import Row, parser, report
from rich.console import Console

from narrowcast.optimizers import FusedAdam
from narrowcast_tools.train.config import ModelConfig, TrainConfig
from narrowcast_tools.train.data import load_corpus
from narrowcast_tools.train.loop import Run
from narrowcast_tools.train.progress import make_progress

SEEDS = (0, 1, 2)
CONFIG = TrainConfig(
    recipe="bf16",
    steps=150,
    batch_size=8,
    seq_len=32,
    eval_every=150,
    eval_batches=16,
    lr=3e-3,
    warmup=15,
    model=ModelConfig(dim=64, layers=2, heads=2, kv_heads=1, hidden=160),
)
INT8, CODES, BF16 = torch.int8, torch.uint8, torch.bfloat16
MOMENTS: dict[str, dict[str, Any]] = {
    "torch fp32": {},
    "fp32": {"exp_avg_dtype": torch.float32},
    "bf16": {"exp_avg_dtype": BF16, "exp_avg_sq_dtype": BF16},
    "E4M3, a scale per tensor": {"exp_avg_dtype": CODES, "exp_avg_sq_dtype": CODES},
    "int8, logarithms of groups": {"exp_avg_dtype": INT8, "exp_avg_sq_dtype": INT8},
}
WEIGHTS = {
    "bf16 weights, torch bf16": "adamw-bf16",
    "bf16 weights, bf16, fp32 masters": "fused-bf16",
    "bf16 weights, int8, fp32 masters": "fused-int8",
    "bf16 weights, int8, rounded at random": "fused-stochastic",
}
"""`--optimizer` of runs whose weights are bf16."""


def measure(options: argparse.Namespace, base: TrainConfig = CONFIG) -> list[Row]:
    base = replace(base, device=options.device)
    corpus, progress = load_corpus(None, seq_len=base.seq_len), make_progress(Console(stderr=True))
    rows: list[Row] = []
    for seed in SEEDS:
        for name in (*MOMENTS, *WEIGHTS):
            if options.only not in name:
                continue
            moments, optimizer = MOMENTS.get(name), WEIGHTS.get(name, base.optimizer)
            run = Run(replace(base, seed=seed, optimizer=optimizer), corpus, progress, folder=None)
            trainer: Any = run.trainer
            if moments:
                trainer.optimizer = FusedAdam(trainer.optimizer.param_groups, **moments)
            result = run.train()
            row: Row = {"moments": name, "seed": seed, "steps": base.steps, "parameters": result.parameters}
            row |= {"bytes_per_parameter": bytes_of_moments(trainer.optimizer) / result.parameters}
            rows.append(row | {"held_out_loss": result.held_out_loss})
    return rows


def bytes_of_moments(optimizer: torch.optim.Optimizer) -> int:
    """Count the bytes of both moments, with their scales and ranges."""
    kept = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    if isinstance(optimizer, FusedAdam):
        kept += [*optimizer._ranges.values()]
        kept += [scale for scales in optimizer._scales.values() for scale in scales.values()]
    return sum(x.nbytes for x in kept)


def main() -> None:
    options = parser(__doc__).parse_args()
    report("moments", measure(options), options)


if __name__ == "__main__":
    main()
