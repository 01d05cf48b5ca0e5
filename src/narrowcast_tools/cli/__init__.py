"""The console command `narrowcast`: turns every foreseen failure into one line and an exit code.

PyTorch takes seconds to import. `--help`, `--version` and wrong options are answered without it: `commands` only
declares the options, and each command imports its work when it runs.
"""

from __future__ import annotations

import difflib
import importlib.util
import os
import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Sequence
from itertools import product, starmap
from pathlib import Path
from typing import cast

from ..words import as_typed, pip_install, program
from .threads import spin_less

EXTRA = {"matplotlib", "numpy", "rich", "safetensors", "typer"}
INTERRUPTED = 130
PIPE_CLOSED = 141
DOCTOR = (["doctor"], ["doctor", "--json"])
ELSEWHERE = {"model": "preset", "epochs": "steps"}
"""Options of other trainers, and those of `train` in their place."""
COMMAND = re.compile("(.*?)(?:(; (?:to continue|run|for example):) (.*))?", re.DOTALL)
"""A message, and the command that it may end with."""
SPACED = re.compile(r"--(?:recipe|mode|keep-bf16)[ =][^ ,]+(?: *, *[^ ,]+)+")
"""Names with spaces at their commas."""
LIBRARY = {"bisect", "convert", "export", "receipt", "revert", "watch"}
"""Functions that a user may take for commands."""
MISSING: str | None = None


def _missing(error: ModuleNotFoundError) -> str:
    """Return the package of the extra that is missing, or raise the error if it is no such package."""
    package = (error.name or "").partition(".")[0]
    if package not in EXTRA:
        raise error
    return package


try:
    import typer

    from ..hardware import GPUS
    from ..hardware import RECIPES as RATES
    from ..interrupt import Interrupted
    from ..train.errors import SettingsError, TrainingError
    from ..train.names import RECIPES
    from ..train.presets import PRESETS
    from .commands import app, values_of
    from .options import EXAMPLES

    KNOWN = {
        "train": {"--data": (), "--preset": PRESETS, "--recipe": RECIPES},
        "demo": {"--data": ()},
        "plan": {"--model": (), "--recipe": RATES, "--gpu": GPUS},
        "bench": {"--only": ()},
    }
    """The options that a word alone may belong to, and their values; the first takes any."""
except ModuleNotFoundError as error:
    MISSING = _missing(error)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: words after the program's name; None takes the process's.

    Returns:
        exit code: 0 done, 1 the work failed, 2 the command or a setting is wrong, 130 or 143 interrupted.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["help"] or words[1:] == ["help"]:
        words = [*(word for word in words if word != "help"), "--help"]
    try:
        code = _run(words)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:  # while PyTorch is imported
        return _fail("interrupted", INTERRUPTED)
    except BrokenPipeError:  # the reader, such as head, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes again when it ends
        return PIPE_CLOSED


def _run(words: list[str]) -> int:
    if words in DOCTOR:  # it reports what is missing
        if importlib.util.find_spec("torch") is None:
            return _fail(f"PyTorch is missing, which everything needs; run: {pip_install('torch')}", 1)
        import narrowcast  # noqa: F401 - before PyTorch, whose import would warn where NumPy is missing

        from ..train.doctor import doctor

        return doctor(json=len(words) > 1)
    if MISSING is not None:
        return _fail(_install(MISSING), 2)
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
        return _fail(_what_is_wrong(error, words), 2)
    except Interrupted as error:
        return _fail(f"{error}{_how_to_go_on(words, error.folder) if error.resumable else ''}", error.code)
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    if code == INTERRUPTED:  # some releases of Typer return it, others raise
        return _fail(f"interrupted{_what_was_saved(words)}", code)
    return code


