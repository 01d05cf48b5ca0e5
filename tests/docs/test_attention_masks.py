"""The picture of the masks is what the library's masks say."""

from __future__ import annotations

import importlib.util
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "docs" / "attention_masks.py"


def test_the_picture_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("attention_masks", SCRIPT)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.PICTURE.read_text() == script.draw(), "run python docs/attention_masks.py"
