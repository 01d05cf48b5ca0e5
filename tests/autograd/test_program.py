"""Programs: that they are their parts, what they save, and that recomputation changes no bit."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import pytest
import torch
from recipes import DEVICE, QUANTIZED
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from narrowcast import functional
from narrowcast.autograd import (
    ActivationSettings,
    DelayedScales,
    LinearFunction,
    LinearFwdArgs,
    LinearWgrad,
    NormSettings,
    activate,
    normalize,
)
from narrowcast.autograd.program import (
    Activation,
    Linear,
    Norm,
    NormArgs,
    Program,
    ProgramArgs,
    ProgramFunction,
    Value,
)
from narrowcast.recipe import LinearPlan, MXFP8BlockScaling, linear_plan

DTYPE = torch.bfloat16
NORM, SWIGLU = NormSettings("RMSNorm", 1e-5, False), ActivationSettings("swiglu", ())
NORMS = [NormSettings("LayerNorm", 1e-5, False), NormSettings("RMSNorm", 1e-3, True)]
NORM_LINEAR = Program([Norm(1, 2), Linear(3, 4)], 5)
MLP = Program([Norm(1, 2, 7), Linear(3, 4), Activation(), Linear(5, 6)], 8)


def plan_of(name: str, needed: bool = True) -> LinearPlan:
    return linear_plan(QUANTIZED[name], "", needed, needed, module_type="linear")


def linear_args(plan: LinearPlan, needs_bias: bool = False) -> LinearFwdArgs:
    return LinearFwdArgs(plan, DTYPE, DelayedScales(), None, LinearWgrad(), needs_bias)


# -- a norm and a linear layer -----------------------------------------------------------------------------------------


def norm_linear_operands() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(input, weight of the norm, weight, bias)."""
    place: dict[str, Any] = {"device": DEVICE, "dtype": DTYPE, "requires_grad": True}
    return (
        torch.randn(2, 16, 32, **place),
        torch.randn(32, **place),
        torch.randn(48, 32, **place),
        torch.randn(48, **place),
    )


def norm_linear(tensors: tuple[Tensor, ...], plan: LinearPlan, *returned: bool) -> Any:
    x, norm_weight, weight, bias = tensors
    args = (NormArgs(NORM, *(returned or (False, False))), linear_args(plan, True))
    return ProgramFunction.apply(ProgramArgs(NORM_LINEAR, args), x, norm_weight, None, weight, bias)


@pytest.mark.parametrize("name", [name for name in QUANTIZED if name != "delayed"])
def test_is_a_norm_and_a_linear_layer(name: str) -> None:
    plan, tensors = plan_of(name), norm_linear_operands()
    x, norm_weight, weight, bias = tensors
    results = []
    for fused in (True, False):
        torch.manual_seed(3)
        if fused:
            y = norm_linear(tensors, plan)
        else:
            normalized = normalize(x, norm_weight, None, NORM)
            y = LinearFunction.apply(weight, normalized, bias, linear_args(plan, True))
        results.append([y, *torch.autograd.grad(y.float().square().sum(), tensors)])
    for ours, theirs in zip(*results):
        assert torch.equal(ours, theirs)


def test_the_norm_s_output_is_not_saved() -> None:
    plan, tensors = plan_of("mxfp8"), norm_linear_operands()
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda t: t):
        norm_linear(tensors, plan)
    wide = [tensor for tensor in saved if tensor.numel() >= tensors[0].numel() and tensor.dtype == DTYPE]
    assert {id(tensor) for tensor in wide} <= {id(tensors[0]), id(tensors[2])}


def test_what_is_returned_beside_the_output_takes_gradients() -> None:
    plan, tensors = plan_of("mxfp8"), norm_linear_operands()
    y, normalized, passed = norm_linear(tensors, plan, True, True)
    assert torch.equal(normalized, normalize(tensors[0], tensors[1], None, NORM))
    assert torch.equal(passed, tensors[0])
    (both,) = torch.autograd.grad((y.sum(), normalized.sum(), passed.sum()), tensors[0], retain_graph=True)
    parts = [
        torch.autograd.grad(one.sum(), tensors[0], retain_graph=True)[0] for one in (y, normalized, passed)
    ]
    torch.testing.assert_close(both, sum(parts), rtol=2e-2, atol=2e-2)
    own = torch.autograd.grad(normalize(tensors[0], tensors[1], None, NORM).sum(), tensors[0])[0]
    torch.testing.assert_close(parts[1], own)
    assert torch.equal(parts[2], torch.ones_like(passed))


