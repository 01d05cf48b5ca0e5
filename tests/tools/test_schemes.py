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
from narrowcast_tools.schemes import GROUND, INK, MARGIN, WIDTH, dark, png, svg, tell, wrap, write

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
    assert (tmp_path / "bars-light.svg").read_text() == light.replace("<svg ", f"<svg {GROUND['light']} ")
    written = (tmp_path / "bars-dark.svg").read_text()
    assert "a row</text>" in light and "a row</text>" in written
    for scheme, text in enumerate((light, written)):
        assert RECIPES["current"][scheme] in text and RECIPES["current"][1 - scheme] not in text
    assert (
        written.count(GROUND["dark"]) == 1
        and f'fill="{INK["dark"]}"' in written
        and INK["light"] not in written
    )
    assert "#e6e6e6" in light, "the gray line"


def test_a_picture_has_a_margin_and_says_what_it_found() -> None:
    figure = Figure(figsize=(WIDTH, 2.0), dpi=72, layout="constrained")
    figure.subplots().plot([0, 1])
    tell(figure, "A finding of more words than a line of this narrow figure has", "a term: " + "word " * 20)
    assert [text.count("\n") for text in (figure.get_suptitle(), figure.get_supxlabel())] == [1, 2]
    for words in range(1, 12):
        titled = Figure(figsize=(WIDTH, 2.0), layout="constrained")
        tell(titled, "word " * words + "from 5.63 to 2.84", "")
        assert not re.search(r"\n\d", titled.get_suptitle()), "a number began a line"
    pixels = imread(io.BytesIO(png(figure)))
    assert 2 * 72 + 2 * 13 + 3 * 11 < 72 * figure.get_figheight() < 2.2 * 72 + 2 * 13 * 1.3 + 3 * 11 * 1.3, (
        "it grew"
    )
    assert pixels.shape[:2] == (int(figure.get_figheight() * 72) + 2 * MARGIN, int(WIDTH * 72) + 2 * MARGIN)
    assert (pixels[:MARGIN] == 1).all() and (pixels[:, :MARGIN] == 1).all() and (pixels < 1).any()
    assert f'viewBox="{-MARGIN} {-MARGIN} ' in svg(figure)


def test_lines_are_as_wide_as_their_room() -> None:
    """A line of as many letters as usually fit lost its last one at the edge of the image."""
    narrow, wide = "i" * 20 + " " + "i" * 20, "W" * 20 + " " + "W" * 20
    assert wrap(narrow, 200) == narrow
    assert wrap(wide, 300) == "W" * 20 + "\n" + "W" * 20
    assert "".join(wrap(wide, 100).split()) == "W" * 40 and wrap(wide, 100).count("\n") > 3, (
        "a word is broken"
    )
    assert wrap("two\n lines ", 100) == "two\nlines"


def test_grays_are_mirrored_and_other_colors_stay() -> None:
    assert [dark(color) for color in ("#ffffff", "#808080", "#0f9488")] == ["#202020", "#838383", "#0f9488"]


def test_letters_are_read_on_a_phone() -> None:
    """At 360 pixels they had 8 or 9."""
    wrong = []
    for light in [*PICTURES, *(ROOT / "docs" / "assets" / "perf").glob("*.svg")]:
        told = light.read_text()
        assert told.count(GROUND[light.stem.rpartition("-")[2]]) == 1, (
            "readable in a viewer that shows it alone"
        )
        _, _, wide, _ = map(float, re.search(r'viewBox="([^"]+)"', told)[1].split())
        least = min(map(float, re.findall(r'font-size(?:="|: )([\d.]+)', told)))
        stem, _, scheme = light.stem.rpartition("-")
        twin = light.with_name(f"{stem}-phone-{scheme}.svg").exists()  # which phones show instead
        if (680 if twin else 330) * least / wide < 11:
            wrong.append(f"{light.name}: {330 * least / wide:.1f} pixels")
    assert not wrong


def test_every_picture_of_the_pages_has_both_schemes() -> None:
    for light in PICTURES:
        stem = re.sub("-(light|dark)$", "", light.stem)
        told = light.with_name(f"{stem}-light.svg").read_text()
        bare = told.replace(f"{GROUND['light']} ", "")
        written = light.with_name(f"{stem}-dark.svg").read_text()
        assert written.replace(f"{GROUND['dark']} ", "") == dark(bare), stem
