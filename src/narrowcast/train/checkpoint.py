"""Checkpoints on disk: a folder per saved step, whole or absent, never half.

A checkpoint is written into a hidden temporary folder, forced to the disk and renamed. A process killed at
any moment leaves the earlier checkpoints as they were and at most a temporary folder, which the next save
removes. Reading checks sizes and SHA-256 sums, and falls back to the checkpoint before a damaged one.
"""

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from . import atomic
from .errors import SettingsError

FORMAT = 1
DESCRIPTION = "checkpoint.json"
KEPT = 2  # the newest, and one to fall back to
PREFIX = "step-"
TEMPORARY = ".tmp-"

TensorFiles = dict[str, dict[str, Tensor]]


@dataclass(frozen=True)
class Checkpoint:
    """One saved step.

    Args:
        path: its folder.
        step: optimizer steps done.
        meta: JSON-able data saved with the tensors.
        tensors: file stem -> tensor name -> tensor on the CPU.
    """

    path: Path
    step: int
    meta: dict
    tensors: TensorFiles


class DamagedCheckpoint(Exception):
    """A checkpoint folder that is not what was saved; the message says in which way."""


def save(folder: Path, *, step: int, meta: dict, tensors: TensorFiles) -> Path:
    """Save a checkpoint and drop all but the newest `KEPT`.

    Args:
        folder: holds the run's checkpoints; made if absent.
        step: optimizer steps done.
        meta: JSON-able data.
        tensors: file stem -> tensor name -> tensor; no two tensors of a file may share memory.

    Returns:
        the checkpoint's folder.

    Raises:
        OSError: the disk refused; earlier checkpoints are untouched.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _remove_temporaries(folder)
    temporary = folder / f"{TEMPORARY}{os.getpid()}-{PREFIX}{step:08d}"
    try:
        _write(temporary, step, meta, tensors)
        final = folder / f"{PREFIX}{step:08d}"
        if final.exists():  # a damaged one that a resumed run has caught up with
            os.rename(final, folder / f"{TEMPORARY}replaced-{final.name}")
        atomic.publish(temporary, final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    for old in steps_in(folder)[KEPT:]:
        # Renamed first, so that a kill during the removal leaves no folder that looks like a checkpoint.
        os.rename(old, folder / f"{TEMPORARY}old-{old.name}")
    _remove_temporaries(folder)
    return final


def load_newest(folder: Path) -> tuple[Checkpoint, list[str]]:
    """Load the newest undamaged checkpoint of a run.

    Args:
        folder: holds the run's checkpoints.

    Returns:
        the checkpoint, and one line for each newer one that was passed over because it is damaged.

    Raises:
        SettingsError: there is none, or all are damaged.
    """
    passed_over: list[str] = []
    for path in steps_in(folder):
        try:
            return load(path), passed_over
        except DamagedCheckpoint as error:
            passed_over.append(f"passed over {path}: {error}")
    found = "; ".join(passed_over) or "there is none"
    raise SettingsError(
        f"no checkpoint to resume in {folder} ({found}); check --out, or start a new run without --resume"
    )


def load(path: Path) -> Checkpoint:
    """Load one checkpoint and check it against its own description.

    Raises:
        DamagedCheckpoint: a file is missing, cut short, altered or of another format version.
    """
    try:
        description = json.loads((path / DESCRIPTION).read_bytes())
        if description["format"] != FORMAT:
            raise DamagedCheckpoint(f"format {description['format']}, this version reads {FORMAT}")
        tensors = {
            stem: _load_tensors(path / _tensor_file(stem), entry)
            for stem, entry in description["files"].items()
        }
        return Checkpoint(path, int(description["step"]), description["meta"], tensors)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise DamagedCheckpoint(f"{type(error).__name__}: {error}") from error


def steps_in(folder: Path) -> list[Path]:
    """Return the run's checkpoint folders, newest first."""
    return sorted(folder.glob(f"{PREFIX}[0-9]*"), reverse=True)


def _write(folder: Path, step: int, meta: dict, tensors: TensorFiles) -> None:
    folder.mkdir()
    files = {}
    for stem, content in tensors.items():
        path = folder / _tensor_file(stem)
        save_file({name: tensor.detach().contiguous() for name, tensor in content.items()}, path)
        atomic.fsync(path)
        files[stem] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
    description = {"format": FORMAT, "step": step, "files": files, "meta": meta}
    # Last, so that a folder without it is known to be unfinished.
    atomic.write_json(folder / DESCRIPTION, description)
    atomic.fsync(folder)


def _load_tensors(path: Path, entry: dict) -> dict[str, Tensor]:
    size = path.stat().st_size
    if size != entry["bytes"]:
        raise DamagedCheckpoint(f"{path.name} has {size} bytes instead of {entry['bytes']}")
    if _sha256(path) != entry["sha256"]:
        raise DamagedCheckpoint(f"{path.name} was altered (its SHA-256 differs)")
    return load_file(path)


def _tensor_file(stem: str) -> str:
    return f"{stem}.safetensors"


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(2**20):
            digest.update(chunk)
    return digest.hexdigest()


def _remove_temporaries(folder: Path) -> None:
    for path in folder.glob(f"{TEMPORARY}*"):
        shutil.rmtree(path, ignore_errors=True)
