"""Write the performance pages' tables and charts from ``benchmarks/results/*.csv``.

    python docs/performance.py

It writes ``docs/performance.md``, the tables between markers in ``docs/choosing.md`` and README, the charts in
``docs/assets/perf/``, and the alternative text of the home page's chart. A table whose rows come from
several machines, versions or commits is refused.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Collection
from pathlib import Path
from statistics import fmean
from textwrap import wrap
from typing import Any, NamedTuple

from performance_chart import Bar, Panel, svg

from narrowcast_tools.colors import in_both_schemes

DOCS = Path(__file__).resolve().parent
RESULTS = DOCS.parent / "benchmarks" / "results"
CHARTS = DOCS / "assets" / "perf"
RUN = ("device", "torch", "triton", "narrowcast", "commit")
"""The columns that say where, with what and when a row was measured."""

Row = dict[str, str]


class Section(NamedTuple):
    """A table of times beside bf16, from rows of one run.

    ``contenders`` maps the names in the file to those on the page; the first is what the others are compared with.
    ``where`` gives the columns that choose rows. ``file``, ``milliseconds`` and ``peak`` name the file and its columns;
    ``scale`` turns a value of the column into milliseconds, ``gib`` one of ``peak`` into GiB.
    """

    key: str
    title: str
    what: str
    command: str
    hardware: str
    notes: tuple[str, ...]
    file: str
    contenders: dict[str, str]
    where: dict[str, str]
    milliseconds: str
    peak: str | None = None
    scale: float = 1.0
    gib: float = 1.0


class Measured(NamedTuple):
    """A row of the page."""

    name: str
    milliseconds: float
    speed: float  # how many times as fast as the first row
    peak: float | None


COMPILED = {
    "bf16, compiled": "bf16",
    "torchao tensorwise, compiled": "torchao tensorwise",
    "torchao rowwise, compiled": "torchao rowwise",
}
LINEAR = {
    **COMPILED,
    "delayed, eager": "delayed",
    "delayed, compiled": "delayed, compiled",
    "current, eager": "current",
    "current, compiled": "current, compiled",
    "block, eager": "128-block",
    "block, compiled": "128-block, compiled",
}
ONE = "one H200"

SECTIONS = (
    Section(
        "fsdp",
        "How fast is a training step on two GPUs?",
        "Four layers of the 8B shape with AdamW under FSDP2, 8192 tokens on each GPU, compiled.",
        "torchrun --nproc-per-node 2 benchmarks/bench_fsdp.py --save",
        "two H200s",
        (
            "`nc.distributed.shard` gathers weights as FP8 codes: half the bytes of bf16.",
            "`FusedAdam` is narrowcast's optimizer; the other rows use PyTorch's fused AdamW.",
        ),
        "fsdp.csv",
        {
            "bf16": "bf16",
            "torchao tensorwise": "torchao tensorwise",
            "delayed, quantized gather": "delayed",
            "current, quantized gather": "current",
            "delayed, quantized gather, FusedAdam": "delayed, FusedAdam",
            "current, quantized gather, FusedAdam": "current, FusedAdam",
        },
        {"commit": "58c05c37"},
        "ms",
        "peak GiB",
    ),
    Section(
        "block",
        "How fast is a Transformer layer?",
        "One `TransformerLayer` of the 8B shape (4096/14336, 32 heads, 8 groups), 8192 tokens, training, compiled.",
        "python benchmarks/bench_transformer.py --only block --save",
        ONE,
        ("Attention stays in bf16 in every row.",),
        "transformer.csv",
        {
            "block, torch bf16": "bf16, plain PyTorch",
            "block, narrowcast bf16": "bf16, narrowcast",
            "block, delayed": "delayed",
            "block, current": "current",
            "block, block-scaled": "128-block",
        },
        {"commit": "676031b"},
        "ms",
        "peak_gib",
    ),
    Section(
        "long",
        "How fast is a Transformer layer over 32k tokens?",
        "The same layer over one sequence of 32,768 tokens, causal, training, compiled.",
        'python benchmarks/bench_transformer.py --only "32k block" --save',
        ONE,
        (
            "Attention stays in bf16 in every row, in cuDNN's kernels. It takes about half of the recipes' time: 54 ms "
            "on an H100 ([attention](attention.md#backends)).",
        ),
        "transformer.csv",
        {
            "32k block, torch bf16": "bf16, plain PyTorch",
            "32k block, narrowcast bf16": "bf16, narrowcast",
            "32k block, delayed": "delayed",
            "32k block, current": "current",
            "32k block, block-scaled": "128-block",
        },
        {"commit": "73d1ca22"},
        "ms",
        "peak_gib",
    ),
    Section(
        "steps",
        "How fast is a training step on one GPU?",
        "Four `TransformerLayer`s of the 8B shape with embedding, bf16 head and AdamW, 8192 tokens, compiled.",
        "python benchmarks/bench_transformer.py --only steps --save",
        ONE,
        ("`FusedAdam` is narrowcast's optimizer; the other rows use PyTorch's fused AdamW.",),
        "transformer.csv",
        {
            "steps, torch bf16": "bf16, plain PyTorch",
            "steps, narrowcast bf16": "bf16, narrowcast",
            "steps, torch bf16, FusedAdam": "bf16, plain PyTorch, FusedAdam",
            "steps, delayed": "delayed",
            "steps, current": "current",
            "steps, block-scaled": "128-block",
            "steps, delayed, FusedAdam": "delayed, FusedAdam",
            "steps, current, FusedAdam": "current, FusedAdam",
        },
        {"commit": "676031b"},
        "ms",
        "peak_gib",
    ),
    Section(
        "mlp",
        "How fast is a feed-forward block?",
        "RMSNorm, SwiGLU and two GEMMs of 4096/14336, 8192 tokens, forward and backward, compiled.",
        "python benchmarks/bench_layernorm_mlp.py --save",
        ONE,
        ("The rows below torchao's are `LayerNormMLP`; CPU time is included.",),
        "layernorm_mlp.csv",
        {
            **COMPILED,
            "delayed, LayerNormMLP, compiled": "delayed",
            "current, LayerNormMLP, compiled": "current",
            "block, LayerNormMLP, compiled": "128-block",
        },
        {"commit": "58c05c37"},
        "p50_ms",
        "peak_mib",
        gib=1 / 1024,
    ),
    Section(
        "linear",
        "How fast is one large linear layer?",
        "`Linear` 4096→14336, 8192 tokens, forward and backward.",
        "python benchmarks/bench_linear.py --save",
        ONE,
        ("The recipes run in eager mode unless the row says compiled; CPU time is included.",),
        "linear.csv",
        LINEAR,
        {"commit": "a090eb1", "in": "4096", "out": "14336"},
        "p50_ms",
        "peak_mib",
        gib=1 / 1024,
    ),
    Section(
        "small-linear",
        "How slow is a small linear layer?",
        "`Linear` 4096→4096, 8192 tokens, forward and backward, one layer alone.",
        "python benchmarks/bench_linear.py --save",
        ONE,
        (
            "The recipes run in eager mode unless the row says compiled; CPU time is included.",
            "The GPU waits for the CPU here. In a compiled model or a CUDA graph it does not.",
            "Later commits take less CPU time: a day later this layer ran 1.06 times as fast as bf16 under delayed "
            "scaling ([Which sizes gain](#which-sizes-of-a-linear-layer-gain)); further runs are in "
            "`benchmarks/results/LOG.md`.",
            '`policy="auto"` measures each size on your GPU and keeps bf16 where it is faster.',
        ),
        "linear.csv",
        LINEAR,
        {"commit": "a090eb1", "in": "4096", "out": "4096"},
        "p50_ms",
        "peak_mib",
        gib=1 / 1024,
    ),
    Section(
        "huggingface",
        "How fast is a converted model of Transformers?",
        "A Llama of 1B parameters, converted, its layers compiled, 8192 tokens a step with AdamW.",
        "python benchmarks/bench_huggingface.py --only full --save",
        ONE,
        ("Attention, head and optimizer stay in high precision.",),
        "huggingface.csv",
        {
            "full, bf16": "bf16",
            "full, delayed": "delayed",
            "full, current": "current",
            "full, block": "128-block",
        },
        {"commit": "b5d4f81b"},
        "ms",
        "peak_gib",
    ),
    Section(
        "lora",
        "How fast is LoRA on weights stored in FP8?",
        "The same Llama with adapters of rank 16 on every linear layer, 8192 tokens a step.",
        "python benchmarks/bench_huggingface.py --only LoRA --save",
        ONE,
        ("Stored weights take half the bytes of bf16, and no step quantizes them.",),
        "huggingface.csv",
        {
            "LoRA, bf16": "bf16",
            "LoRA, current, stored": "current, stored",
            "LoRA, block, stored": "128-block, stored",
        },
        {"commit": "28ebcfd"},
        "ms",
        "peak_gib",
    ),
    Section(
        "head",
        "How fast is a head in FP8?",
        "The head with its loss, 4096 wide, 128256 classes, 8192 tokens, forward and backward, compiled.",
        "python benchmarks/bench_linear_cross_entropy.py --save",
        "one H100",
        (
            "The first row stores the logits; the others make and drop a chunk of them at a time.",
            "`nc.linear_cross_entropy(recipe=)` quantizes the head. [Losses](losses.md) says when to use it.",
        ),
        "linear_cross_entropy.csv",
        {
            "bf16 logits, compiled": "bf16, whole logits",
            "bf16 in chunks, compiled": "bf16, in chunks",
            "current in chunks, compiled": "current",
            "block in chunks, compiled": "128-block",
        },
        {"commit": "727d2a8", "classes": "128256"},
        "p50_ms",
    ),
    Section(
        "optimizer",
        "How fast is FusedAdam?",
        "A step of AdamW on the parameters of four 8B blocks, embedding and head.",
        "python benchmarks/bench_optimizer.py --save",
        ONE,
        ("bf16 parameters and moments in all three rows.",),
        "optimizer.csv",
        {
            "torch fused, bf16": "PyTorch, fused",
            "torch foreach, bf16": "PyTorch, foreach",
            "FusedAdam, bf16": "FusedAdam",
        },
        {"commit": "0ff5e17"},
        "ms",
    ),
)

CHARTED = ("fsdp", "block", "steps", "mlp", "huggingface")
HERO = ("fsdp", "mlp", "huggingface")
SHOWN = ("bf16", "torchao tensorwise", "delayed", "current")
"""The rows of README's table."""
NOT_IN_CHARTS = "FusedAdam"
SHORT = {
    "fsdp": "Training step, four layers of the 8B shape, two GPUs, compiled",
    "block": "TransformerLayer of the 8B shape, compiled",
    "long": "TransformerLayer of the 8B shape, 32k tokens, compiled",
    "steps": "Training step, four layers of the 8B shape, one GPU, compiled",
    "mlp": "Feed-forward block of the 8B shape, compiled",
    "linear": "Linear 4096→14336, compiled",
    "small-linear": "Linear 4096→4096 alone, compiled",
    "huggingface": "Training step, converted 1B Llama of Transformers, compiled",
    "lora": "LoRA step on the same Llama, weights stored in FP8",
    "head": "Head with its loss, 128256 classes, compiled",
    "optimizer": "AdamW step",
}
ALONE = {SHORT["block"]: "one layer alone", SHORT["mlp"]: "one block alone"}
"""What a chart's finding calls a work that is no training step, by its panel's title."""
RECIPES = {"delayed": "delayed scaling", "current": "current scaling", "128-block": "128-block scaling"}


