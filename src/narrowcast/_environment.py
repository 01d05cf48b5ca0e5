"""The one place that reads environment variables.

Every variable is ``NARROWCAST_<NAME>``; the spelling ``NVTE_<NAME>`` is accepted as a fallback, so that scripts
written for Transformer Engine keep their settings. Values are read when the object they configure is built, never
at import and never inside a traced graph's later calls.
"""

from __future__ import annotations

import os
from collections.abc import Collection

from ._checks import shown

_PREFIXES = ("NARROWCAST_", "NVTE_")
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("", "0", "false", "no", "off")


def read_text(name: str, default: str) -> str:
    """Return text value of ``NARROWCAST_<name>``, else of ``NVTE_<name>``, else ``default``."""
    for prefix in _PREFIXES:
        value = os.environ.get(prefix + name)
        if value is not None:
            return value
    return default


def read_flag(name: str, default: bool = False) -> bool:
    """Return the boolean value of a variable.

    Raises:
        ValueError: the variable is set to something that is neither true nor false.
    """
    text = read_text(name, "1" if default else "0").strip().lower()
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise ValueError(f"environment variable NARROWCAST_{name} is {shown(text)}; use 1 or 0")


def read_foreign(name: str) -> str | None:
    """Return the value of a variable that belongs to other tools, such as ``CXX``; None if it is not set."""
    return os.environ.get(name)


def read_by_first_word(words: Collection[str]) -> dict[str, str]:
    """Return every variable whose name begins with one of ``words`` and an underscore, sorted by name."""
    return {name: value for name, value in sorted(os.environ.items()) if name.partition("_")[0] in words}
