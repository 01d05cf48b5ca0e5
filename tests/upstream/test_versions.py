"""The one file of releases, and what must agree with it: the package's metadata, the pages, the build files."""

from __future__ import annotations

import ast
import os
import re
import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from narrowcast._installed import minor
from narrowcast.upstream import versions

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = (ROOT / "pyproject.toml").read_text()
posix = pytest.mark.skipif(sys.platform == "win32", reason="the build files are for a POSIX shell")
newest, second, third, *_ = reversed(versions.TESTED_TORCH)
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
    assert {minor(triton) for triton in versions.TESTED_TORCH.values()} <= set(versions.TESTED_TRITON)
    pythons = list(versions.TESTED_PYTHON)
    assert (pythons[0], pythons[-1]) == (versions.OLDEST_PYTHON, versions.NEWEST_PYTHON)
    assert set(versions.TESTED_PYTHON.values()) <= set(releases)
    assert {*versions.COMPILED, *versions.GPU_TESTS} <= set(versions.GPUS)


def test_the_gpus_said_to_compile_are_those_that_a_test_compiles_for() -> None:
    script = ROOT / "tests" / "kernels" / "cross_compile.py"
    if not script.exists():
        pytest.skip(
            "needs tests/kernels/cross_compile.py, which compiles every kernel for GPUs that are not here"
        )
    found = re.search(r"^SHARED_MEMORY = \{(.*?)\}", script.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    compiled = {divmod(int(sm), 10) for sm in re.findall(r"(\d+):", found[1])}
    assert set(versions.COMPILED) == compiled


def test_the_gpu_tests_are_those_of_the_logs() -> None:
    source = Path(versions.__file__).read_text()
    script = runpy.run_path(str(ROOT / "docs" / "versions_tables.py"))
    assert script["last_runs"]() == versions.GPU_TESTS, "run: python docs/versions_tables.py"
    assert script["with_last_runs"](source) == source
    # a line that starts as a summary is one
    logs = [log.read_text() for log in (ROOT / "benchmarks/results").glob("gpu_tests_*.log")]
    assert sum(log.count("summary:") for log in logs) == len(script["runs"]()) > 0


GPU = re.compile(r"\b(A100|L40S?|RTX ?\d+|H100|H200|B200|B300|Hopper|Blackwell|sm_\d+)")
NEVER = re.compile(r"\b(not|never|no|without|untested|nothing)\b")


def claims(text: str) -> list[str]:
    """Return what sentences about tests on GPUs claim beyond ``versions.GPU_TESTS``."""
    tried = {name for gpu in versions.GPU_TESTS for name in versions.GPUS[gpu].split(", ")}
    tried |= {"sm_" + "".join(map(str, gpu)) for gpu in versions.GPU_TESTS} | {"Hopper"}
    releases = {minor(run["torch"]) for run in versions.GPU_TESTS.values()}
    found = []
    for sentence in re.split(r"(?<=[.:;])\s+|\n\s*\n|\n\|", text):
        said = " ".join(sentence.split())
        if not re.search(r"GPU tests|\b(tested|tests? (ran|runs?|pass\w*))\b", said) or NEVER.search(said):
            continue
        gpus = {gpu for gpu in GPU.findall(said) if gpu not in tried}
        with_gpu = GPU.search(said) or re.search(r"\bGPU", said)
        torches = set(re.findall(r"PyTorch (\d\.\d+)", said)) - releases if with_gpu else set()
        if gpus or torches:
            found.append(said)
    return found


@pytest.mark.parametrize(
    "text, more",
    [
        ("Native execution is tested on an H200.", False),
        ("The GPU tests ran on a B200.", True),
        ("The GPU tests ran on an H200 with PyTorch 2.15.", True),
        ("The GPU tests ran on an H200 with PyTorch 2.11.", False),
        ("On an RTX 50 it was never tested.", False),
        ("PyTorch 2.15 is tested on CPUs.", False),
    ],
)
def test_claims_are_found(text: str, more: bool) -> None:
    assert bool(claims(text)) is more


def test_no_page_claims_more_than_the_gpu_tests() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
    sources = sorted((ROOT / "src").glob("narrowcast_tools/train/*.py"))
    found = {path.name: claims(path.read_text()) for path in [*pages, *sources]}
    assert not {name: sentences for name, sentences in found.items() if sentences}


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


def test_the_requirements_file_pins_the_newest() -> None:
    """Tools that cap or cache torch read it without knowing this project."""
    script = runpy.run_path(str(ROOT / "docs" / "versions_tables.py"))
    text = (ROOT / "requirements.txt").read_text()
    assert text == script["requirements"](), "run: python docs/versions_tables.py"
    assert f"\ntorch=={versions.NEWEST_TORCH}\n" in text


@posix
@pytest.mark.parametrize("name", ["OLDEST_TORCH", "NEWEST_PYTHON", "TESTED_TORCH"])
def test_build_files_read_the_releases(name: str) -> None:
    printed = subprocess.run([ROOT / ".ci/release", name], check=True, capture_output=True, text=True).stdout
    value = getattr(versions, name)
    assert printed.split() == ([value] if isinstance(value, str) else list(value))


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


@posix
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
        assert ("the newest that was tested is" in done.stderr) is (wanted == "" and installed != newest)


def wheel(folder: Path, version: str) -> None:
    """Write an empty package that pip takes for torch."""
    info = f"torch-{version}.dist-info"
    with zipfile.ZipFile(folder / f"torch-{version}-py3-none-any.whl", "w") as file:
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")


@pytest.fixture(scope="module")
def fresh_environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make an environment without torch, whose pip installs nothing but torch."""
    venv = tmp_path_factory.mktemp("fresh") / "venv"
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    python = venv / "bin" / "python"
    python.rename(python.with_name("python-itself"))
    python.write_text(
        '#!/bin/sh\ncase "$*" in *--editable*) exit ;; esac\nexec "$(dirname "$0")/python-itself" "$@"\n'
    )
    python.chmod(0o755)
    return venv


@posix
@pytest.mark.parametrize(
    "wheels, constraint, installed, because",
    [
        (f"{second} {newest} {third}+cpu", "", newest, ""),
        (f"{newest}+cpu {newest}", "", f"{newest}+cpu", ""),
        (f"{second} {newest} {third}+cpu", f"torch<={second}", second, f"a pip constraint excludes {newest}"),
        (f"{third}+cpu 2.13.9", "", f"{third}+cpu", f"pip finds no {newest}, {second} for Python 3"),
        (f"{newest} {third}", f"torch<{second}", third, f"pip finds no {second} for Python 3"),
    ],
)
def test_the_newest_tested_release_that_pip_can_have_is_installed(
    wheels: str, constraint: str, installed: str, because: str, fresh_environment: Path, tmp_path: Path
) -> None:
    done, venv = install_torch(fresh_environment, tmp_path, wheels=wheels, constraint=constraint)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    (which,) = [line for line in lines if " has torch " in line]
    assert not done.stdout and len(lines) <= 5
    assert f"narrowcast: installing torch {installed}: " in done.stderr, "pip is silent for minutes"
    assert lines[-1].startswith("narrowcast: installing the packages of narrowcast[test]")
    installing = [line for line in lines if line.startswith("narrowcast: installing ")]
    assert all(re.search(r"(MB|GB) to download, .*minute", line) for line in installing), (
        "how much, and how long"
    )
    told = re.search(
        r"CPU index is out of reach or lacks torch \S+: pip takes the default build", done.stderr
    )
    assert bool(told) is ("+cpu" not in installed)
    assert f"has torch {installed}{because and ', because '}{because}" in which
    assert ("a pip constraint excludes" in which) is bool(constraint)
    assert list(venv.glob(f"lib/python3*/site-packages/torch-{installed}.dist-info"))
    assert (venv / f".installed-{installed.partition('+')[0]}-test").exists()


@posix
@pytest.mark.parametrize(
    "wheels, wanted, said",
    [
        ("", "", f"no PyTorch, because pip finds no {newest}, {second}, {third}"),
        (newest, f"torch=={third}", f"no PyTorch, because pip finds no {third} for"),
    ],
)
def test_without_a_release_that_pip_can_have_one_line_says_what_to_do(
    wheels: str, wanted: str, said: str, fresh_environment: Path, tmp_path: Path
) -> None:
    done, venv = install_torch(fresh_environment, tmp_path, wheels=wheels, wanted=wanted)
    assert done.returncode == 1
    (advice,) = done.stderr.splitlines()
    assert said in advice and "PIP_FIND_LINKS=" in advice
    assert not list(venv.glob(".installed-*"))


PIP = """#!/bin/sh
case "$*" in
    *--version) exit;;
    *--editable*)
        echo "Collecting numpy>=2"
        echo "  Downloading numpy-2.4.0-cp311-cp311-manylinux.whl (16.9 MB)"
        echo "a warning" >&2
        sleep 2.5;;
    *) echo NEWEST;;
