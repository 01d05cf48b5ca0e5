"""Words of the command line: the answer to a wrong one, and those that start it; without PyTorch, whose import takes
seconds.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeVar

AUTO = "auto"  # of the recipe and of the device
DEVICES = (AUTO, "cpu", "cuda")
TITLES = {
    "bf16": "bf16",
    "delayed": "FP8 delayed",
    "current": "FP8 current",
    "rowwise": "FP8 row-wise",
    "mxfp8": "MXFP8",
    "block": "FP8 128-block",
    "nvfp4": "NVFP4",
    "mxfp6": "MXFP6",
    "mxfp4": "MXFP4",
}
"""What tables and pictures call a recipe."""
MEANT = {"gpu": ("a GPU", "cuda"), "fp8": ("FP8", "current"), "float8": ("FP8", "current")}
"""What words are taken for, and its name here."""
T = TypeVar("T")


def find(name: str, known: Mapping[str, T], option: str, why: str = "", *, suggest: bool = True) -> T:
    """Return the entry of a name.

    Args:
        option: that takes the name, for the message.
        why: what is wrong with a name that has no entry, after the name.
        suggest: whether the message has the name that looks like it.

    Raises:
        ValueError: there is none; the message lists the names, and the nearest one: with the same numbers if it
            has any, a part of the name, of the nearest size, or by spelling.
    """
    if name in known:
        return known[name]
    numbers = re.findall(r"\d+", name)
    same = [one for one in known if numbers in ([], re.findall(r"\d+", one))]
    alike = (
        difflib.get_close_matches(name.lower(), same, 1)
        or [one for one in re.split(r"[-_/ ]", name.lower()) if one in known]
        or _of_nearest_size(name, known)
        or difflib.get_close_matches(name.lower(), known, 1)
    )
    near = f"; the nearest: {alike[0]!r:.60}" if alike and suggest else ""
    what, meant = MEANT.get(name.lower(), ("", ""))
    if meant in known:
        near = f"; for {what} use {meant!r:.60}"
    raise ValueError(f"{option} is {name!r:.60}{why}{near}; use one of {any_of(known)}")


def any_of(names: Iterable[object]) -> str:
    """Return names for a message: "a, b or c"."""
    *others, last = map(str, names)
    return f"{', '.join(others)} or {last}" if others else last


def _of_nearest_size(name: str, known: Iterable[str]) -> list[str]:
    size = _parameters(name)
    sizes = {one: abs(found - size) for one in known if size and (found := _parameters(one))}
    return sorted(sizes, key=lambda one: (sizes[one], len(one)))


def is_address(path: Path) -> bool:
    """Return whether a path is an address, such as ``https:/host/file``: a path joins the two slashes."""
    return path.parts[:1] != () and re.fullmatch(r"[a-z0-9]{2,}:", path.parts[0]) is not None


def as_given(path: Path) -> str:
    """Return a path or an address as the user typed it."""
    return str(path).replace(":/", "://", 1) if is_address(path) else str(path)


def _parameters(name: str) -> float:
    """Return the parameters that a model's name says, such as `8b` or `8b-slice`; 0 where it says none."""
    found = re.match(r"(\d+(?:\.\d+)?)([mb])\b", name.lower())
    return float(found[1]) * {"m": 1e6, "b": 1e9}[found[2]] if found else 0.0


def tell(subject: str, text: str) -> None:
    """Print a line, with the lines that continue it below its text."""
    begin, columns = f"{subject:<12} ", max(shutil.get_terminal_size().columns, 40)
    lines = textwrap.fill(begin + text, columns, subsequent_indent=len(begin) * " ", break_on_hyphens=False)
    print(lines.rstrip(), flush=True)


def follow_up(*words: object) -> str:
    """Return the line, the last of a command, that names the command to type next."""
    return f"next: {shlex.join([*program(), *map(str, words)])}"


def follow_up_again(command: str, option: str, value: object, comment: str = "") -> str:
    """Return the last line of a command that names it again, with another value of an option.

    Args:
        command: as it was typed.
        comment: what the shell passes over.
    """
    words = [word for word in shlex.split(command)[1:] if not word.startswith(f"{option}=")]
    if option in words:
        at = words.index(option)
        del words[at : at + 2]
    return follow_up(*words, option, value) + (f"   # {comment}" if comment else "")


def as_typed(line: str) -> str:
    """Return a command that begins with `narrowcast` as this program was started."""
    return line.replace("narrowcast", shlex.join(program()), 1)


def pip_install(package: str) -> str:
    """Return the command that installs a package for this Python, whose own pip may not be the shell's."""
    return shlex.join([_in_shell(Path(sys.executable)), "-m", "pip", "install", package])


def program() -> list[str]:
    """Return the words that start this program in a shell: make and IDEs start it where it is on no path."""
    started = Path(sys.argv[0])
    if started.name == "__main__.py" or not os.access(started, os.X_OK):
        return [_in_shell(Path(sys.executable)), "-m", "narrowcast"]
    return [_in_shell(started)]


def torchrun() -> list[str]:
    """Return the words that start this Python's torchrun, which is on no path without its environment."""
    beside = Path(sys.executable).with_name("torchrun")
    python = _in_shell(Path(sys.executable))
    return [_in_shell(beside)] if beside.exists() else [python, "-m", "torch.distributed.run"]


def _in_shell(path: Path) -> str:
    """Return how a shell finds a program: by its name alone, or by its path, the shorter one."""
    found = shutil.which(path.name)
    if found and Path(found).absolute() == path.absolute():  # a link may be the Python of another environment
        return path.name
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
