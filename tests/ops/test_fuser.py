"""The fuser: fusing and fusing again, extra tensors and channels, gradients, compiled graphs."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from modules import assert_same, step
from ops_checks import check, check_compiled, make_inputs, only
from recipes import DEVICE
from torch._dynamo.testing import CompileCounter
from torch.nn.utils import spectral_norm as old_spectral_norm
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.nn.utils.prune import random_unstructured

import narrowcast as nc
from narrowcast.ops import (
    AddExtraInput,
    BasicOperation,
    Bias,
    ConstantScale,
    FusedOperation,
    Identity,
    MakeExtraOutput,
    OperationFuser,
    ScaledOperand,
    Sequential,
    register_backward_fusion,
    register_forward_backward_fusion,
    register_forward_fusion,
    unregister_fusion,
)
from narrowcast.ops.fused import Fusion, Match, NearMiss, follows
from narrowcast.recipe import linear_plan

RAN: list[str] = []


class BothScales(FusedOperation):
    """Two ``ConstantScale`` as one, forward and backward."""

    def factor(self) -> float:
        return self.basic_ops[0].scale * self.basic_ops[1].scale  # type: ignore[operator]

    def fuser_forward_compute(self, input_: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            RAN.append("forward")
        return input_ * self.factor(), [(), ()], [(), ()]

    def fuser_forward_save_ctx(
        self, basic_op_ctxs: Any, input_: Any, tensors_to_save: Any, **kwargs: Any
    ) -> None:
        assert len(basic_op_ctxs) == len(tensors_to_save) == 2

    def fuser_backward(self, basic_op_ctxs: Any, grad_output: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            RAN.append("backward")
        return grad_output * self.factor(), [(), ()], [(), ()]


def _two_scales(ops: Any, start: int, recipe: Any) -> Any:
    if not follows(ops, start, ConstantScale, ConstantScale):
        return None
    return NearMiss("the first factor is 1") if ops[start].scale == 1 else Match(2)


FORWARD = Fusion("BothScales", "forward", _two_scales, BothScales)
BACKWARD = Fusion("BothScales", "backward", _two_scales, BothScales)


def scales() -> Sequential:
    return Sequential(Bias(7, dtype=torch.float32), ConstantScale(2.0), ConstantScale(0.25), Identity())


@pytest.fixture(autouse=True)
def nothing_ran() -> None:
    RAN.clear()


@pytest.mark.parametrize(
    "fusions, ran",
    [
        ({"forward": [FORWARD]}, ["forward"]),
        ({"backward": [BACKWARD]}, ["backward"]),
        ({"forward": [FORWARD], "backward": [BACKWARD]}, ["forward", "backward"]),
        ({"joint": [FORWARD]}, ["forward", "backward"]),
    ],
)
def test_each_direction_is_fused_by_itself(fusions: dict[str, Any], ran: list[str]) -> None:
    inputs = make_inputs([(5, 3, 7)], dtype=torch.float32)
    expected = step(scales(), inputs)
    assert RAN == []
    with only(**fusions):
        assert_same(step(scales(), inputs), expected)
        assert ran == RAN


def test_registered_functions_run_from_the_next_call_on() -> None:
    block, inputs = scales(), make_inputs([(5, 7)], dtype=torch.float32)
    expected = step(block, inputs)

    def own(ops: Any, *, recipe: Any) -> Any:
        return FORWARD(ops, recipe=recipe)

    register_forward_fusion(own)
    try:
        assert_same(step(block, inputs), expected)
        assert RAN == ["forward"]
        register_backward_fusion(BACKWARD, prepend=True)
        try:
            step(block, inputs)
            assert RAN == ["forward", "forward", "backward"]
        finally:
            unregister_fusion(BACKWARD)
    finally:
        unregister_fusion(own)
    step(block, inputs)
    assert len(RAN) == 3
    with pytest.raises(ValueError, match="is not registered"):
        unregister_fusion(own)
    with pytest.raises(TypeError, match="got an int"):
        register_forward_backward_fusion(3)  # type: ignore[arg-type]


def test_fuses_again_when_the_value_of_the_recipe_changes() -> None:
    asked: list[Any] = []

    def spy(ops: Any, *, recipe: Any) -> Any:
        asked.append(recipe)
        return ops

    first, same = nc.recipe.DelayedScaling(amax_history_len=4), nc.recipe.DelayedScaling(amax_history_len=4)
    longer, current = nc.recipe.DelayedScaling(amax_history_len=8), nc.recipe.Float8CurrentScaling()
    dequantized = nc.recipe.Float8CurrentScaling(backward_override="dequantized")
    block, inputs = scales(), make_inputs([(5, 7)], dtype=torch.float32)
    with only(forward=[spy]):
        for recipe in (None, None, first, same, longer, current, dequantized, current):
            step(block, inputs, recipe)
        assert asked == [None, first, longer, current, dequantized, current]
        block.requires_grad_(False)
        step(block, [inputs[0].detach().requires_grad_(False)], current)  # now nothing has a backward
        assert len(asked) == 7
        block.to(torch.bfloat16)
        step(block, [inputs[0].detach().requires_grad_(False)], current)
        assert len(asked) == 8


def test_the_backward_begins_at_the_first_operation_that_has_one() -> None:
    seen: list[list[str]] = []

    def spy(ops: Any, *, recipe: Any) -> Any:
        seen.append([type(op).__name__ for op in ops])
        return ops

    class Needs(ConstantScale):
        def op_backward(self, ctx: Any, grad_output: Any) -> Any:
            seen.append([ctx.requires_grad, ctx.input_requires_grad])
            return super().op_backward(ctx, grad_output)

        def pre_fuser_forward(self, *, requires_grad: bool) -> None:
            seen.append([str(requires_grad)])

    block = Sequential(Needs(3.0), Bias(7, dtype=torch.float32), Needs(2.0))
    with only(backward=[spy]):
        (x,) = make_inputs([(5, 7)], dtype=torch.float32, grad=False)
        grads = step(block, [x])
        assert seen == [["False"], ["True"], ["Bias", "Needs"], [True, True]]
        assert torch.equal(grads["d 1.bias"], (2 * grads["out0"] * 2).sum(0))
        seen.clear()
        step(block, [x.requires_grad_()])
        assert seen == [["True"], ["True"], ["Needs", "Bias", "Needs"], [True, True], [True, True]]


@pytest.mark.parametrize(
    "lose",
    [
        lambda ops: ops[1:],
        lambda ops: [*ops, ops[0]],
        lambda ops: ops[::-1],
        lambda ops: [Identity(), *ops[1:]],
        lambda ops: [FusedOperation(ops[:2]), *ops[1:]],
    ],
)
def test_a_fusion_must_cover_the_operations(lose: Any) -> None:
    def careless(ops: Any, *, recipe: Any) -> Any:
        return lose(ops)

    for direction in ("forward", "backward", "joint"):
        with (
            only(**{direction: [careless]}),
            pytest.raises(RuntimeError, match="the fusion careless returned"),
        ):
            scales()(torch.ones(2, 7, requires_grad=True))


# -- extra inputs and outputs -----------------------------------------------------------------------------------------


def test_extra_inputs_and_outputs_in_order() -> None:
    block = Sequential(
        AddExtraInput(), MakeExtraOutput(), ConstantScale(3.0), MakeExtraOutput(), AddExtraInput()
    )
    a, b, c = make_inputs([(5, 7)] * 3, dtype=torch.float32)
    out, first, second = block(a, b, c)
    assert (
        torch.equal(first, a + b) and torch.equal(second, 3 * (a + b)) and torch.equal(out, 3 * (a + b) + c)
    )
    ga, gb, gc_ = torch.autograd.grad(out.sum() + 2 * first.sum() + 5 * second.sum(), (a, b, c))
    assert (
        torch.equal(ga, torch.full_like(ga, 3 * (1 + 5) + 2))
        and torch.equal(gb, ga)
        and torch.equal(gc_ * 20, ga)
    )
    (only_main,) = torch.autograd.grad(block(a, b, c)[0].sum(), a)
    assert torch.equal(only_main, torch.full_like(a, 3.0))
    check(lambda: block, [(5, 7)] * 3)


def residual(*, to_caller: bool) -> Sequential:
    begin, again, end = MakeExtraOutput(), AddExtraInput(), AddExtraInput()
    begin.set_extra_output_channel(0, "skip", output_to_caller=to_caller)
    for op in (again, end):
        op.set_extra_input_channel(0, "skip")
    return Sequential(begin, Bias(7, dtype=torch.float32), again, ConstantScale(0.5), end)


@pytest.mark.parametrize("to_caller", [False, True])
def test_channels_sum_their_gradients(to_caller: bool) -> None:
    block, (x,) = residual(to_caller=to_caller), make_inputs([(5, 7)], dtype=torch.float32)
    with torch.no_grad():
        block[1].bias.add_(1.0)
    result = block(x)
    out = result[0] if to_caller else result
    assert torch.equal(out, 0.5 * (x + 1 + x) + x)
    loss = out.sum() + (7 * result[1].sum() if to_caller else 0)
    gx, gb = torch.autograd.grad(loss, (x, block[1].bias))
    assert torch.equal(gx, torch.full_like(x, 9.0 if to_caller else 2.0)) and torch.equal(
        gb, torch.full((7,), 2.5, device=DEVICE)
    )
    check(lambda: residual(to_caller=to_caller), [(5, 7)], dtype=torch.float32)


class GivesTwice(BasicOperation):
    """Its extra output is new, so nothing but the fuser knows that it has a gradient."""

    num_extra_outputs = 1

    def fuser_forward(self, ctxs: Any, input_: torch.Tensor, **kwargs: Any) -> Any:
        return input_ + 1, [(input_ * 2,)]

    def fuser_backward(self, ctxs: Any, grad: torch.Tensor, *, basic_op_grad_extra_outputs: Any) -> Any:
        ((extra,),) = basic_op_grad_extra_outputs
        return grad if extra is None else grad + 2 * extra, [()], [()]


class AsksWhatItGets(BasicOperation):
    """As operations written for Transformer Engine do."""

    num_extra_inputs = 1

    def fuser_forward(
        self, ctxs: Any, input_: torch.Tensor, *, basic_op_extra_inputs: Any, **kwargs: Any
    ) -> Any:
        ((extra,),) = basic_op_extra_inputs
        ctxs[0].wanted = extra.requires_grad
        return input_ + 3 * extra, [()]

    def fuser_backward(self, ctxs: Any, grad: torch.Tensor, *, basic_op_grad_extra_outputs: Any) -> Any:
        return grad, [()], [(3 * grad if ctxs[0].wanted else None,)]


def test_a_new_tensor_in_a_channel_is_differentiated() -> None:
    def make() -> Sequential:
        giver, taker = GivesTwice(), AsksWhatItGets()
        giver.set_extra_output_channel(0, "new", output_to_caller=False)
        taker.set_extra_input_channel(0, "new")
        return Sequential(giver, taker)

    (x,) = make_inputs([(5, 7)], dtype=torch.float32)
    (grad,) = torch.autograd.grad(make()(x).sum(), x)
    assert torch.equal(grad, torch.full_like(x, 7.0))
    check(make, [(5, 7)], dtype=torch.float32)
    with torch.no_grad():
        assert not make()(x).requires_grad


def test_wrong_channels_are_refused() -> None:
    taker, giver = AddExtraInput(), MakeExtraOutput()
    taker.set_extra_input_channel(0, "a")
    with pytest.raises(
        ValueError, match=r"extra input 0 of AddExtraInput \(operation 1\) comes from channel 'a'"
    ):
        OperationFuser([Identity(), taker])
    giver.set_extra_output_channel(0, "a")
    with pytest.raises(ValueError, match="which no operation in front of it gives"):
        OperationFuser([taker, giver])
    other = MakeExtraOutput()
    other.set_extra_output_channel(0, "a")
    with pytest.raises(ValueError, match="which an earlier operation gives already"):
        OperationFuser([giver, other, taker])
    with pytest.raises(IndexError, match="AddExtraInput has 1 extra inputs; there is no number 1"):
        taker.set_extra_input_channel(1, "a")
    with pytest.raises(IndexError, match="MakeExtraOutput has 1 extra outputs"):
        giver.set_extra_output_channel(-1, "a")
    assert OperationFuser([giver, taker])(torch.ones(2))[0].sum() == 4
    with pytest.raises(
        RuntimeError, match="AddExtraInput is run by a fuser already, so its channels are fixed"
    ):
        taker.set_extra_input_channel(0, "b")
    with pytest.raises(RuntimeError, match="MakeExtraOutput is run by a fuser already"):
        giver.set_extra_output_channel(0, "b")


def test_no_fusion_across_a_channel_inside() -> None:
    begin, end = MakeExtraOutput(), AddExtraInput()
    begin.set_extra_output_channel(0, "a", output_to_caller=False)
    end.set_extra_input_channel(0, "a")
    fusion = Fusion("Pair", "forward", lambda ops, at, recipe: Match(2) if at == 0 else None, FusedOperation)
    assert fusion.look([begin, end], 0, None) == NearMiss("channel 'a' begins and ends inside")
    assert fusion([begin, end], recipe=None) == [begin, end]


class Doubling(FusedOperation):
    """Runs both ends of a channel, and so routes what goes through it."""

    def fuser_forward(
        self, basic_op_ctxs: Any, input_: Any, *, basic_op_extra_inputs: Any, **kwargs: Any
    ) -> Any:
        assert basic_op_extra_inputs[1] == (None,)
        return 2 * input_, [(None,), ()]

    def fuser_backward(
        self, basic_op_ctxs: Any, grad_output: Any, *, basic_op_grad_extra_outputs: Any
    ) -> Any:
        assert basic_op_grad_extra_outputs[0] == (None,)
        return 2 * grad_output, [(), ()], [(), (None,)]


@pytest.mark.parametrize("where", ["forward", "backward", "joint"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_fused_operation_with_a_channel_inside(where: str, compiled: bool) -> None:
    begin, end = MakeExtraOutput(), AddExtraInput()
    begin.set_extra_output_channel(0, "a", output_to_caller=False)
    end.set_extra_input_channel(0, "a")
    fuser, x = OperationFuser([begin, end]), torch.ones(2, requires_grad=True)
    with only(**{where: [lambda ops, *, recipe: [Doubling(ops)]]}):
        y = (torch.compile(fuser, backend="aot_eager", fullgraph=True) if compiled else fuser)(x)
        assert torch.equal(y, 2 * x)
        y.sum().backward()
    assert torch.equal(x.grad, 2 * torch.ones(2))


class Axpy(FusedOperation):
    """A forward that saves nothing, in front of basic operations' backwards."""

    def fuser_forward(
        self, basic_op_ctxs: Any, input_: Any, *, basic_op_extra_inputs: Any, **kwargs: Any
    ) -> Any:
        scale: Any = self.basic_ops[0]
        return scale.scale * input_ + basic_op_extra_inputs[1][0] + self.basic_ops[2].bias, [(), (), ()]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_fused_forward_that_saves_nothing(compiled: bool) -> None:
    fuser = OperationFuser([ConstantScale(3.0), AddExtraInput(), nc.ops.Bias(2, device="cpu")])
    x, extra = torch.ones(4, 2, requires_grad=True), torch.ones(4, 2, requires_grad=True)
    with only(forward=[lambda ops, *, recipe: [Axpy(ops)]]):
        y = (torch.compile(fuser, backend="aot_eager", fullgraph=True) if compiled else fuser)(x, extra)
        y.sum().backward()
    assert torch.equal(y, 3 * x + extra) and torch.equal(x.grad, 3 * torch.ones(4, 2))
    assert torch.equal(extra.grad, torch.ones(4, 2))
    bias: Any = fuser.basic_ops[2]
    assert torch.equal(bias.bias.grad, torch.full((2,), 4.0))


