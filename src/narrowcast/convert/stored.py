"""Frozen weights that are kept as one quantized copy, row-wise: in the recipe's format, in four bits, or in MXFP8.

In the recipe's format, "stored", a step quantizes no weight: fprop reads the copy as it is, and dgrad reads its
transpose, which holds the same numbers in formats that quantize a matrix and its transpose alike.

In four bits, "nvfp4" or "mxfp4", in "mxfp6", "mxfp8" and "fp8-channel", each pass decodes the copy to the model's dtype
and quantizes the result under the recipe. So outputs and gradients are those of the same recipe on a plain weight with
the decoded values, bit for bit, under every recipe and on every device. Nothing but the copy, and the scale or the
maxima that quantize its values once more, is kept from the forward to the backward.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn

from .._checks import shown
from ..formats import DType
from ..layers.described import how_stored
from ..layers.parameters import weight_quantizer
from ..quantizers import (
    Float8RowsQuantizer,
    MXFP4Quantizer,
    MXFP6Quantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Operand,
    Quantizer,
)
from ..recipe import Recipe
from ..upstream.modules import own_parameters

_SYMMETRIC = ("tensor", "128x128")

FOUR_BITS: dict[str, Quantizer] = {
    "nvfp4": NVFP4Quantizer(columnwise=False),
    "mxfp4": MXFP4Quantizer(columnwise=False),
}
"""Quantizers of weights that are stored in four bits, by name."""

DECODED: dict[str, Quantizer] = {
    **FOUR_BITS,
    "mxfp6": MXFP6Quantizer(columnwise=False),
    "mxfp8": MXFP8Quantizer(DType.kFloat8E4M3, columnwise=False),
    "fp8-channel": Float8RowsQuantizer(DType.kFloat8E4M3, columnwise=False),
}
"""Quantizers of copies that each pass decodes, by name: their formats quantize a matrix and its transpose otherwise."""


def stored_quantizer(recipe: Recipe, name: str, weights: str = "stored") -> Quantizer:
    """Return the quantizer of a weight to be stored.

    Args:
        weights: "stored" for the recipe's format, or a name of :data:`DECODED`.
    Raises:
        ValueError: the recipe's format for weights is another one row-wise than column-wise.
    """
    if weights in DECODED:
        return DECODED[weights]
    quantizer = weight_quantizer(recipe, name, "linear")  # only nn.Linear stores weights
    if quantizer._format_layout().native not in _SYMMETRIC:
        raise ValueError(
            f"weights='stored' keeps one copy for both directions, and {type(recipe).__name__} quantizes them "
            "differently; use Float8CurrentScaling, DelayedScaling or Float8BlockScaling, or weights='nvfp4', "
            "'mxfp4', 'mxfp6', 'mxfp8' or 'fp8-channel'"
        )
    return quantizer.with_usage(rowwise=True, columnwise=False)


def stored_bytes(recipe: Recipe, name: str, weight: torch.Tensor, weights: str) -> int:
    """Return bytes of the copy; ``weights`` as in :func:`stored_quantizer`."""
    operand = Operand.of(stored_quantizer(recipe, name, weights), True, False)
    buffers = operand.quantizer._describe_buffers(tuple(weight.shape), weight.dtype)
    return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in buffers.values())


def why_not_stored(weight: torch.Tensor, uses: Counter[int], meta: bool = False) -> str:
    """Return what stands in the way of storing a weight, "" for nothing.

    Args:
        uses: how many modules have each parameter, by its id.
        meta: the weight may be on the meta device, since its values are yet to come.
    """
    if weight.requires_grad:
        return "its weight trains, and is not stored quantized"
    if uses[id(weight)] > 1:
        return "its weight is tied, and is not stored quantized"
    if weight.is_meta and not meta:
        return "its weight is on the meta device, and is not stored quantized"
    return ""


def nothing_to_store(weights: str) -> ValueError:
    """Return the error for a model without a weight that could be stored."""
    return ValueError(
        f"weights={shown(weights)} finds no frozen weight of an nn.Linear to store; call model.requires_grad_(False) "
        "first"
    )


def uses_of_parameters(model: nn.Module) -> Counter[int]:
    """Return how many modules have each parameter, by its id."""
    return Counter(
        id(p) for module in model.modules() for p in own_parameters(module).values() if p is not None
    )


def stored_as(module: nn.Module) -> str:
    """Return how the weight of a converted module is stored, as :func:`stored_quantizer` takes it; "" if it is not."""
    return vars(module).get("_stored_copy", "")  # type: ignore[no-any-return]


def store(layer: Any, weights: str) -> None:
    """Store a converted linear layer's weight quantized; a weight that already is stays."""
    if how_stored(layer.weight) != "codes":
        quantized = stored_quantizer(layer.recipe, layer.name, weights).quantize(layer.weight.detach())
        layer.weight = nn.Parameter(quantized, requires_grad=False)
    layer._stored_rowwise, layer._stored_copy = True, weights
    if weights in DECODED:
        layer._decodes = weights


def restore(layer: Any) -> None:
    """Store the values of the quantized weight in high precision, in its former dtype."""
    if stored_as(layer):
        value = layer.weight.detach().dequantize()
        layer.weight = nn.Parameter(value, requires_grad=layer.weight.requires_grad)
        del layer._stored_rowwise, layer._stored_copy
        vars(layer).pop("_decodes", None)
