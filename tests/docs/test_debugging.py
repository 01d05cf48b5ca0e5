"""The errors and warnings that ``docs/debugging.md`` lists are those of the library."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

import narrowcast as nc
from narrowcast.state import delayed_scaling

SETUP = """import torch
from torch import nn
import narrowcast as nc

def plain():
    return nn.Sequential(nn.Linear(64, 64))

"""
PAGE = Path(__file__).resolve().parents[2] / "docs" / "debugging.md"


@pytest.mark.parametrize(("heading", "count"), [("## Common errors", 15), ("## Common warnings", 5)])
def test_the_common_errors_and_warnings_have_the_texts_of_the_page(
    heading: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delayed_scaling, "_SAID", set())  # what is told once
    monkeypatch.setattr(nc.autocast, "told", False)
    _, _, section = PAGE.read_text().partition(heading)
    table, _, code = section.partition("```python\n")
    listed = re.findall(r"^\| `(.+?)` \|", table, re.MULTILINE)
    names: dict = {}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(SETUP + code.partition("```")[0], names)
    assert len(listed) == len(names["messages"]) == count
    missing = [text for text in listed if not any(text in message for message in names["messages"])]
    assert not missing, f"no message of the page says {missing}"
