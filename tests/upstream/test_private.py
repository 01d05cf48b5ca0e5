"""``private`` and ``entry``: what is there, what is not, and what the error says."""

from __future__ import annotations

import math

import pytest

from narrowcast.upstream.private import ENTRIES, HIDDEN, Absent, UpstreamError, entry, private


@pytest.fixture(autouse=True)
def _own_records(monkeypatch):
    monkeypatch.setattr("narrowcast.upstream.private.ENTRIES", dict(ENTRIES))


def test_returns_what_is_at_the_path():
    assert private("math.floor", follows="a file", without="round") is math.floor


def test_imports_modules_on_the_way():
    assert private("xml.dom.minidom.Document", follows="a file", without="write text").__name__ == "Document"


@pytest.mark.parametrize("path", ["math.no_such_name", "no_such_module.name", "math.floor.no_such_name"])
def test_a_lost_name_raises_at_its_first_use_and_names_the_way_out(path):
    lost = private(path, follows="a file", without="use round")
    assert isinstance(lost, Absent) and not lost
    for use in (lambda: lost(1), lambda: lost.attribute):
        with pytest.raises(UpstreamError, match=rf"has no {path}.*use round.*tested with PyTorch 2\.11"):
            use()


def test_a_lost_name_with_another_way_gives_that():
    assert private("math.no_such_name", follows="a file", without="floors", fallback=int) is int


def test_a_hidden_name_counts_as_lost(monkeypatch):
    monkeypatch.setattr("narrowcast.upstream.private.HIDDEN", HIDDEN | {"math.floor"})
    assert isinstance(private("math.floor", follows="a file", without="round"), Absent)


def test_an_entry_without_a_path_says_what_was_found():
    found = entry("node.meta['place']", follows="a file", without="compile without it")
    with pytest.raises(
        UpstreamError, match=r"has no node.meta\['place'\].*found place_of.*compile without it"
    ):
        raise found.error("place_of")
