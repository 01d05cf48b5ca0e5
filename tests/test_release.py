"""Version, changelog, tag and pages say the same."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import narrowcast as nc

ROOT = Path(__file__).resolve().parents[1]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
SECTION = re.compile(r"^## \[(.+?)\](?: - (\d{4}-\d\d-\d\d))?$", re.MULTILINE)


def disagreements(version: str, changelog: str, tags: list[str], pyproject: str) -> list[str]:
    """Return what does not fit together.

    Args:
        version: of the package.
        changelog: the text.
        tags: those of the commit.
        pyproject: the text of pyproject.toml.
    """
    (top, day), *older = SECTION.findall(changelog)
    released, _, development = version.partition(".dev")
    found = []
    if development:
        if top != "Unreleased":
            found.append(f"version {version} needs a changelog that begins with [Unreleased], not [{top}]")
        if older and not numbers(older[0][0]) < numbers(released):
            found.append(f"version {version} does not follow the last release, {older[0][0]}")
    else:
        if top != version or not day:
            found.append(f"version {version} needs a changelog that begins with [{version}] and its day")
        if ".invalid" in pyproject:
            found.append("[project.urls] of pyproject.toml does not name the repository")
    if tags and f"v{version}" not in tags:
        found.append(f"version {version} is tagged {', '.join(tags)}")
    return found


def numbers(version: str) -> list[int]:
    return [int(number) for number in version.split(".")]


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


def test_pages_name_no_wheel() -> None:
    """No index has a wheel, and the one that a clone builds has another version than the last release."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md"))]
    assert not [page.name for page in pages if re.search(r"narrowcast-[\w.-]+\.whl", page.read_text())]
