"""Full fine-tuning of layers of the 8B shape by ``narrowcast train``'s trainer: loss of each step, time and peak.

A step is one sequence of 8192 tokens, without clipping, with the optimizer. ``blocks compiled`` is
``--compile --by-block``. The vocabulary is an eighth of the model's beside four layers, so that the head has the share
that it has beside 32; ``--layers 32 --vocabulary 128256`` is the whole model. Weights are random, the text is the
standard library's.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from dataclasses import replace
from typing import Any

import torch
from harness import Row, parser, report, seconds_of

from narrowcast_tools.train.data import load_corpus
from narrowcast_tools.train.memory import expected_peak, parameters_of
from narrowcast_tools.train.presets import PRESETS
from narrowcast_tools.train.trainer import Trainer

ADAMW = {
    "optimizer": "adamw-bf16", "chunked_loss": False, "saved_activations": "", "step_in_backward": False
}  # fmt: skip
OURS = {"recipe": "current"}
CONTENDERS: dict[str, dict[str, Any]] = {
    "bf16, adamw-bf16": ADAMW,
    "bf16, adamw-bf16, recomputed": {**ADAMW, "recompute": True},
    "bf16, fused-bf16": {**ADAMW, "optimizer": "fused-bf16"},
    "current, adamw-bf16": {**ADAMW, "recipe": "current"},
    "current, fused-int8, activations kept": {**OURS, "optimizer": "fused-int8", "saved_activations": ""},
    "current, fused-int8": {**OURS, "optimizer": "fused-int8"},
    "current, activations kept": {**OURS, "saved_activations": ""},
    "current": OURS,
    "current, head": {**OURS, "head_recipe": "current"},
    "current, recomputed": {**OURS, "recompute": True},
    "delayed": {"recipe": "delayed"},
    "delayed, head": {"recipe": "delayed", "head_recipe": "current"},
}
"""Beside what ``--preset 8b`` sets."""
SMALL = {"dim": 128, "hidden": 352, "heads": 4, "kv_heads": 2, "layers": 2}
LOSSES = 8


def run(name: str, options: argparse.Namespace) -> Row:
    """Return the row of a contender."""
    cuda, compiled = options.device == "cuda", "compiled" in name
    chosen = CONTENDERS[name.removesuffix(", blocks compiled")]
    base = PRESETS["8b"]
    shape = {"layers": options.layers, "vocabulary": options.vocabulary} | ({} if cuda else SMALL)
    config = replace(
        base,
        **chosen,
        model=replace(base.model, **shape),
        seq_len=base.seq_len if cuda else 64,
        warmup=options.warmup,
        device=options.device,
        compile=compiled,
        by_block=compiled,
        eval_batches=1,
    )
    torch.compiler.reset()
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    trainer = Trainer(config, load_corpus(None, seq_len=config.seq_len))
    losses = [trainer.step(index).item() for index in range(LOSSES)]
    if cuda:  # compiling may have taken more
        torch.cuda.reset_peak_memory_stats()
        trainer.step(LOSSES)
    peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
    step = iter(range(LOSSES + 1, 10**6))
    times = [seconds_of(lambda: trainer.step(next(step)), 4, options.device) for _ in range(options.repeats)]
    seconds, planned = statistics.median(times), (expected_peak(config) or 0.0) / 2**30
    row: Row = {"contender": name, "layers": config.model.layers, "vocabulary": config.model.vocabulary}
    row |= {"parameters_m": parameters_of(config.model) / 1e6, "tokens_a_step": config.tokens_per_step}
    row |= {"ms": seconds * 1e3, "tokens_per_second": config.tokens_per_step / seconds}
    row |= {"peak_gib": peak, "plan_gib": planned, "peak_over_plan": peak / planned}
    return row | {f"loss_{number}": loss for number, loss in enumerate(losses, 1)}


def measure(options: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    for name in options.names or [f"{name}{how}" for name in CONTENDERS for how in ("", ", blocks compiled")]:
        if options.only in name:
            rows.append(run(name, options))
            print(rows[-1], flush=True)
    for row in rows:
        yardstick = "bf16, adamw-bf16" + (", blocks compiled" if "compiled" in str(row["contender"]) else "")
        times = [float(str(other["ms"])) for other in rows if other["contender"] == yardstick]
        row["times_as_fast"] = times[0] / float(str(row["ms"])) if times else "not in this run"
    return rows


def main() -> None:
    options = parser(__doc__)
    options.set_defaults(repeats=3)
    options.add_argument("--names", nargs="*", default=(), help="contenders by their whole names")
    options.add_argument("--layers", type=int, default=4)
    options.add_argument("--vocabulary", type=int, default=16032)
    options.add_argument(
        "--warmup", type=int, default=PRESETS["8b"].warmup, help="steps to the learning rate"
    )
    chosen = options.parse_args()
    report("fine_tune", measure(chosen), chosen)


if __name__ == "__main__":
    main()