def rows_of(file: str) -> list[Row]:
    """Return the rows of a file of results."""
    with (RESULTS / file).open(newline="") as opened:
        return list(csv.DictReader(opened))


def chosen(section: Section) -> dict[str, Row]:
    """Return the section's row for each contender, by its name in the file.

    Raises:
        ValueError: a row is missing or there twice.
    """
    rows = [row for row in rows_of(section.file) if all(row[c] == v for c, v in section.where.items())]
    found = {}
    for contender in section.contenders:
        matching = [row for row in rows if row["contender"] == contender]
        if len(matching) != 1:
            raise ValueError(f"{section.file} has {len(matching)} rows of {contender!r} with {section.where}")
        found[contender] = matching[0]
    return found


def measured(section: Section) -> list[Measured]:
    """Return the section's rows as the page shows them."""
    rows = chosen(section)
    base = float(next(iter(rows.values()))[section.milliseconds])
    return [
        Measured(
            section.contenders[contender],
            float(row[section.milliseconds]) * section.scale,
            base / float(row[section.milliseconds]),
            float(row[section.peak]) * section.gib if section.peak else None,
        )
        for contender, row in rows.items()
    ]


def days() -> dict[str, str]:
    """Return the day of each commit that results name."""
    return {row["commit"]: row["date"] for row in rows_of("commits.csv")}


