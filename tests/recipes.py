"""The recipes every cross-recipe test runs: one of each kind, a custom one, and none."""

from __future__ import annotations

import narrowcast as nc

E4M3, E5M2 = nc.DType.kFloat8E4M3, nc.DType.kFloat8E5M2


def mixed_factory(role: nc.QuantizerRole) -> nc.Quantizer:
    """MXFP8 forward, current-scaled E5M2 gradients would not share blocks; so MXFP8 with E5M2 gradients."""
    if role.tensor_type == "weight":
        return nc.MXFP8Quantizer(E4M3, with_2d_quantization=True)
    if role.tensor_type == "grad_output":
        return nc.MXFP8Quantizer(E5M2)
    return nc.MXFP8Quantizer(E4M3)


RECIPES: dict[str, nc.recipe.Recipe | None] = {
    "none": None,
    "delayed": nc.recipe.DelayedScaling(amax_history_len=4),
    "current": nc.recipe.Float8CurrentScaling(),
    "mxfp8": nc.recipe.MXFP8BlockScaling(),
    "block": nc.recipe.Float8BlockScaling(),
    "nvfp4": nc.recipe.NVFP4BlockScaling(),
    "custom": nc.recipe.CustomRecipe(qfactory=mixed_factory),
}
QUANTIZED = {name: recipe for name, recipe in RECIPES.items() if recipe is not None}
