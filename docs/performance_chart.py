"""Draw bars of speeds as SVG, without a plotting library: the same rows give the same bytes everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from textwrap import wrap
from typing import NamedTuple

from narrowcast_tools.colors import color_of

MARGIN = 6
WIDTH = 316  # the picture: a phone shows it 330 pixels wide, and a letter of 11 as 11 pixels
NUMBERS = 66  # right of the bars
ROW, BAR, NAME = 36, 13, 15  # a contender: its name above its bar
LINE, LETTERS, HEADING = 15, 11.5, 15
FONT = "system-ui, -apple-system, Segoe UI, Roboto, Helvetica, Arial, sans-serif"
KEY = ("Bar and bold: tokens/s over bf16's.", "Longer is faster. Gray: time for the same tokens.")
TEXT = {"light": "#24292f", "dark": "#e6e6e6"}
FAINT = {"light": "#57606a", "dark": "#b0b4ba"}
GROUND = {"light": "white", "dark": "#0d1117"}  # of a file that is opened alone


class Bar(NamedTuple):
    """A contender: its name in the chart, its speed beside bf16, its milliseconds, its own name; 0 if not measured."""

    name: str
    speed: float
    milliseconds: float
    contender: str


class Panel(NamedTuple):
    """A group of bars under a title."""

    title: str
    bars: list[Bar]


def _text(x: float, y: float, text: str, fill: str, style: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" fill="{fill}" {style}>{escape(text, quote=False)}</text>'


def _bar(bar: Bar, y: float, scheme: str, unit: float) -> list[str]:
    """Return a contender's name, its bar below, and its numbers right of both."""
    base, fill = y + NAME + BAR / 2 + 4, color_of(bar.contender, dark=scheme == "dark")
    name = _text(0, y + LETTERS, bar.name, TEXT[scheme])
    if not bar.speed:
        return [name, _text(0, base, "not measured", FAINT[scheme])]
    right = 'text-anchor="end"'
    time = f"{bar.milliseconds:.{0 if bar.milliseconds >= 100 else 1}f} ms"
    return [
        name,
        f'<rect x="0" y="{y + NAME:g}" width="{bar.speed * unit:.1f}" height="{BAR}" rx="2" fill="{fill}"/>',
        _text(WIDTH, y + LETTERS, time, FAINT[scheme], right),
        _text(WIDTH, base, f"{bar.speed:.2f}", TEXT[scheme], f'{right} font-size="13" font-weight="700"'),
    ]


def svg(heading: str, panels: list[Panel], scheme: str, told: Sequence[str], fastest: float) -> str:
    """Return a picture of panels below each other.

    Args:
        heading: what they show, above them.
        panels: groups of bars, all in one unit.
        scheme: "light" or "dark", the page that the picture is for.
        told: what their terms mean and where they were measured, below them; each text begins a line.
        fastest: the speed of the longest bar in all pictures, which have one scale.
    """
    unit = (WIDTH - NUMBERS) / fastest
    parts, y = [], 0.0
    for line in wrap(heading, 34):
        y += HEADING + 4
        parts.append(_text(0, y, line, TEXT[scheme], f'font-size="{HEADING}" font-weight="700"'))
    y += 4
    for line in KEY:
        y += LINE
        parts.append(_text(0, y, line, FAINT[scheme]))
    for panel in panels:
        y += 10
        for line in wrap(panel.title, 42):
            y += LINE
            parts.append(_text(0, y, line, TEXT[scheme], 'font-weight="700"'))
        y += 6
        end = y + ROW * len(panel.bars) - (ROW - NAME - BAR)
        for bar in panel.bars:
            parts += _bar(bar, y, scheme, unit)
            y += ROW
        place = f'x1="{unit:g}" x2="{unit:g}" y1="{end - ROW * len(panel.bars) + ROW - BAR:g}" y2="{end:g}"'
        parts.append(f'<line {place} stroke="{FAINT[scheme]}" stroke-dasharray="3 3"/>')
    for text in told:
        for line in wrap(text, 48):
            y += LINE
            parts.append(_text(0, y, line, FAINT[scheme]))
    wide, high = WIDTH + 2 * MARGIN, y + 5 + 2 * MARGIN
    head = (
        f'<svg style="background: {GROUND[scheme]}" xmlns="http://www.w3.org/2000/svg" '
        f'viewBox="{-MARGIN} {-MARGIN} {wide} {high:g}" '
        f'width="{wide * 1.5:g}" height="{high * 1.5:g}" font-family="{FONT}" font-size="{LETTERS}" role="img">'
    )
    return "\n".join([head, f"<title>{escape(heading, quote=False)}</title>", *parts, "</svg>", ""])