def run_of(rows: list[Row], file: str) -> str:
    """Return the machine, versions and day of rows, and their file.

    Raises:
        ValueError: the rows come from several runs.
    """
    if len({tuple(row[column] for column in RUN) for row in rows}) != 1:
        raise ValueError(f"rows of {file} come from several runs; choose them by {', '.join(RUN)}")
    run = rows[0]
    return (
        f"{run['device']}, PyTorch {run['torch']}, Triton {run['triton']}, narrowcast {run['narrowcast']}, "
        f"{days()[run['commit']]}. Rows: `benchmarks/results/{file}`."
    )


def caption(section: Section) -> str:
    """Return the machine, versions and day of a section's rows, and their file."""
    return run_of(list(chosen(section).values()), section.file)


def table(section: Section) -> list[str]:
    """Return the section's table as lines of Markdown."""
    rows = measured(section)
    head, rule = "| | ms | times as fast as bf16 |", "| --- | ---: | ---: |"
    if section.key == "optimizer":
        head = "| | ms | times as fast as PyTorch, fused |"
    if section.peak:
        head, rule = f"{head} peak GiB |", f"{rule} ---: |"
    lines = [head, rule]
    for row in rows:
        digits = 1 if row.milliseconds >= 20 else 2
        cells = [row.name, f"{row.milliseconds:.{digits}f}", f"{row.speed:.2f}"]
        lines.append(f"| {' | '.join(cells + ([f'{row.peak:.2f}'] if row.peak is not None else []))} |")
    return lines


