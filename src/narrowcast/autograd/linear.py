"""The autograd function of a linear layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._tracing import once_differentiable
from ..functional import replay_of
from ..tensors import plain_gradient, saved_tensors
from .arguments import LinearBwdArgs, LinearFwdArgs
from .gemms import linear_backward, linear_bwd_args, linear_forward
from .weight_gradient import begin_main_grads_


class LinearFunction(torch.autograd.Function):
    """Linear layer, differentiable in its three tensors, which are saved here and nowhere else.

    Operands: weight (N, K), plain or quantized; inp (*lead, K), plain or quantized; bias (N,) or None; ``args``, which
    is not modified. The result is (*lead, N) in the activation dtype.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, inp: Tensor, bias: Tensor | None, args: LinearFwdArgs) -> Tensor:
        forward = replay_of(linear_forward, [inp, weight, bias], (args,))
        out, saved_input, saved_weight = forward(weight, inp, bias, args)
        ctx.save_for_backward(args.scales.scale, *saved_input.tensors, *saved_weight.tensors)
        ctx.backward_objects = linear_bwd_args(args, weight, bias, saved_input, saved_weight)
        # no view, which operators in place and pipelines refuse; what PyTorch 2.11 compiles needs a call in its place
        return out.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        args: LinearBwdArgs = ctx.backward_objects
        scale, *saved = saved_tensors(ctx)
        count, dy = args.saved_input[0], plain_gradient(grad_output)
        begin_main_grads_(args.wgrad)
        backward = replay_of(linear_backward, [dy, scale, *saved], (args,))
        gradients = backward(args, dy, saved[:count], saved[count:], scale)
        return (*gradients, None)
