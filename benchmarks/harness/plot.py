"""The picture of a benchmark: the time of each kernel and of its peers, beside that of a copy."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from narrowcast_tools.colors import PEERS, RECIPES, color_of
from narrowcast_tools.schemes import LETTERS, WIDE, WIDTH, svg, tell, write

from .contenders import COPY, RATIOS, SWEEP

OURS = RECIPES["current"][0]  # the kernel's name says which recipe it belongs to
RESULTS = Path(__file__).parents[1] / "results"
# What is drawn: its name, and the title of the panel of each operation, which a kernel's name starts with.
PICTURES: dict[str, tuple[str, dict[str, str]]] = {
    "quantize": ("Quantizing a bf16 tensor", {"": ""}),
    "norm": (
        "RMSNorm with a quantized result",
        {
            "rmsnorm": "Forward",
            "add+rmsnorm": "Forward, after a residual sum",
            "drmsnorm": "Backward",
        },
    ),
    "activation": (
        "SwiGLU with a quantized result",
        {"swiglu": "Forward", "dswiglu": "Backward"},
    ),
}
FORMATS = {
    "fp8 given scale + amax": "FP8 delayed",
    "fp8 given scale": "FP8 delayed",
    "fp8 current": "FP8 current",
    "fp8 128-block": "FP8 128-block",
    "fp8 128-block 1-D": "128-block, 1x128",
    "fp8 128-block 2-D": "128-block, 128x128",
    "mxfp8": "MXFP8",
    "mxfp8 1-D": "MXFP8, 1x32",
    "mxfp8 2-D": "MXFP8, 32x32",
    "nvfp4 1-D": "NVFP4, 1x16",
    "nvfp4 2-D": "NVFP4, 16x16",
    "nvfp4 RHT": "NVFP4, Hadamard",
    "nvfp4 RHT + SR": "with random rounding",
}
EXPLAINED = {"unfused": "narrowcast, two kernels (unfused)"}
MARKS = ("D", "o", "s", "^", "v")  # of peers: color alone does not distinguish them
BAR, ABOVE, BELOW = 0.46, 0.18, 0.28  # of a row: the bar, and how far it and the marks are from the middle

Row = dict[str, str]


def plot(path: Path, folder: Path | None = None) -> Path | None:
    """Draw ``<stem>-light.svg``, ``<stem>-dark.svg`` and twins for phones from the newest rows of ``<stem>.csv``.

    Args:
        path: the rows.
        folder: where the pictures go; None means beside the rows.

    Returns:
        The picture of light pages; None for a benchmark without a picture.
    """
    if path.stem not in PICTURES:
        return None
    folder = folder or path.parent
    for name, wide in ((path.stem, True), (f"{path.stem}-phone", False)):
        write(svg(_draw(path.stem, newest(path), wide=wide)), folder, name)
    return folder / f"{path.stem}-light.svg"


def newest(path: Path) -> list[Row]:
    """Return the rows of the last row's commit, device and shape; of equal measurements the last."""
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if not row.get("kernel", "").startswith(SWEEP)]
    same = [
        row for row in rows if all(row.get(key) == rows[-1].get(key) for key in ("commit", "device", "shape"))
    ]
    return list({row.get("kernel"): row for row in same}.values())


def day(commit: str) -> str:
    """Return the day of a commit as text that goes on a line; nothing for an unknown commit."""
    with (RESULTS / "commits.csv").open(newline="") as file:
        days = {row["commit"]: row["date"] for row in csv.DictReader(file)}
    return f", {days[commit]}" if commit in days else ""


def split_peer(name: str) -> tuple[str, str]:
    """Return peer and kernel: ``torchao: fp8 current`` -> (``torchao``, ``fp8 current``); no peer for narrowcast."""
    peer, separator, kernel = name.partition(": ")
    return (peer, kernel) if separator and peer in RATIOS else ("", name)