def answer(section: Section) -> str:
    """Return the section's first sentence: how fast the fastest of narrowcast's rows is beside the first row."""
    first, *others = measured(section)
    if section.key == "optimizer":
        return f"**{others[-1].name} is {others[-1].speed:.2f} times as fast as {first.name}.**"
    ours = [row for row in others if row.name.split(",")[0] in RECIPES and NOT_IN_CHARTS not in row.name]
    best = max(ours, key=lambda row: row.speed)
    recipe, _, detail = best.name.partition(", ")
    under = RECIPES[recipe] + (f" ({detail})" if detail else "")
    told = f"**{best.speed:.2f} times as fast as bf16{' at best' if best.speed < 1 else ''}, under {under}.**"
    fused = [row.speed for row in others if row.name == f"{best.name}, {NOT_IN_CHARTS}"]
    return f"{told} `{NOT_IN_CHARTS}` makes it {fused[0]:.2f} times." if fused else told


def panel(key: str) -> Panel:
    """Return the chart of a section: one bar per contender."""
    (section,) = (section for section in SECTIONS if section.key == key)
    bars = [
        Bar(("narrowcast " if row.name in RECIPES else "") + row.name, row.speed, row.milliseconds, row.name)
        for row in measured(section)
        if NOT_IN_CHARTS not in row.name
    ]
    return Panel(SHORT[key], bars)


def measured_with(keys: Collection[str]) -> list[str]:
    """Return the devices, the versions of PyTorch and narrowcast, and the days of sections' rows."""
    rows = [row for section in SECTIONS if section.key in keys for row in chosen(section).values()]
    dates = sorted({days()[row["commit"]] for row in rows})
    told = [" and ".join(sorted({row[name] for row in rows})) for name in ("device", "torch", "narrowcast")]
    return [*told, " to ".join(dict.fromkeys((dates[0], dates[-1])))]


def finding(drawn: Panel) -> str:
    """Return a chart's heading: how fast FP8 is in its fastest recipe."""
    best = max((bar for bar in drawn.bars if bar.contender in RECIPES), key=lambda bar: bar.speed)
    alone = f"{ALONE[drawn.title]} " if drawn.title in ALONE else ""
    return f"FP8 with {RECIPES[best.contender]} trains {alone}{best.speed:.2f} times as fast as bf16"


