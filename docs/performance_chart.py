"""Draw bars of speeds as SVG, without a plotting library: the same rows give the same bytes everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from narrowcast_tools.colors import color_of

MARGIN = 8
WIDTH, NAMES, END = 480, 152, 364  # the picture, where bars begin, and where the longest ends
ROW, BAR = 24, 15
HEAD, TITLE, BELOW = 50, 34, 14
FONT = "system-ui, -apple-system, Segoe UI, Roboto, Helvetica, Arial, sans-serif"
TEXT = {"light": "#24292f", "dark": "#e6e6e6"}
FAINT = {"light": "#57606a", "dark": "#b0b4ba"}


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
    """Return a bar between its name and its numbers, each in a column of its own."""
    base, fill = y + BAR / 2 + 4.5, color_of(bar.contender, dark=scheme == "dark")
    name = _text(NAMES - 8, base, bar.name, TEXT[scheme], 'text-anchor="end"')
    if not bar.speed:
        return [name, _text(NAMES + 4, base, "not measured", FAINT[scheme])]
    return [
        name,
        f'<rect x="{NAMES}" y="{y:g}" width="{bar.speed * unit:.1f}" height="{BAR}" rx="2" fill="{fill}"/>',
        _text(END + 10, base, f"{bar.speed:.2f}", TEXT[scheme], 'font-weight="700"'),
        _text(
            WIDTH - 4,
            base,
            f"{bar.milliseconds:.{0 if bar.milliseconds >= 100 else 1}f} ms",
            FAINT[scheme],
            'text-anchor="end"',
        ),
    ]


def svg(heading: str, panels: list[Panel], scheme: str, versions: Sequence[str], fastest: float) -> str:
    """Return a picture of panels below each other.

    Args:
        heading: the line above them, which says what they show.
        panels: groups of bars, all in one unit.
        scheme: "light" or "dark", the page that the picture is for; the background is transparent.
        versions: the lines below them, which say on what, with what and when they were measured.
        fastest: the speed of the longest bar in all pictures, which have one scale.
    """
    unit = (END - NAMES) / fastest
    one = NAMES + unit
    y: float = HEAD
    parts = [
        _text(4, 22, heading, TEXT[scheme], 'font-size="16" font-weight="700"'),
        _text(4, 43, "Bar and bold number: times as fast as bf16; longer is faster", FAINT[scheme]),
    ]
    for panel in panels:
        parts.append(_text(4, y + 19, panel.title, TEXT[scheme], 'font-weight="600"'))
        y += TITLE
        end = y + ROW * len(panel.bars) - (ROW - BAR)
        parts.append(
            f'<line x1="{one:g}" x2="{one:g}" y1="{y - 4:g}" y2="{end + 4:g}" stroke="{FAINT[scheme]}" '
            'stroke-dasharray="3 3"/>'
        )
        for bar in panel.bars:
            parts += _bar(bar, y, scheme, unit)
            y += ROW
        parts.append(_text(one, end + 17, "bf16 = 1", FAINT[scheme], 'text-anchor="middle" font-size="11"'))
        y += BELOW
    for line in versions:
        y += 17
        parts.append(_text(4, y, line, FAINT[scheme]))
    wide, high = WIDTH + 2 * MARGIN, y + 9 + 2 * MARGIN
    ground = ' style="background: white"' if scheme == "light" else ""  # where the page is dark all the same
    head = (
        f'<svg{ground} xmlns="http://www.w3.org/2000/svg" viewBox="{-MARGIN} {-MARGIN} {wide} {high:g}" '
        f'width="{wide * 1.5:g}" height="{high * 1.5:g}" font-family="{FONT}" font-size="13" role="img">'
    )
    return "\n".join([head, f"<title>{escape(heading, quote=False)}</title>", *parts, "</svg>", ""])
