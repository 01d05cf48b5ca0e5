"""Rows of text in columns."""

from __future__ import annotations

import itertools
import re
import shutil
import textwrap
from collections.abc import Sequence

_HEADING = re.compile(r"(.*\.)?[\d*,-]+\.(?=.)")  # of names: through their last number
_FILE_WIDTH = 200  # where there is no terminal


def terminal_width() -> int:
    """Return the columns of the terminal, or many without one."""
    return shutil.get_terminal_size((_FILE_WIDTH, 24)).columns


def aligned(rows: Sequence[Sequence[str]], right: frozenset[int] = frozenset()) -> list[str]:
    """Return lines of equal columns under the first row; ``right``: columns that are aligned at their right end."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]

    def line(row: Sequence[str]) -> str:
        cells = (
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths))
        )
        return "  ".join(cells).rstrip()

    return [line(rows[0]), line(["-" * width for width in widths]), *(line(row) for row in rows[1:])]


def as_table(
    head: tuple[str, ...], rows: list[tuple[str, ...]], right: frozenset[int] = frozenset(), name: int = 0
) -> list[str]:
    """Return the lines of a table; if it is wider than the terminal, names stand below what they have in common.

    Args:
        right: columns that are aligned at their right end.
        name: the column of modules' names.
    """
    width = terminal_width()
    lines = aligned([head, *rows], right)
    if max(map(len, lines)) <= width:
        return lines
    headings, rows = below_headings(rows, name)
    above = {place: heading for place, heading in enumerate(headings, 2) if heading}
    return with_headings(aligned([head, *rows], right), above, width)


def with_headings(lines: list[str], above: dict[int, str], width: int) -> list[str]:
    """Return the lines of a table with headings above some of them."""
    for place, heading in reversed(above.items()):
        lines[place:place] = wrapped_name(heading, width)
    return lines


def below_headings(rows: list[tuple[str, ...]], name: int = 0) -> tuple[list[str], list[tuple[str, ...]]]:
    """Return headings for the first rows of groups, and the rows with the rest of their names."""
    headings, shorter = [], []
    for heading, group in itertools.groupby(rows, lambda row: (_HEADING.match(row[name]) or [""])[0]):
        below = list(group)
        if len(below) == 1:
            heading = ""
        headings += [heading, *[""] * (len(below) - 1)]
        indent = "  " if heading else ""
        shorter += [
            (*row[:name], indent + row[name].removeprefix(heading), *row[name + 1 :]) for row in below
        ]
    return headings, shorter


def wrapped_name(name: str, width: int) -> list[str]:
    """Return a module's name in lines that end at its dots, or at underscores of a long part; indented alike."""
    indent = " " * (len(name) - len(name.lstrip()))
    width -= len(indent)
    name = name.lstrip()
    lines = [""]
    parts = re.findall(r"[^.]*\.?", name)
    for part in itertools.chain.from_iterable(
        [part] if len(part) <= width else re.findall(r"[^_]*_?", part) for part in parts
    ):
        if lines[-1] and len(lines[-1]) + len(part) > width:
            lines.append("")
        lines[-1] += part
    return [indent + piece for line in lines for piece in textwrap.wrap(line, width)]
