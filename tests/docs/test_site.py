"""What the site adds to the pages."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from narrowcast_tools.colors import in_both_schemes

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


def test_a_page_shows_the_picture_of_its_color_scheme() -> None:
    told = in_both_schemes("../assets/z", "x y")
    assert script("site_hooks").in_both_schemes(f"a\n\n{told}\n") == (
        "a\n\n![x y](../assets/z-light.svg#only-light)\n![x y](../assets/z-dark.svg#only-dark)\n"
    )
    told = in_both_schemes("../assets/z", "x y", phone=True)
    assert script("site_hooks").in_both_schemes(told) == "\n".join(
        f"![x y](../assets/z{width}-{scheme}.svg#only-{scheme}){{ .{screen} }}"
        for width, screen in (("", "page"), ("-phone", "phone"))
        for scheme in ("light", "dark")
    )


def test_every_page_has_its_pictures_in_both_schemes() -> None:
    """GitHub showed white pictures on its dark pages."""
    hooks = script("site_hooks")
    for page in [*sorted((ROOT / "docs").glob("*.md")), ROOT / "benchmarks" / "results" / "LOG.md"]:
        told = page.read_text()
        assert "-light.svg)" not in told, (
            f"{page.name}: write what narrowcast_tools.colors.in_both_schemes returns"
        )
        shown = hooks.in_both_schemes(told)
        dark = len(re.findall(r'dark\.svg"', told))
        assert "<picture" not in shown and shown.count("#only-dark") == dark


def test_the_first_page_says_why_and_when_not() -> None:
    hooks = script("site_hooks")
    page = SimpleNamespace(file=SimpleNamespace(src_uri="index.md"))
    shown = hooks.on_page_markdown((ROOT / "docs" / "index.md").read_text(), page)
    assert "**For whom:**" in shown and "**When not:**" in shown and "| times as fast as bf16" in shown
    what, *numbers, _ = hooks.opening()
    assert what in shown and what.startswith("narrowcast trains")
    assert "\n\n".join(numbers) in shown and "- **Speed:**" in numbers[1]
    assert shown.index("```python") < shown.index("**For whom:**"), "code comes before reasons"
    assert "<!-- " not in shown.partition("\n## Other ways")[0].replace("<!-- how much -->", "").replace(
        "<!-- end of how much -->", ""
    )
    assert "](docs/" not in shown


def test_names_of_examples_and_results_are_links() -> None:
    hooks = script("site_hooks")
    told = "Rows: `fsdp.csv`, `benchmarks/results/norm.csv`; `examples/01_first.py`, `absent.csv`, [`fsdp.csv`](x)"
    example = sorted((ROOT / "examples").glob("*.py"))[0].name
    told = told.replace("01_first.py", example)
    assert hooks.with_links(f"{told}\n```sh\ncat `fsdp.csv`\n```\n", "page.md") == (
        "Rows: [`fsdp.csv`](benchmarks/results/fsdp.csv), "
        "[`benchmarks/results/norm.csv`](benchmarks/results/norm.csv); "
        f"[`examples/{example}`](examples/{example}), `absent.csv`, [`fsdp.csv`](x)\n```sh\ncat `fsdp.csv`\n```\n"
    )
    assert "(results/fsdp.csv)" in hooks.with_links("`fsdp.csv`", "benchmarks/README.md")


def test_phones_show_the_cells_of_a_table_of_words_below_each_other() -> None:
    """On a phone, the last column of choosing.md was cut."""
    labels = script("site_hooks").with_labels
    words = '<table>\n<tr><th>a</th><th><code>b&amp;</code></th></tr>\n<tr><td>1</td><td style="x">2</td></tr></table>'
    cells = '<tr><td data-label="a">1</td><td data-label="b&amp;" style="x">2</td></tr></table>'
    assert labels(words) == words.partition("<tr><td>")[0].replace("<table>", "<table data-words>") + cells
    numbers = '<table><tr><th style="text-align: right;">a</th></tr><tr><td>1</td></tr></table>'
    assert labels(numbers) == numbers
    wide = numbers.replace("<th>b</th>", "").replace("</th>", "</th><th>b</th><th>c</th><th>d</th><th>e</th>")
    assert '<table data-words data-numbers><tr><th style="text-align: right;">a</th>' in labels(wide)


def test_names_of_options_do_not_break_at_a_hyphen() -> None:
    """ "--by-block" ended a line with "--by-"."""
    whole = script("site_hooks").with_whole_names
    told = "<p><code>train --by-block 2</code>, <code>nc.convert</code></p><pre><code>a-b\n</code></pre>"
    assert whole(told) == told.replace("--by-block", '<span class="whole">--by-block</span>')


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda page: page.name
)
def test_pages_write_a_number_below_one_with_its_zero(page: Path) -> None:
    """Both .57 and 0.57 were written."""
    prose = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert not re.findall(r"(?:^|[\s(|~])\.\d+", prose, re.MULTILINE) and "fmt: skip" not in page.read_text()


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    absent = [
        page.name for page in sorted((ROOT / "docs").glob("*.md")) if f": {page.name}\n" not in navigation
    ]
    assert not absent, f"mkdocs.yml has no entry for {absent}"


def test_pages_for_contributors_are_under_the_last_tab() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2].partition("hooks:\n")[0]
    *users, last = re.split(r"^  - ", navigation, flags=re.MULTILINE)
    theirs = {"CONTRIBUTING.md", "specification.md", "benchmarks.md", "gpus.md"}
    theirs |= {
        page.name for page in (ROOT / "docs").glob("a*.md") if page.name.startswith(("architecture", "add-"))
    }
    assert all(f": {page}\n" in last for page in theirs)
    assert not [page for page in theirs if f": {page}\n" in "".join(users)]


def test_signatures_are_formatted_and_shown_once() -> None:
    options, pyproject = (ROOT / "mkdocs.yml").read_text(), (ROOT / "pyproject.toml").read_text()
    (extra,) = re.findall(r"^docs = \[(.*)\]$", pyproject, re.MULTILINE)
    assert '"ruff' in extra, "mkdocstrings needs a formatter"
    assert re.search(r"^ +show_overloads: false", options, re.MULTILINE)
    (length,) = re.findall(r"^ +line_length: (\d+)", options, re.MULTILINE)
    assert int(length) <= 72, "a page shows no more letters of code"


def test_code_fits_beside_both_sidebars() -> None:
    """A box of code shows 88 columns on a screen of 1280 pixels."""
    wide = []
    for page in [ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]:
        blocks = re.findall(r"^ *```.*?\n(.*?)^ *```", page.read_text(), re.MULTILINE | re.DOTALL)
        wide += [(page.name, line) for block in blocks for line in block.splitlines() if len(line) > 88]
    assert not wide
