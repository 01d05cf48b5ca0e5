"""Rows of text in columns."""

from __future__ import annotations

from collections.abc import Sequence


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
