"""The picture of the masks is what the library's masks say."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "docs" / "attention_masks.py"


def test_the_picture_is_up_to_date() -> None:
    dark = pytest.importorskip("narrowcast_tools.schemes").dark
    spec = importlib.util.spec_from_file_location("attention_masks", SCRIPT)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    drawn = script.draw()
    for scheme, text in (("light", drawn), ("dark", dark(drawn))):
        picture = script.ASSETS / f"attention-masks-{scheme}.svg"
        assert picture.read_text() == text, "run python docs/attention_masks.py"
