"""Draws ``docs/assets/grpo-*.svg``: the KL between sampler and trainer in ``examples/16_grpo.py``.

``python docs/grpo_chart.py`` draws the rows of ``benchmarks/results/grpo.csv``; ``--measure`` trains on this CPU first.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import subprocess
import sys
from pathlib import Path
from statistics import median
from types import ModuleType

import torch
from matplotlib.figure import Figure

import narrowcast as nc
from narrowcast_tools.colors import color_of
from narrowcast_tools.schemes import LETTERS, WIDE, WIDTH, tell, write_widths
from narrowcast_tools.train.machine import cpu_model

ROOT = Path(__file__).parents[1]
ROWS, ASSETS = ROOT / "benchmarks" / "results" / "grpo.csv", ROOT / "docs" / "assets"
BLOCK, CURRENT = nc.recipe.Float8BlockScaling(), nc.recipe.Float8CurrentScaling()
RUNS = {
    "bf16": (None, None, 1),
    "FP8 current": (CURRENT, None, 1),
    "FP8 128-block": (BLOCK, None, 1),
    "bf16, batch-invariant": (None, "batch-invariant", 1),
    "FP8 128-block, batch-invariant, two processes": (BLOCK, "batch-invariant", 2),
}
ZERO, LEAST = 2e-10, 5e-10  # where a KL of exactly 0 is drawn, and where the log scale begins


def example() -> ModuleType:
    """Return the example's module; its second process imports it, too."""
    sys.path.insert(0, str(ROOT / "examples"))
    return importlib.import_module("16_grpo")


def measure(steps: int) -> None:
    """Train every run, and write a row per step."""
    torch.set_num_threads(1)
    commit = subprocess.run(["git", "describe", "--always"], cwd=ROOT, capture_output=True, text=True)
    where = {
        "device": f"{cpu_model()}, 1 thread",
        "torch": torch.__version__,
        "narrowcast": nc.__version__,
        "commit": commit.stdout.strip(),
    }
    train = example().train
    with ROWS.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["run", "step", "reward", "kl", *where], lineterminator="\n")
        writer.writeheader()
        for name, (recipe, mode, processes) in RUNS.items():
            for step, (reward, kl) in enumerate(train(recipe, mode, processes, steps)):
                row = {"run": name, "step": step, "reward": f"{reward:.5f}", "kl": f"{kl:.4e}"}
                writer.writerow({**row, **where})
                file.flush()


def draw(wide: bool) -> Figure:
    """Return the KL of the rows, a strip of dots per run; their rewards are too close to draw."""
    with ROWS.open(newline="") as file:
        rows = list(csv.DictReader(file))
    figure = Figure(figsize=(WIDE if wide else WIDTH, 4.2), layout="constrained")
    axes = figure.subplots()
    for place, name in enumerate(RUNS):
        own = [row for row in rows if row["run"] == name]
        found = [float(row["kl"]) for row in own]
        middle, largest = median(found), max(found)
        color = color_of(name)
        axes.plot(
            [kl or ZERO for kl in found], [place] * len(found), "o", ms=7, mew=0, color=color, alpha=0.5
        )
        axes.plot(middle or ZERO, place, "|", ms=16, mew=2.5, color="0.12")
        told = f"median {middle:.1e}, largest {largest:.1e}" if largest else f"0 in all {len(found)} steps"
        for text, weight, above in ((name, "bold", 25), (told, "normal", 12)):
            offset = {"xytext": (4, above), "textcoords": "offset points", "size": LETTERS, "weight": weight}
            axes.annotate(text, (0, place), xycoords=axes.get_yaxis_transform(), **offset)
    axes.axvspan(ZERO / 3, LEAST, color="0.5", alpha=0.18, linewidth=0)
    axes.set(xscale="log", xlim=(ZERO / 3, 1e-4), ylim=(len(RUNS) - 0.6, -0.85), yticks=[])
    powers = range(8, 3, -2)
    ticks = [ZERO, *(10.0**-power for power in powers)]
    axes.set_xticks(ticks, ["exactly\n0", *(f"1e-{power}" for power in powers)], size=LETTERS)
    axes.minorticks_off()
    axes.set_xlabel("KL in nats, log scale; left is better", size=LETTERS)
    axes.grid(axis="x", color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    foot = (
        "KL: how far the trainer's probabilities are from those of the sampler that wrote the answers. A dot: a step; "
        f"a tall line: the median. CPU, torch {rows[0]['torch']}, narrowcast {rows[0]['narrowcast']}"
    )
    tell(figure, "In batch-invariant mode, trainer and sampler agree exactly: KL 0", foot)
    return figure


def main() -> None:
    """Read the options."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--measure", action="store_true", help="train first")
    options.add_argument("--steps", type=int, default=40, help="of each run (default 40)")
    chosen = options.parse_args()
    if chosen.measure:
        measure(chosen.steps)
    write_widths(draw, ASSETS, "grpo")


if __name__ == "__main__":
    sys.exit(main())
