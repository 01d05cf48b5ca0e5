"""Files that are either whole or absent."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import TrainingError


@contextmanager
def writing_into(folder: Path) -> Iterator[None]:
    """Re-raise a disk's refusal, such as a full disk, as the failure of the command.

    Raises:
        TrainingError: the disk refused; the message names the folder.
    """
    try:
        yield
    except OSError as error:
        raise TrainingError(
            f"cannot write into {folder}: {error.strerror or error}; make room, or give --out another folder"
        ) from error


def fsync(path: Path) -> None:
    """Force a file's content, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(temporary: Path, final: Path) -> None:
    """Give a finished file or folder its name: from here on, and not before, readers see it."""
    os.rename(temporary, final)
    fsync(final.parent)


def write_json(path: Path, data: object) -> None:
    """Write a JSON file under a temporary name and rename it into place."""
    write_bytes(path, (json.dumps(data, indent=1) + "\n").encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file under a temporary name and rename it into place."""
    temporary = path.with_name(f".tmp-{os.getpid()}-{path.name}")
    try:
        temporary.write_bytes(content)
        fsync(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync(path.parent)
