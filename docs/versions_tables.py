"""Write what ``narrowcast.upstream.versions`` says into README.md, ``docs/versions.md`` and ``requirements.txt``.

python docs/versions_tables.py
"""

from __future__ import annotations

import re
from pathlib import Path

from narrowcast.upstream import versions

DOCS = Path(__file__).resolve().parent
PAGES = (DOCS.parent / "README.md", DOCS / "versions.md")
STANDINGS = {
    "runs": "runs, by the GPU tests",
    "compiles": "every kernel compiles, never run",
    "not tried": "not tried",
}


def minor(version: str) -> str:
    """``"2.15"`` of ``"2.15.0"``."""
    return ".".join(version.split(".")[:2])


def python(version: str) -> str:
    """A release of Python, and where PyTorch's releases for it end."""
    torch = versions.TESTED_PYTHON[version]
    return version if torch == versions.NEWEST_TORCH else f"{version} (PyTorch up to {minor(torch)})"


def support() -> str:
    """What is supported, what was tested, and what does not work."""
    oldest, newest = minor(versions.OLDEST_TORCH), minor(versions.NEWEST_TORCH)
    releases = ", ".join(f"{torch} ({triton})" for torch, triton in versions.TESTED_TORCH.items())
    pythons = ", ".join(map(python, versions.TESTED_PYTHON))
    lines = [
        "| | supported | tested |",
        "| --- | --- | --- |",
        f"| PyTorch (with Triton) | {oldest} to {newest} | {releases} |",
        f"| Triton | as PyTorch brings it | {', '.join(versions.TESTED_TRITON)} |",
        f"| Python | {versions.OLDEST_PYTHON} to {versions.NEWEST_PYTHON} | {pythons} |",
        "",
        "| GPU | | kernels |",
        "| --- | --- | --- |",
    ]
    for capability, (names, standing) in versions.GPUS.items():
        lines.append(f"| sm_{capability[0]}{capability[1]} | {names} | {STANDINGS[standing]} |")
    return "\n".join(lines) + "\n"


def not_working() -> str:
    """What is known not to work."""
    lines = ["| known not to work | |", "| --- | --- |"]
    lines += [f"| {what} | {why} |" for what, why in versions.NOT_WORKING.items()]
    return "\n".join(lines) + "\n"


def requirements() -> str:
    """``requirements.txt``: what pip and its neighbours read without knowing this project."""
    return (
        "# The newest PyTorch that was tested; `make` takes it if pip can have it. From docs/versions_tables.py.\n"
        f"torch=={versions.NEWEST_TORCH}\n"
    )


TABLES = {"versions": support, "not working": not_working}
"""The pages' markers, each with what stands behind it."""


def written(text: str) -> str:
    """``text`` of a page with its tables as they are now."""
    for name, table in TABLES.items():
        pattern = rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)"
        text = re.sub(
            pattern, lambda found, table=table: found[1] + table() + found[2], text, flags=re.DOTALL
        )
    return text


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(written(page.read_text()))
    (DOCS.parent / "requirements.txt").write_text(requirements())
