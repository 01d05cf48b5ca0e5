"""Roles: the module type, tensor type and layer name that a recipe chooses a quantizer by."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class QuantizerRole:
    """The description of a slot for a custom recipe's factory; empty strings if unknown.

    Attributes:
        module_type: linear, grouped_linear, ...
        tensor_type: input, weight, output, grad_output, grad_input.
        name: the module's name.
    """

    module_type: str = ""
    tensor_type: str = ""
    name: str = ""
