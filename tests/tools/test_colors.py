"""One table of colors: every recipe and every other package has its own, and names of benchmarks find it."""

from __future__ import annotations

from pathlib import Path

import pytest

from narrowcast_tools.colors import PEERS, PLAIN, RECIPES, color_of
from narrowcast_tools.train.recipes import CHOICES

ROOT = Path(__file__).resolve().parents[2]


def test_every_recipe_has_a_color_of_its_own() -> None:
    assert list(RECIPES) == list(CHOICES)
    for scheme in (0, 1):
        colors = [both[scheme] for both in (*RECIPES.values(), *PEERS.values(), PLAIN)]
        assert len(set(colors)) == len(colors)


@pytest.mark.parametrize(
    ("contender", "colors"),
    [
        ("delayed, FusedAdam, head in current", RECIPES["delayed"]),
        ("torchao tensorwise", PEERS["torchao"]),
        ("torchao rowwise, compiled", PEERS["torchao rowwise"]),
        ("TE delayed", PEERS["te"]),
        ("Liger, bf16", PEERS["liger"]),
        ("rmsnorm -> fp8 128-block", RECIPES["block"]),
        ("bf16, batch-invariant", RECIPES["bf16"]),
        ("transpose fp8", PLAIN),
    ],
)
def test_names_of_benchmarks(contender: str, colors: tuple[str, str]) -> None:
    assert (color_of(contender), color_of(contender, dark=True)) == colors


def test_no_plot_has_a_recipe_color_of_its_own() -> None:
    """Delayed scaling was orange in one picture and blue in the next."""
    plots = [
        *(ROOT / "src").rglob("*.py"),
        *(ROOT / "docs").glob("*.py"),
        *(ROOT / "benchmarks").rglob("*.py"),
    ]
    wrong = [
        path.name
        for path in plots
        if path.name not in ("colors.py", "scaling_tables.py")  # its colors are parts of a step
        and any(light in path.read_text().lower() for light, _ in RECIPES.values())
    ]
    assert not wrong, "take the color from narrowcast_tools.colors"
