"""Frozen weights that are kept as one quantized copy: a byte per element, and nothing to quantize in a step.

The copy is row-wise, as fprop reads it. dgrad reads the other direction, which the backward makes by transposing: those
are the same numbers in formats that quantize a matrix and its transpose alike.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn

from ..layers.parameters import weight_quantizer
from ..quantizers import Operand, Quantizer
from ..recipe import Recipe
from ..tensors import QuantizedTensor
from ..upstream.modules import own_parameters

_SYMMETRIC = ("tensor", "128x128")


def stored_quantizer(recipe: Recipe, name: str) -> Quantizer:
    """Return the quantizer of a weight to be stored.

    Raises:
        ValueError: the recipe's format for weights is another one row-wise than column-wise.
    """
    quantizer = weight_quantizer(recipe, name, "linear")  # only nn.Linear stores weights
    if quantizer._format_layout().native not in _SYMMETRIC:
        raise ValueError(
            f"weights='stored' keeps one copy for both directions, and {type(recipe).__name__} quantizes them "
            "differently; use Float8CurrentScaling, DelayedScaling or Float8BlockScaling"
        )
    return quantizer.with_usage(rowwise=True, columnwise=False)


def stored_bytes(recipe: Recipe, name: str, weight: torch.Tensor) -> int:
    """Return bytes of the copy."""
    operand = Operand.of(stored_quantizer(recipe, name), True, False)
    buffers = operand.quantizer._describe_buffers(tuple(weight.shape), weight.dtype)
    return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in buffers.values())


def why_not_stored(weight: torch.Tensor, uses: Counter[int]) -> str:
    """Return what stands in the way of storing a weight, "" for nothing; ``uses``: modules by the id of their
    parameters.
    """
    if weight.requires_grad:
        return "its weight trains, and is not stored quantized"
    if uses[id(weight)] > 1:
        return "its weight is tied, and is not stored quantized"
    if weight.is_meta:
        return "its weight is on the meta device, and is not stored quantized"
    return ""


def uses_of_parameters(model: nn.Module) -> Counter[int]:
    """Return how many modules have each parameter, by its id."""
    return Counter(
        id(p) for module in model.modules() for p in own_parameters(module).values() if p is not None
    )


def store(layer: Any) -> None:
    """Store a converted linear layer's weight quantized; a weight that already is stays."""
    if not isinstance(layer.weight, QuantizedTensor):
        quantized = stored_quantizer(layer.recipe, layer.name).quantize(layer.weight.detach())
        layer.weight = nn.Parameter(quantized, requires_grad=False)
    layer._stored_rowwise = True


def restore(layer: Any) -> None:
    """Store the values of the quantized weight in high precision, in its former dtype."""
    if getattr(layer, "_stored_rowwise", False):
        value = layer.weight.detach().dequantize()
        layer.weight = nn.Parameter(value, requires_grad=layer.weight.requires_grad)
        del layer._stored_rowwise
