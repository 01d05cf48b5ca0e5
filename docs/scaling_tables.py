"""Writes the tables of ``docs/scaling.md`` and draws ``docs/assets/scaling-*.svg``, from ``narrowcast_tools.plan``.

python docs/scaling_tables.py
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure
from matplotlib.patches import Patch

import narrowcast as nc
from narrowcast_tools.hardware import BATCH
from narrowcast_tools.plan import GPUS, MODELS, Estimate, Layout, Model, estimate, plan
from narrowcast_tools.schemes import LETTERS, WIDE, WIDTH, tell, write_widths

DOCS = Path(__file__).resolve().parent
PAGE = DOCS / "scaling.md"
GIB = 2**30
COUNTS = (64, 256, 1024, 4096)
"""GPUs of the table and the picture; the table also has 8, which do not hold the picture's model."""
COLORS = {
    "GEMMs": "#0072B2",
    "attention": "#56B4E9",
    "quantizing": "#CC79A7",
    "norms, activations, copies": "#999999",
    "communication, pipeline bubble": "#D55E00",
}


class Case(NamedTuple):
    """A step that ran: what it reached, and how far off the model may be, as stated on the page."""

    name: str
    model: Model
    layout: Layout
    recipe: str
    gpu: str
    unit: str  # tokens/s/GPU, MFU, or GPU hours per trillion tokens
    reported: float
    error: float  # largest error as a share of what was reported
    memory: float = 0.0  # GiB at the peak, where it was measured

    def estimate(self) -> Estimate:
        """The model's step."""
        return estimate(self.model, self.layout, self.recipe, GPUS[self.gpu])

    def predicted(self) -> float:
        """The model's figure in the unit of the report."""
        result = self.estimate()
        hours = 1e12 / result.tokens_per_second / 3600
        return {"tokens/s/GPU": result.tokens_per_second, "MFU": result.mfu, "GPU hours": hours}[self.unit]


SLICE = replace(MODELS["8b"], name="8b, 4 layers", layers=4, vocabulary=32000)
ONE = Layout(1, 8192, 2048, micro_batch=4, state=(2.0, 2.0, 4.0))
STACK = replace(SLICE, vocabulary=0)  # two GPUs: benchmarks/results/fsdp.csv, commit a609b65
TWO = Layout(2, 2 * 8192, 4096, micro_batch=2, reduced=4.0)  # PyTorch's FSDP2
OURS = replace(TWO, fp8_gather=True, reduced=2.0)
LLAMA = Layout(8192, 16 * 2**20, 8192, tp=8, pp=16, stages=8)
DEEPSEEK = Layout(2048, 15360 * 4096, 4096, pp=16, ep=64, stages=2, overlap_experts=True)

CASES = (
    Case("4 layers of 8B, 1 H200, bf16", SLICE, ONE, "bf16", "h200", "tokens/s/GPU", 90521, 0.1, 11.9),
    Case("the same, delayed", SLICE, ONE, "delayed", "h200", "tokens/s/GPU", 128852, 0.1, 11.6),
    Case("the same, current", SLICE, ONE, "current", "h200", "tokens/s/GPU", 126481, 0.1, 11.6),
    Case("the same, 128-block", SLICE, ONE, "block", "h200", "tokens/s/GPU", 116041, 0.1, 11.6),
    Case(
        "4 layers of 8B, 2 H200, FSDP2, bf16", STACK, TWO, "bf16", "h200", "tokens/s/GPU", 89043, 0.1, 10.89
    ),
    Case("the same, delayed", STACK, OURS, "delayed", "h200", "tokens/s/GPU", 139412, 0.1, 10.98),
    Case("the same, current", STACK, OURS, "current", "h200", "tokens/s/GPU", 133813, 0.1, 10.92),
    Case("Llama 3 405B, 8192 H100", MODELS["405b"], LLAMA, "bf16", "h100", "MFU", 0.43, 0.2),
    Case(
        "Llama 3 405B, 16384 H100",
        MODELS["405b"],
        replace(LLAMA, gpus=16384),
        "bf16",
        "h100",
        "MFU",
        0.41,
        0.2,
    ),
    Case(
        "the same, sequences of 131072",
        MODELS["405b"],
        replace(LLAMA, gpus=16384, length=131072, cp=16),
        "bf16",
        "h100",
        "MFU",
        0.38,
        0.2,
    ),
    Case("DeepSeek-V3, 2048 H800", MODELS["671b"], DEEPSEEK, "block", "h800", "GPU hours", 180_000, 0.3),
)


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


