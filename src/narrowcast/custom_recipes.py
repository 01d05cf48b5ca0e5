"""Factories for :class:`narrowcast.recipe.CustomRecipe`: each built-in way to quantize, tensor by tensor.

A factory is a function from a :class:`narrowcast.QuantizerRole` to a quantizer. Those below do for every tensor what
the recipe of the same name does by default, and are meant to be called from your own::

    def first_layer_in_high_precision(role):
        return high_precision_factory(role) if role.name == "embed" else mxfp8_factory(role)

    with nc.autocast(recipe=nc.recipe.CustomRecipe(qfactory=first_layer_in_high_precision)):
        ...

Those with two formats in their name mix them: by direction, so that the forward's GEMM reads one and those of the
backward another, or by the kind of layer. They are starting points, not recipes that anybody has proven.

The operands of one GEMM need not share a format on the CPU and under ``emulate=True``; a GPU's own GEMMs want equal
ones.
"""

from __future__ import annotations

from .formats import DType
from .quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)
from .recipe import BACKWARD_TENSOR_TYPES, DelayedScalingRequest
from .roles import QuantizerRole


def _is(role: QuantizerRole | None, *kinds: str) -> bool:
    """Return whether the tensor is one of these kinds; an unknown role is not."""
    return role is not None and role.tensor_type in kinds


def high_precision_factory(role: QuantizerRole | None) -> Quantizer:
    """Return a quantizer that keeps high precision."""
    return IdentityQuantizer()


def delayed_scaling_factory(role: QuantizerRole | None) -> DelayedScalingRequest:
    """Return a request for per-tensor FP8 with the scale from earlier steps, whose state the module holds."""
    return DelayedScalingRequest()


def current_scaling_factory(role: QuantizerRole | None) -> Quantizer:
    """Return a per-tensor FP8 quantizer with the scale from the tensor itself: E4M3, gradients in E5M2."""
    is_gradient = _is(role, *BACKWARD_TENSOR_TYPES)
    return Float8CurrentScalingQuantizer(DType.kFloat8E5M2 if is_gradient else DType.kFloat8E4M3)


def float8_block_scaling_factory(role: QuantizerRole | None) -> Quantizer:
    """Return an FP8 quantizer with power-of-two scales: 128x128 tiles for weights, 1x128 blocks for the rest."""
    return Float8BlockQuantizer(
        DType.kFloat8E4M3,
        rowwise=True,
        columnwise=True,
        block_scaling_dim=2 if _is(role, "weight") else 1,
    )


def mxfp8_factory(role: QuantizerRole | None) -> Quantizer:
    """Return an MXFP8 quantizer: E4M3 with one E8M0 scale per 32 elements."""
    return MXFP8Quantizer(DType.kFloat8E4M3)


def nvfp4_factory(role: QuantizerRole | None) -> Quantizer:
    """Return an NVFP4 quantizer: weights in 16x16 tiles, the rest rotated for wgrad, gradients also stochastic."""
    is_weight = _is(role, "weight")
    return NVFP4Quantizer(
        with_rht=not is_weight,
        with_post_rht_amax=not is_weight,
        with_2d_quantization=is_weight,
        stochastic_rounding=_is(role, *BACKWARD_TENSOR_TYPES),
    )


# -- mixtures ----------------------------------------------------------------------------------------------------------


def _by_direction(forward: Quantizer, backward: Quantizer, dequantized: bool = False) -> Quantizer:
    """Return a quantizer per direction; with ``dequantized`` the backward quantizes the forward's values."""
    return HybridQuantizer(
        rowwise_quantizer=forward,
        columnwise_quantizer=backward,
        columnwise_source="rowwise_dequantized" if dequantized else "original",
    )


def high_precision_fwd_mxfp8_bwd_factory(role: QuantizerRole | None) -> Quantizer:
    """Return a quantizer that keeps the forward in high precision and runs the backward in MXFP8."""
    mxfp8 = mxfp8_factory(role)
    return mxfp8 if _is(role, "grad_output") else _by_direction(IdentityQuantizer(), mxfp8)


def mxfp8_fwd_nvfp4_bwd_factory(role: QuantizerRole | None) -> Quantizer:
    """Return a quantizer for a forward in MXFP8 and a backward in NVFP4, with the forward's weights in blocks of 16.

    Inputs and gradients of the backward are as in :func:`nvfp4_factory`.
    """
    if _is(role, "grad_output"):
        return nvfp4_factory(role)
    if _is(role, "weight"):
        return _by_direction(mxfp8_factory(role), NVFP4Quantizer(), dequantized=True)
    if _is(role, "input"):
        return _by_direction(mxfp8_factory(role), nvfp4_factory(role))
    return mxfp8_factory(role)


def mxfp8_fwd_high_precision_bwd_factory(role: QuantizerRole | None) -> Quantizer:
    """Return a quantizer for a forward in MXFP8 and a backward in high precision on the forward's values."""
    if _is(role, "grad_output"):
        return IdentityQuantizer()
    mxfp8 = mxfp8_factory(role)
    return (
        _by_direction(mxfp8, IdentityQuantizer(), dequantized=True) if _is(role, "input", "weight") else mxfp8
    )


def nvfp4_1d_weight_factory(role: QuantizerRole | None) -> Quantizer:
    """Return an NVFP4 quantizer with weights in blocks of 16, column-wise from the forward's values."""
    if _is(role, "weight"):
        return _by_direction(NVFP4Quantizer(), NVFP4Quantizer(), dequantized=True)
    return nvfp4_factory(role)


def nvfp4_row_scaled_fwd_high_precision_bwd_factory(role: QuantizerRole | None) -> Quantizer:
    """Return a quantizer for a forward in NVFP4, inputs with an amax per row, and a high-precision backward.

    The backward reads the forward's values.
    """
    if _is(role, "grad_output"):
        return IdentityQuantizer()
    plain = NVFP4Quantizer(row_scaled_nvfp4=_is(role, "input"))
    return (
        _by_direction(plain, IdentityQuantizer(), dequantized=True) if _is(role, "input", "weight") else plain
    )


def nvfp4_row_scaled_fwd_mxfp8_bwd_factory(role: QuantizerRole | None) -> Quantizer:
    """Return, for grouped layers, a quantizer for a forward in NVFP4, inputs with an amax per row, and MXFP8 backward.

    The backward quantizes the forward's values. Other layers use MXFP8.
    """
    mxfp8 = mxfp8_factory(role)
    if role is None or role.module_type != "grouped_linear" or not _is(role, "input", "weight"):
        return mxfp8
    return _by_direction(NVFP4Quantizer(row_scaled_nvfp4=_is(role, "input")), mxfp8, dequantized=True)


def nvfp4_linear_mxfp8_grouped_linear_factory(role: QuantizerRole | None) -> Quantizer:
    """Return an MXFP8 quantizer for grouped layers, an NVFP4 quantizer for others."""
    return (
        mxfp8_factory(role)
        if role is not None and role.module_type == "grouped_linear"
        else nvfp4_factory(role)
    )
