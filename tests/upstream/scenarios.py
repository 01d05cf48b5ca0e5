"""What is run with a private name hidden; see ``loss.py``. Each returns tensors, whose bits are compared."""

from __future__ import annotations

import copy
from typing import Any

import torch


def _linear(recipe: Any) -> tuple[Any, torch.Tensor]:
    import narrowcast as nc

    torch.manual_seed(0)
    layer = nc.Linear(64, 32, params_dtype=torch.bfloat16, recipe=recipe)
    return layer, torch.randn(16, 64, dtype=torch.bfloat16, requires_grad=True)


def eager() -> list[torch.Tensor]:
    """Forward and backward of a layer, a quantized parameter, and what becomes of it."""
    import narrowcast as nc

    found = []
    for recipe in (nc.recipe.MXFP8BlockScaling(), nc.recipe.DelayedScaling()):
        layer, x = _linear(recipe)
        y = layer(x)
        y.sum().backward()
        found += [y, x.grad, layer.weight.grad]
    quantized = nc.NVFP4Quantizer().quantize(torch.randn(64, 64))
    view = quantized[8:24].t()
    copied = copy.deepcopy(quantized)
    with torch.no_grad():
        copied.mul_(2)
    return [*found, view.clone(), copied.dequantize()]


def compiled() -> list[torch.Tensor]:
    """Forward and backward of a compiled layer, under a recipe that the compiled code builds."""
    import narrowcast as nc

    layer, x = _linear(None)

    def step(x: torch.Tensor) -> torch.Tensor:
        with nc.autocast(recipe=nc.recipe.MXFP8BlockScaling()):
            return layer(x)

    y = torch.compile(step, fullgraph=True, backend="aot_eager")(x)
    y.sum().backward()
    return [y, x.grad, layer.weight.grad]