def test_a_channel_without_what_others_read() -> None:
    begin, end, other = MakeExtraOutput(), AddExtraInput(), AddExtraInput()
    begin.set_extra_output_channel(0, "a", output_to_caller=False)
    for taker in (end, other):
        taker.set_extra_input_channel(0, "a")
    with (
        only(forward=[lambda ops, *, recipe: [Doubling(ops[:2]), *ops[2:]]]),
        pytest.raises(RuntimeError, match="operation 2 reads channel 'a', for which .* returned None"),
    ):
        OperationFuser([begin, end, other])(torch.ones(2))
    public, end = MakeExtraOutput(), AddExtraInput()
    public.set_extra_output_channel(0, "a")
    end.set_extra_input_channel(0, "a")
    with (
        only(forward=[lambda ops, *, recipe: [Doubling(ops)]]),
        pytest.raises(RuntimeError, match="returned None as extra output 0, which the caller gets"),
    ):
        OperationFuser([public, end])(torch.ones(2))


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="a fuser got no operations"):
        OperationFuser([])
    fuser = OperationFuser([Identity(), AddExtraInput()])
    with pytest.raises(ValueError, match="got 2 extra inputs, the operations take 1"):
        fuser(torch.ones(1), torch.ones(1), torch.ones(1))
    for given, which in (((3, torch.ones(1)), "the input"), ((torch.ones(1), [1]), "extra input 0")):
        with pytest.raises(TypeError, match=f"{which} is .*, of type (int|list); give a tensor"):
            fuser(*given)
    with pytest.raises(ValueError, match="basic_op_kwargs has 1 entries; give one dict for each of the 2"):
        fuser(torch.ones(1), torch.ones(1), basic_op_kwargs=[{}])


