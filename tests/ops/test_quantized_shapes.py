"""Operations on what ``Quantize`` made, in formats whose buffers do not say the shape: hybrids, and padded codes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import narrowcast as nc

MXFP8 = nc.MXFP8Quantizer(nc.DType.kFloat8E4M3)
QUANTIZERS: dict[str, Any] = {
    "hybrid": nc.HybridQuantizer(rowwise_quantizer=MXFP8, columnwise_quantizer=nc.NVFP4Quantizer()),
    "nvfp4_rowwise": nc.HybridQuantizer(rowwise_quantizer=nc.NVFP4Quantizer(), columnwise_quantizer=MXFP8),
    "nvfp4": nc.NVFP4Quantizer(),
    "mxfp8": MXFP8,
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", QUANTIZERS)
def test_gelu_of_quantized_values(name: str, compiled: bool) -> None:
    quantizer = QUANTIZERS[name]
    recipe = nc.recipe.CustomRecipe(qfactory=lambda role: quantizer)
    for shape in ((16, 32), (2, 5, 33)):
        module = nc.ops.Sequential(nc.ops.Quantize(forward=True), nc.ops.GELU())
        x = torch.randn(*shape, requires_grad=True)
        forward = torch.compile(module, fullgraph=True, backend="aot_eager") if compiled else module
        with nc.autocast(recipe=recipe):
            y = forward(x)
        y.sum().backward()
        values = quantizer.quantize(x.detach()).dequantize().requires_grad_()
        expected = torch.nn.functional.gelu(values, approximate="tanh")
        expected.sum().backward()
        assert torch.allclose(y, expected, atol=1e-5) and torch.allclose(x.grad, values.grad, atol=1e-5)  # type: ignore[arg-type]
