"""``Identity``, ``Reshape``, ``ConstantScale``, ``AddExtraInput``, ``MakeExtraOutput``: values, gradients, errors."""

from __future__ import annotations

import pytest
import torch
from modules import step
from ops_checks import check, check_compiled, make_inputs

from narrowcast.ops import AddExtraInput, Bias, ConstantScale, Identity, MakeExtraOutput, Reshape, Sequential


def test_identity() -> None:
    check(Identity, [(5, 7)])
    (x,) = make_inputs([(5, 7)])
    results = step(Identity(), [x])
    assert torch.equal(results["out0"], x) and torch.equal(results["d input0"], 2 * x)


@pytest.mark.parametrize("shape", [(-1, 7), (5, 3, 7), (5, -1), (105,)])
def test_reshape(shape: tuple[int, ...]) -> None:
    (x,) = make_inputs([(5, 3, 7)])
    results = step(Reshape(shape), [x])
    assert torch.equal(results["out0"], x.reshape(shape)) and torch.equal(results["d input0"], 2 * x)
    with torch.no_grad():
        assert torch.equal(Reshape(shape)(x), x.reshape(shape))


def test_reshape_keeps_no_memory() -> None:
    (x,) = make_inputs([(64, 64)], dtype=torch.float32)
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append(t.untyped_storage().nbytes()) or t, lambda t: t
    ):
        Reshape((-1,))(x)
    assert saved == [4]


def test_reshape_in_a_list() -> None:
    check(lambda: Sequential(Reshape((-1, 7)), Bias(7), Reshape((-1, 3, 7)), ConstantScale(2.0)), [(5, 3, 7)])


def test_reshape_of_the_features_in_a_list() -> None:
    check_compiled(Sequential(Reshape((-1, 21)), Bias(21), Reshape((-1, 3, 7))), [(5, 3, 7)])


@pytest.mark.parametrize("shape", [(-1, -1), (-2, 7)])
def test_reshape_refuses(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="use sizes, and at most one -1"):
        Reshape(shape)


def test_reshape_of_the_wrong_size() -> None:
    with pytest.raises(RuntimeError, match="shape"):
        Reshape((4, 4))(torch.ones(15))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_constant_scale(dtype: torch.dtype) -> None:
    (x,) = make_inputs([(5, 7)], dtype=dtype)
    out = ConstantScale(0.3)(x)
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(out, 0.3 * x) and torch.equal(grad, 0.3 * torch.ones_like(x))
    check(lambda: ConstantScale(0.3), [(5, 3, 7)], dtype=dtype)


@pytest.mark.parametrize("in_place", [False, True])
def test_add_extra_input(in_place: bool) -> None:
    x, extra = make_inputs([(5, 7)] * 2)
    before = extra.detach().clone()
    results = step(AddExtraInput(in_place=in_place), [x, extra])
    assert torch.equal(results["out0"], x + extra) and torch.equal(extra, before)
    for name in ("d input0", "d input1"):
        assert torch.equal(results[name], 2 * results["out0"])
    check(lambda: AddExtraInput(in_place=in_place), [(5, 7)] * 2)


def test_a_residual_may_have_another_dtype() -> None:
    x, extra = (
        torch.randn(3, 7, dtype=torch.bfloat16, requires_grad=True),
        torch.randn(3, 7, requires_grad=True),
    )
    out = Sequential(ConstantScale(2.0), AddExtraInput())(x, extra)
    assert out.dtype == torch.float32 and torch.equal(out, 2 * x + extra)
    gx, ge = torch.autograd.grad(out.sum(), (x, extra))
    assert gx.dtype == torch.bfloat16 and ge.dtype == torch.float32


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match=r"the extra input has shape \(7,\), the input \(5, 7\)"):
        AddExtraInput()(torch.ones(5, 7), torch.ones(7))


@pytest.mark.parametrize("in_place", [False, True])
def test_make_extra_output(in_place: bool) -> None:
    (x,) = make_inputs([(5, 7)])
    results = step(MakeExtraOutput(in_place=in_place), [x])
    assert torch.equal(results["out0"], x) and torch.equal(results["out1"], x)
    assert torch.equal(results["d input0"], 2 * x + 4 * x)
    first, second = MakeExtraOutput(in_place=in_place)(x)
    assert first is not x and second is not x
    check(lambda: Sequential(MakeExtraOutput(in_place=in_place), Bias(7)), [(5, 7)])


def test_an_unused_extra_output_counts_as_zero() -> None:
    op = MakeExtraOutput()
    op.set_extra_output_channel(0, "nobody", output_to_caller=False)
    x = torch.randn(3, 7, requires_grad=True)
    (grad,) = torch.autograd.grad(Sequential(op, ConstantScale(2.0))(x).sum(), x)
    assert torch.equal(grad, torch.full_like(x, 2.0))