def test_a_quantized_result_that_nobody_asked_for() -> None:
    class Quantizes(Identity):
        def op_forward_compute(self, input_: Any, **kwargs: Any) -> Any:
            plan = linear_plan(nc.recipe.Float8CurrentScaling(), "", False, False, module_type="linear")
            return ScaledOperand(plan.input).quantize(input_), ()

        op_forward_save_ctx = Identity.op_forward_save_ctx

    with pytest.raises(RuntimeError, match="Quantizes returned a Float8TensorStorage as the last output"):
        Quantizes()(torch.ones(2, 32))


def test_wrong_number_of_gradients() -> None:
    class Forgets(Bias):
        def op_backward(self, ctx: Any, grad_output: Any) -> Any:
            return grad_output, ()

    with pytest.raises(RuntimeError, match="the backward of Forgets returned 0 gradients of parameters"):
        Forgets(7, device="cpu")(torch.ones(2, 7)).sum().backward()

    class ForgetsExtra(MakeExtraOutput):
        def fuser_forward_compute(self, input_: Any, **kwargs: Any) -> Any:
            return input_, [()], [()]

        fuser_forward_save_ctx = MakeExtraOutput.fuser_forward_save_ctx

    with pytest.raises(RuntimeError, match="the forward of ForgetsExtra returned 0 extra outputs, it has 1"):
        ForgetsExtra()(torch.ones(2, 7))


