"""The documentation is executed: Python blocks of README.md and docs/, every example, every local link."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ranks import start_method

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
ROOT_PAGES = [ROOT / f"{name}.md" for name in ("CHANGELOG", "CONTRIBUTING", "SECURITY")]
LINKED = [*PAGES, *ROOT_PAGES, ROOT / "benchmarks" / "README.md", ROOT / "benchmarks" / "results" / "LOG.md"]
ELSEWHERE = ROOT / "docs" / "neighbours.md"  # its blocks run in tests/neighbours, with their packages
ON_RANKS = ROOT / "docs" / "export-many-gpus.md"  # its blocks are one script of two ranks
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
MAX_EXAMPLE_LINES = 150
EXTRA = ("transformers", "accelerate", "peft")  # packages of extras that the tests do without


def missing_packages(text: str) -> list[str]:
    wanted = [name for name in EXTRA if re.search(rf"^(?:import|from) {name}\b", text, re.MULTILINE)]
    return [name for name in wanted if importlib.util.find_spec(name) is None]


def marks(path: Path) -> list[pytest.MarkDecorator]:
    text = path.read_text()
    missing = [] if path.name == "README.md" else missing_packages(text)  # README's other blocks run without
    skipped = [pytest.mark.skip(reason=f"needs {', '.join(missing)}: pip install 'narrowcast[peft]'")]
    return [*([pytest.mark.inductor] if "torch.compile" in text else []), *(skipped if missing else [])]


def parameters(paths: list[Path]) -> list:
    return [pytest.param(path, id=path.name, marks=marks(path)) for path in paths]


@pytest.mark.parametrize(
    "page",
    parameters([one for one in PAGES if one not in (ELSEWHERE, ON_RANKS) and BLOCK.search(one.read_text())]),
)
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of one page run in order in one namespace, as a reader would type them."""
    monkeypatch.chdir(tmp_path)
    text = page.read_text()
    namespace: dict[str, object] = {"__name__": f"blocks_of_{page.stem}"}
    for block in BLOCK.finditer(text):
        if page.name == "README.md" and missing_packages(block.group(1)):
            continue
        lines_before = "\n" * text.count("\n", 0, block.start(1))  # tracebacks show the page's line numbers
        exec(compile(lines_before + block.group(1), str(page), "exec"), namespace)


@pytest.mark.parametrize(("page", "columns"), [("README.md", 80), ("docs/convert.md", 88)])
def test_the_first_block_of_a_page_prints_what_the_page_shows(
    page: str, columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    text = (ROOT / page).read_text()
    monkeypatch.setenv("COLUMNS", str(columns))
    block = BLOCK.search(text)
    assert block is not None
    exec(block.group(1), {"__name__": "first_block"})
    shown = text.partition("```text\n")[2].partition("```")[0]
    first, _, last = shown.partition("...\n")
    printed = capsys.readouterr().out
    assert printed.startswith(first) and printed.endswith(last)
    assert max(map(len, shown.splitlines())) <= columns


def test_the_blocks_for_many_ranks_run_on_two(tmp_path: Path) -> None:
    script = tmp_path / "export_ranks.py"
    script.write_text("\n".join(BLOCK.findall(ON_RANKS.read_text())))
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        str(script),
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_local_links_exist(page: Path) -> None:
    """No page links to the generated reference, which a plain clone lacks. The site's strict build checks anchors."""
    targets = [target for target in LINK.findall(page.read_text()) if not re.match(r"\w+://", target)]
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert not missing, f"{page.relative_to(ROOT)} links to files that do not exist: {missing}"


def run_as_script(example: str, folder: str) -> None:
    """In a process of its own: what it prints goes to ``folder/shown``, and its errors behind it."""
    os.chdir(folder)
    with open("shown", "w") as shown:
        for descriptor in (1, 2):
            os.dup2(shown.fileno(), descriptor)
    sys.argv = [example]
    runpy.run_path(example, run_name="__main__")


@pytest.mark.parametrize("example", parameters(EXAMPLES))
def test_example_runs(example: Path, tmp_path: Path) -> None:
    context: Any = multiprocessing.get_context(start_method())
    process = context.Process(target=run_as_script, args=(str(example), str(tmp_path)))
    process.start()
    process.join(300)
    process.kill()
    shown = (tmp_path / "shown").read_text()
    assert process.exitcode == 0, shown
    assert shown.strip(), "an example shows something"


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_examples_stay_short(example: Path) -> None:
    assert len(example.read_text().splitlines()) < MAX_EXAMPLE_LINES


def test_readme_begins_with_what_to_type() -> None:
    """The first screen of ``less README.md`` on a terminal of 80 columns."""
    screen = (ROOT / "README.md").read_text().splitlines()[:24]
    assert {"make demo DEMO_ARGS=--quick", "pip install ."} <= {line.partition("  ")[0] for line in screen}
    assert any("nc.convert(" in line for line in screen)
    assert not [line for line in screen if len(line) > 80 or line.startswith(("|", "<picture"))]


def test_there_is_something_to_run() -> None:
    assert len(EXAMPLES) >= 5
    assert any(BLOCK.search(page.read_text()) for page in PAGES)
