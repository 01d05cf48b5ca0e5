"""The settings that a command's options ask for, checked before PyTorch is imported and again where they are used."""

from __future__ import annotations

import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..words import AUTO, any_of, as_given, is_address
from .config import RANDOM, ModelConfig, TrainConfig, override
from .errors import SettingsError
from .folder import finished_runs, require_checkpoints, require_folder
from .names import MODES, device_word, one_of, recipe_name, recipe_names
from .presets import DEMO, QUICK, find_preset, fitting_evaluations, fitting_warmup, with_steps

MOST_SEEDS = 1000
MOST_TOKENS, MOST_SAMPLES = 100_000, 1000  # to generate: their keys and values stay in memory
CONFIG = "config.json"


@dataclass(frozen=True)
class Choice:
    """The choice of the next token.

    Args:
        temperature: what scores are divided by; 0 takes the likeliest token.
        top_k: only so many of the likeliest tokens are drawn from; 0 draws from all.

    Raises:
        SettingsError: a value is negative or no number.
    """

    temperature: float = 0.8
    top_k: int = 50

    def __post_init__(self) -> None:
        for name, value in (("--temperature", self.temperature), ("--top-k", self.top_k)):
            if not value >= 0:
                raise SettingsError(f"{name} is {str(value).removesuffix('.0')}; it must be 0 or more")

    @property
    def greedy(self) -> bool:
        """Whether every token is the likeliest one."""
        return self.temperature == 0 or self.top_k == 1


def train_settings(given: Mapping[str, Any]) -> tuple[TrainConfig, list[str]]:
    """Return the settings that the options of `train` give, and its recipes or `[AUTO]`.

    The device, the recipe table and a model from a folder or with a tokenizer are found later.

    Raises:
        SettingsError: a value is wrong.
    """
    if not 1 <= (seeds := given["seeds"]) <= MOST_SEEDS:
        raise SettingsError(
            f"--seeds is {seeds}, the runs to compare per recipe; it must be at least 1 and at most {MOST_SEEDS}"
        )
    if given["resume"] and given["out"] is not None:
        require_folder(given["out"], "leave --resume out")
    start, recipes = find_preset(given["preset"]), recipe_names(given["recipe"])
    device_word(given["device"])
    if given["parallel"] is not None:
        one_of(MODES, given["parallel"], "--parallel")
    found_text(given["data"])
    if given["recipe_table"] is not None:
        text_of(given["recipe_table"], "--recipe-table", "an existing JSON file")
    if given["tokenizer"] is not None:
        text_of(given["tokenizer"], "--tokenizer", "a tokenizer.json")
    if given["graphs"]:
        require_graphs(given["device"], compiled=given["compile"], by_block=given["by_block"])
    if given["by_block"] and not given["compile"]:
        raise SettingsError("--by-block says how to compile, and --compile is not given; add --compile")
    shape = start.model
    if given["init"] == RANDOM:
        _require_heads(shape, given)
        shape = override(shape, **taken(given, shape))
    elif not given["init"]:
        raise SettingsError("--init is empty; give random, or the folder of a Llama that Transformers saved")
    else:
        config_text(Path(given["init"]))
    first = "bf16" if recipes == [AUTO] else recipes[0]
    warmup = fitting_warmup(start, given["steps"]) if given["warmup"] is None else given["warmup"]
    every = fitting_evaluations(start, given["steps"]) if given["eval_every"] is None else given["eval_every"]
    later = {
        "warmup": warmup,
        "eval_every": every,
        "recipe": first,
        "recipe_table": None,
        "device": None,
        "model": shape,
    }
    return override(start, **{**taken(given, start), **later}), recipes


