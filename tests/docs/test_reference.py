"""The reference holds every public name, and reads docstrings as they are meant."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import narrowcast as nc
from narrowcast import _environment

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    # by its file: the tests have a package of this name, too
    spec = importlib.util.spec_from_file_location("docs_reference", ROOT / "docs" / "reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def value_at(path: str) -> Any:
    """Return what a dotted path leads to, through as many modules as there are."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def test_every_public_name_is_in_the_reference_once(reference: ModuleType) -> None:
    topics = [reference.entries(topic) for topic in reference.TOPICS.values()]
    listed = [value_at(entry.path) for entries in topics for entry in entries]
    values = {name: getattr(nc, name) for name in nc.__all__}
    absent = [
        name
        for name, value in values.items()
        if (inspect.isclass(value) or inspect.isfunction(value)) and value not in listed
    ]
    assert not absent, f"give their rooms a topic in docs/reference.py: {absent}"
    shown = [entry.path for entries in topics for entry in entries]
    assert len(shown) == len(set(shown))
    own = [entry for entries in topics for entry in entries if entry.shown.startswith("nc.")]
    long = [
        entry.path for entry in own if entry.path.removeprefix("narrowcast") != entry.shown.removeprefix("nc")
    ]
    assert all(path.split(".")[-1] == path.split(".")[-2] for path in long), (
        "an address repeats a module's path"
    )


def test_pages_begin_with_their_names_by_use(reference: ModuleType) -> None:
    pages = reference.pages()
    before = pages["reference/layers.md"].partition(":::")[0]
    assert (
        before.index("`nc.Linear`") < before.index("`nc.TransformerLayer`") < before.index("`nc.Fp8Padding`")
    )
    shown = {entry.shown for entry in reference.entries(reference.TOPICS["layers"])}
    assert set(reference.LAYERS) <= shown, "a name that is gone"
    for name, topic in reference.TOPICS.items():
        for entry in reference.entries(topic):
            assert f"][{entry.path}] | " in pages[f"reference/{name}.md"].partition(":::")[0]
            assert f"][{entry.path}]" in pages["reference/index.md"]


def test_every_entry_has_a_docstring_of_its_own(reference: ModuleType) -> None:
    entries = [entry for topic in reference.TOPICS.values() for entry in reference.entries(topic)]
    assert [entry.shown for entry in entries if not value_at(entry.path).__doc__] == []


def test_the_navigation_has_every_page(reference: ModuleType) -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert [page for page in reference.pages() if f": {page}\n" not in navigation] == []


HIDDEN = ("help", "write_docs")


def test_every_command_and_option_is_in_the_reference(reference: ModuleType) -> None:
    typer = pytest.importorskip("typer")
    from narrowcast_tools.cli.commands import app

    page = reference.pages()["reference/command-line.md"]
    for name, command in typer.main.get_command(app).commands.items():
        section = page.split(f"## narrowcast {name}\n")[1].split("\n## ")[0]
        assert command.help and command.help in section
        options = [option for one in command.params if one.name not in HIDDEN for option in one.opts]
        assert [option for option in options if f"`{option}`" not in section] == []


READERS = {"read_flag", "read_text", "flag_field"}


def test_every_environment_variable_is_on_its_page() -> None:
    read = set()
    for path in (ROOT / "src").glob("narrowcast*/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in READERS:
                read |= {one.value for one in node.args[:1] if isinstance(one, ast.Constant)}
    listed = re.findall(
        r"^\| `NARROWCAST_(\w+)` \|", (ROOT / "docs" / "environment.md").read_text(), re.MULTILINE
    )
    assert sorted(listed) == sorted(read) == sorted(_environment._NAMES)


def test_docstrings_become_markdown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    docstrings = importlib.import_module("docstrings")
    text = """Do it as :class:`Linear`; default: as always.

Args:
    rows, columns: sizes of
        the input; default: one.
Raises:
    ValueError, TypeError: no size.

More.
"""
    expected = """Do it as `Linear`; default: as always.

Args:
    rows: sizes of
        the input; default: one.
    columns: sizes of
        the input; default: one.

Raises:
    ValueError: no size.
    TypeError: no size.

More.
"""
    assert docstrings.as_markdown(text).strip() == expected.strip()


def docstrings_of(path: Path) -> list[tuple[str, str]]:
    """Return the docstrings of a file with the names of their classes and functions."""
    tree = ast.walk(ast.parse(path.read_text()))
    nodes = [node for node in tree if isinstance(node, (ast.ClassDef, ast.FunctionDef))]
    return [(f"{path.name}: {node.name}", text) for node in nodes if (text := ast.get_docstring(node))]


def test_sections_have_one_name_a_line() -> None:
    """griffe takes a line's first name for the parameter or error, and the others for its description."""
    glued = []
    for path in (ROOT / "src" / "narrowcast").rglob("*.py"):
        for name, text in docstrings_of(path):
            errors = re.findall(r"^Raises.*?:\n((?: +.*\n?)+)", text, re.MULTILINE)
            if re.search(r"^Raises .*:$", text, re.MULTILINE) or any(
                re.search(r"[.;] [A-Z]\w*Error: ", section) for section in errors
            ):
                glued.append(name)
    assert not glued, f"write each error on a line of its own: {glued}"