def heading(key: str) -> str:
    """Return a chart's finding, after the release where other charts have a later one."""
    releases = {chart: measured_with((chart,))[2] for chart in CHARTED}
    earlier = "" if releases[key] == max(releases.values()) else f"narrowcast {releases[key]}: "
    return earlier + finding(panel(key))


def alternative(key: str) -> str:
    """Return what a chart shows, for readers who do not see it."""
    drawn = panel(key)
    peers = ", beside torchao" if any("torchao" in bar.name for bar in drawn.bars) else ""
    return f"{drawn.title}: {heading(key)}, on NVIDIA H200{peers}; longer is faster"


def charts() -> dict[str, str]:
    """Return the charts' text by file name: each light and dark, for pages and for phones."""
    panels = {key: panel(key) for key in CHARTED}
    fastest = max(bar.speed for drawn in panels.values() for bar in drawn.bars)
    told = "PyTorch {1}, narrowcast {2}, {0}, {3}"
    return {
        f"{key}{'' if wide else '-phone'}-{scheme}.svg": svg(
            heading(key), drawn, scheme, told.format(*measured_with((key,))), fastest, wide=wide
        )
        for key, drawn in panels.items()
        for scheme in ("light", "dark")
        for wide in (True, False)
    }


HEAD = """# Performance

Steps measured on H200s unless a table names another GPU, beside bf16 and torchao. *Times as fast as bf16* is bf16's
time over a row's: higher is better, and above 1.00 the recipe wins. [Choose a recipe](choosing.md) recommends one;
[Benchmark method](benchmarks.md) describes the timing. Each table comes from one run; its GPU, versions, day and
command are below it. Compare rows within a table: other tables may be of other releases of narrowcast. The heading of
a chart of speeds names its release if that is not the latest; the other pictures name theirs in their last line.

The 8B shape is that of Llama 3 8B: 4096 wide, an MLP of 14336. bf16 has 16 bits, FP8 has 8 and a scale: *delayed* takes
it from earlier steps, *current* and *tensorwise* from the tensor itself, *128-block* has one per block of 128 elements,
*rowwise* one per row. Charts show steps with PyTorch's AdamW.
"""

LOSSES = """## Does the loss suffer?

**Delayed scaling ends {gap:.2%} above bf16, whose own seeds are {apart:.1%} apart.** Held-out loss of 85M parameters
after 1500 steps of 8192 bytes, the mean over seeds. A gap compares runs of the same seeds: three of bf16's eight have a
mean of {three:.4f}, so FP8 current is {current:.2%} above them, although its loss is no higher than bf16's over eight.
bf16's highest seed ends {limit:.2%} above their mean: a mean gap up to there is within their range. A single seed may
be farther away. The [first training run](first-light.md) has one seed, which ranks no recipes.

| recipe | seeds | held-out loss | lowest to highest | gap to bf16 |
| --- | ---: | ---: | ---: | ---: |
{rows}

NVIDIA H200; MXFP8 and NVFP4 emulated. Rows: `benchmarks/results/train_125m_summary.csv`. The preset `125m` has 125M
parameters with a vocabulary of some 50,000 tokens, and 85M on bytes.

{picture}

Reproduce on one H200: `narrowcast train --preset 125m --compile --by-block --recipe bf16,delayed --seeds 8`

- How much may your loss differ? By as much as two seeds of your bf16 run differ: a smaller gap says nothing about a
  recipe. Here the seeds of bf16 are {apart:.1%} apart, and a run of delayed scaling ends up to {most:.1%} above bf16
  of its seed.
- Alone on the GPU bf16 takes 212,000 tokens/s here and FP8 140,000 (`transformer_h200.log`): the model is too narrow.
"""

SIZES = {"file": "policy.csv", "commit": "0ff5e17", "recipe": "delayed"}
SIZES_HEAD = """## Which sizes of a linear layer gain?

**{gain} of {all} sizes gain under delayed scaling.** `Linear` by size, forward and backward, eager, one layer alone.
CPU time is included. `policy="auto"` measures this on your GPU, and keeps bf16 for sizes below 1.

| tokens × in → out | bf16, ms | times as fast as bf16 |
| --- | ---: | ---: |"""

