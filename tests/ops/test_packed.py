"""Operations as Transformer Engine's main branch has users write them: class methods compute from a record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from recipes import RECIPES

import narrowcast as nc
from narrowcast.ops import BasicOperation, FusedOperation

PLACE = {"device": "cpu", "dtype": torch.bfloat16}


@dataclass(slots=True)
class GainForward:
    input_: Any
    gain: torch.Tensor
    output_quantizer: Any
    requires_grad: bool


@dataclass(slots=True)
class GainBackward:
    grad_output: Any
    input_: torch.Tensor
    gain: torch.Tensor
    grad_input_quantizer: Any


class Gain(BasicOperation):
    """y = tanh(x * g), which hands over quantized tensors in both directions."""

    quantizes_output = quantizes_grad_input = True  # for explain
    fwd_args_type = GainForward
    bwd_args_type = GainBackward

    def __init__(self, size: int) -> None:
        super().__init__()
        self.gain = torch.nn.Parameter(torch.linspace(0.5, 1.5, size, dtype=torch.bfloat16))

    def pack_forward_args(
        self,
        basic_op_ctxs: Any,
        input_: Any,
        *,
        next_op_input_quantizer: Any,
        basic_op_kwargs: Any,
        **unused: Any,
    ) -> GainForward:
        assert basic_op_kwargs == [{}]
        return GainForward(input_, self.gain, next_op_input_quantizer, basic_op_ctxs[0].requires_grad)

    @classmethod
    def forward_compute(cls, args: GainForward, *, in_custom_op: bool = False) -> Any:
        y = torch.tanh(args.input_ * args.gain)
        quantized = y if args.output_quantizer is None else args.output_quantizer(y)
        return quantized, [()], (args.input_ * 1,) if args.requires_grad else ()

    @classmethod
    def forward_compute_fake(cls, args: GainForward) -> Any:
        raise AssertionError("the compiler traces the computation itself")

    def forward_setup_context(self, basic_op_ctxs: Any, args: GainForward, aux: Any) -> None:
        basic_op_ctxs[0].save_for_backward(aux[0], args.gain)

    def pack_backward_args(self, basic_op_ctxs: Any, grad_output: Any, **unused: Any) -> GainBackward:
        ctx = basic_op_ctxs[0]
        return GainBackward(grad_output, *ctx.saved_tensors, ctx.prev_op_grad_output_quantizer)

    @classmethod
    def backward_compute(cls, args: GainBackward, *, in_custom_op: bool = False) -> Any:
        dy, x, gain = args.grad_output, args.input_, args.gain
        if isinstance(dy, nc.QuantizedTensorStorage):
            dy = dy.dequantize()
        inner = dy * (1 - torch.tanh(x * gain) ** 2)
        dx = inner * gain
        if args.grad_input_quantizer is not None:
            dx = args.grad_input_quantizer(dx)
        return dx, [((inner * x).sum(0),)], [()]


class SplitGain(Gain):
    """The same in the split form, below the packed one."""

    def op_forward_compute(
        self, input_: Any, *, next_op_input_quantizer: Any, requires_grad: bool, **kwargs: Any
    ) -> Any:
        out, _, saved = self.forward_compute(
            GainForward(input_, self.gain, next_op_input_quantizer, requires_grad)
        )
        return out, (*saved, self.gain) if saved else ()

    def op_forward_save_ctx(self, ctx: Any, input_: Any, tensors_to_save: Any, **kwargs: Any) -> None:
        ctx.save_for_backward(*tensors_to_save)

    def op_backward(self, ctx: Any, grad_output: Any) -> Any:
        grad, params, _ = self.backward_compute(
            GainBackward(grad_output, *ctx.saved_tensors, ctx.prev_op_grad_output_quantizer)
        )
        return grad, params[0]


def block(middle: type[BasicOperation]) -> nc.ops.Sequential:
    torch.manual_seed(0)
    return nc.ops.Sequential(
        nc.ops.Linear(64, 64, bias=False, **PLACE), middle(64), nc.ops.Linear(64, 32, bias=False, **PLACE)
    )


def results(module: Any, run: Any, recipe: Any, steps: int = 2) -> list[torch.Tensor]:
    found = []
    for seed in range(steps):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(seed)).bfloat16().requires_grad_()
        torch.manual_seed(seed)
        with nc.autocast(enabled=recipe is not None, recipe=recipe):
            y = run(x)
        found += [y.detach(), *torch.autograd.grad(y.float().square().sum(), (x, *module.parameters()))]
    return found


@pytest.mark.parametrize("name", [None, "delayed", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_equals_the_split_form(name: str | None, compiled: bool) -> None:
    torch._dynamo.reset()
    recipe = None if name is None else RECIPES[name]
    ours, theirs = block(Gain), block(SplitGain)
    run = torch.compile(ours, fullgraph=True, backend="aot_eager") if compiled else ours
    for a, b in zip(results(ours, run, recipe), results(theirs, theirs, recipe), strict=True):
        assert torch.equal(a, b)
    if recipe is not None:
        assert len(ours.explain(recipe).handed_over) == 2


def test_no_gradients_no_context() -> None:
    module, x = block(Gain), torch.randn(8, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        assert not module(x).requires_grad
    assert torch.equal(nc.ops.Sequential(Gain(64))(x), Gain(64)(x))


class AddScaled(BasicOperation):
    """(x, extra) -> x + 2 * extra; the gradient of x is that of the output."""

    num_extra_inputs = 1

    def pack_forward_args(
        self, basic_op_ctxs: Any, input_: Any, *, basic_op_extra_inputs: Any, **unused: Any
    ) -> Any:
        return input_, basic_op_extra_inputs[0][0]

    @classmethod
    def forward_compute(cls, args: Any) -> Any:
        return args[0] + 2 * args[1], [()], ()

    def forward_setup_context(self, basic_op_ctxs: Any, args: Any, aux: Any) -> None:
        pass

    def pack_backward_args(
        self, basic_op_ctxs: Any, grad_output: Any, *, basic_op_grad_extra_outputs: Any
    ) -> Any:
        assert basic_op_grad_extra_outputs == [()]
        return grad_output

    @classmethod
    def backward_compute(cls, args: Any) -> Any:
        return None, [()], [(2 * args,)]


def test_extra_inputs_and_the_gradient_that_is_handed_on() -> None:
    x, extra = torch.randn(4, 8, requires_grad=True), torch.randn(4, 8, requires_grad=True)
    y = nc.ops.Sequential(AddScaled(), nc.ops.ConstantScale(3.0))(x, extra)
    assert torch.equal(y, 3 * (x + 2 * extra))
    dx, de = torch.autograd.grad(y.sum(), (x, extra))
    assert (dx == 3).all() and (de == 6).all()


class Unchanged(AddScaled):
    """None as the output stands for the input."""

    @classmethod
    def forward_compute(cls, args: Any) -> Any:
        return None, [()], ()


def test_none_is_the_input() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    assert torch.equal(nc.ops.Sequential(Unchanged(), nc.ops.ConstantScale(2.0))(x, x.detach()), 2 * x)


class LegacyBeside(AddScaled):
    """Transformer Engine's own operations define both; the packed form runs."""

    num_extra_inputs = 0

    def pack_forward_args(self, basic_op_ctxs: Any, input_: Any, **unused: Any) -> Any:
        return input_, input_

    @classmethod
    def backward_compute(cls, args: Any) -> Any:
        return 3 * args, [()], [()]

    def op_forward(self, ctx: Any, input_: Any, **kwargs: Any) -> Any:
        raise AssertionError

    def op_backward(self, ctx: Any, grad_output: Any) -> Any:
        raise AssertionError


