"""The recipes every cross-recipe test runs: one of each kind, a custom one, and none."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch

import narrowcast as nc

# Where cross-recipe tests run: on the accelerator when there is one. Formats it cannot multiply are emulated there.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EMULATE = DEVICE == "cuda"

E4M3, E5M2 = nc.DType.kFloat8E4M3, nc.DType.kFloat8E5M2


def mixed_factory(role: nc.QuantizerRole) -> nc.Quantizer:
    """MXFP8 with 32x32 tiles for weights and E5M2 gradients."""
    if role.tensor_type == "weight":
        return nc.MXFP8Quantizer(E4M3, with_2d_quantization=True)
    if role.tensor_type == "grad_output":
        return nc.MXFP8Quantizer(E5M2)
    return nc.MXFP8Quantizer(E4M3)


RECIPES: dict[str, nc.recipe.Recipe | None] = {
    "none": None,
    "delayed": nc.recipe.DelayedScaling(amax_history_len=4),
    "current": nc.recipe.Float8CurrentScaling(),
    "mxfp8": nc.recipe.MXFP8BlockScaling(emulate=EMULATE),
    "block": nc.recipe.Float8BlockScaling(),
    "nvfp4": nc.recipe.NVFP4BlockScaling(emulate=EMULATE),
    "custom": nc.recipe.CustomRecipe(qfactory=mixed_factory, emulate=EMULATE),
}
QUANTIZED = {name: recipe for name, recipe in RECIPES.items() if recipe is not None}


def kinds(names: Iterable[str]) -> list[Any]:
    """Parameters of tests of compiled code: these recipes, those that compile as nvfp4 does on request."""
    alike = ("mxfp8", "block", "custom")  # scales of blocks, and no state
    return [pytest.param(name, marks=pytest.mark.requested) if name in alike else name for name in names]


# Formats that differ from those above in their codecs and layouts alone, and so run in fewer of the layers' tests.
MORE_FORMATS: dict[str, nc.recipe.Recipe] = {
    "mxfp6": nc.recipe.MXFP6BlockScaling(emulate=EMULATE),
    "mxfp4": nc.recipe.MXFP4BlockScaling(emulate=EMULATE),
    "rowwise": nc.recipe.Float8RowwiseScaling(),
    "rowwise_with_gw_hp": nc.recipe.Float8RowwiseScaling(high_precision_wgrad=True),
}
