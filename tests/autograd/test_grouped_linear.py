"""The boundary of grouped linear layers: each group is what a linear layer of its own computes.

To the bit on a CPU; on a GPU other kernels multiply groups, in another order.
"""

from __future__ import annotations

import pytest
import torch
from recipes import QUANTIZED
from torch import Tensor

import narrowcast as nc
from narrowcast.autograd import (
    DelayedScales,
    Groups,
    LinearFunction,
    LinearFwdArgs,
    LinearWgrad,
    grouped_linear,
)
from narrowcast.autograd import groups as groups_module
from narrowcast.autograd.groups import GatedActivation, GroupedRows, Places
from narrowcast.recipe import linear_plan


def _mixed(role: nc.QuantizerRole) -> nc.Quantizer:
    if role.tensor_type == "grad_output":
        return nc.MXFP8Quantizer(nc.DType.kFloat8E5M2)
    return nc.HybridQuantizer(
        rowwise_quantizer=nc.MXFP8Quantizer(nc.DType.kFloat8E4M3),
        columnwise_quantizer=nc.Float8CurrentScalingQuantizer(nc.DType.kFloat8E4M3),
    )


RECIPES = {**QUANTIZED, "mixed": nc.recipe.CustomRecipe(qfactory=_mixed, emulate=True)}
DTYPE = torch.bfloat16
SIZES = [32, 0, 64]


def operands() -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """(input, weights, biases)."""
    place = {"device": "cpu", "dtype": DTYPE}
    x = torch.randn(sum(SIZES), 32, **place, requires_grad=True)  # type: ignore[call-overload]
    weights = [torch.randn(48, 32, **place, requires_grad=True) for _ in SIZES]  # type: ignore[call-overload]
    return x, weights, [torch.randn(48, **place, requires_grad=True) for _ in SIZES]  # type: ignore[call-overload]


@pytest.mark.parametrize("known", [True, False], ids=["host", "device"])
@pytest.mark.parametrize("name", ["current", "mxfp8", "block", "mixed"])
def test_groups_are_linear_layers(name: str, known: bool) -> None:
    x, weights, biases = operands()
    plan = linear_plan(RECIPES[name], "", True, True, module_type="linear")
    args = LinearFwdArgs(plan, DTYPE, DelayedScales(), None, LinearWgrad(), True)
    groups = Groups(3, 48, 32, True, True, known)
    y = grouped_linear(x, torch.tensor(SIZES), weights, biases, args, groups)
    ours = torch.autograd.grad(y.float().square().sum(), [x, *weights, *biases])
    rows = x.split(SIZES)
    alone = [LinearFunction.apply(w, part, b, args) for w, part, b in zip(weights, rows, biases) if len(part)]
    expected = torch.cat(alone)
    theirs = torch.autograd.grad(
        expected.float().square().sum(), [x, *weights, *biases], allow_unused=True, materialize_grads=True
    )
    assert torch.equal(y, expected)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


def test_what_is_saved_of_a_plain_input_is_itself() -> None:
    """No view of it, which a hook on saved tensors would take for another tensor."""
    x, weights, biases = operands()
    whole, saved = x.detach().view(2, -1, 32).requires_grad_(), []
    args = LinearFwdArgs(
        linear_plan(None, "", True, True, module_type="linear"),
        DTYPE,
        DelayedScales(),
        None,
        LinearWgrad(),
        True,
    )
    with torch.autograd.graph.saved_tensors_hooks(lambda one: saved.append(one) or one, lambda one: one):
        grouped_linear(
            whole, torch.tensor(SIZES), weights, biases, args, Groups(3, 48, 32, True, True, False)
        )
    assert any(one is whole for one in saved)


@pytest.mark.parametrize("wanted", ["input", "weight", "bias", "nothing"])
@pytest.mark.parametrize("name", ["high precision", "current"])
def test_one_gradient_alone(name: str, wanted: str) -> None:
    x, weights, biases = operands()
    recipe = QUANTIZED.get(name)
    full = LinearFwdArgs(
        linear_plan(recipe, "", True, True, module_type="linear"),
        DTYPE,
        DelayedScales(),
        None,
        LinearWgrad(),
        True,
    )
    groups = Groups(3, 48, 32, True, True, True)
    y = grouped_linear(x, torch.tensor(SIZES), weights, biases, full, groups)
    leaves = {"input": [x], "weight": weights, "bias": biases, "nothing": []}[wanted]
    expected = torch.autograd.grad(y.float().square().sum(), leaves) if leaves else ()
    for tensor in (x, *weights, *biases):
        tensor.requires_grad_(any(tensor is leaf for leaf in leaves))
    plan = linear_plan(recipe, "", wanted == "input", wanted == "weight", module_type="linear")
    args = LinearFwdArgs(plan, DTYPE, DelayedScales(), None, LinearWgrad(), wanted == "bias")
    alone = grouped_linear(x, torch.tensor(SIZES), weights, biases, args, groups)
    assert torch.equal(alone, y)
    assert alone.requires_grad == bool(leaves)
    if leaves:
        for ours, theirs in zip(torch.autograd.grad(alone.float().square().sum(), leaves), expected):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("single", [True, False])
