"""Writes the tables of ``docs/scaling.md`` and draws ``docs/assets/scaling.png``, from ``narrowcast.plan``.

python docs/scaling_tables.py
"""

from __future__ import annotations

import re
from pathlib import Path

from narrowcast.plan import MODELS, plan
from narrowcast.plan.validate import CASES

DOCS = Path(__file__).resolve().parent
PAGE, PICTURE = DOCS / "scaling.md", DOCS / "assets" / "scaling.png"
GIB = 2**30
COLORS = {
    "GEMMs": "#0072B2",
    "attention": "#56B4E9",
    "quantizing": "#CC79A7",
    "norms, activations, copies": "#999999",
    "communication": "#D55E00",
    "pipeline bubble": "#E69F00",
}


def compared() -> str:
    """What ran beside what the model says."""
    rows = [
        "| step | reported | predicted | error | GiB, measured | predicted |",
        "| --- " + "| ---: " * 5 + "|",
    ]
    for case in CASES:
        told = {"MFU": "{:.1%} MFU", "GPU hours": "{:,.0f} GPU hours"}.get(case.unit, "{:,.0f} tokens/s")
        result, predicted = case.estimate(), case.predicted()
        error = predicted / case.reported - 1
        measured = f"{case.memory:.1f}" if case.memory else "-"
        rows.append(
            f"| {case.name} | {told.format(case.reported)} | {told.format(predicted)} | {error:+.0%} "
            f"| {measured} | {result.total_memory / GIB:.1f} |"
        )
    return "\n".join(rows)


def planned() -> str:
    """The plans of all models."""
    rows = [
        "| model | GPUs | recipe | layout | microbatches | GiB | of it activations | GB received | step, s "
        "| GEMMs | exposed and bubble | tokens/s/GPU | MFU |",
        "| --- | ---: | --- | --- | ---: " + "| ---: " * 8 + "|",
    ]
    for model in MODELS:
        for gpus in (8, 64, 256, 1024, 4096):
            for recipe in ("bf16", "block"):
                try:
                    e = plan(model, gpus, recipe)
                except ValueError as error:
                    missing = re.search(r"[\d.,]+ GiB more", str(error))
                    assert missing
                    rows.append(f"| {model} | {gpus} | {recipe} | does not fit: {missing[0]} {'| ' * 10}|")
                    continue
                lost = sum(t for name, t in e.seconds.items() if "exposed" in name or "bubble" in name)
                layout = f"{e.layout}{', recomputing' if e.layout.recompute else ''}"
                rows.append(
                    f"| {model} | {gpus} | {recipe} | {layout} | {e.layout.micro_batches} x {e.layout.micro_batch} "
                    f"| {e.total_memory / GIB:.0f} | {e.memory['activations'] / GIB:.0f} "
                    f"| {sum(e.wire.values()) / 1e9:,.0f} | {e.step:.2f} | {e.seconds['GEMMs'] / e.step:.0%} "
                    f"| {lost / e.step:.0%} | {e.tokens_per_second:,.0f} | {e.mfu:.0%} |"
                )
    return "\n".join(rows)


def page() -> str:
    """The page with the tables that the model gives now."""
    text = PAGE.read_text()
    for name, table in (("compared", compared()), ("planned", planned())):
        mark = f"<!-- {name}: docs/scaling_tables.py -->"
        before, after = text.split(mark + "\n")
        text = f"{before}{mark}\n{table}\n\n" + after.split("\n\n", 1)[1]
    return text


def draw() -> None:
    """What one million tokens of the 70B model cost, by part, over the number of GPUs."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.8), dpi=130, layout="constrained")
    figure.suptitle(
        "70B on H200s, 16 Mi tokens a step: where the GPUs' time goes", x=0.01, ha="left", weight="bold"
    )
    counts = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
    for axes, recipe in zip(figure.subplots(1, 2, sharey=True), ("bf16", "block")):
        bottom = [0.0] * len(counts)
        results = [plan("70b", gpus, recipe) for gpus in counts]
        for part, color in COLORS.items():
            heights = []
            for result in results:
                per_million = 1e6 / result.tokens_per_second / result.step
                shares = {"communication": ("exposed", "slowed")}.get(part, (part,))
                seconds = sum(t for name, t in result.seconds.items() if name.startswith(shares))
                heights.append(seconds * per_million)
            axes.bar(range(len(counts)), heights, bottom=bottom, color=color, label=part, width=0.8)
            bottom = [low + height for low, height in zip(bottom, heights)]
        for place, (result, top) in enumerate(zip(results, bottom)):
            layout = result.layout
            told = f"{result.mfu:.0%}\nTP{layout.tp}\nPP{layout.pp}"
            axes.text(place, top + 8, told, ha="center", size=7.5, color="0.3")
        axes.set_xticks(range(len(counts)), [str(count) for count in counts])
        axes.set_title({"bf16": "bf16", "block": "FP8 128-block, FP8 gather"}[recipe], loc="left", size=10)
        axes.set_xlabel("GPUs   (above the bars: MFU of the bf16 peak, layout)", size=8.5)
        axes.spines[["top", "right"]].set_visible(False)
        if recipe == "bf16":
            axes.set_ylabel("GPU-seconds per million tokens")
        else:
            axes.legend(frameon=False, loc="upper left", ncols=2, fontsize=8.5)
        axes.set_ylim(0, 1180)
    figure.savefig(PICTURE)


if __name__ == "__main__":
    PAGE.write_text(page())
    draw()
