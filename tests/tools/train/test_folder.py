"""The folder of a run: one process at a time, and no trace where nothing was written."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from narrowcast_tools.train.errors import SettingsError
from narrowcast_tools.train.folder import finished_runs, run_folder

HOLDER = """
import sys
from pathlib import Path
from narrowcast_tools.train.folder import run_folder

with run_folder(Path(sys.argv[1]), resume=False):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_one_process_holds_it_and_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = [sys.executable, "-c", HOLDER, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        named = (
            rf"process {holder.pid} on \S+ is writing a run into .*run; wait for it, or give --out another"
        )
        for resume in (False, True):
            with pytest.raises(SettingsError, match=named), run_folder(folder, resume=resume):
                pass
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
    assert (folder / ".lock").exists()
    with run_folder(folder, resume=False):  # the system let go of it
        assert (folder / ".lock").read_text().startswith(f"process {os.getpid()} on ")
    assert not (folder / ".lock").exists()


def test_the_same_process_holds_it_once(tmp_path: Path) -> None:
    with run_folder(tmp_path, resume=False):
        with (
            pytest.raises(SettingsError, match=f"process {os.getpid()} on"),
            run_folder(tmp_path, resume=True),
        ):
            pass
        assert (tmp_path / ".lock").exists()


def test_what_was_made_and_stays_empty_is_removed(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    for name in ("there", "new/folder"):
        with pytest.raises(ZeroDivisionError), run_folder(tmp_path / name, resume=False) as folder:
            assert 1 / (0 if folder.is_dir() else 1)
    assert [p.name for p in tmp_path.rglob("*")] == ["there"]
    with run_folder(tmp_path / "new" / "folder", resume=False) as folder:
        (folder / "result.json").touch()
    assert [p.name for p in folder.iterdir()] == ["result.json"]


def test_numbers_go_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = []
    for _ in range(2):
        with run_folder(None, resume=False) as folder:
            (folder / "result.json").touch()
        names.append(str(folder))
    assert names == ["runs/train-001", "runs/train-002"]
    for other in ("train-7", "train-x", "train-1000", "train"):
        Path("runs", other).mkdir()
    with run_folder(None, resume=True) as folder:
        assert str(folder) == "runs/train-1000"
    with run_folder(None, resume=False) as folder:
        assert str(folder) == "runs/train-1001"
    assert not folder.exists()


@pytest.mark.parametrize("inside", ["", "checkpoints", "checkpoints/step-00000002", "result.json"])
def test_a_part_of_a_run_names_the_run(inside: str, tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints" / "step-00000002").mkdir(parents=True)
    (tmp_path / "run" / "result.json").write_text("{}")
    assert finished_runs([tmp_path / "run" / inside]) == [tmp_path / "run" / "result.json"]
    with run_folder(tmp_path / "run" / inside, resume=True) as folder:
        assert folder == tmp_path / "run"