def planned() -> tuple[str, str]:
    """The plans of all models: how fast they are, and what a step and the memory hold."""
    speed = ["| model | GPUs | recipe | layout | step, s | tokens/s/GPU | MFU |"]
    speed.append("| --- | ---: | --- | --- | ---: | ---: | ---: |")
    parts = ["| model | GPUs | recipe | microbatches | GiB | activations | GB received | GEMMs | waiting |"]
    parts.append("| --- | ---: | --- | ---: " + "| ---: " * 5 + "|")
    for model in MODELS:
        for gpus in (8, *COUNTS):
            for recipe in ("bf16", "block"):
                name = f"| {model} | {gpus} | {'128-block' if recipe == 'block' else recipe}"
                try:
                    e = plan(model, gpus, recipe, batch_size=BATCH // 8192)
                except ValueError as error:
                    missing = re.search(r"[\d.,]+ GiB more", str(error))
                    assert missing
                    speed.append(f"{name} | does not fit: {missing[0]} | | | |")
                    continue
                lost = sum(t for name, t in e.seconds.items() if "exposed" in name or "bubble" in name)
                layout = re.sub(r" x (TP|PP) 1\b", "", str(e.layout))
                layout += ", recomputing" if e.layout.recompute else ""
                speed.append(f"{name} | {layout} | {e.step:.2f} | {e.tokens_per_second:,.0f} | {e.mfu:.0%} |")
                parts.append(
                    f"{name} | {e.layout.micro_batches} x {e.layout.micro_batch} "
                    f"| {e.total_memory / GIB:.0f} | {e.memory['activations'] / GIB:.0f} "
                    f"| {sum(e.wire.values()) / 1e9:,.0f} | {e.seconds['GEMMs'] / e.step:.0%} "
                    f"| {lost / e.step:.0%} |"
                )
    return "\n".join(speed), "\n".join(parts)


def page() -> str:
    """The page with the tables that the model gives now."""
    text = PAGE.read_text()
    speed, parts = planned()
    for name, table in (("compared", compared()), ("planned", speed), ("parts", parts)):
        mark = f"<!-- {name}: docs/scaling_tables.py -->"
        before, after = text.split(mark + "\n")
        text = f"{before}{mark}\n{table}\n\n" + after.split("\n\n", 1)[1]
    return text


def draw(wide: bool) -> Figure:
    """What one million tokens of the 70B model cost, by part, over the number of GPUs; on pages or on phones."""
    figure = Figure(figsize=(WIDE, 3.2) if wide else (WIDTH, 5.9), layout="constrained")
    shape = (1, 2) if wide else (2, 1)
    panels = dict(zip(("bf16", "block"), figure.subplots(*shape, sharey=True)))
    steps: dict[str, list[float]] = {}
    for recipe, axes in panels.items():
        bottom = [0.0] * len(COUNTS)
        results = [plan("70b", gpus, recipe, batch_size=BATCH // 8192) for gpus in COUNTS]
        steps[recipe] = [result.step for result in results]
        for part, color in COLORS.items():
            heights = []
            for result in results:
                per_million = 1e6 / result.tokens_per_second / result.step
                shares = {"communication, pipeline bubble": ("exposed", "slowed", "pipeline bubble")}.get(
                    part, (part,)
                )
                seconds = sum(t for name, t in result.seconds.items() if name.startswith(shares))
                heights.append(seconds * per_million)
            axes.bar(range(len(COUNTS)), heights, bottom=bottom, color=color, label=part, width=0.8)
            bottom = [low + height for low, height in zip(bottom, heights)]
        for place, (result, top) in enumerate(zip(results, bottom)):
            axes.text(place, top + 14, f"{top:.0f}", ha="center", size=LETTERS, weight="bold")
            inside = {"ha": "center", "va": "center", "size": LETTERS, "color": "white"}
            axes.text(place, 200, f"MFU\n{result.mfu:.0%}", **inside)
        axes.set_xticks(range(len(COUNTS)), [f"{gpus}" for gpus in COUNTS], size=LETTERS)
        axes.set_xlabel("GPUs", size=LETTERS)
        told = {"bf16": "bf16", "block": "FP8, a scale per block of 128"}[recipe]
        axes.set_title(told, loc="left", size=LETTERS, weight="bold")
        axes.tick_params(axis="y", labelsize=LETTERS)
        axes.spines[["top", "right"]].set_visible(False)
        if axes.get_subplotspec().is_first_col():
            axes.set_ylabel("GPU-seconds per\nmillion tokens", size=LETTERS)
        axes.set_ylim(0, 950)
    told = {"GEMMs": "matrix products", "communication, pipeline bubble": "communication, waiting"}
    keys = [Patch(color=color, label=told.get(part, part)) for part, color in COLORS.items()]
    saved = [1 - block / plain for plain, block in zip(steps["bf16"], steps["block"])]
    finding = (
        f"Estimate: FP8 saves {100 * min(saved):.0f} to {max(saved):.0%} of a 70B model's GPU time on {COUNTS[0]} to "
        f"{COUNTS[-1]} H200s"
    )
    foot = (
        "Shorter is better. MFU: the share of the GPUs' bf16 peak in use. Not measured: "
        f"`narrowcast plan` of {nc.__version__} computed it, likely 5 to 15% too fast."
    )
    tell(figure, finding, foot, keys, columns=3 if wide else 1)
    return figure


if __name__ == "__main__":
    PAGE.write_text(page())
    write_widths(draw, DOCS / "assets", "scaling")
