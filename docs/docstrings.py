"""Turn the library's docstrings into the Markdown that mkdocstrings reads."""

from __future__ import annotations

import re

ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):`~?([^`]+)`")
SHARED = re.compile(r"^    (\*{0,2}\w+(?:,\s+\*{0,2}\w+)+): (.*\n?(?:     .*\n?)*)", re.MULTILINE)

HEADING = re.compile(r"(?<=[^\n]\n)(?=(?:Args|Attributes|Raises|Returns|Yields):\n)")


def each_by_itself(found: re.Match[str]) -> str:
    """Return parameters that share a description as one a line, each with the description."""
    return "".join(f"    {name}: {found[2].rstrip()}\n" for name in re.split(r",\s+", found[1]))


def as_markdown(text: str) -> str:
    """Return a docstring with code instead of Sphinx roles, one parameter or error a line, and sections apart.

    Args:
        text: a docstring without its indentation.
    """
    return SHARED.sub(each_by_itself, HEADING.sub("\n", ROLE.sub(r"`\1`", text)) + "\n")
