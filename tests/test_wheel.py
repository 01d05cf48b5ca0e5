"""The release's wheel and sdist, and the wheel installed into an empty environment without a network."""

from __future__ import annotations

import email
import importlib.util
import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import narrowcast as nc

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("hatchling") is None, reason="needs hatchling: pip install 'narrowcast[test]'"
)


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        map(str, command), cwd=cwd, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def build(kind: str, source: Path, out: Path) -> Path:
    """Return the file that the build backend makes of ``source``, as pip asks it to."""
    code = f"import sys; from hatchling.build import build_{kind}; build_{kind}(sys.argv[1])"
    run(sys.executable, "-c", code, out, cwd=source)
    (made,) = out.iterdir()
    return made


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("sdist", ROOT, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that the sdist builds, so that both hold what they need."""
    folder = tmp_path_factory.mktemp("source")
    with tarfile.open(sdist) as files:
        files.extractall(folder)
    (source,) = folder.iterdir()
    return build("wheel", source, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel. A path file lends it this one's packages, without editable installs."""
    folder = tmp_path_factory.mktemp("empty")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel)
    (packages,) = folder.glob("lib/python*/site-packages")
    assert not (packages / "torch").exists()
    lent = {
        str(Path(found.origin).parents[1])
        for name in ("torch", "typer")
        if (found := importlib.util.find_spec(name)) and found.origin
    }
    (packages / "lent.pth").write_text("\n".join(sorted(lent)))
    return python


def test_files_are_named_for_the_version(sdist: Path, wheel: Path) -> None:
    assert sdist.name == f"narrowcast-{nc.__version__}.tar.gz"
    assert wheel.name == f"narrowcast-{nc.__version__}-py3-none-any.whl"


def test_the_wheel_holds_the_packages_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as files:
        names = files.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        fields = email.message_from_bytes(files.read(metadata))
    folder = metadata.split("/")[0]
    assert {name.split("/")[0] for name in names} == {"narrowcast", "narrowcast_tools", folder}
    sources = {
        path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src").glob("narrowcast*/**/*.py")
    }
    assert sources <= set(names)
    assert {"narrowcast/py.typed", f"{folder}/licenses/LICENSE", f"{folder}/entry_points.txt"} <= set(names)
    assert fields["Version"] == nc.__version__
    assert fields["Requires-Python"] == ">=3.10"


def test_the_sdist_holds_what_its_makefile_runs(sdist: Path) -> None:
    with tarfile.open(sdist) as files:
        names = {name.partition("/")[2] for name in files.getnames()}
    needed = {
        ".ci/venv",
        "Makefile",
        "README.md",
        "mkdocs.yml",
        "requirements.txt",
        "docs/index.md",
        "tests/conftest.py",
        "tools/census.py",
    }
    assert needed <= names


def test_the_installed_wheel_trains(python: Path, tmp_path: Path) -> None:
    code = (
        "import importlib.metadata, sys, torch, narrowcast as nc\n"
        "layer = nc.convert(torch.nn.Sequential(torch.nn.Linear(64, 64)), 'mxfp8', only='0')\n"
        "layer(torch.ones(4, 64)).sum().backward()\n"
        "assert layer[0].weight.grad.any()\n"
        "print(importlib.metadata.version('narrowcast'), nc.__version__, nc.__file__)\n"
    )
    version, imported, file = run(python, "-I", "-c", code, cwd=tmp_path).split()
    assert version == imported == nc.__version__
    assert Path(file).is_relative_to(python.parents[1])


def test_the_installed_command_runs(python: Path, tmp_path: Path) -> None:
    assert nc.__version__ in run(python.parent / "narrowcast", "--version", cwd=tmp_path)
    pytest.importorskip("typer")
    assert "train" in run(python.parent / "narrowcast", "--help", cwd=tmp_path)
    assert nc.__version__ in run(python, "-m", "narrowcast", "--version", cwd=tmp_path)
