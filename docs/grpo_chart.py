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

import torch
from matplotlib.figure import Figure

import narrowcast as nc
from narrowcast_tools.colors import color_of
from narrowcast_tools.schemes import svg, write
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
FLOOR = 1e-9  # where a KL of exactly 0 is drawn


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
    sys.path.insert(0, str(ROOT / "examples"))  # the second process imports it, too
    train = importlib.import_module("16_grpo").train
    with ROWS.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["run", "step", "reward", "kl", *where], lineterminator="\n")
        writer.writeheader()
        for name, (recipe, mode, processes) in RUNS.items():
            for step, (reward, kl) in enumerate(train(recipe, mode, processes, steps)):
                row = {"run": name, "step": step, "reward": f"{reward:.5f}", "kl": f"{kl:.4e}"}
                writer.writerow({**row, **where})
                file.flush()


def draw() -> None:
    """Draw the KL of the rows; their rewards are too close to draw."""
    with ROWS.open(newline="") as file:
        rows = list(csv.DictReader(file))
    figure = Figure(figsize=(6.5, 4.9), layout="constrained")
    axes = figure.subplots()
    rewards: dict[str, list[float]] = {}
    for name in RUNS:
        own = [row for row in rows if row["run"] == name]
        steps = [int(row["step"]) for row in own]
        rewards[name] = [float(row["reward"]) for row in own]
        # Where lines lie on each other, the wide one of bf16 shows around the others.
        wide = name.startswith("bf16")
        style = {"color": color_of(name), "linewidth": 5.0 if wide else 1.5, "alpha": 0.55 if wide else 1}
        style |= {"linestyle": (0, (3, 1.5)) if "batch-invariant" in name and not wide else "-"}
        axes.plot(steps, [max(float(row["kl"]), FLOOR) for row in own], label=name, **style)
    axes.set_title("KL between sampler and trainer, k3 estimate; lower is better", loc="left", size=10.5)
    axes.set(yscale="log", xlabel="step", ylim=(FLOOR / 5, None))
    ticks = [FLOOR, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4]
    axes.set_yticks(ticks, ["exactly 0", *(f"1e-{power}" for power in range(8, 3, -1))])
    axes.minorticks_off()
    told = "both batch-invariant runs, all steps"
    axes.annotate(told, (steps[-1] / 2, FLOOR), (0, -12), textcoords="offset points", ha="center", size=8.5)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(
        title="The batch-invariant mode makes the KL exactly 0",
        title_fontproperties={"size": 12, "weight": "bold"},
        alignment="left",
        loc="outside upper left",
        frameon=False,
        fontsize=9,
        handlelength=3.5,
    )
    apart = max(max(at) - min(at) for at in zip(*rewards.values()))
    first, last = (rewards["bf16"][at] for at in (0, -1))
    told = f"Not drawn: the reward. In bf16 it rises from {first:.2f} to {last:.2f}; all runs are within {apart:.2f}."
    where = f"CPU: {rows[0]['device']}, torch {rows[0]['torch']}, narrowcast {rows[0]['narrowcast']}"
    figure.supxlabel(f"{told}\n{where}", x=0.01, ha="left", size=8.5, color="0.35")
    write(svg(figure), ASSETS, "grpo")


def main() -> None:
    """Read the options."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--measure", action="store_true", help="train first")
    options.add_argument("--steps", type=int, default=40, help="of each run (default 40)")
    chosen = options.parse_args()
    if chosen.measure:
        measure(chosen.steps)
    draw()


if __name__ == "__main__":
    sys.exit(main())
