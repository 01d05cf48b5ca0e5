"""The one file of releases, and what must agree with it: the package's metadata, the pages, the build files."""

from __future__ import annotations

import ast
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from narrowcast._installed import minor
from narrowcast.upstream import versions

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = (ROOT / "pyproject.toml").read_text()
NUMBERED = re.compile(r"\b2\.(?:1[1-9])\.\d")


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def test_the_file_imports_nothing() -> None:
    tree = ast.parse(Path(versions.__file__).read_text())
    imported = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert [node.module for node in imported] == ["__future__"]  # type: ignore[union-attr]


def test_the_tested_releases_are_the_supported_ones() -> None:
    releases = list(versions.TESTED_TORCH)
    assert releases == sorted(releases, key=numbers)
    assert (releases[0], releases[-1]) == (versions.OLDEST_TORCH, versions.NEWEST_TORCH)
    major, oldest = numbers(releases[0])[:2]
    assert [numbers(release)[:2] for release in releases] == [
        (major, oldest + i) for i in range(versions.SUPPORTED_RELEASES)
    ]
    assert set(versions.SLICED_TORCH.split()) <= set(releases)
    assert {minor(triton) for triton in versions.TESTED_TORCH.values()} <= set(versions.TESTED_TRITON)
    pythons = list(versions.TESTED_PYTHON)
    assert (pythons[0], pythons[-1]) == (versions.OLDEST_PYTHON, versions.NEWEST_PYTHON)
    assert set(versions.TESTED_PYTHON.values()) <= set(releases)
    assert {standing for _, standing in versions.GPUS.values()} <= {"runs", "compiles", "not tried"}


