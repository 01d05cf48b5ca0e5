"""Write what ``narrowcast.upstream.versions`` says into README.md, ``docs/versions.md`` and ``requirements.txt``.

python docs/versions_tables.py
"""

from __future__ import annotations

import re
from pathlib import Path

from narrowcast import _installed
from narrowcast.upstream import versions

DOCS = Path(__file__).resolve().parent
PAGES = (DOCS.parent / "README.md", DOCS / "versions.md")
LOGS = DOCS.parent / "benchmarks" / "results"
SUMMARY = re.compile(
    r"^summary: sm_(?P<capability>\d+), (?P<gpu>.+), PyTorch (?P<torch>.+), Triton (?P<triton>.+), "
    r"(?P<date>\d{4}-\d\d-\d\d), (?P<commit>\w+): "
    r"(?P<passed>\d+) passed, (?P<failed>\d+) failed, (?P<not_run>.+) not run$",
    re.MULTILINE,
)
"""A line for each whole run of the GPU tests, in ``gpu_tests_*.log``."""


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
        "| | supported | tested on CPUs |",
        "| --- | --- | --- |",
        f"| PyTorch (with Triton) | {oldest} to {newest} | {releases} |",
        f"| Triton | as PyTorch brings it | {', '.join(versions.TESTED_TRITON)} |",
        f"| Python | {versions.OLDEST_PYTHON} to {versions.NEWEST_PYTHON} | {pythons} |",
        "",
        "| GPU | | tried |",
        "| --- | --- | --- |",
    ]
    for capability, names in versions.GPUS.items():
        lines.append(f"| {_installed.sm(capability)} | {names} | {_installed.gpu_standing(capability)} |")
    return "\n".join(lines) + "\n"


def runs() -> list[dict[str, str]]:
    """Whole runs of the GPU tests, oldest first, from the logs."""
    logs = (log.read_text() for log in sorted(LOGS.glob("gpu_tests_*.log")))
    found = [line.groupdict() for log in logs for line in SUMMARY.finditer(log)]
    return sorted(found, key=lambda run: run["date"])


def gpu_tests() -> str:
    """Every whole run of the GPU tests."""
    lines = [
        "| date | GPU | PyTorch | Triton | commit | passed | failed | not run |",
        "| --- | --- | --- | --- | --- | ---: | ---: | ---: |",
    ]
    columns = ("date", "gpu", "torch", "triton", "commit", "passed", "failed", "not_run")
    lines += ["| " + " | ".join(run[column] for column in columns) + " |" for run in runs()]
    return "\n".join(lines) + "\n"


def last_runs() -> dict[tuple[int, int], dict[str, str]]:
    """``GPU_TESTS`` of ``versions.py``: the last whole run on each compute capability."""
    return {
        (int(run["capability"][:-1]), int(run["capability"][-1])): {
            field.replace("_", " "): value for field, value in run.items() if field != "capability"
        }
        for run in runs()
    }


def not_working() -> str:
    """What is known not to work, a row for each problem."""
    lines = ["| known not to work | |", "| --- | --- |"]
    for what, why in versions.NOT_WORKING.items():
        lines += [f"| {what} | {one} |" for one in re.split(r"; (?!so )", why)]
    return "\n".join(lines) + "\n"


def requirements() -> str:
    """``requirements.txt``: what pip and its neighbours read without knowing this project."""
    return (
        "# The newest PyTorch that was tested; `make` takes it if pip can have it. From docs/versions_tables.py.\n"
        f"torch=={versions.NEWEST_TORCH}\n"
    )


TABLES = {"versions": support, "not working": not_working, "gpu tests": gpu_tests}
"""The pages' markers, each with what stands behind it."""


def written(text: str) -> str:
    """``text`` of a page with its tables as they are now."""
    for name, table in TABLES.items():
        pattern = rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)"
        text = re.sub(
            pattern, lambda found, table=table: found[1] + table() + found[2], text, flags=re.DOTALL
        )
    return text


def with_last_runs(source: str) -> str:
    """``versions.py`` with the GPU tests of today."""
    lines = ""
    for capability, run in sorted(last_runs().items()):
        fields = "".join(f'        "{field}": "{value}",\n' for field, value in run.items())
        lines += f"    {capability}: {{\n{fields}    }},\n"
    return re.sub(r'(?<=\nGPU_TESTS = ).*?(?=\n""")', f"{{\n{lines}}}", source, flags=re.DOTALL)


if __name__ == "__main__":
    source = Path(versions.__file__)
    source.write_text(with_last_runs(source.read_text()))
    versions.GPU_TESTS.update(last_runs())  # for the tables below
    (DOCS.parent / "requirements.txt").write_text(requirements())
    for page in PAGES:
        page.write_text(written(page.read_text()))
