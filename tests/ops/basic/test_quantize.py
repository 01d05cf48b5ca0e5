"""Quantize: rounds forward, backward or both, inside autocast only, and hands codes to who asks for them."""

from __future__ import annotations

import copy
import dataclasses
from functools import partial
from typing import Any

import pytest
import torch
from modules import assert_same, step
from ops_checks import check, check_compiled, make_inputs
from recipes import DEVICE, QUANTIZED, RECIPES
from torch import nn
from torch.utils.checkpoint import checkpoint

import narrowcast as nc
from narrowcast import ops
from narrowcast.recipe import linear_plan
from narrowcast.tensors import QuantizedTensorStorage

from .contract import check_split_forward


def rounded(x: torch.Tensor, recipe: Any, mode: str) -> torch.Tensor:
    """Quantized as the recipe does it, and dequantized."""
    plan = linear_plan(recipe, "", False, False, module_type="linear")
    quantizer = (plan.input if mode == "forward" else plan.grad_output).quantizer
    return quantizer.replace(internal=False).quantize(x.detach()).dequantize()


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("forward", [False, True])
@pytest.mark.parametrize("name", ["current", "mxfp8", "block", "custom"])
def test_rounds_what_it_is_told_to(name: str, forward: bool, backward: bool) -> None:
    op, recipe = ops.Quantize(forward, backward), RECIPES[name]
    (x,) = make_inputs([(3, 5, 64)])
    with nc.autocast(recipe=recipe):
        out = op(x)
    grad = torch.randn_like(out)
    (dx,) = torch.autograd.grad(out, x, grad)
    assert torch.equal(out, rounded(x, recipe, "forward") if forward else x)
    assert torch.equal(dx, rounded(grad, recipe, "backward") if backward else grad)
    assert not forward or not torch.equal(out, x)


def test_does_nothing_without_a_recipe() -> None:
    op = ops.Quantize(True, True)
    (x,) = make_inputs([(3, 64)])
    out = op(x)
    grad = torch.randn_like(out)
    assert torch.equal(out, x) and torch.equal(torch.autograd.grad(out, x, grad)[0], grad)


def test_leaves_gradients_alone_under_a_backward_override() -> None:
    recipe = dataclasses.replace(nc.recipe.Float8CurrentScaling(), backward_override="high_precision")
    (x,) = make_inputs([(3, 64)])
    with nc.autocast(recipe=recipe):
        out = ops.Quantize(True, True)(x)
    grad = torch.randn_like(out)
    assert not torch.equal(out, x) and torch.equal(torch.autograd.grad(out, x, grad)[0], grad)


def test_delayed_scaling_follows_the_amax() -> None:
    op, recipe = ops.Quantize(True, True, device=DEVICE), nc.recipe.DelayedScaling(amax_history_len=2)
    (x,) = make_inputs([(4, 64)])
    for step_ in range(3):
        with nc.autocast(recipe=recipe):
            out = op(x * 2.0**step_)
        out.backward(torch.full_like(out, 0.5))
        nc.renew_delayed_scaling(op)
    amax = (x * 4.0).abs().max().float()
    assert op.scale[0] == 448.0 / amax and not op.amax.any()
    assert op.scale[2] == 57344.0 / 0.5


@pytest.mark.parametrize("name", QUANTIZED)
def test_promises(name: str) -> None:
    op = ops.Quantize(True, True, device=DEVICE)
    check_compiled(op, [(5, 3, 50)], QUANTIZED[name], dynamic=name == "current")
    if name in ("delayed", "nvfp4"):
        check(lambda: op, [(5, 3, 64)], QUANTIZED[name])
    check_split_forward(op, *make_inputs([(5, 64)]))


def around(*more: nn.Module) -> ops.Sequential:
    torch.manual_seed(3)
    kwargs: Any = {"device": DEVICE, "dtype": torch.bfloat16}
    return ops.Sequential(ops.BasicLinear(64, 48, **kwargs), *more, ops.BasicLinear(48, 40, **kwargs))


@pytest.mark.parametrize("name", QUANTIZED)
def test_rounds_once_between_linear_layers(name: str) -> None:
    """In front of who quantizes anyway it changes nothing: what it hands over has been quantized as asked."""
    plain = around()
    quantizing = around(ops.Quantize(True, True, device=DEVICE))
    for seed in range(2):
        inputs = make_inputs([(4, 8, 64)], seed=seed)
        expected = step(plain, inputs, QUANTIZED[name])
        ours = step(quantizing, inputs, QUANTIZED[name])
        assert_same(ours, {key.replace("d 1.", "d 2."): value for key, value in expected.items()})


def test_hands_over_codes() -> None:
    _, quantize, linear = around(ops.Quantize(device=DEVICE))
    (x,) = make_inputs([(4, 8, 48)])
    with nc.autocast(recipe=RECIPES["mxfp8"]):
        wanted = ops.ScaledOperand(linear.get_input_quantizer())  # type: ignore[operator]
        made, _ = quantize.op_forward_compute(  # type: ignore[operator]
            x, prev_op_grad_output_quantizer=None, next_op_input_quantizer=wanted, requires_grad=True
        )
    assert isinstance(made, QuantizedTensorStorage) and made.shape == x.shape


