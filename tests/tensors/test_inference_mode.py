"""Quantized weights under ``torch.inference_mode``, whichever side of it they were made on."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from recipes import QUANTIZED

import narrowcast as nc

GROUPED = ["current", "mxfp8", "block"]


@pytest.mark.parametrize("inside", [False, True], ids=["made outside", "made inside"])
@pytest.mark.parametrize("name", [*QUANTIZED, *(f"grouped {name}" for name in GROUPED)])
def test_weights_are_read_copied_and_saved(name: str, inside: bool) -> None:
    recipe = QUANTIZED[name.removeprefix("grouped ")]
    with torch.inference_mode(inside), nc.quantized_model_init(recipe=recipe):
        if name.startswith("grouped"):
            layer: Any = nc.GroupedLinear(2, 32, 48, device="cpu", single_grouped_parameter=True)
        else:
            layer = nc.Linear(32, 48, device="cpu")
    values = layer.weight.dequantize()
    with torch.inference_mode():
        made = (layer.weight.detach(), layer.weight.clone(), layer.weight.detach().clone())
        made += (copy.deepcopy(layer).weight, layer.state_dict()["weight"])
        for tensor in made:
            plain = tensor.dequantize() if hasattr(tensor, "dequantize") else tensor
            assert torch.equal(plain, values)
