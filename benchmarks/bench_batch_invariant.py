"""The price of the batch-invariant mode: CPU time of a forward, with the mode and without, in turns.

    python benchmarks/bench_batch_invariant.py --save

On a GPU nothing was measured. ``ratio`` is the time relative to the library's order of sums (lower is better).
"""

from __future__ import annotations

import statistics
import time
from argparse import Namespace
from collections.abc import Callable

import torch
from harness import Row, parser, report

import narrowcast as nc
from narrowcast.recipe import Recipe

WIDTH, HEADS, LENGTH = 1024, 8, 128
ROWS = (1, 64, 512)
RECIPES: dict[str, Recipe | None] = {
    "bf16": None,
    "block": nc.recipe.Float8BlockScaling(),
    "mxfp8": nc.recipe.MXFP8BlockScaling(),
}
Run = Callable[[], object]


def linear(recipe: Recipe | None, rows: int) -> Run:
    """A linear layer on so many rows."""
    layer = nc.Linear(WIDTH, WIDTH, bias=False, recipe=recipe, params_dtype=torch.bfloat16, device="cpu")
    x = torch.randn(rows, WIDTH, dtype=torch.bfloat16)
    return lambda: layer(x)


def attention(sequences: int) -> Run:
    """Causal attention of so many sequences."""
    layer = nc.DotProductAttention(
        HEADS, WIDTH // HEADS, qkv_format="bshd", attn_mask_type="causal", attention_dropout=0.0
    )
    q, k, v = torch.randn(3, sequences, LENGTH, HEADS, WIDTH // HEADS, dtype=torch.bfloat16)
    return lambda: layer(q, k, v)


def head(rows: int) -> Run:
    """The loss of a head with 8192 classes."""
    hidden, weight = (torch.randn(size, WIDTH, dtype=torch.bfloat16) for size in (rows, 8192))
    return lambda: nc.linear_cross_entropy(hidden, weight, torch.zeros(rows, dtype=torch.int64))


def cases() -> dict[str, Run]:
    """What is timed, by name."""
    found = {
        f"linear {name}, {rows} rows": linear(recipe, rows)
        for name, recipe in RECIPES.items()
        for rows in ROWS
    }
    found[f"attention, 4 sequences of {LENGTH}"] = attention(4)
    found["linear_cross_entropy, 64 rows"] = head(64)
    return found


@torch.no_grad()
def milliseconds(run: Run, repeats: int) -> tuple[float, float]:
    """Return the medians of CPU time, without the mode and with it."""
    times: dict[str | None, list[float]] = {None: [], "batch-invariant": []}
    for _ in range(repeats + 1):
        for mode, taken in times.items():
            nc.set_deterministic(mode)
            start = time.process_time()
            run()
            taken.append(1e3 * (time.process_time() - start))
    nc.set_deterministic(None)
    library, invariant = (statistics.median(taken[1:]) for taken in times.values())
    return library, invariant


def measure(chosen: Namespace) -> list[Row]:
    """Time every case whose name contains ``--only``."""
    rows: list[Row] = []
    for name, run in cases().items():
        if chosen.only in name:
            library, invariant = milliseconds(run, chosen.repeats)
            rows.append(
                {"case": name, "library_ms": library, "invariant_ms": invariant, "ratio": invariant / library}
            )
    return rows


def main() -> None:
    """Measure and report, on the CPU."""
    chosen = parser(__doc__).parse_args()
    chosen.device = "cpu"
    torch.manual_seed(0)
    report("batch_invariant", measure(chosen), chosen)


if __name__ == "__main__":
    main()
