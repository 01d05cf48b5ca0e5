"""The folder of a run: found or made, held by one process, and gone again if nothing was written into it.

Without PyTorch, as `names` says.
"""

import os
import socket
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from ..interrupt import Interrupted
from .errors import SettingsError

try:
    import fcntl
except ModuleNotFoundError:  # Windows, where no lock is taken
    fcntl = None

RUNS = Path("runs")
PREFIX = "train-"
COMPARISON = "comparison-"
SHOWN_RUNS = 3
LOCK = ".lock"
RESULT = "result.json"
COMPARED = "results.json"  # of a comparison
LOSSES = "loss.png"  # the picture of a run alone, or of a comparison
DIVERGED = "diverged.json"  # of a run that did
CHECKPOINTS = "checkpoints"
UNFINISHED = "unfinished"  # folder of the runs of a demo that was interrupted
DESCRIPTION = "checkpoint.json"  # of a checkpoint


def finished_runs(folders: Sequence[Path]) -> list[Path]:
    """Return the results of the runs in folders, at any depth.

    Raises:
        SettingsError: a folder has no run, not even one that was interrupted or diverged, or does not exist.
    """
    for folder in folders:
        require_folder(folder)
    found = {folder: [*run_of(folder).rglob(RESULT)] for folder in folders}
    for folder, results in found.items():
        if not (results or interrupted_runs([folder]) or diverged_runs([folder])):
            raise SettingsError(
                f"no finished run in {folder}; give folders that hold a {RESULT} of narrowcast train"
            )
    return sorted({path for results in found.values() for path in results})


def interrupted_runs(folders: Sequence[Path]) -> list[Path]:
    """Return the folders of the runs with checkpoints in folders, at any depth, that neither ended nor diverged."""
    runs = {path.parent for folder in folders for path in run_of(folder).rglob(CHECKPOINTS)}
    return sorted(run for run in runs if not any((run / name).exists() for name in (RESULT, DIVERGED)))


def diverged_runs(folders: Sequence[Path]) -> list[Path]:
    """Return the files of the runs without a result in folders, at any depth, that say where these diverged."""
    found = {path for folder in folders for path in run_of(folder).rglob(DIVERGED)}
    return sorted(path for path in found if not path.with_name(RESULT).exists())


def run_of(path: Path) -> Path:
    """Return the folder of the run whose checkpoints, one of them, or result a path names; else the path."""
    folder = path.parent if path.name == RESULT else path
    return next((one.parent for one in (folder, folder.parent) if one.name == CHECKPOINTS), folder)


def only_run_of(path: Path) -> Path:
    """Return what ``run_of`` does, or the run below it if there is one alone."""
    run = run_of(path)
    below = _runs_below(run)
    return below[0] if len(below) == 1 and not (run / CHECKPOINTS).exists() else run


def runs_below(folder: Path) -> str:
    """Return that a folder holds runs, at any depth, as part of a message; "" if it holds none."""
    runs = _runs_below(folder)
    count = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    names = textwrap.shorten(", ".join(str(run.relative_to(folder)) for run in runs), 100, placeholder=" ...")
    return f"holds {count}: {names}; give the folder of one, such as {runs[0]}" if runs else ""


def _runs_below(folder: Path) -> list[Path]:
    return sorted(found.parent for found in folder.rglob(CHECKPOINTS) if found.parent != folder)


def require_unmixed(folder: Path, *, several: bool) -> None:
    """Check that one new run does not come into a folder of several, or ``several`` into that of one.

    Raises:
        SettingsError: it would.
    """
    if several and any((folder / name).exists() for name in (RESULT, CHECKPOINTS)):
        raise SettingsError(f"{folder} holds a single run; give --out another folder for several")
    beside = (folder.glob(f"*/{name}") for name in (RESULT, CHECKPOINTS))
    if not several and ((folder / COMPARED).exists() or any(map(any, beside))):
        raise SettingsError(f"{folder} holds several runs or a comparison; give --out another folder for one")


def require_folder(path: Path, otherwise: str = "") -> None:
    """Check that the folder of a run is there.

    Args:
        otherwise: what may be done instead of giving one that is, for the message.

    Raises:
        SettingsError: it is not.
    """
    if not path.exists():
        raise SettingsError(f"{_absent(path)}{f'; or {otherwise}' if otherwise else ''}")


def require_checkpoints(path: Path) -> None:
    """Check that a folder is one of a run or of a checkpoint; whether that can be read is seen later.

    Raises:
        SettingsError: it is not.
    """
    if not (path / DESCRIPTION).exists() and not (only_run_of(path) / CHECKPOINTS).exists():
        raise SettingsError(without_checkpoint(path))


