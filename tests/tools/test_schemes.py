"""A picture for dark pages is that for light ones in other colors."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from matplotlib.figure import Figure
from matplotlib.image import imread

from narrowcast_tools.colors import RECIPES
from narrowcast_tools.schemes import INK, MARGIN, WHITE, WIDTH, dark, png, svg, tell, write

ROOT = Path(__file__).resolve().parents[2]
PICTURES = [*(ROOT / "docs" / "assets").glob("*.svg"), *(ROOT / "benchmarks" / "results").glob("*.svg")]


def test_a_figure_is_written_twice(tmp_path: Path) -> None:
    figure = Figure()
    axes = figure.subplots()
    axes.barh(["a row"], [1.0], color=RECIPES["current"][0])
    axes.axvline(1.0, color="0.9")
    light = svg(figure)
    assert svg(figure) == light
    write(light, tmp_path, "bars")
    assert (tmp_path / "bars-light.svg").read_text() == light.replace("<svg ", f"<svg {WHITE} ")
    written = (tmp_path / "bars-dark.svg").read_text()
    assert "a row</text>" in light and "a row</text>" in written
    for scheme, text in enumerate((light, written)):
        assert RECIPES["current"][scheme] in text and RECIPES["current"][1 - scheme] not in text
    assert f'fill="{INK["dark"]}"' in written and INK["light"] not in written
    assert "#e6e6e6" in light, "the gray line"


def test_a_picture_has_a_margin_and_says_what_it_found() -> None:
    figure = Figure(figsize=(WIDTH, 3.0), dpi=72, layout="constrained")
    figure.subplots().plot([0, 1])
    tell(figure, "A finding of more words than a line of this narrow figure has", "a term: " + "word " * 20)
    assert [text.count("\n") for text in (figure.get_suptitle(), figure.get_supxlabel())] == [1, 2]
    pixels = imread(io.BytesIO(png(figure)))
    assert pixels.shape[:2] == (3 * 72 + 2 * MARGIN, int(WIDTH * 72) + 2 * MARGIN)
    assert (pixels[:MARGIN] == 1).all() and (pixels[:, :MARGIN] == 1).all() and (pixels < 1).any()
    assert f'viewBox="{-MARGIN} {-MARGIN} ' in svg(figure)


def test_grays_are_mirrored_and_other_colors_stay() -> None:
    assert [dark(color) for color in ("#ffffff", "#808080", "#0f9488")] == ["#202020", "#838383", "#0f9488"]


def test_letters_are_read_on_a_phone() -> None:
    """At 360 pixels they had 8 or 9."""
    wrong = []
    for light in PICTURES:
        told = light.read_text()
        _, _, wide, _ = map(float, re.search(r'viewBox="([^"]+)"', told)[1].split())
        least = min(map(float, re.findall(r'font-size(?:="|: )([\d.]+)', told)))
        if 330 * least / wide < 11:
            wrong.append(f"{light.name}: {330 * least / wide:.1f} pixels")
    assert not wrong


def test_every_picture_of_the_pages_has_both_schemes() -> None:
    for light in PICTURES:
        stem = re.sub("-(light|dark)$", "", light.stem)
        told = light.with_name(f"{stem}-light.svg").read_text()
        assert told.count(WHITE) == 1, "readable in a dark viewer that shows it alone"
        assert light.with_name(f"{stem}-dark.svg").read_text() == dark(told.replace(f"{WHITE} ", "")), stem
