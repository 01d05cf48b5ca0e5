"""The console command `narrowcast`: turns every foreseen failure into one line and an exit code.

PyTorch takes seconds to import. `--help`, `--version` and wrong options are answered without it: `commands` only
declares the options, and each command imports its work when it runs.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from typing import cast

from .threads import spin_less

EXTRA = {"matplotlib", "numpy", "rich", "safetensors", "typer"}
INTERRUPTED = 130
RESUMABLE = {"train", "demo"}
MISSING: str | None = None


def _missing(error: ModuleNotFoundError) -> str:
    """Return the package of the extra that is missing, or raise the error if it is no such package."""
    package = (error.name or "").partition(".")[0]
    if package not in EXTRA:
        raise error
    return package


try:
    import typer

    from ..train.errors import SettingsError, TrainingError
    from .commands import app
except ModuleNotFoundError as error:
    MISSING = _missing(error)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: words after the program's name; None takes the process's.

    Returns:
        exit code: 0 done, 1 the work failed, 2 the command or a setting is wrong, 130 interrupted.
    """
    if MISSING is not None:
        return _fail(_install(MISSING), 2)
    words = list(sys.argv[1:] if arguments is None else arguments)
    typed = shlex.join(["narrowcast", *words])
    spin_less()
    # Typer exports BadParameter and not its base class, which every wrong command line raises.
    usage_error = cast(type[typer.BadParameter], typer.BadParameter.__mro__[1])
    try:
        # Typer's own handling prints a usage text and a frame around each message.
        code = app(args=words or ["--help"], prog_name="narrowcast", standalone_mode=False, obj=typed) or 0
    except ModuleNotFoundError as error:
        return _fail(_install(_missing(error)), 2)
    except SettingsError as error:
        return _fail(str(error), 2)
    except TrainingError as error:
        return _fail(str(error), 1)
    except usage_error as error:
        # Typer's message does not always name the value; the words do.
        return _fail(f"{error.format_message()} (you typed: {typed}; see --help)", 2)
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    if code == INTERRUPTED:  # some releases of Typer return it, others raise
        further = "; the same command with --resume continues from the last checkpoint"
        return _fail("interrupted" + (further if words[:1] and words[0] in RESUMABLE else ""), code)
    return code


def _install(package: str) -> str:
    return f"the package {package} is missing; run: pip install 'narrowcast[train]'"


def _fail(message: str, code: int) -> int:
    # the library reads the environment; a command that fails before importing it fails alike in every process
    environment = sys.modules.get("narrowcast._environment")
    rank = environment.read_foreign("RANK") if environment else None  # set by torchrun
    program = f"narrowcast, rank {rank}" if rank and rank != "0" else "narrowcast"
    print(f"{program}: {' '.join(message.split())}", file=sys.stderr)
    return code
