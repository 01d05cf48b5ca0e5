"""The tables of every command, in one style: no frame, and a line below the headings."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text


class _Titled(Table):
    """A table below its title, which rich would wrap where the table ends and not where the terminal does."""

    def __init__(self, above: str, **options: Any) -> None:
        super().__init__(**options)
        self._above = above

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self._above:
            yield Text(self._above, style="table.title")
        yield from super().__rich_console__(console, options)


def make_table(
    headings: Sequence[str], title: str = "", *, left: Collection[str] = (), footers: Sequence[str] = ()
) -> Table:
    """Return a table without rows.

    Args:
        left: headings of columns that are aligned at their left end, as the first one is; the others have numbers.
        footers: the last row, below a line, if there is one.
    """
    table = _Titled(
        title,
        box=box.SIMPLE,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        show_footer=bool(footers),
    )
    for index, heading in enumerate(headings):
        justify = "left" if index == 0 or heading in left else "right"
        footer = footers[index] if footers else ""
        table.add_column(heading, justify=justify, overflow="fold", footer=footer)
    return table