# -- the boundary -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compute", [weight_norm, spectral_norm, old_spectral_norm, random_unstructured])
def test_a_weight_that_is_computed_from_others_is_refused(compute: Any) -> None:
    """Its gradient would go past the computation: unmasked to a pruned weight."""
    op = nc.ops.BasicLinear(32, 32, device=DEVICE)
    compute(op, "weight", **({"amount": 0.5} if compute is random_unstructured else {}))
    block = nc.ops.Sequential(op, nc.ops.GELU())
    for run in (op, block):
        with pytest.raises(
            RuntimeError, match=r"'weight' of this .*BasicLinear is computed from other parameters"
        ):
            run(torch.randn(32, 32, device=DEVICE))


def test_one_autograd_node_for_the_whole_list() -> None:
    block, (x,) = scales(), make_inputs([(5, 7)], dtype=torch.float32)
    y = block(x)
    node = y.grad_fn
    assert type(node).__name__ == "_OperationsFunctionBackward"
    assert {type(f).__name__ for f, _ in node.next_functions if f is not None} == {"AccumulateGrad"}


class Keeps(BasicOperation):
    """Saves a tensor of its own making."""

    def op_forward_compute(self, input_: Any, **kwargs: Any) -> Any:
        made = input_ + 1
        MADE.append(weakref.ref(made))
        return made * made, (made,)

    def op_forward_save_ctx(self, ctx: Any, input_: Any, tensors_to_save: Any, **kwargs: Any) -> None:
        ctx.save_for_backward(*tensors_to_save)

    def op_backward(self, ctx: Any, grad_output: Any) -> Any:
        (made,) = ctx.saved_tensors
        return 2 * made * grad_output, ()


