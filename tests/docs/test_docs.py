"""The documentation is executed: Python blocks of README.md and docs/, every example, every local link."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import narrowcast as nc

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
MAX_EXAMPLE_LINES = 150
EXTRA = ("transformers", "accelerate", "peft")  # packages of extras that the tests do without


def marks(path: Path) -> list[pytest.MarkDecorator]:
    text = path.read_text()
    wanted = [name for name in EXTRA if re.search(rf"^(?:import|from) {name}\b", text, re.MULTILINE)]
    missing = [name for name in wanted if importlib.util.find_spec(name) is None]
    skipped = [pytest.mark.skip(reason=f"needs {', '.join(missing)}: pip install 'narrowcast[peft]'")]
    return [*([pytest.mark.inductor] if "torch.compile" in text else []), *(skipped if missing else [])]


def parameters(paths: list[Path]) -> list:
    return [pytest.param(path, id=path.name, marks=marks(path)) for path in paths]


@pytest.mark.parametrize("page", parameters([page for page in PAGES if BLOCK.search(page.read_text())]))
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of one page run in order in one namespace, as a reader would type them."""
    monkeypatch.chdir(tmp_path)
    text = page.read_text()
    namespace: dict[str, object] = {"__name__": f"blocks_of_{page.stem}"}
    for block in BLOCK.finditer(text):
        lines_before = "\n" * text.count("\n", 0, block.start(1))  # tracebacks show the page's line numbers
        exec(compile(lines_before + block.group(1), str(page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_local_links_exist(page: Path) -> None:
    targets = [target for target in LINK.findall(page.read_text()) if "://" not in target]
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert not missing, f"{page.relative_to(ROOT)} links to files that do not exist: {missing}"


@pytest.mark.parametrize("example", parameters(EXAMPLES))
def test_example_runs(example: Path, tmp_path: Path) -> None:
    # The package that the tests import, wherever it comes from and whatever the working directory is.
    environment = {**os.environ, "PYTHONPATH": str(Path(nc.__file__).resolve().parents[1])}
    command = [sys.executable, str(example)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stdout.strip(), "an example shows something"


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_examples_stay_short(example: Path) -> None:
    assert len(example.read_text().splitlines()) < MAX_EXAMPLE_LINES


def test_there_is_something_to_run() -> None:
    assert len(EXAMPLES) >= 5
    assert any(BLOCK.search(page.read_text()) for page in PAGES)
