"""The options of a run, kept in its folder: `--resume` takes them from there. Without PyTorch, as `names` says."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..words import AUTO
from .asked import demo_settings, train_settings
from .config import TrainConfig, setting_of
from .errors import SettingsError
from .folder import UNFINISHED, demo_folder, resumed_folder

OPTIONS = "options.json"
PATHS = ("data", "tokenizer", "recipe_table")
"""Options that take a path, beside `out`."""
OF_A_COMMAND = {"out", "resume", "parallel", "tp_size", "write_docs"}
"""Options of one command, which the next one gives again or not."""
MOVABLE = {"steps", "save_every", "tensorboard", "device", "data", "tokenizer", "recipe_table"}
"""Options that may change, or that are compared with the checkpoint by what they resolve to."""
SCALED = ("warmup", "eval_every")
"""Options that fewer steps make smaller unless they are given: a run that goes on has its own."""
SERIES = {"recipe", "seed", "seeds"}
"""Options that may change where a folder holds several runs: others are added."""


def options_of(context: Any) -> dict[str, Any]:
    """Return the options of a command that are not the default, as JSON takes them."""
    return {
        param.name: str(value) if isinstance(value, Path) else value
        for param in context.command.params
        if param.name in context.params.keys() - OF_A_COMMAND
        and (value := context.params[param.name]) != param.default
    }


def content(options: Mapping[str, Any], config: TrainConfig, *, several: bool) -> dict[str, Any]:
    """Return what `OPTIONS` holds: the options of a command, whether of several runs, and what this run is."""
    return {
        "options": options,
        "several": several,
        "run": {name: getattr(config, name) for name in ("recipe", "keep_bf16", "seed", *SCALED)},
    }


def resumed_train(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of `train --resume`, as `_with_kept` does."""
    return _with_kept(given, resumed_folder(given["out"]), train_settings, MOVABLE, SERIES)


def resumed_demo(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of `demo --resume`, as `_with_kept` does."""
    folder = demo_folder(given["out"], quick=given["quick"])
    return {**_with_kept(given, folder / UNFINISHED, demo_settings, {"data", "device"}), "out": folder}


def _with_kept(
    given: Mapping[str, Any],
    folder: Path,
    resolve: Callable[[Mapping[str, Any]], Any],
    movable: Collection[str],
    adding: Collection[str] = (),
) -> dict[str, Any]:
    """Return the options of a resumed command: those that are not given are those of the run in its folder.

    Args:
        given: every option, with its default where the command does not give it.
        folder: of a run, or of several; one that keeps no options changes nothing.
        resolve: returns the settings that options have.
        movable: options that may differ.
        adding: those that may also differ where the folder is of several runs.

    Raises:
        SettingsError: an option that is given has another value than the run; the message names all of them.
    """
    kept, single = _read(folder)
    if not kept:
        return dict(given)
    context = given["context"]
    typed = [name for name in given if _is_typed(context, name)]
    defaults = {param.name: param.default for param in context.command.params}
    options = {name: value for name, value in kept["options"].items() if name in given}
    options |= {name: Path(options[name]) for name in PATHS if name in options}
    asked = {**given, **{name: defaults[name] for name in typed}, **options}
    changed = {name: given[name] for name in typed if given[name] != asked[name]}
    run = kept["run"]
    asked |= {name: run[name] for name in SCALED if name in asked and asked[name] is None}
    if single:
        asked |= {**{name: run[name] for name in ("recipe", "keep_bf16", "seed")}, "seeds": 1}
    elif asked.get("recipe") == AUTO:
        asked |= {name: run[name] for name in ("recipe", "keep_bf16")}
    asked |= {name: given[name] for name in OF_A_COMMAND if name in given}
    before = resolve(asked)
    movable = {*movable, *OF_A_COMMAND, *(() if single else adding)}
    differing: dict[str, Any] = {}
    for name in [name for name in changed if name not in movable]:
        try:
            if resolve({**asked, name: changed[name]}) == before:
                continue
        except SettingsError:
            resolve({**given, **defaults, name: changed[name]})  # raises where the value alone is wrong
        differing[name] = changed[name]
    if differing:
        raise SettingsError(_refused(differing, asked, before, folder))
    return {**asked, **changed}


def _read(folder: Path) -> tuple[dict[str, Any], bool]:
    """Return the options that a folder keeps, {} if none, and whether they are those of the run in it."""
    own = folder / OPTIONS
    others = sorted(folder.glob(f"*/{OPTIONS}"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
    for path in (own, *others):
        with suppress(OSError, ValueError, LookupError, TypeError):  # what cannot be read keeps none
            kept = json.loads(path.read_text())
            if path == own or kept["several"]:
                return {"options": dict(kept["options"]), "run": dict(kept["run"])}, path == own
    return {}, True


def _is_typed(context: Any, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _refused(differing: Mapping[str, Any], asked: Mapping[str, Any], settings: Any, folder: Path) -> str:
    config = settings[0] if isinstance(settings, tuple) else settings

    def of_run(name: str) -> object:
        value = asked[name]
        places = (vars(config), vars(config.model)) if value is None else ()
        return next((place[name] for place in places if name in place), value)

    ours = _joined([setting_of(name, value) for name, value in differing.items()])
    theirs = _joined([setting_of(name, of_run(name)) for name in differing])
    verb, them = ("differs", "it") if len(differing) == 1 else ("differ", "them")
    return (
        f"{ours} {verb} from the run in {folder}, which has {theirs}; leave {them} out to resume it, or leave "
        "--resume out and give --out another folder"
    )


def _joined(words: list[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else words[0]
