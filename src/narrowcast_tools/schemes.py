"""Pictures as SVG for light pages and for dark ones."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.image import imread, imsave
from matplotlib.textpath import text_to_path

from .colors import DARK

# matplotlib measures DejaVu Sans, which is wide: labels of the others fit the room that it leaves.
FONTS = "system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, 'DejaVu Sans', sans-serif"
# of a file that is opened alone, or on a page of the other scheme
GROUND = {
    scheme: f'style="background: {color}"' for scheme, color in (("light", "white"), ("dark", "#0d1117"))
}
INK = {"light": "#1f2328", "dark": "#e6e6e6"}
WIDTH = 4.3  # inches of a figure: a phone, which shows it 330 pixels wide, then has a pixel per point
WIDE = 7.6  # a laptop's screen and a page on it
MARGIN, ENLARGED = 8, 1.6  # points around a figure, and pixels of a wide page per point
LETTERS, TITLE = 11, 13  # points: the smallest letters, and those of a finding
NO_BREAK = "\N{NO-BREAK SPACE}"
LINE, KEY = 1.2, 1.5  # the height of a line and of a legend's row, as multiples of their letters


def wrap(text: str, points: float, size: float = LETTERS, weight: str = "normal") -> str:
    """Break lines, and words that are too long for one, where they would be wider than so many points.

    Lines are broken at spaces, not at `NO_BREAK`, which the result has as a space.
    """
    font = FontProperties(size=size, weight=weight)

    def fits(line: str) -> bool:
        wide, _, _ = text_to_path.get_text_width_height_descent(line, font, ismath=False)
        return wide <= 0.96 * points  # images have letters that end on pixels, and wider ones

    lines: list[str] = []
    for line in text.splitlines():
        lines.append("")
        for word in filter(None, line.strip().split(" ")):
            joined = f"{lines[-1]} {word}" if lines[-1] else word
            if lines[-1] and not fits(joined):
                lines.append(joined := word)
            lines[-1] = joined
            while not fits(joined) and len(joined) > 1:
                end = next(end for end in range(len(joined) - 1, 0, -1) if end == 1 or fits(joined[:end]))
                lines[-1:] = [joined[:end], joined := joined[end:]]
    return "\n".join(lines).replace(NO_BREAK, " ")


def tell(figure: Figure, finding: str, foot: str, keys: Sequence[Artist] = (), columns: int = 1) -> None:
    """Write a finding and a legend above a figure, and below it what its terms mean and where it was measured.

    Args:
        figure: laid out with constraints; it grows by the height of what is written.
        finding: a sentence for readers who know no term of this package.
        foot: its lines are wrapped to the figure's width.
        keys: labeled parts for the legend; none without one.
        columns: of the legend.
    """
    points = figure.get_figwidth() * 72
    together = re.sub(r" (?=[+\N{MINUS SIGN}\d])", NO_BREAK, finding)  # a word and its number
    title = wrap(together, points, TITLE, "bold")
    if keys:
        figure.legend(
            handles=keys,
            title=title,
            title_fontproperties={"size": TITLE, "weight": "bold"},
            alignment="left",
            loc="outside upper left",
            ncols=columns,
            frameon=False,
            fontsize=LETTERS,
            borderpad=0,
            borderaxespad=0,
        )
    else:
        figure.suptitle(title, x=0, ha="left", size=TITLE, weight="bold")
    told = wrap(foot, points)
    figure.supxlabel(told, x=0, ha="left", size=LETTERS, color="0.35")
    height = LINE * TITLE * len(title.splitlines()) + LINE * LETTERS * len(told.splitlines())
    deepest = max((str(key.get_label()).count("\n") for key in keys), default=0)
    height += (KEY + LINE * deepest) * LETTERS * -(-len(keys) // columns)
    figure.set_figheight(figure.get_figheight() + height / 72)


def middles(heights: Sequence[float]) -> list[float]:
    """Return how far down the middle of each of some rows is."""
    return [end - height / 2 for height, end in zip(heights, accumulate(heights))]


def png(figure: Figure) -> bytes:
    """Return a figure as a PNG image with a margin."""
    image, framed = io.BytesIO(), io.BytesIO()
    figure.savefig(image, format="png")
    image.seek(0)
    # Padding the box that is saved would move a legend outside of the axes with it.
    margin = int(figure.dpi * MARGIN / 72)
    pixels = np.pad(imread(image), ((margin, margin), (margin, margin), (0, 0)), constant_values=1.0)
    imsave(framed, pixels, format="png")
    return framed.getvalue()


def svg(figure: Figure) -> str:
    """Return a figure as SVG for light pages; the same figure gives the same bytes."""
    file = io.StringIO()
    # A text stays text: readers can search and select it.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "narrowcast", "svg.id": None}):
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = re.sub(r"'DejaVu Sans'[^;\"]*", FONTS, file.getvalue())
    text = text.replace("*{stroke-linejoin", "text{white-space: pre} *{stroke-linejoin", 1)
    text = re.sub(r'width="([\d.]+)pt" height="([\d.]+)pt" viewBox="[^"]*"', _framed, text, count=1)
    # matplotlib leaves black out, and the root's color stands for it.
    return text.replace("<svg ", f'<svg fill="{INK["light"]}" ', 1).replace("#000000", INK["light"])


def _framed(size: re.Match[str]) -> str:
    """Return the attributes of a picture of this size with a margin around it."""
    width, height = (float(points) + 2 * MARGIN for points in size.groups())
    box = f'viewBox="{-MARGIN} {-MARGIN} {width:g} {height:g}"'
    return f'width="{width * ENLARGED:g}" height="{height * ENLARGED:g}" {box}'


def dark(light: str) -> str:
    """Return an SVG of light pages for dark ones: recipes and packages in their other color, grays mirrored."""

    known = {**DARK, INK["light"]: INK["dark"]}

    def other(found: re.Match[str]) -> str:
        color = found[0].lower()
        if color in known:
            return known[color]
        parts = [int(color[at : at + 2], 16) for at in (1, 3, 5)]
        if max(parts) - min(parts) > 12:
            return color
        return "#" + f"{230 - parts[1] * 198 // 255:02x}" * 3

    return re.sub("#[0-9a-fA-F]{6}", other, light)


def write(light: str, folder: Path, stem: str) -> None:
    """Write ``<stem>-light.svg`` and ``<stem>-dark.svg``, each on the ground of its pages."""
    for scheme, text in (("light", light), ("dark", dark(light))):
        (folder / f"{stem}-{scheme}.svg").write_text(text.replace("<svg ", f"<svg {GROUND[scheme]} ", 1))


def write_widths(draw: Callable[[bool], Figure], folder: Path, stem: str) -> None:
    """Write a picture for wide pages, and as ``<stem>-phone`` for phones.

    Args:
        draw: returns the figure; told whether it is for wide pages.
    """
    for width, wide in (("", True), ("-phone", False)):
        write(svg(draw(wide)), folder, stem + width)
