"""``Bias``."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..._checks import flags, shape_of, whole
from ...functional import quantize_dbias
from ...functional.collectives import group_name, group_size
from ...layers import parameter_device
from ...layers.parameters import parameter_dtype
from ...layers.tensor_parallel import Split
from ..handover import matrix_of
from ..op import BasicOperation


class Bias(BasicOperation, values=("bias.requires_grad",)):
    """y = x + bias over the last dim.

    The gradient of the bias is the sum over all other dims, in fp32. If the previous operation requests the gradient
    quantized, the same pass quantizes it.

    Args:
        size: size of the last dim.
        device: device of the parameter; default: the accelerator, or the CPU without one.
        dtype: dtype of the parameter; default: torch's default dtype.
        tensor_parallel: hold the rank's share of the bias.
        tensor_parallel_group: process group that shares it; None is the default group.
    Raises:
        ValueError: the size is not positive or the group does not divide it; in forward, another last dim.
    """

    quantizes_grad_input = True

    bias: nn.Parameter

    _passes_gradient = True

    def __init__(
        self,
        size: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        tensor_parallel: bool = False,
        tensor_parallel_group: Any = None,
    ) -> None:
        super().__init__()
        flags(tensor_parallel=tensor_parallel)
        shares = (
            group_size(group_name(tensor_parallel_group, "tensor_parallel_group")) if tensor_parallel else 1
        )
        whole(size=size)
        if size < 1 or size % shares:
            raise ValueError(f"size is {size}; use a positive multiple of the {shares} ranks that share it")
        self.tensor_parallel, self.tensor_parallel_group = tensor_parallel, tensor_parallel_group
        self.size, self.local_size, self._shares = size, size // shares, shares
        place, kind = parameter_device(device), parameter_dtype(None, dtype)
        self.bias = nn.Parameter(torch.empty(self.local_size, dtype=kind, device=place))
        if place.type != "meta":
            self.reset_parameters()

    def _split_of(self, name: str) -> Split | None:
        """Return how ranks share the bias."""
        return (
            None
            if name != "bias"
            else Split(0, group_name(self.tensor_parallel_group), self._shares, "tensor")
        )

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the bias to 0; a parameter on the meta device is first made on the default device."""
        if self.bias.is_meta:
            self.bias = nn.Parameter(torch.empty_like(self.bias, device=parameter_device(None)))
        self.bias.zero_()

    def pre_first_fuser_forward(self) -> None:
        if self.bias.is_meta:
            self.reset_parameters()

    def op_forward_compute(self, input_: Any, **kwargs: Any) -> Any:
        if input_.shape[-1] != self.local_size:
            raise ValueError(
                f"input has shape {shape_of(input_)}; its last dim must be size={self.local_size}"
            )
        return input_ + self.bias.to(input_.dtype), ()

    def op_forward_save_ctx(self, ctx: Any, input_: Any, tensors_to_save: Any, **kwargs: Any) -> None:
        ctx.with_grad_bias, ctx.bias_dtype = self.bias.requires_grad, self.bias.dtype

    def op_backward(self, ctx: Any, grad_output: Any) -> Any:
        wanted = ctx.prev_op_grad_output_quantizer
        # a fused operation's forward that saves nothing may be in front
        dtype = getattr(ctx, "bias_dtype", self.bias.dtype)
        if not getattr(ctx, "with_grad_bias", self.bias.requires_grad):
            return grad_output, (None,)
        rows = matrix_of(grad_output)
        if wanted is None or not ctx.input_requires_grad:
            return grad_output, (rows.sum(dim=0, dtype=torch.float32).to(dtype),)
        *buffers, sums = quantize_dbias(rows, wanted.operand.quantizer, *wanted.state(rows))
        grad = wanted.assemble(buffers, tuple(grad_output.shape), grad_output.dtype)
        return grad, (sums.to(dtype),)