def _draw(stem: str, rows: Sequence[Row], *, wide: bool) -> Figure:
    title, operations = PICTURES[stem]
    found = {split_peer(row["kernel"]): row for row in rows}
    copy = float(found.pop(("", COPY))["us_p50"])
    peers = ["", *(peer for peer in PEERS if any(peer == one for one, _ in found))]
    kernels: dict[str, dict[str, dict[str, Row]]] = {operation: {} for operation in operations}
    for (peer, kernel), row in found.items():
        operation, _, made = kernel.rpartition(" -> ")
        kernels[operation].setdefault(made, {})[peer] = row
    heights = [len(one) for one in kernels.values()]
    figure = Figure(
        figsize=(WIDE if wide else WIDTH, 0.3 * sum(heights) + 0.4 * len(heights) + 0.5), layout="constrained"
    )
    panels = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axes, operation in zip(panels, operations):
        axes.set_title(operations[operation], loc="left", size=LETTERS, weight="bold")
        axes.set_xlim(0, 1.05 * max(float(row["us_p50"]) for row in found.values()))
        _panel(axes, kernels[operation], peers, copy)
    panels[-1].set_xlabel("microseconds a call; shorter is better", size=LETTERS)
    where = rows[-1]
    size = where["shape"].replace("x", "\N{MULTIPLICATION SIGN}")
    apart = max(
        (float(row["us_p80"]) - float(row["us_p20"])) / float(row["us_p50"]) for row in found.values()
    )
    foot = (
        f"Bold: narrowcast's median; percentiles 20 and 80 are at most {apart:.1%} apart. Tensor: {size}. "
        f"{_unmeasured(peers)}\n{where['device']}, PyTorch {where['torch']}, Triton {where['triton']}, "
        f"narrowcast {where['narrowcast']}{day(where['commit'])}"
    )
    tell(figure, f"{title}: {_finding(kernels, peers[1:])}", foot, _legend(peers), columns=2 if wide else 1)
    return figure


def _unmeasured(peers: Sequence[str]) -> str:
    """Return which other libraries' kernels have no rows."""
    absent = {"te": "Transformer Engine", "torchao": "torchao", "liger": "Liger"}
    named = [title for peer, title in absent.items() if peer not in peers]
    return f"Not measured: {', '.join(named)}." if named else ""


def _finding(kernels: dict[str, dict[str, dict[str, Row]]], peers: Sequence[str]) -> str:
    """Return in how many cases narrowcast is the fastest; 2% count as equal."""
    cases = [of for operation in kernels.values() for of in operation.values() if len(of) > 1]
    times = [[float(of[peer]["us_p50"]) for peer in ("", *peers) if peer in of] for of in cases]
    equal = sum(0.98 * ours <= min(others) < 1.02 * ours for ours, *others in times)
    won = sum(1.02 * ours <= min(others) for ours, *others in times)
    slower, alone = len(cases) - won - equal, sum(map(len, kernels.values())) - len(cases)
    one = "two kernels (unfused)" if peers[:1] == ["unfused"] else "".join(peers[:1])
    than = f"faster than {one}" if len(peers) == 1 else "the fastest"
    rest = {"equal in {}": equal, "slower in {}": slower, "no peer in {}": alone}
    told = [
        f"narrowcast is {than} in {won} of {len(cases) + alone} cases",
        *(name.format(n) for name, n in rest.items() if n),
    ]
    return ", ".join(told)


def _panel(axes: Axes, kernels: dict[str, dict[str, Row]], peers: Sequence[str], copy: float) -> None:
    """Draw a row per format: narrowcast's bar with its time, and a mark per peer."""
    axes.axvline(copy, color="0.45", linewidth=1, linestyle="--")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=LETTERS, labelbottom=True)
    axes.grid(axis="x", color="0.9")
    axes.set_axisbelow(True)
    for y, of_format in enumerate(kernels.values()):
        row = of_format[""]
        time = float(row["us_p50"])
        axes.barh(y - ABOVE, time, height=BAR, color=OURS, alpha=0.45, linewidth=0)
        # the share of a copy's bandwidth is that of the least time
        axes.barh(y - ABOVE, time * min(float(row["share"]), 1.0), height=BAR, color=OURS, linewidth=0)
        for mark, peer in zip(MARKS, peers[1:]):
            if peer in of_format:
                axes.plot(float(of_format[peer]["us_p50"]), y + BELOW, mark, **_mark(peer))
        told = f"{time:.0f}" if time >= 100 else f"{time:.1f}"
        beside = {"textcoords": "offset points", "va": "center", "size": LETTERS, "weight": "bold"}
        axes.annotate(told, (time, y - ABOVE), (4, 0), **beside)
    names = [re.sub(r"(\d)x(\d)", "\\1\N{MULTIPLICATION SIGN}\\2", FORMATS[name]) for name in kernels]
    axes.set_yticks(range(len(names)), names, size=LETTERS)
    axes.set_ylim(len(names) - 0.4, -0.5)


def _mark(peer: str) -> dict[str, object]:
    return {"color": color_of(peer), "markersize": 7, "markeredgecolor": "0.15", "markeredgewidth": 0.8}


def _legend(peers: Sequence[str]) -> list[Patch | Line2D]:
    ours = [Patch(color=OURS, label="narrowcast: least time for its bytes")]
    ours.append(Patch(color=OURS, alpha=0.45, linewidth=0, label="narrowcast: the rest of the time"))
    others = [
        Line2D([], [], linewidth=0, marker=mark, label=EXPLAINED.get(peer, peer), **_mark(peer))
        for mark, peer in zip(MARKS, peers[1:])
    ]
    return [*ours, *others, Line2D([], [], color="0.45", linestyle="--", label="a copy of the input")]
