"""Dropout: what it computes, where its mask comes from, and that one helper chooses for both halves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from modules import assert_same, step
from ops_checks import check_backwards, check_recomputed, check_without_gradients, make_inputs
from torch import Tensor

from narrowcast import ops

from .contract import check_split_forward


@pytest.mark.parametrize("p", [0.0, 0.25, 0.9, 1.0])
def test_drops_and_scales(p: float) -> None:
    x = torch.ones(100, 200, requires_grad=True)
    torch.manual_seed(0)
    out = ops.Dropout(p)(x)
    kept = out != 0
    assert abs(kept.float().mean().item() - (1 - p)) < 0.01
    if p < 1:
        torch.testing.assert_close(out[kept], torch.full_like(out[kept], 1 / (1 - p)))
    (dx,) = torch.autograd.grad(out, x, torch.full_like(out, 3.0))
    torch.testing.assert_close(dx, 3.0 * out)


def test_is_that_of_torch() -> None:
    (x,) = make_inputs([(8, 33)], dtype=torch.float32)
    torch.manual_seed(1)
    ours = ops.Dropout(0.3)(x)
    torch.manual_seed(1)
    assert torch.equal(ours, torch.nn.functional.dropout(x, 0.3))


def test_does_nothing_while_evaluating() -> None:
    (x,) = make_inputs([(8, 33)])
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = ops.Dropout(0.5).eval()(x)
    assert torch.equal(out, x) and out is not x and not saved
    (dx,) = torch.autograd.grad(out, x, torch.ones_like(out))
    assert torch.equal(dx, torch.ones_like(x))


def test_keeps_one_byte_per_element() -> None:
    (x,) = make_inputs([(8, 33)])
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        ops.Dropout(0.5)(x)
    assert [(t.numel(), t.element_size()) for t in saved] == [(8 * 33, 1)]


class Never(ops.Dropout):
    def implementation(self, *args: Any) -> Any:
        return "identity"


def test_one_helper_chooses_for_both_halves() -> None:
    (x,) = make_inputs([(8, 33)])
    out = Never(0.5)(x)
    (dx,) = torch.autograd.grad(out, x, torch.ones_like(out))
    assert torch.equal(out, x) and torch.equal(dx, torch.ones_like(x))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic: bool) -> None:
    op = ops.Dropout(0.4)
    forward = torch.compile(op, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for rows in (8, 11) if dynamic else (8, 8):
        inputs = make_inputs([(rows, 33)])
        assert_same(step(op, inputs, None, forward), step(op, inputs))
    op.eval()
    assert_same(step(op, inputs, None, forward), step(op, inputs))


def test_promises() -> None:
    op = ops.Dropout(0.4)
    check_without_gradients(op, [(8, 33)])
    check_backwards(op, [(8, 33)])
    check_recomputed(op, [(8, 33)])
    check_split_forward(op.eval(), *make_inputs([(8, 33)]))


@pytest.mark.inductor
def test_inductor_drops_as_much() -> None:
    op = ops.Dropout(0.25)
    x = torch.ones(64, 256, requires_grad=True)
    out = torch.compile(op, fullgraph=True)(x)
    (dx,) = torch.autograd.grad(out, x, torch.ones_like(out))
    assert torch.equal(out, dx) and abs((out == 0).float().mean().item() - 0.25) < 0.02


def test_refuses() -> None:
    for p in (-0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match="p is .*; use a probability between 0 and 1"):
            ops.Dropout(p)
