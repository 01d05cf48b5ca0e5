"""Checkpoints are whole or absent: killed saves, damaged files, clean folders."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from narrowcast_tools.train import atomic, checkpoint
from narrowcast_tools.train.checkpoint import DamagedCheckpoint, load, load_newest, save, steps_in
from narrowcast_tools.train.errors import SettingsError

NAMES = ["checkpoint.json", "model.safetensors", "training.safetensors"]


def save_step(folder: Path, step: int) -> Path:
    tensors = {
        "model": {"w": torch.full((3, 5), float(step)), "none": torch.empty(0)},
        "training": {"generator": torch.arange(7, dtype=torch.uint8), "t": torch.ones(4, 6).T},
    }
    return save(folder, step=step, meta={"history": [step]}, tensors=tensors)


def test_round_trip(tmp_path: Path) -> None:
    path = save_step(tmp_path / "new" / "folder", 7)
    assert sorted(p.name for p in path.iterdir()) == NAMES
    found = load(path)
    assert (found.step, found.meta) == (7, {"history": [7]})
    assert torch.equal(found.tensors["model"]["w"], torch.full((3, 5), 7.0))
    assert found.tensors["model"]["none"].shape == (0,)
    assert found.tensors["training"]["generator"].dtype == torch.uint8
    assert found.tensors["training"]["t"].shape == (6, 4)


def test_the_newest_two_are_kept(tmp_path: Path) -> None:
    for step in (9, 10, 20, 100):
        save_step(tmp_path, step)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000020", "step-00000100"]
    assert load_newest(tmp_path)[0].step == 100


def test_damaged_newer_ones_take_no_room_of_good_ones(tmp_path: Path) -> None:
    """A run that fell back saves at other steps than the damaged checkpoint's."""
    truncate(save_step(tmp_path, 9) / "model.safetensors")
    for step in (3, 5, 7):
        save_step(tmp_path, step)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000005", "step-00000007", "step-00000009"]
    assert load_newest(tmp_path)[0].step == 7


KILLED_SAVE = """
import os, signal, sys
import torch
from pathlib import Path
from narrowcast_tools.train import atomic, checkpoint

def killed(*arguments):
    os.kill(os.getpid(), signal.SIGKILL)

{patch} = killed
checkpoint.save(Path(sys.argv[1]), step=2, meta={{}}, tensors={{"model": {{"w": torch.ones(9)}}}})
"""


@pytest.mark.parametrize("moment", ["atomic.publish", "atomic.write_json"])
def test_a_kill_during_the_save_loses_nothing(tmp_path: Path, moment: str) -> None:
    save_step(tmp_path, 1)
    program = KILLED_SAVE.format(patch=moment)
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], timeout=120)
    assert done.returncode == -signal.SIGKILL
    left = [p for p in tmp_path.iterdir() if p.name != "step-00000001"]
    assert len(left) == 1, "the killed save leaves its temporary folder"
    assert left[0].name.startswith(".tmp-")
    found, passed_over = load_newest(tmp_path)
    assert (found.step, passed_over) == (1, [])
    save_step(tmp_path, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


def test_a_failed_save_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_step(tmp_path, 1)

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(atomic, "write_json", full)
    with pytest.raises(OSError, match="No space left"):
        save_step(tmp_path, 2)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def future(path: Path) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 99}))


def edited(change: Callable[[dict], object]) -> Callable[[Path], None]:
    """Change the description and leave its sum as it was, as a slip of an editor or of the disk would."""

    def damage(path: Path) -> None:
        description = json.loads(path.read_text())
        change(description)
        path.write_text(json.dumps(description))

    return damage


def make_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def make_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *((name, truncate) for name in NAMES),
        *((name, Path.unlink) for name in NAMES),
        *((name, make_a_pipe) for name in NAMES),
        *((name, make_a_folder) for name in NAMES),
        ("model.safetensors", flip),
        ("training.safetensors", flip),
        ("checkpoint.json", lambda path: path.write_text("[]")),
        ("checkpoint.json", lambda path: path.write_text("{}")),
        ("checkpoint.json", lambda path: path.write_bytes(b"\xff\xfe")),
        ("checkpoint.json", lambda path: path.write_text("[" * 100_000)),
        ("checkpoint.json", lambda path: path.write_text('{"format": 2, "sha256": 1}')),
        ("checkpoint.json", lambda path: os.truncate(path, checkpoint.LARGEST_DESCRIPTION + 1)),
        ("checkpoint.json", future),
        ("checkpoint.json", edited(lambda d: d["meta"]["history"].pop())),
        ("checkpoint.json", edited(lambda d: d["meta"].pop("history"))),
        ("checkpoint.json", edited(lambda d: d.update(step=3))),
        ("checkpoint.json", edited(lambda d: d.update(step="2"))),
        ("checkpoint.json", edited(lambda d: d["files"].pop("training"))),
        ("checkpoint.json", edited(lambda d: d["files"]["model"].update(bytes=1))),
        ("checkpoint.json", edited(lambda d: d.pop("sha256"))),
        (".", lambda path: path.rename(path.with_name("step-00000009"))),
    ],
)
def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, name: str, damage) -> None:
    save_step(tmp_path, 1)
    damaged = save_step(tmp_path, 2)
    damage(damaged / name)
    damaged = max(tmp_path.iterdir())
    with pytest.raises(DamagedCheckpoint):
        load(damaged)
    found, passed_over = load_newest(tmp_path)
    assert found.step == 1
    assert len(passed_over) == 1
    assert str(damaged) in passed_over[0]


def test_spacing_and_order_are_no_damage(tmp_path: Path) -> None:
    path = save_step(tmp_path, 2)
    description = json.loads((path / "checkpoint.json").read_text())
    (path / "checkpoint.json").write_text(json.dumps(dict(reversed(description.items()))))
    assert load(path).step == 2


def test_a_damaged_checkpoint_is_replaced_when_the_run_gets_there_again(tmp_path: Path) -> None:
    save_step(tmp_path, 1)
    truncate(save_step(tmp_path, 2) / "model.safetensors")
    save_step(tmp_path, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]
    assert load_newest(tmp_path)[0].step == 2


def test_nothing_to_resume(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"no checkpoint to resume in [^ ()]*; check --out"):
        load_newest(tmp_path / "absent")
    truncate(save_step(tmp_path, 1) / "model.safetensors")
    with pytest.raises(SettingsError, match=r"no checkpoint to resume .*model.safetensors has \d+ bytes"):
        load_newest(tmp_path)
    assert steps_in(tmp_path), "refusing to resume removes nothing"
    assert checkpoint.FORMAT == 2


FULL_DISK = """
import resource, sys
import torch
from pathlib import Path
from narrowcast_tools.train import checkpoint

resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
try:
    checkpoint.save(Path(sys.argv[1]), step=2, meta={"m": "x" * 9000}, tensors={"model": {"w": torch.ones(2000)}})
except OSError as error:
    print("OSError", error)
"""


@pytest.mark.parametrize("room", [4000, 8500], ids=["no room for tensors", "no room for the description"])
def test_a_disk_that_is_really_full(tmp_path: Path, room: int) -> None:
    """The system refuses to write past a size, as it does on a full disk: safetensors tells it in its own way."""
    save_step(tmp_path, 1)
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path), str(room)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("OSError"), done.stderr
    assert "too large" in done.stdout
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]
