"""Every row of the page of guarantees names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "guarantees.md").read_text()
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
ROWS = [
    line
    for line in PAGE.splitlines()
    if line.startswith("| ") and not line.startswith("| ---") and not line.endswith("| test |")
]


def functions(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[2:42])
def test_a_guarantee_names_tests_that_exist(row: str) -> None:
    *_, cell, _ = row.split("|")
    named = NAMED.findall(cell)
    assert named and not NAMED.sub("", cell).strip(" ,"), "the last cell names tests and nothing else"
    for path, name in named:
        assert name.startswith("test_") and name in functions(path), f"{path} has no {name}"


def test_the_page_has_its_parts() -> None:
    parts = [line[3:] for line in PAGE.splitlines() if line.startswith("## ")]
    assert parts == ["Bit-exact", "Close, with a bound", "Kept or noticed", "Refused", "Not promised"]
    assert len(ROWS) > 40
