"""Roles: which tensor of which module a quantizer is for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class QuantizerRole:
    """What a custom recipe's factory is told about a slot; empty strings when unknown.

    ``module_type``: linear, grouped_linear, ... ``tensor_type``: input, weight, output, grad_output, grad_input.
    ``name``: the module's name.
    """

    module_type: str = ""
    tensor_type: str = ""
    name: str = ""
