"""The picture of the masks is what the library's masks say."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "docs" / "attention_masks.py"


def test_the_picture_is_up_to_date(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    spec = importlib.util.spec_from_file_location("attention_masks", SCRIPT)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    for columns, name in script.WRITTEN.items():
        script.write(script.draw(columns), tmp_path, name)
    for drawn in tmp_path.iterdir():
        assert (script.ASSETS / drawn.name).read_text() == drawn.read_text(), (
            "run python docs/attention_masks.py"
        )
