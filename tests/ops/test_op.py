"""The two forms of an operation: what a class may define, which one runs, and what the fuser hands to each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from modules import step
from ops_checks import check, make_inputs
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import narrowcast as nc
from narrowcast.ops import BasicOperation, CompositeOperation, FusedOperation, OperationContext, ScaledOperand


class Double(BasicOperation):
    """Split form; the records of what was called are the test's."""

    def op_forward_compute(self, input_: Any, *, requires_grad: bool, **kwargs: Any) -> Any:
        return 2 * input_, (input_,) if requires_grad else ()

    def op_forward_save_ctx(self, ctx: Any, input_: Any, tensors_to_save: Any, **kwargs: Any) -> None:
        ctx.save_for_backward(*tensors_to_save)
        ctx.factor = "two"

    def op_backward(self, ctx: Any, grad_output: Any) -> Any:
        (saved,) = ctx.saved_tensors
        assert ctx.factor == "two" and saved.shape == grad_output.shape
        return 2 * grad_output, ()


class LegacyDouble(BasicOperation):
    def op_forward(self, ctx: Any, input_: Any, **kwargs: Any) -> Any:
        ctx.save_for_backward(input_)
        return 2 * input_

    def op_backward(self, ctx: Any, grad_output: Any) -> Any:
        return 2 * grad_output, ()


class LegacyTriple(Double):
    """Legacy below split."""

    def op_forward(self, ctx: Any, input_: Any, **kwargs: Any) -> Any:
        return 1.5 * super().op_forward(ctx, input_, **kwargs)

    def op_backward(self, ctx: Any, grad_output: Any) -> Any:
        grad, params = super().op_backward(ctx, grad_output)
        return 1.5 * grad, params


class SplitAgain(LegacyTriple):
    """Split below legacy below split."""

    op_forward_compute = Double.op_forward_compute
    op_forward_save_ctx = Double.op_forward_save_ctx
    op_backward = Double.op_backward


class OnlyBackward(LegacyTriple):
    def op_backward(self, ctx: Any, grad_output: Any) -> Any:
        return super().op_backward(ctx, grad_output)


