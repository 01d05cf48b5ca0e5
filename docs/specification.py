"""Writes ``docs/specification.md`` from ``docs/specification.csv``, and checks that what the rows name exists.

    python docs/specification.py

A row has: number, title, where it lives (a path below ``src/narrowcast/`` or the root, and a name in it), the tests
that prove it, and "yes", "by design: <reason>" or "not yet: <what is missing>".
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
PAGE = DOCS / "specification.md"
HEAD = """# The specification, row by row

The rows A1 to A123 are those of the specification that this library was written to. Each has a status: **yes**;
**by design** where the library does it another way, with the reason; **not yet** where something is missing. A row that
is "not yet" names the test of what is there, if there is one.

`docs/specification.py` writes this page from `docs/specification.csv`; `tests/docs/test_specification.py` fails when a
file, a name in it or a test that a row points to is gone.
"""


class Row(NamedTuple):
    """One row of the table."""

    row: str
    title: str
    where: str
    test: str
    status: str

    @property
    def kind(self) -> str:
        """ "yes", "by design" or "not yet"."""
        return self.status.split(":")[0]

    @property
    def tests(self) -> list[str]:
        """``path::name`` of each test."""
        return [test.strip() for test in self.test.split(",") if test.strip()]


def rows() -> list[Row]:
    """The rows of the data file."""
    with (DOCS / "specification.csv").open(newline="") as file:
        return [Row(**row) for row in csv.DictReader(file, delimiter="|")]


def missing(row: Row) -> list[str]:
    """What a row points to that does not exist."""
    absent = []
    path, _, name = row.where.partition(":")
    found = [base / path for base in (ROOT / "src" / "narrowcast", ROOT) if (base / path).exists()]
    if not found or (name and not re.search(rf"(?<!\w){re.escape(name)}(?!\w)", found[0].read_text())):
        absent.append(row.where)
    for test in row.tests:
        path, _, name = test.partition("::")
        file = ROOT / path
        if not file.exists() or not re.search(rf"^ *def {re.escape(name)}\(", file.read_text(), re.MULTILINE):
            absent.append(test)
    return absent


def page() -> str:
    """The page as Markdown."""
    table = rows()
    counts = Counter(row.kind for row in table)
    lines = [
        HEAD,
        f"{counts['yes']} yes, {counts['by design']} by design, {counts['not yet']} not yet.\n",
        "| row | what | where | test | status |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in table:
        tests = "<br>".join(f"`{test.removeprefix('tests/')}`" for test in row.tests)
        kind, _, reason = row.status.partition(": ")
        status = f"**{kind}**: {reason}" if reason else kind
        lines.append(f"| {row.row} | {row.title} | `{row.where}` | {tests} | {status} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    absent = {row.row: missing(row) for row in rows() if missing(row)}
    if absent:
        raise SystemExit(f"these do not exist: {absent}")
    PAGE.write_text(page())
    print(f"wrote {PAGE}")
