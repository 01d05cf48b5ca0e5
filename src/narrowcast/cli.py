"""The console command `narrowcast`: turns every foreseen failure into one line and an exit code."""

import sys
from collections.abc import Sequence

EXTRA = {"matplotlib", "numpy", "rich", "safetensors", "typer"}
MISSING: str | None = None

try:
    import typer

    from .train.commands import app
    from .train.errors import SettingsError, TrainingError
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] not in EXTRA:
        raise
    MISSING = error.name


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
    # Typer exports BadParameter and not its base class, which every wrong command line raises.
    usage_error = typer.BadParameter.__mro__[1]
    try:
        # Typer's own handling prints a usage text and a frame around each message.
        return app(args=words, prog_name="narrowcast", standalone_mode=False, obj=words) or 0
    except SettingsError as error:
        return _fail(str(error), 2)
    except TrainingError as error:
        return _fail(str(error), 1)
    except usage_error as error:
        return _fail(f"{error.format_message()} Try: narrowcast --help", 2)
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted; a run with checkpoints continues with --resume", 130)


def _fail(message: str, code: int) -> int:
    print(f"narrowcast: {' '.join(message.split())}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
