"""Version, changelog, tag and pages say the same, and a release is refused if they do not."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import narrowcast as nc

ROOT = Path(__file__).resolve().parents[1]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
disagreements = runpy.run_path(str(ROOT / "tools" / "release.py"))["disagreements"]
needs_git = pytest.mark.skipif(not shutil.which("git"), reason="needs git")


def test_version_changelog_and_tag_agree() -> None:
    tags = ""
    if (ROOT / ".git").exists() and shutil.which("git"):
        command = ["git", "-C", str(ROOT), "tag", "--points-at", "HEAD", "--list", "v*"]
        tags = subprocess.run(command, capture_output=True, text=True).stdout
    pyproject = (ROOT / "pyproject.toml").read_text()
    assert not disagreements(nc.__version__, CHANGELOG, tags.split(), pyproject)


@pytest.mark.parametrize(
    "version, top, tags, url, found",
    [
        ("0.3.0.dev0", "[Unreleased]", "", ".invalid", ""),
        ("0.3.0.dev0", "[0.3.0] - 2026-12-01", "", ".invalid", "begins with [Unreleased]"),
        ("0.2.0.dev0", "[Unreleased]", "", ".invalid", "does not follow the last release"),
        ("0.3.0.dev0", "[Unreleased]", "v0.3.0", ".invalid", "is tagged v0.3.0"),
        ("0.3.0", "[0.3.0] - 2026-12-01", "v0.3.0", ".org", ""),
        ("0.3.0", "[0.3.0] - 2026-12-01", "v0.3.1", ".org", "is tagged v0.3.1"),
        ("0.3.0", "[0.3.0]", "", ".org", "and its day"),
        ("0.3.0", "[Unreleased]", "", ".org", "begins with [0.3.0]"),
        ("0.3.0", "[0.3.0] - 2026-12-01", "", ".invalid", "does not name the repository"),
    ],
)
def test_disagreements_are_found(version: str, top: str, tags: str, url: str, found: str) -> None:
    changelog = f"# Changelog\n\n## {top}\n\n## [0.2.0] - 2026-11-26\n"
    told = disagreements(version, changelog, tags.split(), f'Repository = "https://narrowcast{url}"')
    assert len(told) == bool(found) and found in "".join(told)


@pytest.fixture
def release(tmp_path: Path) -> Callable[..., tuple[int, str]]:
    """Return a function that runs a command, or the release script, in a repository with a release's files."""
    identity = {f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment |= identity | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}

    def run(*words: str) -> tuple[int, str]:
        command = words or (sys.executable, "tools/release.py")
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "release.py", tmp_path / "tools")
    (tmp_path / "src" / "narrowcast").mkdir(parents=True)
    (tmp_path / "src" / "narrowcast" / "_version.py").write_text('__version__ = "0.3.0"\n')
    (tmp_path / "CHANGELOG.md").write_text("## [0.3.0] - 2026-12-01\n")
    (tmp_path / "pyproject.toml").write_text("")
    for words in (["init"], ["add", "."], ["commit", "--message", "x"]):
        assert run("git", *words)[0] == 0
    return run


@needs_git
def test_a_release_is_tagged_once(release: Callable[..., tuple[int, str]]) -> None:
    status, said = release()
    assert status == 0 and "as v0.3.0" in said, said
    assert release("git", "cat-file", "-t", "v0.3.0") == (0, "tag\n"), "annotated"
    status, said = release()
    assert status == 1 and "the tag v0.3.0 exists" in said


@needs_git
@pytest.mark.parametrize(
    "file, text, found",
    [
        ("src/narrowcast/_version.py", '__version__ = "0.3.0.dev0"', "is between releases"),
        ("src/narrowcast/_version.py", '__version__ = "0.3.1"', "begins with [0.3.1]"),
        ("CHANGELOG.md", "## [Unreleased]\n", "begins with [0.3.0]"),
        ("pyproject.toml", 'Repository = "https://narrowcast.invalid"', "does not name the repository"),
    ],
)
def test_a_release_is_refused(
    file: str, text: str, found: str, release: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    (tmp_path / file).write_text(text)
    status, said = release()
    assert status == 1 and found in said and "commit them first" in said
    release("git", "commit", "--all", "--message", "x")
    status, said = release()
    assert status == 1 and found in said and "commit them first" not in said
    release("git", "tag", "v0.3.2")
    assert "is tagged v0.3.2" in release()[1]
    assert release("git", "tag") == (0, "v0.3.2\n")


def test_the_changelog_begins_with_two_minutes_of_reading() -> None:
    heading, *lines = CHANGELOG.split("\n## [")[1].split("\n### ")[1].splitlines()
    assert heading == "In two minutes" and len(" ".join(lines).split()) <= 350
    assert all(len(line) <= 140 for line in lines)


def test_pages_name_no_wheel() -> None:
    """No index has a wheel, and the one that a clone builds has another version than the last release."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md"))]
    assert not [page.name for page in pages if re.search(r"narrowcast-[\w.-]+\.whl", page.read_text())]