def test_the_form_defined_last_runs() -> None:
    flags = {
        cls: cls._use_split_forward for cls in (Double, LegacyDouble, LegacyTriple, SplitAgain, OnlyBackward)
    }
    assert flags == {
        Double: True,
        LegacyDouble: False,
        LegacyTriple: False,
        SplitAgain: True,
        OnlyBackward: False,
    }
    x = torch.ones(3, requires_grad=True)
    for cls, factor in (
        (Double, 2),
        (LegacyDouble, 2),
        (LegacyTriple, 3),
        (SplitAgain, 2),
        (OnlyBackward, 3),
    ):
        y = cls()(x)
        (grad,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(y, factor * x) and torch.equal(grad, torch.full_like(x, factor)), cls


@pytest.mark.parametrize("cls", [Double, LegacyDouble, LegacyTriple, SplitAgain])
def test_both_forms_pass_all_checks(cls: type[BasicOperation]) -> None:
    check(lambda: nc.ops.Sequential(cls(), nc.ops.Bias(7)), [(5, 3, 7)])


PAIRS = [
    ("op_forward_compute", "op_forward_save_ctx"),
    ("op_forward_save_ctx", "op_forward_compute"),
    ("fuser_forward_compute", "fuser_forward_save_ctx"),
    ("fuser_forward_save_ctx", "fuser_forward_compute"),
]


@pytest.mark.parametrize("base", [BasicOperation, FusedOperation, CompositeOperation])
@pytest.mark.parametrize("defined, missing", PAIRS)
def test_half_a_pair_is_refused(base: type, defined: str, missing: str) -> None:
    with pytest.raises(TypeError, match=f"Half defines {defined} but not {missing}"):
        type("Half", (base,), {defined: lambda self: None})


def test_the_other_half_may_be_inherited_from_an_operation() -> None:
    class Same(Double):
        def op_forward_compute(self, input_: Any, **kwargs: Any) -> Any:
            return super().op_forward_compute(input_, **kwargs)

    assert torch.equal(Same()(torch.ones(2)), torch.full((2,), 2.0))


@pytest.mark.parametrize("base", [BasicOperation, FusedOperation, Double])
@pytest.mark.parametrize("legacy", ["op_forward", "fuser_forward"])
@pytest.mark.parametrize("pair", PAIRS[::2])
def test_two_forms_in_one_class_are_refused(base: type, legacy: str, pair: tuple[str, str]) -> None:
    for split in (pair, pair[:1], pair[1:]):
        with pytest.raises(TypeError, match=f"Both defines {legacy} together with {split[0]}"):
            type("Both", (base,), {name: lambda self: None for name in (legacy, *split)})


def test_an_operation_without_forward_is_refused() -> None:
    class Nothing(BasicOperation):
        def op_backward(self, ctx: Any, grad_output: Any) -> Any:
            return grad_output, ()

    with pytest.raises(TypeError, match="Nothing has no forward"):
        Nothing()

    class NothingFused(FusedOperation):
        pass

    with pytest.raises(NotImplementedError, match="NothingFused has no forward"):
        NothingFused([Double()]).fuser_forward_compute(
            torch.ones(2),
            basic_op_extra_inputs=[()],
            prev_op_grad_output_quantizer=None,
            next_op_input_quantizer=None,
            basic_op_kwargs=[{}],
            requires_grad=False,
        )


def test_an_operation_without_backward_says_so() -> None:
    class ForwardOnly(BasicOperation):
        def op_forward(self, ctx: Any, input_: Any, **kwargs: Any) -> Any:
            return input_ + 1

    assert torch.equal(ForwardOnly()(torch.ones(2)), torch.full((2,), 2.0))
    with pytest.raises(NotImplementedError, match="ForwardOnly has no backward: define op_backward"):
        ForwardOnly()(torch.ones(2, requires_grad=True)).sum().backward()


@pytest.mark.parametrize("method", ["op_forward_compute", "op_forward"])
def test_extra_tensors_need_the_methods_of_the_fuser(method: str) -> None:
    methods = {
        "op_forward_compute": lambda self, x, **kwargs: (x, ()),
        "op_forward_save_ctx": lambda self, *a: None,
    }
    if method == "op_forward":
        methods = {"op_forward": lambda self, ctx, x, **kwargs: x}
    cls = type("Extra", (BasicOperation,), {**methods, "num_extra_inputs": 1, "num_extra_outputs": 2})
    with pytest.raises(RuntimeError, match="Extra has 1 extra inputs and 2 extra outputs"):
        cls()(torch.ones(2), torch.ones(2))


@pytest.mark.parametrize("method", ["op_forward", "op_forward_compute", "op_forward_save_ctx", "op_backward"])
def test_methods_without_extra_tensors_are_refused_by_hand(method: str) -> None:
    arguments: dict[str, Any] = {"prev_op_grad_output_quantizer": None, "next_op_input_quantizer": None}
    if method != "op_forward":
        arguments["requires_grad"] = True
    call = getattr(nc.ops.AddExtraInput(), method)
    x = torch.ones(2)
    operands = {"op_forward": (None, x), "op_forward_compute": (x,), "op_forward_save_ctx": (None, x, ())}
    with pytest.raises(RuntimeError, match="AddExtraInput has 1 extra inputs and 0 extra outputs"):
        call(None, x) if method == "op_backward" else call(*operands[method], **arguments)


def test_save_must_return_nothing() -> None:
    class Returns(Double):
        def op_forward_save_ctx(self, *args: Any, **kwargs: Any) -> Any:
            return 3

    x = torch.ones(2, requires_grad=True)
    message = r"Returns.op_forward_save_ctx returned 3; it must return None: .*ctx.save_for_backward"
    with pytest.raises(RuntimeError, match=message):
        Returns()(x)
    neighbours: dict[str, Any] = {"prev_op_grad_output_quantizer": None, "next_op_input_quantizer": None}
    with pytest.raises(RuntimeError, match=message):
        Returns().op_forward(OperationContext(True, True, None, None), x, **neighbours)


def test_compute_and_save_get_the_same_arguments() -> None:
    seen: list[tuple[str, dict[str, Any]]] = []

    class Spy(Double):
        def op_forward_compute(self, input_: Any, **kwargs: Any) -> Any:
            seen.append(("compute", kwargs))
            return super().op_forward_compute(input_, **kwargs)

        def op_forward_save_ctx(self, ctx: Any, input_: Any, tensors_to_save: Any, **kwargs: Any) -> None:
            seen.append(("save", kwargs))
            super().op_forward_save_ctx(ctx, input_, tensors_to_save, **kwargs)

    Spy()(torch.ones(2, requires_grad=True), flavour="x")
    (first, computed), (second, saved) = seen
    assert (first, second) == ("compute", "save") and computed == saved
    assert computed == {
        "flavour": "x",
        "requires_grad": True,
        "prev_op_grad_output_quantizer": None,
        "next_op_input_quantizer": None,
    }
    seen.clear()
    Spy()(torch.ones(2))
    assert [name for name, _ in seen] == ["compute"] and seen[0][1]["requires_grad"] is False


def test_legacy_call_of_a_split_operation() -> None:
    op, ctx, x = Double(), OperationContext(), torch.ones(2)
    quantizers: dict[str, Any] = {"prev_op_grad_output_quantizer": None, "next_op_input_quantizer": None}
    assert torch.equal(op.op_forward(ctx, x, **quantizers), 2 * x)
    assert ctx.saved_tensors == (x,)
    ctx = OperationContext()
    output, extra = op.fuser_forward([ctx], x, basic_op_extra_inputs=[()], basic_op_kwargs=[{}], **quantizers)
    assert torch.equal(output, 2 * x) and extra == [()] and ctx.saved_tensors == (x,)


def test_compute_is_pure_and_save_works_on_fakes() -> None:
    op, x = nc.ops.Sequential(nc.ops.Bias(7, device="cpu"), nc.ops.ConstantScale(0.5)), torch.randn(5, 7)
    for basic in op:
        before = {k: v for k, v in vars(basic).items() if not k.startswith("_")}
        arguments: dict[str, Any] = {
            "prev_op_grad_output_quantizer": None,
            "next_op_input_quantizer": None,
            "requires_grad": True,
        }
        first, _ = basic.op_forward_compute(x, **arguments)
        again, _ = basic.op_forward_compute(x, **arguments)
        assert torch.equal(first, again)
        assert before == {k: v for k, v in vars(basic).items() if not k.startswith("_")}
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        ctx, fake = OperationContext(), mode.from_tensor(x)
        Double().op_forward_save_ctx(ctx, fake, (fake,))
        assert ctx.saved_tensors == (fake,)


def test_a_fused_operation_needs_basic_ones() -> None:
    with pytest.raises(ValueError, match="FusedOperation got no basic operations"):
        FusedOperation([])


def test_composite_operations_are_taken_apart() -> None:
    class ScaledBias(CompositeOperation):
        def __init__(self) -> None:
            super().__init__([nc.ops.Bias(7), nc.ops.ConstantScale(2.0)])

    module = ScaledBias()
    assert list(module.state_dict()) == ["basic_ops.0.bias"]
    (x,) = make_inputs([(5, 7)], dtype=torch.float32)
    block = nc.ops.Sequential(module, nc.ops.Identity())
    (fuser,) = block.groups()
    assert [type(op).__name__ for op in fuser.basic_ops] == ["Bias", "ConstantScale", "Identity"]  # type: ignore[union-attr]
    alone, together = step(module, [x]), step(block, [x])
    assert torch.equal(alone["out0"], 2 * x) and torch.equal(together["out0"], 2 * x)
    assert torch.equal(together["d 0.basic_ops.0.bias"], alone["d basic_ops.0.bias"])


def test_two_tensors_of_one_kind_do_not_share_a_delayed_scale() -> None:
    class Twins(Double):
        def __init__(self) -> None:
            super().__init__()
            self._add_delayed_state("", "cpu")

        def get_quantizer_roles(self, mode: Any) -> list[nc.QuantizerRole]:
            return [nc.QuantizerRole("linear", "input")] * 2 if mode == "forward" else []

    with pytest.raises(ValueError, match="of one kind, in roles .* have get_quantizer_roles tell different"):
        nc.set_recipe(Twins(), nc.recipe.DelayedScaling())


def test_quantizers_of_an_operation() -> None:
    class Asks(Double):
        def __init__(self) -> None:
            super().__init__()
            self._add_delayed_state("", "cpu")

        def num_quantizers(self, mode: Any) -> int:
            return 2 if mode == "forward" else 1

    op, recipe = Asks(), nc.recipe.DelayedScaling()
    assert op.get_quantizer("forward", 0) is None
    with nc.autocast(recipe=recipe):
        operand, scales = op.get_quantizer("backward", 0), op.forward_arguments(True, True)["scales"]
        assert operand is not None and operand.unseen == -57344.0 and scales.amax is op.amax
        assert scales.scale is op.scale and not op.scale.any()
        x = torch.randn(3, 5, 32)
        quantized = ScaledOperand(operand, scales.scale, scales.amax).quantize(x)
    assert quantized.shape == x.shape
    assert op.amax[2] == x.abs().max()
    with pytest.raises(IndexError, match="Asks has 2 forward quantizers; there is no number 2"):
        op.get_quantizer("forward", 2)
    op.reset_recipe_state(recipe=recipe)
    assert not op.amax.any() and not op.amax_history.any() and op._last_recipe is recipe
    with nc.autocast(recipe=nc.recipe.MXFP8BlockScaling(emulate=True)):
        asked = op.get_quantizer("forward", 1)
        assert asked is not None and asked.unseen is None and any(asked.rowwise) and any(asked.columnwise)
        assert op.forward_arguments(True, True) == {}
    assert Double().num_quantizers("forward") == 0 and isinstance(op, nn.Module)


@pytest.mark.parametrize(
    "name",
    ["op_forward_setup_context", "fuser_setup_context", "separate_fuser_setup_context"],
)
def test_names_that_were_given_up_do_not_exist(name: str) -> None:
    assert not hasattr(Double, name)
