"""The price of the batch-invariant mode: time of a forward, with the mode and without, in turns.

    python benchmarks/bench_batch_invariant.py --save

CPU time on a CPU; on a GPU the time of the kernels, on weights that do not stay in the cache. ``ratio`` is the time
relative to the library's order of sums (lower is better); ``one_process`` is the mode with ``processes=1``. Layers have
stored weights: nothing quantizes a weight.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

import torch
from harness import Row, parser, report, time_in_turns

import narrowcast as nc
from narrowcast.recipe import Recipe

Run = Callable[[], object]
SIZES: dict[str, dict[str, Any]] = {
    "cpu": {"width": 1024, "rows": (1, 64, 512), "heads": 8, "length": 128, "classes": 8192, "layers": 1},
    "cuda": {
        "width": 4096,
        "rows": (1, 64, 512, 8192),
        "heads": 32,
        "length": 1024,
        "classes": 128256,
        "layers": 8,
    },
}


def recipes(emulate: bool) -> dict[str, Recipe | None]:
    """What linear layers multiply."""
    return {
        "bf16": None,
        "block": nc.recipe.Float8BlockScaling(),
        "delayed": nc.recipe.DelayedScaling(),
        "mxfp8": nc.recipe.MXFP8BlockScaling(emulate=emulate),
    }


def linear(recipe: Recipe | None, rows: int, size: dict[str, Any], device: str) -> Sequence[Run]:
    """Linear layers on so many rows."""
    width = size["width"]
    options: Any = {"bias": False, "params_dtype": torch.bfloat16, "device": device}
    stored = contextlib.nullcontext() if recipe is None else nc.quantized_model_init(recipe=recipe)
    with stored:
        layers = [nc.Linear(width, width, recipe=recipe, **options).eval() for _ in range(size["layers"])]
    x = torch.randn(rows, width, dtype=torch.bfloat16, device=device)
    return [lambda layer=layer: layer(x) for layer in layers]  # type: ignore[misc]


def attention(size: dict[str, Any], device: str) -> Sequence[Run]:
    """Causal attention of four sequences."""
    heads, features = size["heads"], size["width"] // size["heads"]
    layer = nc.DotProductAttention(
        heads, features, qkv_format="bshd", attn_mask_type="causal", attention_dropout=0.0
    )
    q, k, v = torch.randn(3, 4, size["length"], heads, features, dtype=torch.bfloat16, device=device)
    return [lambda: layer(q, k, v)]


def head(size: dict[str, Any], device: str) -> Sequence[Run]:
    """The loss of a head for 64 rows."""
    options: Any = {"dtype": torch.bfloat16, "device": device}
    hidden, weight = (torch.randn(count, size["width"], **options) for count in (64, size["classes"]))
    target = torch.zeros(64, dtype=torch.int64, device=device)
    return [lambda: nc.linear_cross_entropy(hidden, weight, target)]


def cases(device: str) -> dict[str, Callable[[], Sequence[Run]]]:
    """What is timed, by name."""
    size = SIZES[device]
    found: dict[str, Callable[[], Sequence[Run]]] = {
        f"linear {name}, {rows} rows": lambda recipe=recipe, rows=rows: linear(recipe, rows, size, device)  # type: ignore[misc]
        for name, recipe in recipes(device == "cuda").items()
        for rows in size["rows"]
    }
    found[f"attention, 4 sequences of {size['length']}"] = lambda: attention(size, device)
    found[f"linear_cross_entropy, {size['classes']} classes, 64 rows"] = lambda: head(size, device)
    return found


@torch.no_grad()
def milliseconds(runs: Sequence[Run], repeats: int, device: str) -> list[float]:
    """Return the medians of the time: without the mode, in the mode of 8 processes, and in that of one."""
    modes = (None, 8, 1)
    times: dict[str, list[float]] = {str(processes): [] for processes in modes}

    def in_mode(processes: int | None) -> Callable[[Run], object]:
        def run(one: Run) -> object:
            nc.set_deterministic("batch-invariant" if processes else None, processes=processes or 8)
            return one()

        return run

    if device == "cuda":
        contenders = {str(processes): in_mode(processes) for processes in modes}
        found = time_in_turns(contenders, [(run,) for run in runs], repeats)
        times = {mode: [us / 1e3 for us in taken] for mode, taken in found.items()}
    else:
        for _ in range(repeats + 1):
            for processes in modes:
                start = time.process_time()
                in_mode(processes)(runs[0])
                times[str(processes)].append(1e3 * (time.process_time() - start))
        times = {mode: taken[1:] for mode, taken in times.items()}
    nc.set_deterministic(None)
    return [statistics.median(taken) for taken in times.values()]


def measure(chosen: Namespace) -> list[Row]:
    """Time every case whose name contains ``--only``."""
    rows: list[Row] = []
    for name, make in cases(chosen.device).items():
        if chosen.only in name:
            library, invariant, one = milliseconds(make(), chosen.repeats, chosen.device)
            row: Row = {
                "case": name,
                "library_ms": library,
                "invariant_ms": invariant,
                "ratio": invariant / library,
            }
            rows.append(row | {"one_process_ms": one, "one_process_ratio": one / library})
    return rows


def main() -> None:
    """Measure and report."""
    chosen = parser(__doc__).parse_args()
    torch.manual_seed(0)
    report("batch_invariant", measure(chosen), chosen)


if __name__ == "__main__":
    main()