ACCOUNT_HEAD = """## Where does the time of a training step go?

**{speed:.2f} times as fast as bf16, under {best} scaling.** A 1B Llama of 16 layers, 8192 tokens, AdamW, compiled four
blocks at a time and replayed as a CUDA graph. A step takes {plain:.1f} ms in bf16 with PyTorch's fused optimizer. Under
the recipes, with `FusedAdam(weight_codes=)` and a head under current scaling, it takes {steps} ms:
{speeds} times as fast.
"""
ACCOUNT_NOTES = """A part of a bar is the time of a group of kernels, the sum of the table's cells. The GEMMs save the
most time. Casts (quantizing) take a part of it back. Attention takes longer under every recipe, with the same kernels
as in bf16; why is not explained. Head and optimizer differ since the recipes' rows have an FP8 head and `FusedAdam`.
The [converted Llama](#how-fast-is-a-converted-model-of-transformers) gains less in another setup: modules of
Transformers with their linear layers converted, PyTorch's AdamW, a bf16 head, no CUDA graph.

Reproduce on one H200:
`narrowcast bench account --model 1b --optimizer FusedAdam --head-recipe current --in-parts --out account`

- The floor is the least time that operations or bytes take on this GPU; [Benchmark method](benchmarks.md) has the
  rules. Norms pass placeholders for absent tensors, so their floor is too high.
- Gaps are the replayed step minus its kernels. Replays follow each other, so the GPU is hotter and kernels are slower.
- Under a recipe, casts include the norms and activations that are fused into them. The optimizer quantizes the weights.
- `FusedAdam` would make bf16's step faster, too: see [the optimizer](#how-fast-is-fusedadam).
- Attention is the largest group that no recipe makes faster.
"""

KERNELS = """## How close are the kernels to a copy?

The pictures show the time of one call on one tensor: shorter is better. A bar is narrowcast's time, a mark a peer's.
The strong part of the bar is the least time: the bytes that the kernel has to move, as fast as a copy on the device
moved bytes in the same rounds. The faint part is the rest. A row quantizes with a scale that is given (delayed
scaling), with the tensor's own scale (current), with a scale per 128-element block, in MXFP8, or in NVFP4, with a
random Hadamard transform where it says so. MXFP8 has a scale per 32 values, NVFP4 one per 16. *Unfused* is the same
norm or activation in a kernel of its own, followed by the kernel that quantizes. `make plots` draws the pictures from
the files of the same names in `benchmarks/results/`.

{quantize}

{norm}

{activation}

`benchmarks/results/LOG.md` in the repository is the log of all measurements, with raw output and commits.
`docs/performance.py` writes this page from `benchmarks/results/*.csv`.
"""


def sizes() -> list[str]:
    """Return the section of linear layers by size, as lines of Markdown."""
    rows = [
        row
        for row in rows_of(SIZES["file"])
        if (row["commit"], row["recipe"]) == (SIZES["commit"], SIZES["recipe"])
    ]
    gain = sum(float(row["share_under_the_recipe"]) < 1 for row in rows)
    lines = [SIZES_HEAD.format(gain=gain, all=len(rows))]
    for row in rows:
        size = row["size"].replace("x", " × ").replace("->", " → ")
        speed = 1 / float(row["share_under_the_recipe"])
        lines.append(f"| {size} | {float(row['bf16_ms']):.2f} | {speed:.2f} |")
    reproduce = f"Reproduce on {ONE}: `python benchmarks/bench_policy.py --save`"
    return [*lines, "", run_of(rows, SIZES["file"]), "", reproduce, ""]


