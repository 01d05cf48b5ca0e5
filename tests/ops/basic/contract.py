"""What the split forward of every basic operation promises."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from narrowcast import ops
from narrowcast.autograd import DelayedScales
from narrowcast.tensors import prepare_for_saving


def check_split_forward(op: ops.BasicOperation, x: Tensor, *extra: Tensor) -> None:
    """Compute gives the same twice and leaves the operation alone; save stores it, on fake tensors, too."""
    assert op._use_split_forward
    kwargs: dict[str, Any] = {
        "basic_op_extra_inputs": [extra],
        "prev_op_grad_output_quantizer": None,
        "next_op_input_quantizer": None,
        "basic_op_kwargs": [{}],
        "requires_grad": True,
    }
    before = attributes(op)
    with torch.no_grad():
        (first, _, saved), (second, _, again) = (op.fuser_forward_compute(x, **kwargs) for _ in range(2))
        assert torch.equal(first, second)  # type: ignore[arg-type]
        for a, b in zip(prepare_for_saving(*saved[0])[0], prepare_for_saving(*again[0])[0], strict=True):
            assert a is b is None or torch.equal(a, b)  # type: ignore[arg-type]
        assert op.fuser_forward_compute(x, **{**kwargs, "requires_grad": False})[2] == [()]
        with FakeTensorMode() as mode:
            fake, *fake_extra = [mode.from_tensor(tensor) for tensor in (x, *extra)]
            tensors = tuple(mode.from_tensor(t) if isinstance(t, Tensor) else t for t in saved[0])
            ctx = ops.OperationContext()
            kwargs["basic_op_extra_inputs"] = [tuple(fake_extra)]
            assert op.fuser_forward_save_ctx([ctx], fake, [tensors], **kwargs) is None
        assert len(ctx.saved_tensors) == len(tensors)
        assert all(a is b for a, b in zip(ctx.saved_tensors, tensors))
    assert attributes(op) == before


def attributes(op: ops.BasicOperation) -> dict[str, Any]:
    """Public state of an operation, by identity."""
    return {name: id(value) for name, value in vars(op).items() if not name.startswith("_")}


def wanted_by(op: Any, mode: str) -> ops.ScaledOperand:
    """How an operation wants its input, or the gradient of its output, as a fuser would hand that on."""
    scales = op.forward_arguments(True, True).get("scales") or DelayedScales()
    if mode == "forward":
        return ops.ScaledOperand(op.get_input_quantizer(), scales.scale, scales.amax)
    return ops.ScaledOperand(op.get_grad_output_quantizer(), scales.scale, scales.amax)
