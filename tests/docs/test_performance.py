"""The performance page, its charts and the table of docs/choosing.md are what the rows of the benchmarks give."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def performance(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    return importlib.import_module("performance")


def section_of(performance: ModuleType, key: str) -> Any:
    return next(section for section in performance.SECTIONS if section.key == key)


def test_files_are_what_the_script_writes(performance: ModuleType) -> None:
    files = performance.files()
    stale = [path.name for path, text in files.items() if not path.exists() or path.read_text() != text]
    assert not stale, f"run `python docs/performance.py`: {stale} are not what it writes"
    kept = set(performance.CHARTS.iterdir())
    assert kept <= files.keys(), "a chart that no script writes"


def test_a_changed_row_changes_the_page(
    performance: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in performance.RESULTS.glob("*.csv"):
        (tmp_path / path.name).write_text(path.read_text())
    monkeypatch.setattr(performance, "RESULTS", tmp_path)
    rows = (tmp_path / "fsdp.csv").read_text()
    assert "139029,58.92" in rows
    (tmp_path / "fsdp.csv").write_text(rows.replace("139029,58.92", "139029,68.54"))
    before, after = (ROOT / "docs" / "performance.md").read_text(), performance.page()
    changed = [line for line in after.splitlines() if line not in before.splitlines()]
    answer, row, picture = changed
    assert answer.startswith(
        "**1.53 times as fast as bf16, under current scaling.** `FusedAdam` makes it 1.55 times."
    )
    assert picture.startswith(
        '  <img src="assets/perf/fsdp-light.svg" alt="Training step, four layers of the 8B shape, two GPUs, compiled: '
        "FP8 with current scaling trains 1.53 times as fast as bf16, on NVIDIA H200, beside torchao;"
    )
    assert row == "| delayed | 68.5 | 1.35 | 10.12 |"
    assert all("68.5 ms" in performance.charts()[f"fsdp{width}-dark.svg"] for width in ("", "-phone"))


def test_readme_begins_with_the_numbers_of_the_tables(performance: ModuleType) -> None:
    readme = " ".join((ROOT / "README.md").read_text().split())
    first = readme.partition("```")[0]
    speeds = {
        section.key: row.speed
        for section in performance.SECTIONS
        if section.key in performance.HERO
        for row in performance.measured(section)
        if row.name == "delayed"
    }
    (fsdp,) = (section for section in performance.SECTIONS if section.key == "fsdp")
    torchao = next(row.speed for row in performance.measured(fsdp) if row.name == "torchao tensorwise")
    assert f"narrowcast is {speeds['fsdp']:.2f} times as fast, torchao is {torchao:.2f} times" in first
    alone = speeds.pop("mlp")
    told = f"Training steps are {min(speeds.values()):.2f} to {max(speeds.values()):.2f} times as fast"
    block = f"block alone {alone:.2f} times"
    assert told in first and block in first, "a block is no training step"
    assert not re.search(r"\d\.\d\d", first.partition("Beside bf16")[0]), "what it is comes before numbers"
    peaks = {row.name: f"{row.peak:.2f}" for row in performance.measured(section_of(performance, "linear"))}
    ours, plain, other = (peaks[name] for name in ("delayed", "bf16", "torchao tensorwise"))
    assert f"peaks at {ours} GiB, at {plain} in bf16 and {other} in torchao" in readme


def test_a_chart_of_an_earlier_release_says_so(performance: ModuleType) -> None:
    """Rows of 0.1.0 stood beside those of 0.3.0 without a word in the heading."""
    for name in performance.CHARTED:
        (built,) = {row["narrowcast"] for row in performance.chosen(section_of(performance, name)).values()}
        assert performance.heading(name).startswith(f"narrowcast {built}: ") == (built != "0.3.0.dev0"), name


def test_losses_of_readme_are_those_of_the_pages(performance: ModuleType) -> None:
    readme = (ROOT / "README.md").read_text()
    gap, apart = re.search(
        r"ends (\S+) above bf16, whose own seeds are (\S+) apart", performance.losses()
    ).groups()
    assert readme.count(f"{gap} above") == 2 and f"alone are {apart} apart" in readme
    (single,) = re.findall(r"ends up to (\S+) above bf16\s+of its seed", performance.losses())
    assert f"ends up to {single} above bf16 of the same seed" in readme
    shown = re.findall(r"^\| ([^|]+) \| (2\.\d+) \| ([^|]+) \|$", readme, re.MULTILINE)
    demo = re.findall(
        r"^\| ([^|]+) \| (2\.\d+) \| ([^|]+) \|",
        (ROOT / "docs/first-light.md").read_text(),
        re.MULTILINE,
    )
    assert shown == demo and len(shown) == 7


def test_rows_of_two_runs_are_not_put_into_one_table(performance: ModuleType) -> None:
    rows = performance.rows_of("fsdp.csv")
    with pytest.raises(ValueError, match="several runs"):
        performance.run_of(rows, "fsdp.csv")


def test_every_result_has_a_day(performance: ModuleType) -> None:
    named = {
        row["commit"]
        for path in performance.RESULTS.glob("*.csv")
        for row in performance.rows_of(path.name)
        if row.get("commit")
    }
    assert named <= performance.days().keys(), "add the commit and its day to benchmarks/results/commits.csv"


def test_times_of_attention_are_those_of_the_rows(performance: ModuleType) -> None:
    times = {
        (row["head_dim"], row["batch"], row["length"], row["contender"]): float(row["p50_us"]) / 1e3
        for row in performance.rows_of("attention.csv")
        if row["pass"] == "both"
    }
    page = (ROOT / "docs" / "attention.md").read_text()
    lines = re.findall(r"^\| (\d+) \| (\d+) \S (\d+) \| (.*) \|$", page, re.MULTILINE)
    assert len(lines) == 6
    for *where, cells in lines:
        for contender, cell in zip(("narrowcast", "flash", "flex"), cells.split("|"), strict=True):
            time = times.get((*where, contender))
            assert cell.strip() == ("" if time is None else f"{time:.2f}"), (where, contender)
    rows = performance.rows_of("attention_fp8.csv")
    shares = [float(row["share"]) for row in rows if row["head_dim"] == "128"]
    forward, backward = shares[::2], shares[1::2]
    page = " ".join(page.split())
    assert f"forward is {1 / max(forward):.2f} to {1 / min(forward):.2f} times as fast as" in page
    assert f"backward takes {min(backward):.2f} to {max(backward):.2f} times as long" in page


def test_steps_of_the_8b_shape_are_those_of_the_rows(performance: ModuleType) -> None:
    rows = performance.rows_of("llama.csv")
    page = (ROOT / "docs" / "measured.md").read_text()
    lines = re.findall(r"^\| (H[12]00) \| (.*) \| (\d+) \| (.*) \| (.*) \| (.*) \|$", page, re.MULTILINE)
    assert len(lines) == 9
    for gpu, name, classes, ms, rate, relative in lines:
        commit = {"H200": "73d1ca22", "H100": "c8c016bf"}[gpu]
        where = {
            "contender": name.partition(", `")[0],
            "classes at a time": classes,
            "commit": commit,
            "ms": ms,
        }
        (row,) = [row for row in rows if all(row[column] == value for column, value in where.items())]
        assert gpu in row["device"] and row["model TFLOP/s"] == rate
        assert f"{float(row['vs bf16']):.2f}" == relative


def test_lora_steps_and_decoding_are_those_of_the_rows(performance: ModuleType) -> None:
    page = (ROOT / "docs" / "measured.md").read_text()
    lora, decode = performance.rows_of("lora.csv"), performance.rows_of("decode.csv")
    speeds = {f"{1 / float(row['share_of_bf16']):.2f}" for row in [*lora, *decode]}
    steps = re.findall(
        r"^\| [^|]+ \| 0\.\d\d \| ?([\d.]*) \| ([\d.]+) \| [\d.]+ \([\d.]+\) \|$", page, re.MULTILINE
    )
    decoded = re.findall(r"^\| [^|]+ \| \d\.\d\d \| \d\.\d\d \| ([\d.]+) \| [\d.]+ \|$", page, re.MULTILINE)
    assert len(steps) == len(decoded) == 5
    assert {speed for pair in steps for speed in pair if speed} | set(decoded) <= speeds


def test_text_in_charts_stays_inside_and_apart_and_is_read_on_a_phone(performance: ModuleType) -> None:
    """A letter of 13 may be 7.2 wide, a bold one 7.8, as in the widest font that a browser falls back to."""
    chart = importlib.import_module("performance_chart")
    assert 330 / (chart.WIDTH + 2 * chart.MARGIN) * chart.LETTERS >= 11
    for name, text in performance.charts().items():
        assert re.search(r">PyTorch \d[^<]*, narrowcast \d[^<]*</text>", text), f"{name} names no versions"
        ends: dict[str, float] = {}  # of what begins at the left
        for x, y, attributes, content in re.findall(r'<text x="(.+?)" y="(.+?)"(.*?)>(.+?)</text>', text):
            size = float((re.search(r'font-size="([\d.]+)"', attributes) or [0, chart.LETTERS])[1])
            width = (7.8 if "700" in attributes else 7.2) / 13 * size * len(content)
            left = float(x) - (width if "anchor" in attributes else 0)
            assert left >= 0 and size >= chart.LETTERS, (name, content)
            assert left + width <= (chart.WIDTH if "-phone-" in name else chart.WIDE), (name, content)
            assert left == 0 or ends.get(y, 0) < left, (name, content)
            ends.setdefault(y, left + width)
        bars = [float(width) for width in re.findall(r'<rect[^>]* width="([\d.]+)"', text)]
        narrow, wide = chart.WIDTH - chart.NUMBERS, chart.WIDE - chart.NAMES - 2 * chart.NUMBERS
        assert max(bars) <= (narrow if "-phone-" in name else wide)