def losses() -> str:
    """Return the section of losses by recipe."""
    seeds: dict[str, dict[str, float]] = {}
    for row in rows_of("train_125m_summary.csv"):
        seeds.setdefault(row["recipe"], {})[row["seed"]] = float(row["held-out loss"])
    plain = seeds["bf16"]
    lines, gaps = [], {}
    for recipe, found in seeds.items():
        mean, least, most = fmean(found.values()), min(found.values()), max(found.values())
        gaps[recipe] = mean / fmean(plain[seed] for seed in found) - 1
        gap = "-" if recipe == "bf16" else f"{gaps[recipe]:+.2%}"
        name = "128-block" if recipe == "block" else recipe
        lines.append(f"| {name} | {len(found)} | {mean:.4f} | {least:.4f} to {most:.4f} | {gap} |")
    apart = (max(plain.values()) - min(plain.values())) / fmean(plain.values())
    farthest = max(loss / plain[seed] for seed, loss in seeds["delayed"].items()) - 1
    three = fmean(plain[seed] for seed in seeds["current"])
    alternative = (
        "Held-out loss over the steps by recipe, and the last one's gap to bf16's by seed, beside the range of bf16's "
        "own eight seeds, 85M parameters"
    )
    drawn = in_both_schemes("assets/losses-h200", alternative, phone=True)
    return LOSSES.format(
        gap=gaps["delayed"],
        apart=apart,
        limit=max(plain.values()) / fmean(plain.values()) - 1,
        most=farthest,
        three=three,
        current=gaps["current"],
        rows="\n".join(lines),
        picture=drawn,
    )


def account() -> list[str]:
    """Return the section of a step's kernels by group, as lines of Markdown.

    Raises:
        ValueError: the rows come from several runs.
    """
    rows = rows_of("account.csv")
    runs = {tuple(row[column] for column in ("device", "torch", "narrowcast", "date")) for row in rows}
    if len(runs) != 1:
        raise ValueError("rows of account.csv come from several runs")
    device, torch, narrowcast, date = runs.pop()
    steps: dict[str, dict[str, dict[str, str]]] = {}
    for row in rows:
        name = row["contender"].partition(",")[0]
        steps.setdefault("128-block" if name == "block" else name, {})[row["group"]] = row
    times = {name: float(next(iter(groups.values()))["step_ms"]) for name, groups in steps.items()}
    plain, *recipes = times
    best = min(recipes, key=times.__getitem__)
    told = [f"{times[name]:.1f} ({name})" for name in recipes]
    speeds = [f"{times[plain] / times[name]:.2f}" for name in recipes]
    numbers: dict[str, Any] = {"speed": times[plain] / times[best], "best": best, "plain": times[plain]}
    lines = [ACCOUNT_HEAD.format(**numbers, steps=", ".join(told), speeds=", ".join(speeds))]
    titles = [*(f"{name}, ms" for name in times), f"{recipes[0]}: floor over time"]
    lines += [f"| kernels | {' | '.join(titles)} |", f"| --- |{' ---: |' * len(titles)}"]
    for group in dict.fromkeys(name for groups in steps.values() for name in groups):
        cells = [f"{float(one[group]['ms']):.1f}" if group in one else "" for one in steps.values()]
        share = steps[recipes[0]].get(group, {}).get("share_of_floor", "")
        lines.append(f"| {group} | {' | '.join([*cells, f'{float(share):.2f}' if share else ''])} |")
    run = (
        f"{device}, PyTorch {torch}, narrowcast {narrowcast}, {date}. Rows: `benchmarks/results/account.csv`."
    )
    alternative = (
        f"A step takes {times[best]:.1f} ms under {RECIPES[best]}, {times[plain]:.1f} in bf16; milliseconds by group "
        "of kernels, bf16 and three recipes"
    )
    drawn = in_both_schemes("assets/account", alternative, phone=True)
    return [*lines, "", run, "", drawn, "", ACCOUNT_NOTES]


def kernels() -> str:
    """Return the section of kernels beside their peers."""
    told = {
        "quantize": "Quantizing kernels and their peers",
        "norm": "RMSNorm that quantizes its result, and its peers",
        "activation": "SwiGLU that quantizes its result, and its peers",
    }
    drawn = {
        name: in_both_schemes(f"../benchmarks/results/{name}", alternative, phone=True)
        for name, alternative in told.items()
    }
    return KERNELS.format(**drawn)


