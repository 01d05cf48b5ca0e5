"""The table of the specification points to files, names and tests that exist, and the page is written from it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load() -> Any:
    spec = importlib.util.spec_from_file_location("specification_table", ROOT / "docs" / "specification.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TABLE = load()


def test_every_row_is_there_once() -> None:
    assert [row.row for row in TABLE.rows()] == [f"A{number}" for number in range(1, 124)]


@pytest.mark.parametrize("row", TABLE.rows(), ids=lambda row: row.row)
def test_what_a_row_names_exists(row: Any) -> None:
    assert not TABLE.missing(row)
    assert row.kind in ("yes", "by design", "not yet")
    assert (row.kind == "yes") == (row.status == "yes"), "any other status has a reason"
    assert row.tests or row.kind == "not yet", "what is said to hold has a test"


def test_a_test_that_is_gone_is_noticed() -> None:
    row = TABLE.rows()[0]
    assert TABLE.missing(row._replace(test=row.test + "_no_more")) == [row.test + "_no_more"]
    assert TABLE.missing(row._replace(where=row.where + "_no_more")) == [row.where + "_no_more"]


def test_the_page_is_written_from_the_table() -> None:
    assert TABLE.PAGE.read_text() == TABLE.page(), "run `python docs/specification.py`"
