"""Turn the library's docstrings into the Markdown that mkdocstrings reads."""

from __future__ import annotations

import re

ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):`~?([^`]+)`")
SHARED = re.compile(r"^    (\*{0,2}\w+(?:,\s+\*{0,2}\w+)+): (.*\n?(?:     .*\n?)*)", re.MULTILINE)
ARGS = re.compile(r"^Args:\n(?: +.*\n?)+", re.MULTILINE)
GLUED = re.compile(r"(?<=[.;]) `{0,2}(\w+_\w+)`{0,2}: ")
RAISES = re.compile(r"^Raises(?: \((?P<when>.+)\))?:\n(?P<errors>(?: +.*\n?)+)", re.MULTILINE)
ERROR = re.compile(r"(?:^|(?<=[.;:]) )(?=(?:[A-Z]\w*(?:Error|Warning)(?:, | or )?)+: )")


def one_a_line(found: re.Match[str]) -> str:
    """Return a ``Raises`` section with a line per error, behind the sentence that says when."""
    errors = ERROR.split(" ".join(found["errors"].split()))
    when = f"The errors below are raised {found['when']}.\n\n" if found["when"] else ""
    return f"\n{when}Raises:\n" + "".join(f"    {error}\n" for error in errors if error)


def each_by_itself(found: re.Match[str]) -> str:
    """Return parameters that share a description as one a line, each with the description."""
    return "".join(f"    {name}: {found[2].rstrip()}\n" for name in re.split(r",\s+", found[1]))


def as_markdown(text: str) -> str:
    """Return a docstring with code in place of Sphinx roles, and one parameter or error a line.

    Args:
        text: a docstring without its indentation.
    """
    text = RAISES.sub(one_a_line, ROLE.sub(r"`\1`", text) + "\n")
    text = ARGS.sub(lambda found: GLUED.sub(r"\n    \1: ", found[0]), text)
    return SHARED.sub(each_by_itself, text)