def _require_heads(shape: ModelConfig, given: Mapping[str, Any]) -> None:
    """Check the heads that are given for a preset's width, which is not to blame.

    Raises:
        SettingsError: they do not fit; the message lists those that do.
    """
    heads, width, keys = given["heads"], given["dim"] or shape.dim, given["kv_heads"]
    if heads is not None and given["dim"] is None:
        fitting = [
            n for n in range(1, width // 2 + 1) if not width % (2 * n) and (keys or not n % shape.kv_heads)
        ]
        what = f"with the preset's --dim {width}{'' if keys else f' and --kv-heads {shape.kv_heads}'}"
        _require_among("--heads", heads, fitting, what)
    elif keys is not None and heads is None:
        fitting = [n for n in range(1, shape.heads + 1) if not shape.heads % n]
        _require_among("--kv-heads", keys, fitting, f"with the preset's --heads {shape.heads}")


def _require_among(option: str, value: int, fitting: list[int], what: str) -> None:
    if value > 0 and value not in fitting:
        raise SettingsError(f"{option} is {value}; {what} use {any_of(fitting)}")


def demo_settings(given: Mapping[str, Any]) -> TrainConfig:
    """Return the settings that the options of `demo` give; the device is found later.

    Raises:
        SettingsError: a value is wrong.
    """
    start, steps, page = QUICK if given["quick"] else DEMO, given["steps"], given["write_docs"]
    device_word(given["device"])
    if page is not None and page.suffix != ".md":
        raise SettingsError(f"--write-docs is {page}; give it a file that ends in .md")
    found_text(given["data"])
    start = start if steps is None else with_steps(start, steps)
    return override(start, compile=given["compile"], emulate=given["emulate"], seed=given["seed"])


def generate_settings(given: Mapping[str, Any]) -> tuple[Choice, str | None]:
    """Return the choice of tokens that the options of `generate` give, and the recipe, or None for the run's.

    Raises:
        SettingsError: a value is wrong.
    """
    device_word(given["device"])
    recipe = None if given["recipe"] is None else recipe_name(given["recipe"])
    choice = Choice(given["temperature"], given["top_k"])
    for name, most in (("tokens", MOST_TOKENS), ("samples", MOST_SAMPLES)):
        if not 1 <= given[name] <= most:
            raise SettingsError(f"--{name} is {given[name]:,}; it must be at least 1 and at most {most:,}")
    if choice.greedy and given["samples"] > 1:
        option = "--temperature 0" if choice.temperature == 0 else "--top-k 1"
        raise SettingsError(
            f"--samples is {given['samples']}, and with {option} all are the same text; leave one of them out"
        )
    override(TrainConfig(), seed=given["seed"])
    if not given["prompt"]:
        raise SettingsError("--prompt is empty; give it some text to continue")
    if given["graphs"]:
        require_graphs(given["device"], compiled=given["compile"])
    require_checkpoints(given["run"])
    return choice, recipe


def compare_settings(given: Mapping[str, Any]) -> None:
    """Check that there are runs to compare.

    Raises:
        SettingsError: there are none.
    """
    finished_runs(given["runs"])


def require_graphs(device: str, *, compiled: bool, by_block: bool = False) -> None:
    """Check that CUDA graphs can be replayed.

    Raises:
        SettingsError: the device is the CPU, or the step is not compiled as a whole.
    """
    if device == "cpu":
        raise SettingsError("--graphs replays CUDA graphs, and --device is cpu; leave --graphs out")
    if not compiled:
        raise SettingsError(
            "--graphs replays what the compiler made, and --compile is not given; add --compile"
        )
    if by_block:
        raise SettingsError(
            "--graphs replays the whole step, and --by-block compiles parts; leave one of them out"
        )


def taken(given: Mapping[str, Any], settings: object) -> dict[str, Any]:
    """Return the options that are settings of a part."""
    return {name: value for name, value in given.items() if name in vars(settings)}


def text_of(path: Path, option: str, what: str) -> str:
    """Return the text of a file that an option names.

    Raises:
        SettingsError: it cannot be read; `what` says what to give instead.
    """
    try:
        return path.read_text()
    except (OSError, ValueError) as error:
        why = (
            "an address; download it first"
            if is_address(path)
            else getattr(error, "strerror", None) or "no text"
        )
        raise SettingsError(
            f"{option} is {as_given(path)}, which cannot be read ({why}); give {what}"
        ) from error


def config_text(folder: Path) -> str:
    """Return the text of the configuration in a folder that `--init` names.

    Raises:
        SettingsError: there is none.
    """
    use = "random, or the folder of a Llama that Transformers saved"
    for path, why in ((folder, "does not exist"), (folder / CONFIG, f"has no {CONFIG}")):
        if not path.exists():
            why = "is an address; download it first" if is_address(folder) else why
            raise SettingsError(f"--init is {as_given(folder)}, which {why}; give {use}")
    return text_of(folder / CONFIG, "--init", use)


def found_text(data: Path | None) -> tuple[Path, str]:
    """Return the file or folder of the text, and its name for people; None is the Python standard library's sources.

    Raises:
        SettingsError: there is none.
    """
    root = Path(sysconfig.get_path("stdlib")) if data is None else data
    source = "the Python standard library's sources" if data is None else str(data)
    if is_address(root):
        raise SettingsError(
            f"--data is {as_given(root)}, an address; download it first, and give --data the file"
        )
    if not root.exists():
        raise SettingsError(
            f"--data is {source}, where no file or folder is; give an existing text file or folder"
        )
    return root, source