@pytest.mark.parametrize("name", QUANTIZED)
def test_a_layer_behind_it_trains(name: str) -> None:
    """Outside of a list nobody asks for columns; a layer's weight gradient reads them all the same."""
    torch.manual_seed(0)
    quantize, linear = ops.Quantize(device=DEVICE), nc.Linear(64, 48, device=DEVICE, bias=False)
    (x,) = make_inputs([(32, 64)], dtype=torch.float32)
    for leaf in (x, x.detach()):
        linear.weight.grad = None
        with nc.autocast(recipe=QUANTIZED[name]):
            given = quantize(leaf)
            linear(given).sum().backward()
            with torch.no_grad():
                assert not quantize.eval()(leaf).get_usages()["columnwise"]
            quantize.train()
        wanted = torch.ones(32, 48, device=DEVICE).t() @ x.detach()
        error = (linear.weight.grad - wanted).norm() / wanted.norm()  # type: ignore[operator]
        assert error < 0.3


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("name", QUANTIZED)
def test_a_layer_behind_a_reentrant_checkpoint_of_it_trains(name: str, nested: bool) -> None:
    """Whose first run records no gradients, and hands the quantized tensor on."""
    torch.manual_seed(0)
    linear, results = nc.Linear(64, 48, device=DEVICE, bias=False), []
    (x,) = make_inputs([(32, 64)], dtype=torch.float32)
    for recomputed in (False, True):
        quantize, linear.weight.grad = ops.Quantize(device=DEVICE), None
        checkpointed = partial(checkpoint, use_reentrant=True) if recomputed else lambda run, x: run(x)
        leaf = x.detach().requires_grad_()
        with nc.autocast(recipe=QUANTIZED[name]):
            if nested:
                y = checkpointed(lambda x: linear(checkpointed(quantize, x)), leaf)
            else:
                y = linear(checkpointed(quantize, leaf))
            y.sum().backward()
        results.append([y.detach(), leaf.grad, linear.weight.grad])
    assert all(map(torch.equal, *results))


def test_its_quantizers() -> None:
    op = ops.Quantize(forward=False, backward=True)
    assert (op.num_quantizers("forward"), op.num_quantizers("backward")) == (0, 1)
    assert op.get_quantizer("backward", 0) is None
    with nc.autocast(recipe=RECIPES["current"]):
        operand = op.get_quantizer("backward", 0)
        assert operand is not None and any(operand.rowwise) and not any(operand.columnwise)
        with pytest.raises(IndexError, match="has 0 forward quantizers; there is no number 0"):
            op.get_quantizer("forward", 0)


def test_a_copy_has_its_scales_renewed() -> None:
    copied = copy.deepcopy(nc.ops.Quantize())
    x = 100 * make_inputs([(16, 32)])[0].detach()
    for _ in range(2):
        with nc.autocast(recipe=RECIPES["delayed"]):
            copied(x)
    assert copied.scale[0] != 1


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
def test_a_reentrant_checkpoint_reads_the_gradient_scale_of_its_forward(compiles: bool) -> None:
    """Its first run records no gradients, and nothing in the graph of that run needs the scale."""
    recipe = nc.recipe.DelayedScaling(amax_history_len=1)

    def gradients(recomputes: bool) -> list[torch.Tensor]:
        op, found = ops.Quantize(forward=False, backward=True, device="cpu"), []
        model = ops.Sequential(op)
        nc.set_recipe(model, recipe)
        op.recipe = recipe
        run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiles else model
        for seed in range(3):
            x = torch.randn(16, 32, generator=torch.Generator().manual_seed(seed)).requires_grad_()
            y = checkpoint(run, x, use_reentrant=True) if recomputes else run(x)
            with torch.no_grad():
                run(x)  # renews
            ((10.0**seed) * y.sin()).sum().backward()
            found.append(x.grad)
        return [*found, *(buffer for name, buffer in op.state_dict().items())]

    for ours, wanted in zip(gradients(True), gradients(False), strict=True):
        assert torch.equal(ours, wanted)


@pytest.mark.inductor
def test_a_reentrant_checkpoint_of_no_rows_under_inductor() -> None:
    """Inductor knows that an empty output depends on nothing, and left out what reads the gradient's scale."""
    model = ops.Sequential(ops.Quantize(forward=False), ops.Linear(17, 17, device=DEVICE))
    nc.set_recipe(model, nc.recipe.DelayedScaling())
    run = torch.compile(model, fullgraph=True)
    x = torch.randn(0, 17, device=DEVICE, requires_grad=True)
    checkpoint(run, x, use_reentrant=True).sum().backward()
    assert x.grad is not None and x.grad.shape == (0, 17)