def test_a_residual_is_added_first_and_takes_the_gradient_of_the_sum() -> None:
    plan, (x, norm_weight, weight, bias) = plan_of("mxfp8"), norm_linear_operands()
    residual = torch.randn_like(x).requires_grad_()
    program = Program([Norm(1, 2, 5), Linear(3, 4)], 6)
    args = (NormArgs(NORM, False, True), linear_args(plan, True))
    y, passed = ProgramFunction.apply(
        ProgramArgs(program, args), x, norm_weight, None, weight, bias, residual
    )
    total = (x + residual).detach().requires_grad_()
    expected = norm_linear((total, norm_weight, weight, bias), plan)
    assert torch.equal(passed, total) and torch.equal(y, expected)
    ours = torch.autograd.grad(y.float().square().sum(), (x, residual, weight))
    (of_sum, of_weight) = torch.autograd.grad(expected.float().square().sum(), (total, weight))
    assert torch.equal(ours[0], of_sum) and torch.equal(ours[1], of_sum) and torch.equal(ours[2], of_weight)


def test_what_the_node_says_of_the_layer() -> None:
    tensors = operands()
    said = block(linear_args(plan_of("current")), *tensors).grad_fn.backward_objects
    assert said.fp8 is True and said.backward_override is None
    assert said.reduce_and_update_bwd_fp8_tensors is False
    assert said.grad_output_quantizer is not None


@pytest.mark.parametrize("settings", NORMS, ids=lambda settings: settings.normalization)
@pytest.mark.parametrize("name", QUANTIZED)
def test_the_output_of_a_norm_is_kept_where_somebody_reads_it(name: str, settings: NormSettings) -> None:
    x, weight = torch.randn(33, 50).bfloat16(), torch.randn(50)
    bias = torch.randn(50) if settings.normalization == "LayerNorm" else None
    expected, mean, rstd, _ = functional.norm(
        x, None, weight, bias, settings.eps, settings.normalization, settings.zero_centered_gamma
    )
    results = []
    for override, keep in ((None, False), (None, True), ("high_precision", False)):
        args = linear_args(dataclasses.replace(plan_of(name), backward_override=override))
        if args.plan.input.unseen is not None:
            args = args._replace(scales=DelayedScales(torch.tensor([2.0, 1.0]), torch.zeros(2)))
        torch.manual_seed(3)
        how, first = NormArgs(settings, keep, False), Value(x, None, (33,), 33)
        normalized, [saved] = Norm(1, 2).forward(first, [x, weight, bias], how, args, [])
        assert torch.equal(saved.tensors[2], mean) and torch.equal(saved.tensors[3], rstd)
        if keep or override:
            assert normalized.plain is not None and torch.equal(normalized.plain, expected)
        else:
            assert normalized.plain is None
        rowwise, columnwise, quantizer = normalized.operand  # type: ignore[misc]
        assert quantizer == args.plan.input.quantizer and rowwise and columnwise
        if args.plan.input.unseen is not None:
            assert args.scales.amax.tolist() == [float(expected.abs().max()), 0.0]  # type: ignore[union-attr]
        results.append(rowwise + columnwise)
    for others in results[1:]:
        assert all(map(torch.equal, results[0], others)) and len(results[0]) == len(others)


# -- a feed-forward block ----------------------------------------------------------------------------------------------


def operands() -> list[Tensor]:
    """Input, weight of the norm, weights of fc1 and fc2."""
    place: dict[str, Any] = {"device": DEVICE, "dtype": DTYPE, "requires_grad": True}
    return [torch.randn(shape, **place) for shape in ((2, 16, 32), (32,), (128, 32), (32, 64))]


def results(name: str, tensors: list[Tensor], run: Any) -> list[Tensor]:
    torch.manual_seed(3)
    y = run(linear_args(plan_of(name)), *tensors)
    return [y, *torch.autograd.grad(y.float().square().sum(), tensors)]


