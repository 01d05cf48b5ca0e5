"""Pictures as SVG for light pages and for dark ones, on transparent ground."""

from __future__ import annotations

import io
import re
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from .colors import DARK

# matplotlib measures DejaVu Sans, which is wide: labels of the others fit the room that it leaves.
FONTS = "system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, 'DejaVu Sans', sans-serif"
WHITE = 'style="background: white"'
INK = {"light": "#1f2328", "dark": "#e6e6e6"}


def svg(figure: Figure) -> str:
    """Return a figure as SVG for light pages; the same figure gives the same bytes."""
    file = io.StringIO()
    # A text stays text: readers can search and select it.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "narrowcast", "svg.id": None}):
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = re.sub(r"'DejaVu Sans'[^;\"]*", FONTS, file.getvalue())
    text = text.replace("*{stroke-linejoin", "text{white-space: pre} *{stroke-linejoin", 1)
    # matplotlib leaves black out, and the root's color stands for it.
    return text.replace("<svg ", f'<svg fill="{INK["light"]}" ', 1).replace("#000000", INK["light"])


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
    """Write ``<stem>-light.svg``, on white where the page is dark all the same, and ``<stem>-dark.svg``."""
    (folder / f"{stem}-light.svg").write_text(light.replace("<svg ", f"<svg {WHITE} ", 1))
    (folder / f"{stem}-dark.svg").write_text(dark(light))
