"""``Bias``: values, its gradient, the gradient it quantizes for the operation in front, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from modules import assert_same, step
from ops_checks import check, check_compiled, make_inputs
from recipes import DEVICE, QUANTIZED

import narrowcast as nc
from narrowcast.autograd import DelayedScales
from narrowcast.functional import dequantize
from narrowcast.ops import BasicOperation, Bias, ScaledOperand, Sequential
from narrowcast.quantizers import Operand
from narrowcast.tensors import QuantizedTensorStorage


def bias(size: int, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Bias:
    op = Bias(size, device=DEVICE, dtype=dtype, **options)
    with torch.no_grad():
        op.bias.normal_()
    return op


@pytest.mark.parametrize("shape", [(7,), (5, 7), (5, 3, 7), (0, 7)])
def test_values_and_gradients(shape: tuple[int, ...]) -> None:
    op, (x,) = bias(7, torch.float32), make_inputs([shape], dtype=torch.float32)
    results = step(op, [x])
    assert torch.equal(results["out0"], x + op.bias)
    assert torch.equal(results["d input0"], 2 * results["out0"])
    assert torch.equal(results["d bias"], (2 * results["out0"]).reshape(-1, 7).sum(0))


def test_the_sum_is_taken_in_fp32() -> None:
    op, x = bias(3), torch.ones(1000, 3, dtype=torch.bfloat16, device=DEVICE)
    op(x).sum().backward()
    assert torch.equal(op.bias.grad, torch.full_like(op.bias, 1000.0))  # ones added up in bf16 end at 256


def test_eager_compiled_dynamic_and_the_rest() -> None:
    check(lambda: Sequential(bias(7), bias(7)), [(5, 3, 7)])


def test_frozen() -> None:
    op, (x,) = bias(7).requires_grad_(False), make_inputs([(5, 7)])
    results = step(op, [x])
    assert set(results) == {"out0", "d input0"}


class Wants(BasicOperation):
    """Wants the gradient of its output quantized, and takes both."""

    def __init__(self) -> None:
        super().__init__()
        self._add_delayed_state("", DEVICE)

    def num_quantizers(self, mode: Any) -> int:
        return int(mode == "backward")

    def get_quantizer_roles(self, mode: Any) -> list[nc.QuantizerRole]:
        return [nc.QuantizerRole("linear", "grad_output")] * self.num_quantizers(mode)

    def get_grad_output_quantizer(self) -> Operand | None:
        return self.get_quantizer("backward", 0)

    def op_forward_compute(self, input_: Any, **kwargs: Any) -> Any:
        return 2 * input_, ()

    def op_forward_save_ctx(self, ctx: Any, *args: Any, **kwargs: Any) -> None:
        ctx.own = self.get_quantizer("backward", 0)

    def quantized(self, ctx: Any, grad_output: torch.Tensor) -> QuantizedTensorStorage:
        scales = ctx.scales or DelayedScales()
        return ScaledOperand(ctx.own, scales.scale, scales.amax).quantize(grad_output)

    def op_backward(self, ctx: Any, grad_output: Any) -> Any:
        if ctx.own is not None:
            made = (
                grad_output
                if isinstance(grad_output, QuantizedTensorStorage)
                else self.quantized(ctx, grad_output)
            )
            assert made.shape[-1] == 32
            rows = dequantize(made.rowwise_operand(), made._quantizer, False, torch.bfloat16, [40, 32])
            grad_output = rows.view(made.shape)
        return 2 * grad_output, ()


@pytest.mark.parametrize("name", QUANTIZED)
def test_it_quantizes_the_gradient_for_the_operation_in_front(name: str) -> None:
    def make() -> Sequential:
        torch.manual_seed(0)
        return Sequential(Wants(), bias(32))

    class Between(nc.ops.Identity):
        """Asks nothing, so that nobody quantizes for the first."""

    if "nvfp4" not in name:  # rounds stochastically: drawn anew
        block, inputs = make(), make_inputs([(5, 8, 32)])
        apart = Sequential(Wants(), Between(), bias(32))
        apart[2].load_state_dict(block[1].state_dict())
        ours, theirs = step(block, inputs, QUANTIZED[name]), step(apart, inputs, QUANTIZED[name])
        theirs["d 1.bias"] = theirs.pop("d 2.bias")
        assert_same(ours, theirs)
    check_compiled(make(), [(5, 8, 32)], QUANTIZED[name])


def test_state_and_errors() -> None:
    op = bias(7)
    assert list(op.state_dict()) == ["bias"]
    for size in (0, -3):
        with pytest.raises(ValueError, match=f"size is {size}; use a positive multiple of the 1 ranks"):
            Bias(size)
    with pytest.raises(ValueError, match=r"input has shape \(5, 1\); its last dim must be size=7"):
        op(torch.ones(5, 1, device=DEVICE, dtype=torch.bfloat16))
    meta = Bias(7, device="meta")
    assert meta.bias.is_meta
    assert torch.equal(meta(torch.ones(2, 7, device=DEVICE)), torch.ones(2, 7, device=DEVICE))