def _what_is_wrong(error: typer.BadParameter, words: list[str]) -> str:
    """Return what is wrong in our words, as Typer's differ between its releases: name, value, remedy."""
    found, kind, param = error.format_message(), type(error).__name__, getattr(error, "param", None)
    names = [str(one.callback.__name__) for one in app.registered_commands if one.callback]
    name = next((word for word in words if not word.startswith("-")), "")
    program = f"narrowcast {name}" if name in names else "narrowcast"
    whole = as_typed(f"{program} --help{'-all' if name == 'train' else ''}")
    look = f"{whole} lists"
    if option := getattr(error, "option_name", ""):
        if "requires" in found:
            command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
            meant = next(one.help for one in command.params if option in one.opts)
            return f"{option} has no value; {whole} says: {meant.partition('. ')[0].rstrip('.')}"
        params = error.ctx.command.params if error.ctx else []
        near = _nearest(option, [one for param in params for one in (*param.opts, *param.secondary_opts)])
        begin = f"{name} has no option {option}" if name in names else f"no option {option}"
        return f"{begin}; {f'the nearest: {near}; ' if near else ''}{look} all"
    if kind == "MissingParameter":
        argument = getattr(param, "name", "").upper()
        return f"the argument {argument} is missing; for example: {as_typed(EXAMPLES[name][0])}"
    if param is None:
        if "extra argument" in found:
            extra = found[found.rfind("(") + 1 :].rstrip(").")
            if name in ("doctor", "presets"):
                return f"{name} takes no names and shows all; leave {extra!r:.60} out"
            if spaced := SPACED.search(" ".join(words)):
                use = f"write {re.sub(' *, *', ',', spaced[0])}, without a space"
            else:
                use = _use_of(extra, name) or f"{look} all"
            return f"{extra!r:.60} belongs to no option of {program}; {use}"
        if program == "narrowcast" and name:
            if name in LIBRARY:
                return (
                    f"no command {name!r:.60}; it is a function of the library, narrowcast.{name}; {look} all"
                )
            alike = difflib.get_close_matches(name, names, 1)
            return f"no command {name!r:.60}; {f'the nearest: {alike[0]!r:.60}; ' if alike else ''}{look} all"
        return error.message if kind == "BadParameter" else f"{_uncapitalized(found)}; {look} what it takes"
    if not (values := values_of(param, words)):
        return f"{_uncapitalized(found)}; {look} what it takes"
    kinds = (("valid int", "a whole number"), ("number", "a number"), ("float", "a number"))
    use = next((text for part, text in kinds if part in found), f"one that {whole} names")
    return f"{param.opts[0]} is {values[-1]!r:.60}; use {use}"


def _use_of(extra: str, command: str) -> str:
    """Return where a word belongs that stands in a command alone; "" if that is not known."""
    if command == "generate":
        return "put a text of several words in quotes, as --prompt 'Once upon a time'"
    known = KNOWN.get(command, {})
    option = next((option for option, names in known.items() if extra in names), next(iter(known), ""))
    return f"did you mean {option} {shlex.quote(extra)}?" if option and " " not in extra else ""


def _nearest(option: str, options: list[str]) -> str:
    """Return the option that begins as the typed one, is spelled like it, means it, or shares a word; or ""."""
    typed, names = option.strip("-"), [one.strip("-") for one in options]
    initials = "".join(word[:1] for word in typed.split("-"))
    found = (
        sorted((one for one in names if one.startswith(typed)), key=len)
        or difflib.get_close_matches(typed, names, 1)
        or [one for one in names if one == initials and len(one) > 1]
        or [one for one in names if one == ELSEWHERE.get(typed)]
        or [one for one in names if any(starmap(_same_word, product(typed.split("-"), one.split("-"))))]
    )
    return next((one for one in options if found and one.strip("-") == found[0]), "")


def _same_word(one: str, other: str) -> bool:
    return min(len(one), len(other)) > 2 and (one.startswith(other) or other.startswith(one))


def _what_was_saved(words: list[str]) -> str:
    """Return what an interruption before the first step leaves; later ones are `Interrupted`."""
    if words[:1] not in (["train"], ["demo"]):
        return ""
    if "--resume" in words:
        return " before a new step, so nothing new was saved; run the same command again"
    return " before the first step, so nothing was saved; run the command again, without --resume"


def _uncapitalized(message: str) -> str:
    return message[:1].lower() + message[1:].rstrip(".")


def _how_to_go_on(words: list[str], folder: Path | None) -> str:
    """Return the command that continues. ``folder``: of the run, which keeps the options of ``train``."""
    added = [] if folder is None else ["--out", str(folder)]
    if _rank() is not None:
        return f"; the same command with {shlex.join([*added, '--resume'])} continues"
    if words[0] == "train":
        further = ["train", *added, "--resume"]
    else:
        further = [*words, *(() if "--resume" in words else ("--resume",))]
    if words[0] == "demo" and (by_make := os.environ.get("NARROWCAST_DEMO")):
        return f"; to continue: {by_make}{shlex.quote(shlex.join(further[1:]))}"
    return f"; to continue: {shlex.join([*program(), *further])}"


def _install(package: str) -> str:
    return (
        f"the package {package} is missing, which commands need; in the clone, run: {pip_install('.[train]')}"
    )


def _fail(message: str, code: int) -> int:
    rank = _rank()
    program = f"narrowcast, rank {rank}" if rank and rank != "0" else "narrowcast"
    found = COMMAND.fullmatch(message)
    assert found is not None
    text, before_command, command = found.groups("")
    line, between = f"{program}: {' '.join(text.split())}{before_command}", " "
    if sys.stderr.isatty():
        columns = shutil.get_terminal_size().columns
        line = textwrap.fill(line, columns, break_long_words=False, break_on_hyphens=False)
        between = "\n"  # the command is copied as one line
    print(between.join(filter(None, (line, command))), file=sys.stderr)
    return code


def _rank() -> str | None:
    """Return what torchrun set; None before the library is imported, when a command fails alike in every process."""
    environment = sys.modules.get("narrowcast._environment")
    return environment.read_foreign("RANK") if environment else None
