"""NaN, infinities and zeros in the input, the weight and the gradient of random layers, and the step after."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

import narrowcast as nc

from .draw import Draw, gradients


def case(draw: Draw) -> dict[str, float]:
    recipe, dtype = draw.recipe(with_none=True), draw.dtype()
    features, rows = draw.size("features", 130), draw.size("rows", 130)
    module = draw.layer(features, recipe, dtype)
    shape = (*draw.lead(rows), features)
    x = draw.values("x", shape, dtype, "normal")
    with torch.no_grad():
        outputs = module(x).shape
    dy = draw.values("dy", outputs, dtype, "normal")
    value = draw.pick("value", (math.nan, math.inf, -math.inf))
    row = draw.note("row", draw.random.randrange(rows))
    where = draw.pick("where", ("x", "dy", "weight", "zeros"))
    if where == "zeros":
        _zeros(module, shape, dy)
        return {}
    good = _finite(gradients(module, x, dy))
    assert good == [True] * len(good), f"of finite values, result {good.index(False)} is not finite"
    if where == "x":
        bad = _with(x, row, draw.random.randrange(features), value)
        results = gradients(module, bad, dy)
        assert not results[0].flatten(0, -2)[row].isfinite().any(), "the row of y is finite"
        assert _finite(results[1:]).count(False), "no gradient shows it"
    elif where == "dy":
        bad = _with(dy, row, draw.random.randrange(outputs[-1]), value)
        results = gradients(module, x, bad)
        assert results[0].isfinite().all(), "the forward sees the gradient"
        assert _finite(results[1:]).count(False), "no gradient shows it"
        if isinstance(module, nc.Linear):
            assert not results[1].flatten(0, -2)[row].isfinite().any(), "the row of dx is finite"
            assert not results[2].isfinite().all(), "dw is finite"
    else:
        weight = next(p for p in module.parameters() if p.dim() == 2)
        kept = weight.detach().clone()
        with torch.no_grad():
            weight[draw.random.randrange(weight.shape[0]), draw.random.randrange(weight.shape[1])] = value
        results = gradients(module, x, dy)
        assert not results[0].isfinite().all() or not isinstance(module, nc.Linear), "y is finite"
        assert _finite(results[:2]).count(False), "neither y nor dx shows it"
        with torch.no_grad():
            weight.copy_(kept)
    after = _finite(gradients(module, x, dy))
    assert after == [True] * len(after), f"in the step after, result {after.index(False)} is not finite"
    return {}


def _zeros(module: nn.Module, shape: tuple[int, ...], dy: Tensor) -> None:
    """Zeros as input, as gradient, as both."""
    zero_x = torch.zeros(shape, dtype=dy.dtype, device=dy.device)
    results = gradients(module, zero_x, dy)
    assert all(_finite(results)), "of a zero input, a result is not finite"
    if isinstance(module, nc.Linear):
        bias = torch.zeros(1, dtype=dy.dtype, device=dy.device) if module.bias is None else module.bias
        assert torch.equal(results[0], bias.expand_as(results[0])), "of a zero input, y is not the bias"
        assert not results[2].any(), "of a zero input, dw is not zero"
    results = gradients(module, torch.randn_like(zero_x), torch.zeros_like(dy))
    assert not any(gradient.any() for gradient in results[1:]), "of a zero gradient, a gradient is not zero"


def _with(x: Tensor, row: int, column: int, value: float) -> Tensor:
    x = x.contiguous().clone()
    x.view(-1, x.shape[-1])[row, column] = value
    return x


def _finite(results: list[Tensor]) -> list[bool]:
    return [bool(result.isfinite().all()) for result in results]