esac
"""


@posix
def test_a_terminal_shows_what_pip_is_doing(tmp_path: Path) -> None:
    """It showed seconds alone."""
    import pty

    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(PIP.replace("NEWEST", newest))
    python.chmod(0o755)
    ours, theirs = pty.openpty()
    command = [ROOT / ".ci/venv", tmp_path / "venv", "train"]
    environment = {name: value for name, value in os.environ.items() if name != "TORCH"}
    done = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, stderr=theirs)
    told = os.read(ours, 10_000).decode()
    assert done.returncode == 0 and "narrowcast: 2 s, pip: downloading numpy, 16.9 MB" in told
    assert told.count("\n") == 1 and told.endswith("\r\x1b[K") and "a warning" not in told
    assert (tmp_path / "venv" / f".installed-{newest}-train").exists()


def install_torch(
    fresh: Path, folder: Path, *, wheels: str, constraint: str = "", wanted: str = ""
) -> tuple[subprocess.CompletedProcess[str], Path]:
    """Run .ci/venv on a copy of an environment, without a network.

    Returns:
        The process, and the environment.
    """
    venv, links, constraints = folder / "venv", folder / "wheels", folder / "constraints.txt"
    shutil.copytree(fresh, venv, symlinks=True)
    links.mkdir()
    for version in wheels.split():
        wheel(links, version)
    constraints.write_text(constraint)
    stand_in = folder / "bin" / "nvidia-smi"
    stand_in.parent.mkdir()
    stand_in.write_text("#!/bin/sh\nexit 9\n")  # no GPU
    stand_in.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    environment |= {
        "PATH": f"{stand_in.parent}{os.pathsep}{os.environ['PATH']}",
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_FIND_LINKS": str(links),
        "PIP_CONSTRAINT": str(constraints),
        "TORCH": wanted,
        **dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9"),
        "no_proxy": "",
    }
    command = [ROOT / ".ci/venv", venv, "test"]
    return subprocess.run(command, env=environment, capture_output=True, text=True), venv


def test_the_matrix_names_a_release_that_pip_cannot_have(tmp_path: Path, monkeypatch) -> None:
    rows = matrix()["rows"]
    made = rows.__globals__["made"]  # type: ignore[attr-defined]
    monkeypatch.setitem(made.__globals__, "ROOT", tmp_path)
    monkeypatch.setitem(made.__globals__, "find_python", lambda version: None)
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci" / "venv").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / ".ci" / "venv").chmod(0o755)
    found = rows([], [])  # type: ignore[operator]
    assert [row for row, _ in found if "slice" in row] == [
        f"| {release} | | | slice | not to be had here | |\n" for release in versions.TESTED_TORCH
    ]
    assert all(passed for _, passed in found)


MAKE = """#!/bin/sh
echo "$@" >> "$CALLS"
echo "1 passed in 2.00s of $1"
case " $FAILS " in *" $1 "*)
    echo "1 failed in 3.00s of $1"; echo "make: *** [Makefile:1: $1] Error 1" >&2; exit 2;;
