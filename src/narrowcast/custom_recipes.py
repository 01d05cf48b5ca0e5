"""Factories for :class:`narrowcast.recipe.CustomRecipe`: each built-in way to quantize, tensor by tensor.

A factory is a function from a :class:`narrowcast.QuantizerRole` to a quantizer. Those below do for every tensor what
the recipe of the same name does by default, and are meant to be called from your own::

    def first_layer_in_high_precision(role):
        return high_precision_factory(role) if role.name == "embed" else mxfp8_factory(role)

    with nc.autocast(recipe=nc.recipe.CustomRecipe(qfactory=first_layer_in_high_precision)):
        ...

The operands of one GEMM need not share a format on the CPU and under ``emulate=True``; a GPU's own GEMMs want equal
ones.
"""

from __future__ import annotations

from .formats import DType
from .quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)
from .recipe import BACKWARD_TENSOR_TYPES, DelayedScalingRequest
from .roles import QuantizerRole


def high_precision_factory(role: QuantizerRole) -> Quantizer:
    """No quantization: the tensor as it is."""
    return IdentityQuantizer()


def delayed_scaling_factory(role: QuantizerRole) -> DelayedScalingRequest:
    """Per-tensor FP8 with the scale from earlier steps: a request, because the state belongs to the module."""
    return DelayedScalingRequest()


def current_scaling_factory(role: QuantizerRole) -> Quantizer:
    """Per-tensor FP8 with the scale from the tensor itself: E4M3, gradients in E5M2."""
    is_gradient = role.tensor_type in BACKWARD_TENSOR_TYPES
    return Float8CurrentScalingQuantizer(DType.kFloat8E5M2 if is_gradient else DType.kFloat8E4M3)


def float8_block_scaling_factory(role: QuantizerRole) -> Quantizer:
    """FP8 with power-of-two scales: 128x128 tiles for weights, 1x128 blocks for the rest."""
    return Float8BlockQuantizer(
        DType.kFloat8E4M3,
        rowwise=True,
        columnwise=True,
        block_scaling_dim=2 if role.tensor_type == "weight" else 1,
    )


def mxfp8_factory(role: QuantizerRole) -> Quantizer:
    """MXFP8: E4M3 with one E8M0 scale per 32 elements."""
    return MXFP8Quantizer(DType.kFloat8E4M3)


def nvfp4_factory(role: QuantizerRole) -> Quantizer:
    """NVFP4: 16x16 tiles for weights; the rest rotated for wgrad, gradients also rounded stochastically."""
    is_weight = role.tensor_type == "weight"
    return NVFP4Quantizer(
        with_rht=not is_weight,
        with_post_rht_amax=not is_weight,
        with_2d_quantization=is_weight,
        stochastic_rounding=role.tensor_type in BACKWARD_TENSOR_TYPES,
    )