def test_the_gpus_said_to_compile_are_those_that_a_test_compiles_for() -> None:
    script = ROOT / "tests" / "kernels" / "cross_compile.py"
    if not script.exists():
        pytest.skip(
            "needs tests/kernels/cross_compile.py, which compiles every kernel for GPUs that are not here"
        )
    found = re.search(r"^SHARED_MEMORY = \{(.*?)\}", script.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    compiled = {divmod(int(sm), 10) for sm in re.findall(r"(\d+):", found[1])}
    assert {gpu for gpu, (_, standing) in versions.GPUS.items() if standing != "not tried"} == compiled


def test_the_package_requires_the_oldest() -> None:
    assert f'"torch>={minor(versions.OLDEST_TORCH)}"' in PYPROJECT
    assert f'requires-python = ">={versions.OLDEST_PYTHON}"' in PYPROJECT
    assert f'"triton>={versions.TESTED_TRITON[0]};' in PYPROJECT
    assert tuple(re.findall(r"Python :: (3\.\d+)", PYPROJECT)) == tuple(versions.TESTED_PYTHON), (
        "the classifiers of pyproject.toml are the Pythons that are tested"
    )


@pytest.mark.parametrize("page", ["README.md", "docs/versions.md"])
def test_the_pages_have_the_tables_of_today(page: str) -> None:
    script = runpy.run_path(str(ROOT / "docs" / "versions_tables.py"))
    text = (ROOT / page).read_text()
    assert minor(versions.NEWEST_TORCH) in script["support"]() and script["support"]() in text
    assert script["written"](text) == text, "run: python docs/versions_tables.py"


@pytest.mark.skipif(sys.platform == "win32", reason="the build files are for a POSIX shell")
@pytest.mark.parametrize(
    "name", [name for name in vars(versions) if name.startswith(("OLDEST", "NEWEST", "SLICED"))]
)
def test_build_files_read_the_plain_lines(name: str) -> None:
    printed = subprocess.run([ROOT / ".ci/release", name], check=True, capture_output=True, text=True).stdout
    assert printed == getattr(versions, name) + "\n"


def test_build_files_name_no_release_themselves() -> None:
    for name in (".ci/venv", ".ci/run", ".ci/matrix", ".ci/release", "Makefile"):
        lines = [line for line in (ROOT / name).read_text().splitlines() if not line.lstrip().startswith("#")]
        assert not NUMBERED.findall("\n".join(lines)), f"{name} names a release; versions.py is the place"


@pytest.mark.parametrize("name", ["slice", "small"])
def test_listed_tests_exist(name: str) -> None:
    lines = (ROOT / ".ci" / name).read_text().splitlines()
    listed = [word for line in lines for word in line.partition("#")[0].split()]
    assert listed and len(set(listed)) == len(listed)
    paths = [re.sub("^--(ignore|deselect)=", "", word).partition("::")[0] for word in listed]
    assert not [path for path in paths if not (ROOT / path).exists()]


def matrix() -> dict[str, object]:
    return runpy.run_path(str(ROOT / ".ci" / "matrix"))


def test_the_matrix_tells_what_ran(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch) -> None:
    """A row has the versions that were found, pytest's closing line, and whether all passed."""
    listed = tmp_path / "tests" / "test_one.py"
    listed.parent.mkdir()
    listed.write_text("def test_right(): pass\ndef test_wrong(): assert False\n")
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci" / "slice").write_text("tests  # all\n")
    run = matrix()["run"]
    run.__globals__["ROOT"] = tmp_path  # type: ignore[attr-defined]
    monkeypatch.setenv("JOBS", "0")
    row, passed = run("slice", sys.executable)  # type: ignore[operator]
    cells = [cell.strip() for cell in row.split("|")[1:-1]]
    assert cells[3:5] == ["slice", "1 failed, 1 passed"] and not passed
    assert cells[0].startswith("2.") and cells[2].startswith("3.")


def venv_of(folder: Path) -> Path:
    """Stand for an environment that has this process's torch, and whose pip does nothing."""
    python = folder / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\n[ "$1 $2" = "-m pip" ] || exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return folder


@pytest.mark.skipif(sys.platform == "win32", reason="the build files are for a POSIX shell")
@pytest.mark.parametrize("wanted", ["torch==2.0.0", "", "installed"])
def test_an_environment_with_another_torch_is_not_taken_in_silence(wanted: str, tmp_path: Path) -> None:
    installed = torch.__version__.partition("+")[0]
    environment = {**os.environ, "TORCH": wanted.replace("installed", f"torch=={installed}")}
    command = [ROOT / ".ci/venv", venv_of(tmp_path / "venv"), "test"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if wanted == "torch==2.0.0":
        assert done.returncode == 2 and f"has torch=={installed}, not torch==2.0.0; remove it" in done.stderr
    else:
        assert done.returncode == 0
        newest = versions.TESTED_PYTHON.get("{}.{}".format(*sys.version_info), versions.NEWEST_TORCH)
        assert ("the newest that was tested is" in done.stderr) is (wanted == "" and installed != newest)


MAKE = """#!/bin/sh
echo "$@" >> "$CALLS"
echo "1 passed in 2.00s of $1"
case " $FAILS " in *" $1 "*)
    echo "1 failed in 3.00s of $1"; echo "make: *** [Makefile:1: $1] Error 1" >&2; exit 2;;
esac
"""


@pytest.mark.skipif(sys.platform == "win32", reason="the build files are for a POSIX shell")
@pytest.mark.parametrize("fails", ["", "install", "slice", "small", "test"])
def test_a_run_ends_with_the_summary_of_its_last_tests(fails: str, tmp_path: Path) -> None:
    """The whole suite comes last. What fails ends the run, which fails, too, and has pytest's line at its end.

    Environments are made beside lint, each before its tests.
    """
    calls = tmp_path / "calls"
    stand_ins = {"make": MAKE, **{f"python{version}": "#!/bin/sh\n" for version in versions.TESTED_PYTHON}}
    for name, program in stand_ins.items():
        (tmp_path / name).write_text(program)
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "CI": "1", "FAILS": fails, "CALLS": str(calls), "PATH": path}
    done = subprocess.run(
        [ROOT / ".ci/run"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    whole = [call.split() for call in calls.read_text().splitlines()]
    installed = [call[1:] for call in whole if call[0] == "install"]
    order = list(dict.fromkeys(call[0] for call in whole if call[0] != "install" or call[0] == fails))
    if fails == "install":
        assert done.returncode != 0 and set(order) == {"lint", "install"} and len(installed) == 1
    elif fails:
        assert done.returncode != 0 and order[-1] == fails
        assert done.stdout.splitlines()[-1] == f"1 failed in 3.00s of {fails}"
    else:
        assert done.returncode == 0 and order == ["lint", "slice", "fuzz", "small", "test"]
        oldest, newest = (call for call in whole if call[0] == "fuzz")
        assert f"TORCH=torch=={versions.OLDEST_TORCH}" in oldest and "TORCH" not in " ".join(newest)
        assert installed == [call[1:] for call in whole if call[0] in ("slice", "small")]
        slices = [call[-1 - ("PYTHON" in call[-1])] for call in whole if call[0] == "slice"]
        assert slices == [f"TORCH=torch=={release}" for release in versions.SLICED_TORCH.split()]
        assert done.stdout.splitlines()[-1] == "1 passed in 2.00s of test"
    folders = {
        Path(word.removeprefix("VENV=")).parent for call in whole for word in call if word.startswith("VENV=")
    }
    assert len(folders) == 1 and not folders.pop().exists(), "the environments of a CI machine are removed"