esac
"""


VENV = """#!/bin/sh
echo install VENV=$1 ${TORCH:+TORCH=$TORCH} ${PYTHON:+PYTHON=$PYTHON} >> "$CALLS"
case " $FAILS " in *" install "*) exit 2;; esac
[ "$TORCH" != "torch==$MISSING" ] || exit 1
mkdir -p "$1" && touch "$1/.installed-$2"
"""


def run_ci(
    folder: Path, *, fails: str = "", missing: str = ""
) -> tuple[subprocess.CompletedProcess[str], list]:
    """Run .ci/run with stand-ins for make and .ci/venv.

    Returns:
        The process, and the words of each call.
    """
    calls = folder / "calls"
    stand_ins = {"make": MAKE, ".ci/venv": VENV} | {
        f"python{version}": "#!/bin/sh\n" for version in versions.TESTED_PYTHON
    }
    (folder / ".ci").mkdir()
    for name in ("run", "release", "commits"):
        (folder / ".ci" / name).symlink_to(ROOT / ".ci" / name)
    for name, program in stand_ins.items():
        (folder / name).write_text(program)
        (folder / name).chmod(0o755)
    environment = {
        **{name: value for name, value in os.environ.items() if name not in ("TORCH", "PYTHON")},
        "CI": "1",
        "FAILS": fails,
        "MISSING": missing,
        "CALLS": str(calls),
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
    }
    done = subprocess.run(
        [folder / ".ci/run"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return done, [call.split() for call in calls.read_text().splitlines()]


@posix
def test_a_run_skips_a_release_that_pip_cannot_have(tmp_path: Path) -> None:
    missing = versions.OLDEST_TORCH
    done, calls = run_ci(tmp_path, missing=missing)
    assert done.returncode == 0, done.stdout
    assert f"no make slice TORCH=torch=={missing}" in done.stdout
    assert {call[0] for call in calls} >= {"small", "test"} and "slice" not in {call[0] for call in calls}
    assert done.stdout.splitlines()[-1] == "1 passed in 2.00s of test"


@posix
@pytest.mark.parametrize("fails", ["", "install", "slice", "small", "test"])
def test_a_run_ends_with_the_summary_of_its_last_tests(fails: str, tmp_path: Path) -> None:
    """The whole suite comes last. What fails ends the run, which fails, too, and has pytest's line at its end.

    The environment of the slice is made beside lint, the next one only where the slice's is gone, for the disk.
    """
    done, whole = run_ci(tmp_path, fails=fails)
    installed = [call[1:] for call in whole if call[0] == "install"]
    order = list(dict.fromkeys(call[0] for call in whole if call[0] != "install" or call[0] == fails))
    if fails == "install":
        assert done.returncode != 0 and set(order) == {"lint", "install"} and len(installed) == 1
    elif fails:
        assert done.returncode != 0 and order[-1] == fails
        assert done.stdout.splitlines()[-1] == f"1 failed in 3.00s of {fails}"
    else:
        assert done.returncode == 0 and order == ["lint", "slice", "small", "test"]
        assert installed == [call[1:] for call in whole if call[0] in ("slice", "small")]
        assert [call[0] for call in whole if call[0] != "lint"] == [
            "install",
            "slice",
            "install",
            "small",
            "test",
        ]
        of_releases = [
            (call[0], word)
            for call in whole
            if call[0] in ("slice", "small")
            for word in call
            if "TORCH" in word
        ]
        assert of_releases == [("slice", f"TORCH=torch=={versions.OLDEST_TORCH}")]
        assert done.stdout.splitlines()[-1] == "1 passed in 2.00s of test"
    folders = {
        Path(word.removeprefix("VENV=")).parent for call in whole for word in call if word.startswith("VENV=")
    }
    assert len(folders) == 1 and not folders.pop().exists(), "the environments of a CI machine are removed"
