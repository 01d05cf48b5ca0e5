"""The recipe names of the command line and what stands behind them."""

from collections.abc import Callable
from dataclasses import dataclass

import narrowcast as nc

from .errors import SettingsError

LowPrecisionRecipe = (
    nc.recipe.DelayedScaling
    | nc.recipe.Float8CurrentScaling
    | nc.recipe.MXFP8BlockScaling
    | nc.recipe.Float8BlockScaling
    | nc.recipe.NVFP4BlockScaling
)


@dataclass(frozen=True)
class RecipeChoice:
    """One word of `--recipe`.

    Args:
        title: what tables and pictures call it.
        recipe: the library's recipe; None trains in plain bfloat16.
        native: tells whether the default accelerator has kernels for it, and why not.
        tolerance: largest gap of the held-out loss to bfloat16's that the demo accepts, in percent.
    """

    title: str
    recipe: type[LowPrecisionRecipe] | None = None
    native: Callable[..., bool | tuple[bool, str]] | None = None
    tolerance: float | None = None

    def availability(self) -> tuple[bool, str]:
        """Return whether the default accelerator has kernels for the recipe, and why not."""
        answer = True if self.native is None else self.native(return_reason=True)
        return answer if isinstance(answer, tuple) else (answer, "")


CHOICES: dict[str, RecipeChoice] = {
    "bf16": RecipeChoice("bf16"),
    "delayed": RecipeChoice("FP8 delayed", nc.recipe.DelayedScaling, nc.is_fp8_available, 1.0),
    "current": RecipeChoice("FP8 current", nc.recipe.Float8CurrentScaling, nc.is_fp8_available, 1.0),
    "mxfp8": RecipeChoice("MXFP8", nc.recipe.MXFP8BlockScaling, nc.is_mxfp8_available, 1.0),
    "block": RecipeChoice(
        "FP8 128-block", nc.recipe.Float8BlockScaling, nc.is_fp8_block_scaling_available, 1.0
    ),
    "nvfp4": RecipeChoice("NVFP4", nc.recipe.NVFP4BlockScaling, nc.is_nvfp4_available, 3.0),
}
ALIASES = {"none": "bf16"}


def recipe_name(word: str) -> str:
    """Return the canonical name of a recipe; `none` means `bf16`.

    Raises:
        SettingsError: the word names no recipe.
    """
    name = ALIASES.get(word, word)
    if name not in CHOICES:
        known = ", ".join([*ALIASES, *CHOICES])
        raise SettingsError(f"unknown recipe {word!r}; --recipe takes one of {known}")
    return name


def build_recipe(name: str, *, device: str, emulate: bool) -> LowPrecisionRecipe | None:
    """Build the library's recipe, or None for bfloat16.

    Args:
        name: canonical recipe name.
        device: `cpu` or `cuda`. On the CPU every recipe runs on the reference numerics without being asked.
        emulate: run a recipe that the accelerator lacks by dequantizing exactly to bfloat16.

    Raises:
        SettingsError: the accelerator has no kernels for the recipe and `emulate` is off.
    """
    choice = CHOICES[name]
    if choice.recipe is None:
        return None
    # Left out rather than False: the library's own default listens to its environment variable.
    recipe = choice.recipe(emulate=True) if emulate else choice.recipe()
    native, reason = choice.availability()
    if device != "cpu" and not native and not recipe.emulate:
        raise SettingsError(
            f"recipe {name!r} is not native on this device ({reason}); "
            "add --emulate to run it through exact dequantization"
        )
    return recipe
