"""The answer to a wrong word of an option, without PyTorch, whose import takes seconds."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import TypeVar

AUTO = "auto"  # of the recipe and of the device
DEVICES = (AUTO, "cpu", "cuda")
T = TypeVar("T")


def find(name: str, known: Mapping[str, T], option: str, why: str = "", *, suggest: bool = True) -> T:
    """Return the entry of a name.

    Args:
        option: that takes the name, for the message.
        why: what is wrong with a name that has no entry, after the name.
        suggest: whether the message has the name that looks like it.

    Raises:
        ValueError: there is none; the message lists the names, and the nearest one, with the same numbers if it
            has any: another size is another model.
    """
    if name in known:
        return known[name]
    numbers = re.findall(r"\d+", name)
    same = [one for one in known if numbers in ([], re.findall(r"\d+", one))]
    alike = difflib.get_close_matches(name.lower(), same, 1) if suggest else []
    near = f"; the nearest: {alike[0]!r:.60}" if alike else ""
    raise ValueError(f"{option} is {name!r:.60}{why}{near}; use one of {', '.join(known)}")