def page() -> str:
    """Return ``docs/performance.md``."""
    lines = [HEAD]
    for section in SECTIONS:
        lines += [f"## {section.title}", "", f"{answer(section)} {section.what}", "", *table(section), ""]
        lines += [caption(section), ""]
        if section.key in CHARTED:
            lines += [
                in_both_schemes(f"assets/perf/{section.key}", alternative(section.key), phone=True),
                "",
            ]
        lines += [f"Reproduce on {section.hardware}: `{section.command}`", ""]
        lines += [*(f"- {note}" for note in section.notes), ""]
    return "\n".join([*lines, *account(), *sizes(), losses(), kernels()])


def break_even() -> str:
    """Return the table of ``docs/choosing.md``: times as fast as bf16 per work and recipe."""
    columns = (*RECIPES, "torchao tensorwise")
    lines = [f"| work | {' | '.join(columns)} |", "| --- | ---: | ---: | ---: | ---: |"]
    for section in SECTIONS:
        values = {row.name.removesuffix(", stored"): f"{row.speed:.2f}" for row in measured(section)}
        compiled = {
            name.removesuffix(", compiled"): value for name, value in values.items() if "compiled" in name
        }
        cells = [(values | compiled).get(name, "") for name in columns]
        anchor = re.sub(r"[^a-z0-9]+", "-", section.title.lower()).strip("-")
        if any(cells):
            lines.append(f"| [{SHORT[section.key]}](performance.md#{anchor}) | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def how_much() -> str:
    """Return the table of README, which fits a terminal: speed beside bf16 and peak memory of what its chart shows."""
    shown = {"fsdp": "8B layers", "mlp": "8B block", "huggingface": "converted 1B"}
    works = [measured(section) for section in SECTIONS if section.key in HERO]
    rows = [{row.name: row for row in work} for work in works]
    lines = [
        f"| times as fast as bf16 | {' | '.join(shown.values())} |",
        f"| --- |{' ---: |' * len(shown)}",
    ]
    names = {"delayed": "narrowcast, delayed", "current": "narrowcast, current"}
    for name in SHOWN:
        speeds = [f"{work[name].speed:.2f}" if name in work else "-" for work in rows]
        lines.append(f"| {names.get(name, name)} | {' | '.join(speeds)} |")
    peaks = [f"{work['bf16'].peak:.1f}, {work['delayed'].peak:.1f}" for work in rows]
    lines.append(f"| peak GiB: bf16, delayed | {' | '.join(peaks)} |")
    what = (
        "*8B layers*: a training step of four layers of Llama 3's 8B shape on two GPUs, under FSDP2. *8B block*: "
        "forward and backward of one of their feed-forward blocks. In both, narrowcast uses its fused layers, and "
        "FSDP2 gathers weights in FP8; torchao converts `nn.Linear`s and gathers in bf16. *Converted 1B*: a training "
        "step of a Llama of Transformers after `nc.convert`. A dash: not measured."
    )
    device, torch, ours, dates = measured_with(HERO)
    told = f"Measured on an {device} with PyTorch {torch} and narrowcast {ours}, {dates}."
    return "\n".join([*lines, "", *wrap(f"{what} {told}", 80), ""])


def with_table(path: Path, name: str, table: str) -> str:
    """Return the text of a page with the table between its markers as it is now."""
    pattern = rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)"
    return re.sub(pattern, lambda found: found[1] + table + found[2], path.read_text(), flags=re.DOTALL)


def with_alternative(text: str, key: str) -> str:
    """Return a page with what its chart shows, for readers who do not see it."""
    pattern = rf'(perf/{key}-phone-light\.svg" alt=)"[^"]*"'
    return re.sub(pattern, lambda found: f'{found[1]}"{alternative(key)}"', text)


def files() -> dict[Path, str]:
    """Return the text of every file that this script writes."""
    readme, home, choosing = DOCS.parent / "README.md", DOCS / "index.md", DOCS / "choosing.md"
    return {
        readme: with_table(readme, "how much", how_much()),
        home: with_alternative(home.read_text(), "fsdp"),
        choosing: with_table(choosing, "break even", break_even()),
        DOCS / "performance.md": page(),
        **{CHARTS / name: text for name, text in charts().items()},
    }


if __name__ == "__main__":
    CHARTS.mkdir(parents=True, exist_ok=True)
    for path, text in files().items():
        path.write_text(text)
        print(f"wrote {path.relative_to(DOCS.parent)}")