def test_the_packed_form_runs_where_a_class_defines_the_legacy_one_beside_it() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    y = LegacyBeside()(x)
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(y, 3 * x) and (grad == 3).all()


class PackedPair(FusedOperation):
    """Two gains in one forward, whose backward the two do apart."""

    def pack_forward_args(self, basic_op_ctxs: Any, input_: Any, **unused: Any) -> Any:
        return input_, *[op.gain for op in self.basic_ops]

    @classmethod
    def forward_compute(cls, args: Any) -> Any:
        first = torch.tanh(args[0] * args[1])
        return torch.tanh(first * args[2]), [(), ()], (args[0] * 1, first)

    def forward_setup_context(self, basic_op_ctxs: Any, args: Any, aux: Any) -> None:
        for ctx, saved, gain in zip(basic_op_ctxs, aux, args[1:], strict=True):
            ctx.save_for_backward(saved, gain)


def test_a_fused_operation_of_the_packed_form() -> None:
    def fuse(ops: Any, *, recipe: Any) -> Any:
        return [PackedPair(ops)] if all(type(op) is Gain for op in ops) and len(ops) == 2 else ops

    torch.manual_seed(0)
    module = nc.ops.Sequential(Gain(64), Gain(64))
    apart = results(module, module, None)
    nc.ops.register_forward_fusion(fuse)
    try:
        fused = results(module, module, None)
        assert type(module._module_groups[0]._forward_ops[0][0]) is PackedPair
    finally:
        nc.ops.unregister_fusion(fuse)
    for a, b in zip(fused, apart, strict=True):
        assert torch.equal(a, b)


def test_parts_of_the_form_go_together() -> None:
    with pytest.raises(
        TypeError, match="defines forward_compute but not pack_forward_args and forward_setup"
    ):
        type("Half", (BasicOperation,), {"forward_compute": classmethod(lambda cls, args: None)})
    with pytest.raises(TypeError, match="defines backward_compute but not pack_backward_args"):
        type("Half", (LegacyBeside,), {"backward_compute": None, "pack_backward_args": None}) and type(
            "Half", (BasicOperation,), {"backward_compute": classmethod(lambda cls, args: None)}
        )
    with pytest.raises(TypeError, match="forward_compute together with op_forward_compute"):
        type(
            "Both",
            (AddScaled,),
            {"forward_compute": None, "op_forward_compute": None, "op_forward_save_ctx": None},
        )
