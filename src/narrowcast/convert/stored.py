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
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .. import _keywords
from .._checks import is_one_of, not_among, shown
from ..formats import DType
from ..layers.described import how_stored
from ..layers.parameters import weight_quantizer
from ..nn import Linear
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
from ..tensors import grouped_tensor_of, quantize_members
from ..upstream.modules import own_parameters
from .experts import StackedExpertsLayer, is_transposed

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


EXPORTED_AS = {"plain": "bf16", "stored": "compressed-tensors", "fp8-channel": "compressed-tensors"}
"""Formats of ``export`` for ways to keep weights that have another name there."""


def check_weights(weights: Any, ways: Sequence[str]) -> None:
    """Check a ``weights=``.

    Raises:
        ValueError: it is none of the ways.
    """
    if is_one_of(weights, ways):
        return
    if isinstance(weights, str) and weights in _keywords.CHOICES["format"]:
        here = [way for way in ways if EXPORTED_AS.get(way, way) == weights] or ["stored"]
        use = " or ".join(map(shown, here))
        raise ValueError(f"weights is {shown(weights)}, which is a format of narrowcast.export; use {use}")
    raise ValueError(f"weights is {not_among(weights, ways)}")


def stored_quantizer(
    recipe: Recipe, name: str, weights: str = "stored", module_type: str = "linear"
) -> Quantizer:
    """Return the quantizer of a weight to be stored; of stacked experts that of each.

    Args:
        name, module_type: of the layer, in quantizer roles.
        weights: "stored" for the recipe's format, or a name of :data:`DECODED`.
    Raises:
        ValueError: the recipe's format for weights is another one row-wise than column-wise.
    """
    if weights in DECODED:
        return DECODED[weights]
    quantizer = weight_quantizer(recipe, name, module_type)
    if quantizer._format_layout().native not in _SYMMETRIC:
        raise ValueError(
            f"weights='stored' keeps one copy for both directions, and {type(recipe).__name__} quantizes them "
            "differently; use Float8CurrentScaling, DelayedScaling or Float8BlockScaling, or weights='nvfp4', "
            "'mxfp4', 'mxfp6', 'mxfp8' or 'fp8-channel'"
        )
    return quantizer.with_usage(rowwise=True, columnwise=False)


def stored_bytes(
    recipe: Recipe,
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    weights: str,
    module_type: str = "linear",
) -> int:
    """Return bytes of the copy of a weight (N, K) or (G, N, K); the others are those of :func:`stored_quantizer`."""
    operand = Operand.of(stored_quantizer(recipe, name, weights, module_type), True, False)
    if len(shape) == 3:
        members = quantize_members([torch.empty(shape, dtype=dtype, device="meta")], operand.quantizer)
        return sum(buffer.nbytes for buffer in members.get_data_tensors() if buffer is not None)
    buffers = operand.quantizer._describe_buffers(shape, dtype)
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


def stores(layer: Any, module: Any) -> bool:
    """Return whether a module, which is a ``layer`` or becomes one, keeps its weights as one quantized copy."""
    return issubclass(layer or type(module), (Linear, StackedExpertsLayer))


def nothing_to_store(weights: str) -> ValueError:
    """Return the error for a model without a weight that could be stored."""
    return ValueError(
        f"weights={shown(weights)} finds no frozen weight of an nn.Linear or of experts to store; call "
        "model.requires_grad_(False) first"
    )


def uses_of_parameters(model: nn.Module) -> Counter[int]:
    """Return how many modules have each parameter, by its id."""
    return Counter(
        id(p) for module in model.modules() for p in own_parameters(module).values() if p is not None
    )


def stored_as(module: nn.Module) -> str:
    """Return how the weight of a converted module is stored, as :func:`stored_quantizer` takes it; "" if it is not."""
    return vars(module).get("_stored_copy", "")  # type: ignore[no-any-return]


def stored_copy(value: torch.Tensor, quantizer: Quantizer, transposed: bool) -> nn.Parameter:
    """Return a weight (N, K) as a quantized parameter, or those of experts (E, N, K), which may be ``transposed``."""
    quantized: Any = (
        grouped_tensor_of(value, quantizer, transposed) if value.dim() == 3 else quantizer.quantize(value)
    )
    return nn.Parameter(quantized, requires_grad=False)


def store(layer: Any, weights: str) -> None:
    """Store a converted layer's weights quantized; a weight that already is stays."""
    transposed = is_transposed(layer)
    for stage in layer._stages:
        weight = getattr(layer, stage.weight)
        if how_stored(weight) != "codes":
            quantizer = stored_quantizer(layer.recipe, stage.name, weights, layer._module_type)
            setattr(layer, stage.weight, stored_copy(weight.detach(), quantizer, transposed))
    layer._stored_rowwise, layer._stored_copy = True, weights
    if weights in DECODED:
        layer._decodes = weights


def restore(layer: Any) -> None:
    """Store the values of the quantized weights in high precision, in their former dtype."""
    if stored_as(layer):
        for stage in layer._stages:
            weight = getattr(layer, stage.weight)
            value = nn.Parameter(weight.detach().dequantize(), requires_grad=weight.requires_grad)
            setattr(layer, stage.weight, value)
        del layer._stored_rowwise, layer._stored_copy
        vars(layer).pop("_decodes", None)
