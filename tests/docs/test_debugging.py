"""The errors that ``docs/debugging.md`` lists are those that the library raises."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "debugging.md"


def test_the_common_errors_have_the_texts_of_the_page() -> None:
    table, _, code = PAGE.read_text().partition("## Common errors")[2].partition("```python\n")
    listed = re.findall(r"^\| `(.+?)` \|", table, re.MULTILINE)
    names: dict = {}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(
            "import torch\nfrom torch import nn\nimport narrowcast as nc\n" + code.partition("```")[0], names
        )
    assert len(listed) == len(names["messages"]) == 12
    missing = [text for text in listed if not any(text in message for message in names["messages"])]
    assert not missing, f"no error of the page says {missing}"