def block(linear: LinearFwdArgs, x: Tensor, norm: Tensor, fc1: Tensor, fc2: Tensor, plans: Any = None) -> Any:
    call = ProgramArgs(MLP, (NormArgs(NORM, False, False), linear, SWIGLU, linear), plans)
    return ProgramFunction.apply(call, x, norm, None, fc1, None, fc2, None, None)


def parts(linear: LinearFwdArgs, x: Tensor, norm: Tensor, fc1: Tensor, fc2: Tensor) -> Any:
    call = ProgramArgs(NORM_LINEAR, (NormArgs(NORM, False, False), linear))
    hidden = ProgramFunction.apply(call, x, norm, None, fc1, None)
    return LinearFunction.apply(fc2, activate(hidden, SWIGLU), None, linear)


@pytest.mark.parametrize("name", ["current", "mxfp8", "block"])
def test_is_its_four_parts(name: str) -> None:
    tensors = operands()
    for ours, theirs in zip(results(name, tensors, block), results(name, tensors, parts), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("override", ["dequantized", "high_precision"])
def test_is_its_four_parts_where_the_backward_is_overridden(override: str) -> None:
    recipe = MXFP8BlockScaling(backward_override=override)
    plan, found = linear_plan(recipe, "", True, True, module_type="linear"), []
    for run in (block, parts):
        torch.manual_seed(3)
        tensors = operands()
        y = run(linear_args(plan), *tensors)
        found.append([y, *torch.autograd.grad(y.float().square().sum(), tensors)])
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", ["current", "nvfp4"])
def test_recomputation_saves_operands_alone_and_changes_nothing(name: str) -> None:
    tensors, plan = operands(), plan_of(name, False)
    saved: list[Tensor] = []

    def recomputed(linear: LinearFwdArgs, *operands: Tensor) -> Any:
        def keep(tensor: Tensor) -> Tensor:
            saved.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            return block(linear, *operands, plans=(plan, plan))

    again, plain = results(name, tensors, recomputed), results(name, tensors, block)
    if name == "current":
        assert all(map(torch.equal, again, plain))
    assert torch.equal(again[0], plain[0])
    assert {id(tensor) for tensor in saved} <= {id(tensor) for tensor in tensors}


def test_recomputation_begins_with_the_sum_of_a_residual() -> None:
    tensors, plan, linear = operands(), plan_of("current", False), linear_args(plan_of("current"))
    residual = torch.randn_like(tensors[0]).requires_grad_()
    found, saved = [], []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    for plans in (None, (plan, plan)):
        saved.clear()
        call = ProgramArgs(MLP, (NormArgs(NORM, False, True), linear, SWIGLU, linear), plans)
        x, norm, fc1, fc2 = tensors
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            y, _ = ProgramFunction.apply(call, x, norm, None, fc1, None, fc2, None, residual)
        found.append([y, *torch.autograd.grad(y.float().square().sum(), [*tensors, residual])])
    assert all(map(torch.equal, *found))
    assert not any(tensor is residual or tensor is tensors[0] for tensor in saved)


class Alive(TorchDispatchMode):
    """Bytes that are alive beside some tensors', as each operator of this package begins."""

    def __init__(self, *beside: Tensor) -> None:
        super().__init__()
        self.storages = {tensor.untyped_storage()._cdata: 0 for tensor in beside}
        self.marks: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "narrowcast":
            self.marks.append((func._opname, sum(self.storages.values())))
        result = func(*args, **(kwargs or {}))
        for one in (
            [result] if isinstance(result, Tensor) else result if isinstance(result, (list, tuple)) else ()
        ):
            storage = one.untyped_storage()
            if storage._cdata not in self.storages:
                self.storages[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.storages.pop, storage._cdata, None)
        return result


def test_a_stage_lets_go_of_what_only_its_own_gemm_reads() -> None:
    """As fc2 begins, fc1's output is alive and what the backward reads: no row-wise input, no quantized weight."""
    tensors, linear = operands(), linear_args(plan_of("current"))
    with Alive(*tensors) as alive:
        block(linear, *tensors)
    (before_fc2,) = [made for name, made in alive.marks if name == "act_quantize"]
    hidden, columnwise = 32 * 128 * DTYPE.itemsize, 32 * 32
    assert hidden + columnwise <= before_fc2 <= hidden + columnwise + 512
