"""Draw bars of speeds as SVG, without a plotting library: the same rows give the same bytes everywhere."""

from __future__ import annotations

from html import escape
from textwrap import wrap
from typing import NamedTuple

from narrowcast_tools.colors import color_of

MARGIN = 6
WIDTH, WIDE = (
    316,
    620,
)  # a phone shows the first 330 pixels wide, and a letter of 11 as 11 pixels; a page the other
NAMES, WIDE_ROW = 170, 22  # of the wide one, whose names are left of the bars
NUMBERS = 66  # right of the bars
ROW, BAR, NAME = 36, 13, 15  # a contender: its name above its bar
LINE, LETTERS, HEADING = 15, 11.5, 15
FONT = "system-ui, -apple-system, Segoe UI, Roboto, Helvetica, Arial, sans-serif"
KEY = "Bar and bold: tokens/s over bf16's. Longer is faster. Gray: time for the same tokens."
TEXT = {"light": "#24292f", "dark": "#e6e6e6"}
FAINT = {"light": "#57606a", "dark": "#b0b4ba"}
GROUND = {"light": "white", "dark": "#0d1117"}  # of a file that is opened alone


class Bar(NamedTuple):
    """A contender: its name in the chart, its speed beside bf16, its milliseconds, its own name."""

    name: str
    speed: float
    milliseconds: float
    contender: str


class Panel(NamedTuple):
    """Bars under a title."""

    title: str
    bars: list[Bar]


def _text(x: float, y: float, text: str, fill: str, style: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" fill="{fill}" {style}>{escape(text, quote=False)}</text>'


def _bar(bar: Bar, y: float, scheme: str, unit: float, *, wide: bool) -> list[str]:
    """Return a contender's name, its bar below or beside it, and its numbers."""
    left, top = (NAMES, y) if wide else (0, y + NAME)
    base, fill = top + BAR / 2 + 4, color_of(bar.contender, dark=scheme == "dark")
    length, bold = bar.speed * unit, 'font-size="13" font-weight="700"'
    right = 'text-anchor="end"'
    place, align = (left + length + 6, "") if wide else (WIDTH, f"{right} ")
    time = f"{bar.milliseconds:.{0 if bar.milliseconds >= 100 else 1}f} ms"
    return [
        _text(0, y + LETTERS, bar.name, TEXT[scheme]),
        f'<rect x="{left}" y="{top:g}" width="{length:.1f}" height="{BAR}" rx="2" fill="{fill}"/>',
        _text(place, base, f"{bar.speed:.2f}", TEXT[scheme], f"{align}{bold}"),
        _text(WIDE if wide else WIDTH, base if wide else y + LETTERS, time, FAINT[scheme], right),
    ]


def svg(heading: str, panel: Panel, scheme: str, told: str, fastest: float, *, wide: bool) -> str:
    """Return a picture of bars.

    Args:
        heading: what they show, above them.
        panel: the bars and what they are of.
        scheme: "light" or "dark", the page that the picture is for.
        told: what their terms mean and where they were measured, below them.
        fastest: the speed of the longest bar in all pictures, which have one scale.
        wide: for pages; else for phones.
    """
    width, row = (WIDE, WIDE_ROW) if wide else (WIDTH, ROW)
    left, above = (NAMES, 0) if wide else (0, NAME)
    unit = (width - left - NUMBERS * (2 if wide else 1)) / fastest
    letters = width * 48 / WIDTH  # of a line, about
    parts, y = [], 0.0
    for line in wrap(heading, int(letters * 0.7)):
        y += HEADING + 4
        parts.append(_text(0, y, line, TEXT[scheme], f'font-size="{HEADING}" font-weight="700"'))
    y += 4
    for line in wrap(KEY, int(letters)):
        y += LINE
        parts.append(_text(0, y, line, FAINT[scheme]))
    y += 10
    for line in wrap(panel.title, int(letters * 0.87)):
        y += LINE
        parts.append(_text(0, y, line, TEXT[scheme], 'font-weight="700"'))
    y += 10 if wide else 6
    begin, end = y + above, y + row * len(panel.bars) - (row - above - BAR)
    for bar in panel.bars:
        parts += _bar(bar, y, scheme, unit, wide=wide)
        y += row
    place = f'x1="{left + unit:g}" x2="{left + unit:g}" y1="{begin:g}" y2="{end:g}"'
    parts.append(f'<line {place} stroke="{FAINT[scheme]}" stroke-dasharray="3 3"/>')
    for line in wrap(told, int(letters)):
        y += LINE
        parts.append(_text(0, y, line, FAINT[scheme]))
    box, high = width + 2 * MARGIN, y + 5 + 2 * MARGIN
    head = (
        f'<svg style="background: {GROUND[scheme]}" xmlns="http://www.w3.org/2000/svg" '
        f'viewBox="{-MARGIN} {-MARGIN} {box} {high:g}" '
        f'width="{box * 1.2:g}" height="{high * 1.2:g}" font-family="{FONT}" font-size="{LETTERS}" role="img">'
    )
    return "\n".join([head, f"<title>{escape(heading, quote=False)}</title>", *parts, "</svg>", ""])
