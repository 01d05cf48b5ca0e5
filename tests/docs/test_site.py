"""What the site adds to the pages."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]


def script(name: str) -> ModuleType:
    """Return the module of a script in ``docs/``."""
    specification = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "remote, address",
    [
        ("git@git.example.org:group/narrowcast.git\n", "https://git.example.org/group/narrowcast"),
        ("https://user@git.example.org/group/narrowcast", "https://git.example.org/group/narrowcast"),
        ("ssh://git@git.example.org/group/narrowcast.git", "https://git.example.org/group/narrowcast"),
        ("/srv/git/narrowcast.git", None),
        ("../narrowcast", None),
        ("", None),
    ],
)
def test_the_site_links_the_repository_it_was_cloned_from(remote: str, address: str | None) -> None:
    assert script("site_hooks").web_address(remote) == address


def test_the_first_page_says_why_and_when_not() -> None:
    hooks = script("site_hooks")
    page = SimpleNamespace(file=SimpleNamespace(src_uri="index.md"))
    shown = hooks.on_page_markdown((ROOT / "docs" / "index.md").read_text(), page)
    assert "**For whom:**" in shown and "**When not:**" in shown and "| speed beside bf16" in shown
    assert "<!-- why" not in shown and "](docs/" not in shown


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    absent = [
        page.name for page in sorted((ROOT / "docs").glob("*.md")) if f": {page.name}\n" not in navigation
    ]
    assert not absent, f"mkdocs.yml has no entry for {absent}"
