"""Checkpoints on disk: a folder per saved step, whole or absent, never half.

A checkpoint is written into a hidden temporary folder, forced to the disk and renamed. A process killed at
any moment leaves the earlier checkpoints as they were and at most a temporary folder, which the next save
removes. Every byte is under a SHA-256 sum: those of the tensor files are in the description, and the
description holds its own. Reading falls back to the checkpoint before a damaged one.
"""

import hashlib
import json
import os
import shutil
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from . import atomic
from .errors import SettingsError
from .folder import DESCRIPTION

FORMAT = 2
LARGEST_DESCRIPTION = 2**30  # bytes: losses of some thirty million steps
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


# Errors of reading unknown bytes: a folder instead of a file, no JSON, other JSON, deep JSON.
DAMAGE = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, SafetensorError)


class NoCheckpoint(SettingsError):
    """A run has no checkpoint that can be read. ``passed_over``: a line for each that is damaged."""

    def __init__(self, folder: Path, passed_over: list[str]) -> None:
        self.passed_over = "; ".join(passed_over)
        why = f" ({self.passed_over})" if passed_over else ""
        super().__init__(
            f"no checkpoint to resume in {folder}{why}; check --out, or start a new run without --resume"
        )


def save(folder: Path, *, step: int, meta: dict, tensors: TensorFiles) -> Path:
    """Save a checkpoint and keep `KEPT` of its run, itself and those before it.

    Args:
        folder: holds the run's checkpoints; made if absent.
        tensors: file stem -> tensor name -> tensor; no two tensors of a file may share memory.

    Returns:
        the checkpoint's folder.

    Raises:
        OSError: the disk refused, be it full; earlier checkpoints are untouched.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _remove_temporaries(folder)
    temporary = folder / f"{TEMPORARY}{os.getpid()}-{_name_of(step)}"
    try:
        _write(temporary, step, meta, tensors)
        final = folder / _name_of(step)
        if final.exists():  # a damaged one that a resumed run has caught up with
            os.rename(final, folder / f"{TEMPORARY}replaced-{final.name}")
        atomic.publish(temporary, final)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, SafetensorError):  # how safetensors tells that a disk is full
            raise OSError(str(error)) from error
        raise
    # Newer ones were passed over when this run was resumed: they are no fallback, and are left for people to see.
    saved = [path for path in steps_in(folder) if path.name <= final.name]
    for old in saved[KEPT:]:
        # Renamed first, so that a kill during the removal leaves no folder that looks like a checkpoint.
        os.rename(old, folder / f"{TEMPORARY}old-{old.name}")
    _remove_temporaries(folder)
    return final


def load_newest(
    folder: Path, accept: Callable[[Checkpoint], None] = lambda found: None
) -> tuple[Checkpoint, list[str]]:
    """Load the newest undamaged checkpoint of a run.

    Args:
        folder: holds the run's checkpoints.
        accept: takes a checkpoint over; raises `DamagedCheckpoint` where it cannot.

    Returns:
        the checkpoint, and one line for each newer checkpoint that was passed over because it is damaged.

    Raises:
        NoCheckpoint: there is none, or all are damaged.
    """
    passed_over: list[str] = []
    for path in steps_in(folder):
        try:
            found = load(path)
            accept(found)
            return found, passed_over
        except DamagedCheckpoint as error:
            passed_over.append(f"passed over {path}: {error}")
    raise NoCheckpoint(folder, passed_over)


def load(path: Path) -> Checkpoint:
    """Load one checkpoint. Its files are checked against its description, and the description against its checksum.

    Raises:
        DamagedCheckpoint: a file is missing, cut short, altered or of another format version, or the folder's name is
            that of another step.
    """
    try:
        description = _describe(path)
        if path.name != _name_of(description["step"]):
            raise DamagedCheckpoint(f"it holds step {description['step']}, which is not its folder's name")
        tensors = {
            stem: _load_tensors(path / _tensor_file(stem), entry)
            for stem, entry in description["files"].items()
        }
        return Checkpoint(path, description["step"], description["meta"], tensors)
    except DAMAGE as error:
        raise DamagedCheckpoint(f"{type(error).__name__}: {error}") from error


def saved_meta(folder: Path) -> dict[str, Any]:
    """Return the data of the newest checkpoint whose description can be read; no settings if there is none."""
    for path in steps_in(folder):
        with suppress(DamagedCheckpoint, *DAMAGE):
            return _describe(path)["meta"]
    return {"settings": {}}


def steps_in(folder: Path) -> list[Path]:
    """Return the run's checkpoint folders, newest first."""
    return sorted(folder.glob(f"{PREFIX}[0-9]*"), reverse=True)


def _describe(path: Path) -> dict[str, Any]:
    description = json.loads(_bytes_of_file(path / DESCRIPTION, at_most=LARGEST_DESCRIPTION))
    if description["format"] != FORMAT:
        raise DamagedCheckpoint(f"format {description['format']}, this version reads {FORMAT}")
    if description.pop("sha256") != _sum_of(description):
        raise DamagedCheckpoint(f"{DESCRIPTION} was altered (its SHA-256 differs)")
    return description


def _write(folder: Path, step: int, meta: dict, tensors: TensorFiles) -> None:
    folder.mkdir()
    files = {}
    for stem, content in tensors.items():
        path = folder / _tensor_file(stem)
        save_file({name: tensor.detach().contiguous() for name, tensor in content.items()}, path)
        atomic.fsync(path)
        files[stem] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
    description = {"format": FORMAT, "step": step, "files": files, "meta": meta}
    description["sha256"] = _sum_of(description)
    # Last, so that a folder without it is known to be unfinished.
    atomic.write_json(folder / DESCRIPTION, description)
    atomic.fsync(folder)


def _load_tensors(path: Path, entry: dict) -> dict[str, Tensor]:
    # The sizes come first: what is not as long as it was is never read, and safetensors allocates no more than that.
    size = _size_of_file(path)
    if size != entry["bytes"]:
        raise DamagedCheckpoint(f"{path.name} has {size} bytes instead of {entry['bytes']}")
    if _sha256(path) != entry["sha256"]:
        raise DamagedCheckpoint(f"{path.name} was altered (its SHA-256 differs)")
    return load_file(path)


def _bytes_of_file(path: Path, *, at_most: int) -> bytes:
    if (size := _size_of_file(path)) > at_most:
        raise DamagedCheckpoint(f"{path.name} has {size} bytes, more than the {at_most} that are read")
    return path.read_bytes()


def _size_of_file(path: Path) -> int:
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):  # opening a pipe would wait for ever
        raise DamagedCheckpoint(f"{path.name} is no file")
    return found.st_size


def _sum_of(description: dict) -> str:
    """Return the SHA-256 of a description, which does not depend on how its JSON was spaced or ordered."""
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()


def _name_of(step: int) -> str:
    return f"{PREFIX}{step:08d}"


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