def without_checkpoint(path: Path, why: str = "") -> str:
    """Return why a folder has nothing to load, and what to give instead. ``why``: what its checkpoints have."""
    if not path.exists():
        return _absent(path)
    if path.is_file():
        run = next((f"its run, {one.parent}" for one in path.parents if one.name == CHECKPOINTS), "a run")
        return f"{path} is a file; give the folder of {run}"
    if several := runs_below(path):
        return f"{path} {several}"
    if (path / COMPARED).exists():
        return f"{path} holds a comparison and no checkpoint; give the folder of a run of narrowcast train"
    return f"{path} holds no checkpoint that can be read{why}; give the folder of a run"


def _absent(path: Path) -> str:
    """Return that a folder is not there, and the last runs that are."""
    runs = sorted(_runs().items(), reverse=True)[:SHOWN_RUNS]
    such = f", such as {', '.join(str(run) for _, run in runs)}" if runs else " of narrowcast train"
    return f"{path} does not exist; give the folder of a run{such}"


def resumed_folder(out: Path | None) -> Path:
    """Return the folder of the run that `--resume` continues: that of `--out`, or the last one.

    Raises:
        SettingsError: there is no last one.
    """
    return _last_run() if out is None else run_of(out)


def demo_folder(out: Path | None, *, quick: bool) -> Path:
    """Return the folder of a demo."""
    return out or RUNS / ("demo-quick" if quick else "demo")


@contextmanager
def run_folder(out: Path | None, *, resume: bool, prefix: str = PREFIX) -> Iterator[Path]:
    """Hold the folder of a run as the only process.

    Args:
        out: the folder; made if absent. None is the next `runs/train-NNN`, or with `resume` the last one.
        resume: whether the run goes on from what is there.
        prefix: of the folder's name if `out` is None.

    Yields:
        the folder. What was made is removed again where the run ends without having written into it.

    Raises:
        SettingsError: another process holds it, it cannot be made or written, or there is no run to resume.
    """
    if resume:
        out = resumed_folder(out)
    missing = [path for path in (out or RUNS, *(out or RUNS).parents) if not path.exists()]
    try:
        folder = _fresh_run(prefix) if out is None else out
        if out is None:
            missing.insert(0, folder)
        folder.mkdir(parents=True, exist_ok=True)
        lock = _take_lock(folder)
    except OSError as error:
        if out is not None and (file := next((path for path in (out, *out.parents) if path.is_file()), None)):
            raise SettingsError(f"--out is {out}, and {file} is a file; give --out another folder") from error
        raise SettingsError(
            f"cannot make or write the folder {out or RUNS} ({error.strerror}); give --out another one"
        ) from error
    try:
        yield folder
    except Interrupted as error:
        error.folder = folder
        raise
    finally:
        (folder / LOCK).unlink(missing_ok=True)
        os.close(lock)
        with suppress(OSError):  # a folder that is not empty stays, and so do its parents
            for path in missing:
                path.rmdir()


def _take_lock(folder: Path) -> int:
    """Return the descriptor of a lock that the system releases when the process ends, however it ends."""
    path = folder / LOCK
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if fcntl is not None:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(lock, 200).decode(errors="replace") or "another process"
            os.close(lock)
            raise SettingsError(
                f"{holder} is writing a run into {folder}; wait for it, or give --out another folder"
            ) from None
        # The one before may have removed the file between our opening and our locking it.
        if path.exists() and os.path.samestat(os.fstat(lock), path.stat()):
            os.ftruncate(lock, 0)
            os.write(lock, f"process {os.getpid()} on {socket.gethostname()}".encode())
            return lock
        os.close(lock)


def _runs(prefix: str = PREFIX) -> dict[int, Path]:
    return {
        int(number): path
        for path in RUNS.glob(f"{prefix}*")
        if (number := path.name.removeprefix(prefix)).isdecimal()
    }


def _last_run() -> Path:
    if not (runs := _runs()):
        raise SettingsError(f"no run to resume in {RUNS}; give --out its folder, or leave --resume out")
    return runs[max(runs)]


def _fresh_run(prefix: str) -> Path:
    number = max(_runs(prefix), default=0)
    while True:
        number += 1
        path = RUNS / f"{prefix}{number:03d}"
        with suppress(FileExistsError):  # another run may start at this moment
            path.mkdir(parents=True)
            return path