def test_stored_weights_are_decoded_for_a_backward_in_high_precision(single: bool) -> None:
    """Also where a list of operations has saved them as bare storages."""
    recipe = nc.recipe.Float8CurrentScaling(backward_override="high_precision")
    with nc.quantized_model_init(recipe=recipe):
        layer = nc.ops.GroupedLinear(3, 32, 48, device="cpu", dtype=DTYPE, single_grouped_weight=single)
    model = nc.set_recipe(nc.ops.Sequential(layer), recipe)
    x, splits = operands()[0], torch.tensor(SIZES)
    y = model(x, splits)
    dy = torch.randn_like(y)
    y.backward(dy)
    weights = [w.detach().dequantize() for w in layer._parts_of("weight")]
    each = weights[0].unbind(0) if single else weights
    expected = torch.cat([part @ w for part, w in zip(dy.split(SIZES), each)])
    assert x.grad is not None and torch.equal(x.grad, expected)


def test_what_a_stage_on_groups_follows_from() -> None:
    splits, scales = torch.tensor(SIZES), torch.ones(sum(SIZES))
    groups = [Groups(3, 48, 32, True, True, True), Groups(3, 48, 64, True, True, True)]
    groups += [Groups(2, 48, 32, True, True, True), Groups(3, 48, 32, True, True, False)]
    rows = [GroupedRows(one, splits, DTYPE, DTYPE, scales) for one in groups]
    rows += [GroupedRows(groups[0], splits, torch.float32, DTYPE, scales)]
    rows += [GroupedRows(groups[0], splits, DTYPE, torch.float32, scales)]
    hidden = torch.ones(4, 4)
    of_activations = [GatedActivation("swiglu", []), GatedActivation("swiglu", [1.0], hidden)]
    rows += [GroupedRows(groups[0], splits, DTYPE, DTYPE, scales, one) for one in of_activations]
    depends = [one.depends() for one in rows]
    assert len({key for key, _ in depends}) == len(rows)
    assert GroupedRows(groups[0], splits, DTYPE, DTYPE).depends()[0] == depends[0][0]
    for (_, tensors), others in zip(depends, [[]] * 6 + [[None], [hidden]], strict=True):
        assert all(a is b for a, b in zip(tensors, [splits, scales, *others], strict=True))


def test_where_weights_of_groups_are() -> None:
    whole = torch.zeros(3, 4, 5)
    assert Places([whole]).depends() == ((1, False), [])
    assert Places([*whole]).depends() == ((3, True), [])
    assert Places([whole[0], whole[2]]).depends() == ((2, False), [])
    assert Places([*whole[:2]]).depends() == ((2, True), [])


def test_the_forward_alone_is_batch_invariant(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def count(name: str) -> None:
        run = getattr(groups_module, name)
        monkeypatch.setattr(
            groups_module, name, lambda kind, *rest: calls.append((name, kind)) or run(kind, *rest)
        )

    count("grouped_gemm")
    count("grouped_gemm_batch_invariant")
    x, weights, biases = operands()
    nc.set_deterministic("batch-invariant")
    try:
        plan = linear_plan(QUANTIZED["block"], "", True, True, module_type="linear")
    finally:
        nc.set_deterministic(None)
    args = LinearFwdArgs(plan, DTYPE, DelayedScales(), None, LinearWgrad(), True)
    y = grouped_linear(x, torch.tensor(SIZES), weights, biases, args, Groups(3, 48, 32, True, True, True))
    y.float().sum().backward()
    assert calls == [("grouped_gemm_batch_invariant", "fprop"), ("grouped_gemm", "dgrad")]


@pytest.mark.parametrize("single", [True, False])
def test_stored_weights_are_decoded_for_a_forward_in_high_precision(single: bool) -> None:
    with nc.quantized_model_init(recipe=QUANTIZED["current"]):
        layer = nc.ops.GroupedLinear(
            3, 32, 48, device="cpu", dtype=DTYPE, bias=False, single_grouped_weight=single
        )
    x, splits = operands()[0], torch.tensor(SIZES)
    y = nc.ops.Sequential(layer)(x, splits)
    dy = torch.randn_like(y)
    y.backward(dy)
    weights = [w.detach().dequantize() for w in layer._parts_of("weight")]
    each = weights[0].unbind(0) if single else weights
    assert torch.equal(y, torch.cat([part @ w.t() for part, w in zip(x.split(SIZES), each)]))
    expected = torch.cat([part @ w for part, w in zip(dy.split(SIZES), each)])
    assert x.grad is not None and torch.equal(x.grad, expected)


@pytest.mark.parametrize("name", ["mxfp8", "block"])
def test_groups_of_codes_are_quantized_as_what_they_decode_to(name: str) -> None:
    x, splits = operands()[0].detach(), torch.tensor(SIZES)
    codes = nc.MXFP8Quantizer(nc.DType.kFloat8E5M2, rowwise=True, columnwise=False)(x)
    operand = linear_plan(QUANTIZED[name], "", True, True, module_type="linear").input
    rows = GroupedRows(Groups(3, 48, 32, True, True, True), splits, DTYPE, DTYPE)
    found, expected = rows.quantize(codes, operand), rows.quantize(codes.dequantize().to(DTYPE), operand)
    assert found.rowwise and found.columnwise
    for ours, theirs in zip(found, expected):
        if isinstance(ours, list):
            assert all(map(torch.equal, ours, theirs))
