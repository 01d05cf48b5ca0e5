"""Tag the commit as a release: ``python tools/release.py``. Refuses if version, changelog, tags and files disagree."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
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


def git(*words: str) -> str:
    command = ["git", "-C", str(ROOT), *words]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def main() -> None:
    version = runpy.run_path(str(ROOT / "src/narrowcast/_version.py"))["__version__"]
    changelog, pyproject = ((ROOT / name).read_text() for name in ("CHANGELOG.md", "pyproject.toml"))
    tags = git("tag", "--points-at", "HEAD", "--list", "v*").split()
    found = disagreements(version, changelog, tags, pyproject)
    if ".dev" in version:
        found.append(f"version {version} is between releases; set the release in src/narrowcast/_version.py")
    if git("tag", "--list", f"v{version}"):
        found.append(f"the tag v{version} exists; a release needs another version")
    if git("status", "--porcelain"):
        found.append("files differ from the commit; commit them first")
    if found:
        sys.exit("\n".join(f"narrowcast: {line}" for line in found))
    git("tag", "--annotate", f"v{version}", "--message", version)
    print(f"tagged {git('rev-parse', '--short', 'HEAD')} as v{version}; next: git push origin v{version}")


if __name__ == "__main__":
    main()
