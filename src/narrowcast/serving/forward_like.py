"""``forward_like``: layers whose forward quantizes as an inference engine does.

An engine has its own rule for the scales of activations: which elements share one, its lower bound, how it is rounded,
and whether codes come from a division or a product. ``docs/serving.md`` has the table, with the sources.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from .. import _checks
from .._checks import is_one_of, not_among, shown
from ..formats import E4M3, DType
from ..layers import LinearLayer
from ..layers.set_recipe import set_recipe
from ..quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8GroupsQuantizer,
    Float8RowsQuantizer,
    IdentityQuantizer,
    Quantizer,
)
from ..recipe import BACKWARD_TENSOR_TYPES, CustomRecipe, DelayedScaling, MMParams, Recipe
from ..roles import QuantizerRole

_Module = TypeVar("_Module", bound=nn.Module)

ROWS: dict[str, dict[str, Any]] = {
    "vllm": {"rule": "divide", "smallest_scale": 1.0 / (E4M3.max * 512.0)},
    "sglang": {"rule": "reciprocal"},
    "transformers": {"rule": "product"},
}
"""How each engine scales a token."""

GROUPS: dict[str, dict[str, Any]] = {
    "vllm": {"rule": "divide", "amax_epsilon": 1e-10},
    "sglang": {"rule": "factors", "amax_epsilon": 1e-10},
    "transformers": {"rule": "triton", "smallest_scale": 1e-12},
}
"""How each engine scales 128 elements of a token."""

WEIGHT_ONLY = "weight-only"
"""What runs as an engine that decodes weights, and leaves inputs as they are."""
DECODING = "compressed-tensors"
"""What decodes weights and inputs, and multiplies them in the dtype of the model."""
ENGINES = (*ROWS, DECODING, WEIGHT_ONLY)

STATIC = "fp8-static"
FORMATS = ("hf-fp8-block128", "fp8-channel", "fp8-tensor", STATIC)


@dataclass(frozen=True)
class EngineQuantizers:
    """A factory of a custom recipe: forward operands as an engine has them, gradients as in training.

    Attributes:
        engine: one of :data:`ENGINES`.
        format: one of :data:`FORMATS`.
        bfloat16: the model has that dtype, which :data:`DECODING` computes scales in.
    """

    engine: str
    format: str
    bfloat16: bool = False

    def __call__(self, role: QuantizerRole) -> Quantizer:
        """Return the quantizer of a role."""
        is_gradient = role.tensor_type in BACKWARD_TENSOR_TYPES
        if role.tensor_type != "weight" and (
            self.engine == WEIGHT_ONLY or (is_gradient and self.engine == DECODING)
        ):
            return IdentityQuantizer()
        if self.format == "hf-fp8-block128":
            if role.tensor_type == "input":
                return Float8GroupsQuantizer(DType.kFloat8E4M3, **GROUPS[self.engine])
            dim = 2 if role.tensor_type == "weight" else 1
            return Float8BlockQuantizer(
                DType.kFloat8E4M3, rowwise=True, columnwise=True, block_scaling_dim=dim
            )
        if is_gradient:
            return Float8RowsQuantizer(DType.kFloat8E5M2)
        in_its_dtype: dict[str, Any] = {"rule": "bfloat16" if self.bfloat16 else "divide"}
        if role.tensor_type == "input":
            return Float8RowsQuantizer(DType.kFloat8E4M3, **ROWS.get(self.engine, in_its_dtype))
        if self.format == "fp8-channel":  # a scale in bf16 is loaded as it is served
            return Float8RowsQuantizer(DType.kFloat8E4M3, **in_its_dtype)
        return Float8CurrentScalingQuantizer(DType.kFloat8E4M3, force_pow_2_scales=self.engine == DECODING)


def forward_like(
    model: _Module, engine: str, *, format: str = "hf-fp8-block128", emulate: bool | None = None
) -> _Module:
    """Give the layers of a model the recipe whose forward quantizes as an inference engine does.

    Layers without a recipe keep high precision, as they are served. Train with the model, or evaluate log-probabilities
    with it. :func:`weights` and :func:`narrowcast.export` then serve the weights that this forward multiplies.

    Args:
        model: converted, or made of this library's layers.
        engine: "vllm", "sglang" or "transformers", whose rule inputs are quantized by; "compressed-tensors", which
            decodes inputs and weights to the dtype of the model (Transformers without ``use_optimized_inference``); or
            "weight-only", which leaves inputs in high precision: Transformers on a CPU, and Marlin's kernels. The last
            two leave gradients in high precision.
        format: "hf-fp8-block128" (weights in 128 x 128 tiles, inputs in 1 x 128 groups), "fp8-channel" (a scale per
            row of a weight and per token), "fp8-tensor" (a scale per weight and per token), or "fp8-static" (delayed
            scaling: a scale per weight and one for the inputs of a layer, the same rule in all engines).
        emulate: decode operands before they are multiplied, which the last two engines need on a GPU, and experts with
            scales per row; None does it for them.

    Returns:
        ``model``.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: the engine or format is unknown, they do not go together, or no layer has a recipe.
    """
    _checks.module("model", model)
    if not is_one_of(engine, ENGINES):
        raise ValueError(f"engine is {not_among(engine, ENGINES)}")
    if not is_one_of(format, FORMATS):
        raise ValueError(f"format is {not_among(format, FORMATS)}")
    names = {
        name: layer._module_type == "grouped_linear"
        for name, layer in model.named_modules()
        if isinstance(layer, LinearLayer) and layer.recipe is not None
    }
    if not names:
        raise ValueError("no layer of the model has a recipe; convert it first: nc.convert(model, recipe)")
    if format == STATIC and engine == WEIGHT_ONLY:
        raise ValueError(
            f"format={shown(format)} scales inputs, which engine={shown(engine)} leaves in high precision"
        )
    if format == STATIC:
        return set_recipe(model, dict.fromkeys(names, DelayedScaling(emulate=bool(emulate))))
    by_row = format != "hf-fp8-block128"
    if engine == DECODING and not by_row:
        raise ValueError(
            f"format={shown(format)} is not one of engine={shown(engine)}; use 'fp8-channel' or 'fp8-tensor'"
        )
    dtypes = {parameter.dtype for name in names for parameter in model.get_submodule(name).parameters(False)}
    factory = EngineQuantizers(engine, format, engine == DECODING and dtypes == {torch.bfloat16})
    recipes: dict[bool, Recipe] = {}
    for grouped in (False, True):
        decodes = engine in (DECODING, WEIGHT_ONLY) or (by_row and grouped) if emulate is None else emulate
        recipes[grouped] = CustomRecipe(qfactory=factory, fp8_gemm_fprop=MMParams(True), emulate=decodes)
    return set_recipe(model, {name: recipes[is_grouped] for name, is_grouped in names.items()})
