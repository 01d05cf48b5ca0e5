"""The console command `narrowcast`: turns every foreseen failure into one line and an exit code."""

import shlex
import sys
from collections.abc import Sequence
from typing import cast

from narrowcast import _environment as environment

EXTRA = {"matplotlib", "numpy", "rich", "safetensors", "typer"}
INTERRUPTED = 130
RESUMABLE = {"train", "demo"}
MISSING: str | None = None

try:
    import typer

    from .train.commands import app
    from .train.errors import SettingsError, TrainingError
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] not in EXTRA:
        raise
    MISSING = error.name.partition(".")[0]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: words after the program's name; None takes the process's.

    Returns:
        exit code: 0 done, 1 the work failed, 2 the command or a setting is wrong, 130 interrupted.
    """
    if MISSING is not None:
        return _fail(f"the package {MISSING} is missing; run: pip install 'narrowcast[train]'", 2)
    words = list(sys.argv[1:] if arguments is None else arguments)
    typed = shlex.join(["narrowcast", *words])
    # Typer exports BadParameter and not its base class, which every wrong command line raises.
    usage_error = cast(type[typer.BadParameter], typer.BadParameter.__mro__[1])
    try:
        # Typer's own handling prints a usage text and a frame around each message.
        code = app(args=words or ["--help"], prog_name="narrowcast", standalone_mode=False, obj=typed) or 0
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


def _fail(message: str, code: int) -> int:
    rank = environment.read_foreign("RANK") or "0"  # of a process of torchrun
    program = "narrowcast" if rank == "0" else f"narrowcast, rank {rank}"
    print(f"{program}: {' '.join(message.split())}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