MADE: list[Any] = []


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_main_input_may_be_an_extra_input_too(dynamic: bool) -> None:
    block, (x,) = Sequential(Bias(7), ConstantScale(3.0), AddExtraInput()), make_inputs([(5, 7)])
    forward = torch.compile(block, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for run in (block, forward):
        (grad,) = torch.autograd.grad(run(x, x).sum(), x)
        assert torch.equal(grad, torch.full_like(x, 4.0))


def test_parameters_may_be_tied() -> None:
    block, (x,) = Sequential(Bias(7), ConstantScale(3.0), Bias(7)), make_inputs([(5, 7)])
    block[2].bias = block[0].bias
    forward = torch.compile(block, fullgraph=True, backend="aot_eager")
    for run in (block, forward):
        (grad,) = torch.autograd.grad(run(x).sum(), block[0].bias)
        assert torch.equal(grad, torch.full((7,), 20.0, device=DEVICE))


def shared() -> Sequential:
    bias = Bias(7, dtype=torch.float32)
    return Sequential(bias, ConstantScale(3.0), bias)


def test_an_operation_may_stand_in_two_places() -> None:
    block, (x,) = shared(), make_inputs([(5, 7)], dtype=torch.float32)
    (grad,) = torch.autograd.grad(block(x).sum(), block[0].bias)
    assert torch.equal(grad, torch.full((7,), 5 * (3.0 + 1.0), device=DEVICE))
    check(shared, [(5, 7)], dtype=torch.float32)


def test_saved_tensors_die_with_the_backward() -> None:
    MADE.clear()
    (x,) = make_inputs([(5, 7)], dtype=torch.float32)
    y = Keeps()(x)
    gc.collect()
    assert MADE[0]() is not None
    y.sum().backward(retain_graph=True)
    assert MADE[0]() is not None
    y.sum().backward()
    gc.collect()
    assert MADE[0]() is None
    assert torch.equal(x.grad, 4 * (x + 1))
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()


def test_contexts_survive_a_change_between_forward_and_backward() -> None:
    """Two forwards, then their backwards in any order."""
    block = scales()
    a, b = make_inputs([(5, 7), (3, 7)], dtype=torch.float32)
    ya, yb = block(a), block(b)
    gb, ga = torch.autograd.grad(yb.square().sum(), b), torch.autograd.grad(ya.square().sum(), a)
    assert torch.equal(ga[0], ya) and torch.equal(gb[0], yb)


def test_no_further_graph_after_the_first_step() -> None:
    counter, block = CompileCounter(), residual(to_caller=False)
    forward = torch.compile(block, fullgraph=True, backend=counter)
    for seed in range(4):
        step(block, make_inputs([(5, 7)], dtype=torch.float32, seed=seed), None, forward)
    assert counter.frame_count == 1


def test_registering_is_noticed_by_compiled_code() -> None:
    block, inputs = scales(), make_inputs([(5, 7)], dtype=torch.float32)
    counter = CompileCounter()
    forward = torch.compile(block, fullgraph=True, backend=counter)
    before = step(block, inputs, None, forward)
    with only(joint=[FORWARD]):
        assert_same(step(block, inputs, None, forward), before)
    assert counter.frame_count == 2


def test_static_and_dynamic_compile_of_fused_lists() -> None:
    with only(forward=[FORWARD], backward=[BACKWARD]):
        check_compiled(scales(), [(5, 7)], dtype=torch.float32, dynamic=False)
        check(scales, [(5, 2, 3, 7)], dtype=torch.float32)
