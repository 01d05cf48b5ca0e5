"""Random layers under ``torch.compile(fullgraph=True)``: the bits of eager code, and no graph after the second step."""

from __future__ import annotations

import copy

import torch
from torch._dynamo.testing import CompileCounterWithBackend

from .draw import Draw, assert_same, gradients


def case(draw: Draw) -> dict[str, float]:
    recipe, dtype = draw.recipe(with_none=True), draw.dtype()
    features, rows = draw.size("features", 130), draw.size("rows", 130)
    module = draw.layer(features, recipe, dtype)
    dynamic = draw.pick("dynamic", (None, None, True))
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = copy.deepcopy(module)
    forward = torch.compile(compiled, fullgraph=True, dynamic=dynamic, backend=counter)
    graphs: list[int] = []
    for step in range(5):
        # Sizes 0 and 1 are special to the compiler, and so is one block of scales: up to 128 rows are another graph.
        size = rows + 129 + 16 * step if dynamic else rows
        x = draw.values(f"x {step}", (size, features), dtype).contiguous()  # strides would be another graph
        with torch.no_grad():
            outputs = copy.deepcopy(module)(x).shape
        dy = draw.values(f"dy {step}", outputs, dtype).contiguous()
        expected = gradients(module, x, dy)
        torch.manual_seed(7)
        leaf = x.detach().requires_grad_(True)
        y = forward(leaf)
        found = torch.autograd.grad(y, [leaf, *compiled.parameters()], dy)
        assert_same([y.detach(), *found], expected, f"step {step} compiled")
        graphs.append(counter.frame_count)
    state, theirs = compiled.state_dict(), module.state_dict()
    assert state.keys() == theirs.keys(), f"state dicts differ in {state.keys() ^ theirs.keys()}"
    assert_same(list(state.values()), list(theirs.values()), f"state {list(state)}")
    assert graphs[-1] == graphs[1], f"graphs after each step: {graphs}"
    return {"graphs": float(graphs[-1])}
