"""The recipe names of the command line and what stands after them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import nn

import narrowcast as nc
from narrowcast._checks import shown
from narrowcast.recipe import NAMES

from ..words import TITLES
from .asked import text_of
from .errors import SettingsError


@dataclass(frozen=True)
class RecipeChoice:
    """One word of `--recipe`.

    Args:
        title: what tables and pictures call it.
        recipe: the library's recipe; None trains in plain bfloat16.
        native: tells whether the default accelerator has kernels for it, and why not.
    """

    title: str
    recipe: Callable[..., nc.recipe.Recipe] | None = None
    native: Callable[..., bool | tuple[bool, str]] | None = None

    def availability(self) -> tuple[bool, str]:
        """Return whether the default accelerator has kernels for the recipe, and why not."""
        answer = True if self.native is None else self.native(return_reason=True)
        return answer if isinstance(answer, tuple) else (answer, "")


def _nowhere(return_reason: bool) -> tuple[bool, str]:
    return False, "no GPU's GEMM is called for this format; it runs emulated everywhere"


CHOICES: dict[str, RecipeChoice] = {
    "bf16": RecipeChoice(TITLES["bf16"]),
    "delayed": RecipeChoice(TITLES["delayed"], NAMES["delayed"], nc.is_fp8_available),
    "current": RecipeChoice(TITLES["current"], NAMES["current"], nc.is_fp8_available),
    "rowwise": RecipeChoice(TITLES["rowwise"], NAMES["rowwise"], nc.is_fp8_available),
    "mxfp8": RecipeChoice(TITLES["mxfp8"], NAMES["mxfp8"], nc.is_mxfp8_available),
    "block": RecipeChoice(TITLES["block"], NAMES["block"], nc.is_fp8_block_scaling_available),
    "nvfp4": RecipeChoice(TITLES["nvfp4"], NAMES["nvfp4"], nc.is_nvfp4_available),
    "mxfp6": RecipeChoice(TITLES["mxfp6"], NAMES["mxfp6"], _nowhere),
    "mxfp4": RecipeChoice(TITLES["mxfp4"], NAMES["mxfp4"], _nowhere),
}
EMULATED = ("mxfp6", "mxfp4")  # on every device
HEAD = "head"  # the model's name of its output layer
LAYERS = (
    "the layers are blocks.N.attention.qkv, blocks.N.attention.proj, blocks.N.feed_forward.gate_up, "
    "blocks.N.feed_forward.down and head, with N from 0, or * for every block"
)


def build_recipe(
    name: str, *, device: str, emulate: bool, saved_activations: str | None = None
) -> nc.recipe.Recipe | None:
    """Build the library's recipe, or None for bfloat16.

    Args:
        name: canonical recipe name.
        device: `cpu` or `cuda`. On the CPU every recipe runs on the reference numerics without being asked.
        emulate: run a recipe that the accelerator lacks by dequantizing exactly to bfloat16.
        saved_activations: of the recipe.

    Raises:
        SettingsError: the accelerator has no kernels for the recipe and `emulate` is off, or an environment variable
            that the recipe reads has a wrong value.
    """
    choice = CHOICES[name]
    if choice.recipe is None:
        return None
    # Left out rather than False: the library's own default listens to its environment variable. Native kernels are used
    # where they are: --emulate is for the recipes without.
    emulated = emulate and not choice.availability()[0]
    options = {"saved_activations": saved_activations} if saved_activations else {}
    try:
        recipe = choice.recipe(emulate=True, **options) if emulated else choice.recipe(**options)
    except ValueError as error:
        raise SettingsError(str(error)) from None
    _require_kernels(recipe, choice, f"recipe {shown(name)}", device, "add --emulate")
    return recipe


def recipe_table(
    name: str,
    *,
    table: str,
    keep_bf16: str,
    device: str,
    emulate: bool,
    head: str = "bf16",
    saved_activations: str | None = None,
) -> dict[str, nc.recipe.Recipe | None]:
    """Build the recipes of a model's layers by pattern, as `narrowcast.set_recipe` takes them.

    Later patterns override earlier ones. The output head stays in bfloat16 unless `head` or `table` names its recipe:
    its error reaches the loss directly, and it is a small share of the work.

    Args:
        name: canonical name of the recipe of all layers.
        table: JSON as `narrowcast.recipe.recipes_to_json` writes it, laid over `name` and `head`; empty for none.
        keep_bf16: patterns that stay in bfloat16, separated by commas; laid over all of these.
        device: `cpu` or `cuda`.
        emulate: as `build_recipe` takes it, for the recipes of `name` and `head`; those of `table` say it themselves.
        head: canonical name of the recipe of the output head.
        saved_activations: of the recipe of `name`.

    Raises:
        SettingsError: `table` is not a table, or the accelerator has no kernels for a recipe.
    """
    recipes: dict[str, nc.recipe.Recipe | None] = {
        "": build_recipe(name, device=device, emulate=emulate, saved_activations=saved_activations),
        HEAD: build_recipe(head, device=device, emulate=emulate),
    }
    try:
        recipes |= nc.recipe.recipes_from_json(table or "{}")
    except (TypeError, ValueError, KeyError) as error:
        raise SettingsError(f"--recipe-table: {error}") from error
    for pattern, recipe in recipes.items():
        for choice in CHOICES.values():
            if recipe is not None and type(recipe) is choice.recipe:
                _require_kernels(
                    recipe, choice, f"the recipe of {shown(pattern)}", device, 'give it "emulate": true'
                )
    for pattern in words_of(keep_bf16):
        recipes.pop(pattern, None)  # to come last, after what would override it
        recipes[pattern] = None
    return recipes


def read_recipe_table(path: Path | None) -> str:
    """Return the recipes in a file as the JSON that `recipe_table` takes; empty without a file.

    Raises:
        SettingsError: the file cannot be read, or holds no table of recipes.
    """
    if path is None:
        return ""
    text = text_of(path, "--recipe-table", "an existing JSON file")
    try:
        return nc.recipe.recipes_to_json(nc.recipe.recipes_from_json(text))
    except (TypeError, ValueError, KeyError) as error:
        raise SettingsError(f"--recipe-table {path}: {error}") from error


def words_of(text: str) -> list[str]:
    """Return the words that commas separate."""
    return [word for part in text.split(",") if (word := part.strip())]


def set_recipes(
    model: nn.Module, recipes: dict[str, nc.recipe.Recipe | None], *, keep_bf16: str = ""
) -> None:
    """Give the layers of a model their recipes.

    Args:
        keep_bf16: patterns of the option of this name, for the message.

    Raises:
        SettingsError: a pattern matches no layer.
    """
    try:
        nc.set_recipe(model, recipes)
    except (TypeError, ValueError) as error:
        option = (
            "--keep-bf16"
            if any(shown(word) in str(error) for word in words_of(keep_bf16))
            else "--recipe-table"
        )
        message = str(error).removeprefix("recipe: ")  # the argument of set_recipe
        pattern, unknown, hint = message.partition(" matches no low-precision layer of this ")
        if unknown:
            hint = hint.partition("; ")[2]
            hint = LAYERS if hint.startswith("it has") else f"{hint}; {LAYERS}"
            message = f"{pattern} matches no layer of the model; {hint}"
        raise SettingsError(f"{option}: {message}") from error


def _require_kernels(
    recipe: nc.recipe.Recipe, choice: RecipeChoice, what: str, device: str, fix: str
) -> None:
    native, reason = choice.availability()
    if device != "cpu" and not native and not recipe.emulate:
        raise SettingsError(
            f"{what} is not native on this device ({reason}); {fix} to run it through exact dequantization"
        )
