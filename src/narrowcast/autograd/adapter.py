"""Adapters of two thin matrices beside linear layers, with fewer passes over memory.

An adapter adds ``(x A^T) (s B)^T`` to its layer's output. ``AdaptedLinearFunction`` adds it in the layer's GEMM, before
the sum is rounded. For other formats ``adapter_inputs`` is before the layers that read one input, and
``adapter_output`` after each of them. So the layers' own gradients of the input come by the first one, which sums them
and adds the adapters' products in one pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._tracing import once_differentiable
from ..functional import add_product, product, thin_products
from ..tensors import saved_tensors
from .arguments import LinearBwdArgs, LinearFwdArgs
from .gemms import linear_backward, linear_bwd_args, linear_forward


def _matrix(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


class _Inputs(torch.autograd.Function):
    """(x, A, ...) -> (x, ..., x A^T, ...), or the products alone; see :func:`adapter_inputs`."""

    @staticmethod
    def forward(ctx: Any, passes: bool, inp: Tensor, *lora_as: Tensor) -> Any:
        thins = [lora_a.to(inp.dtype) for lora_a in lora_as]
        thin = thins[0] if len(thins) == 1 else torch.cat(thins)
        ctx.passes, ctx.ranks, ctx.kind = passes, [lora_a.shape[0] for lora_a in lora_as], lora_as[0].dtype
        ctx.save_for_backward(inp, thin)
        hidden = product(_matrix(inp), thin)
        products = (
            [part.contiguous() for part in hidden.split(ctx.ranks, 1)] if len(lora_as) > 1 else [hidden]
        )
        return (*[inp.view_as(inp) for _ in lora_as if passes], *products)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        inp, thin = ctx.saved_tensors
        count = len(ctx.ranks)
        grad_hidden = grads[-1] if count == 1 else torch.cat(grads[-count:], 1)
        grad_inp = None
        if ctx.passes:
            grad_inp = add_product([_matrix(grad) for grad in grads[:count]], grad_hidden, thin.t())
        elif ctx.needs_input_grad[1]:
            grad_inp = grad_hidden @ thin
        grad_as = (grad_hidden.t() @ _matrix(inp)).to(ctx.kind).split(ctx.ranks)
        return None, None if grad_inp is None else grad_inp.view(inp.shape), *grad_as


class _Output(torch.autograd.Function):
    """(y, h, B, s) -> y + h (s B)^T."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, hidden: Tensor, lora_b: Tensor, scaling: float) -> Tensor:
        thin = (lora_b * scaling).to(hidden.dtype)
        ctx.scaling, ctx.kind = scaling, lora_b.dtype
        ctx.save_for_backward(hidden, thin)
        # Not one kernel: rounding the sum loses small products, which a graph adds in fp32 where it is read.
        return out + product(hidden, thin).view(out.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        hidden, thin = ctx.saved_tensors
        grad_hidden, columns = thin_products(_matrix(grad).to(hidden.dtype), thin, hidden)
        return grad, grad_hidden, (columns * ctx.scaling).to(ctx.kind), None


class AdaptedLinearFunction(torch.autograd.Function):
    """A linear layer with a frozen weight and an adapter, whose products are added in the layer's own GEMMs.

    Operands as of ``LinearFunction``, and A (r, K), B (N, r) with their scaling. The plan is quantized, and nothing is
    split over processes.
    """

    @staticmethod
    def forward(
        ctx: Any,
        weight: Any,
        inp: Tensor,
        bias: Tensor | None,
        lora_a: Tensor,
        lora_b: Tensor,
        scaling: float,
        args: LinearFwdArgs,
    ) -> Tensor:
        thin_a, thin_b = lora_a.to(inp.dtype), (lora_b * scaling).to(inp.dtype)
        hidden = product(_matrix(inp), thin_a)
        out, saved_input, saved_weight = linear_forward(weight, inp, bias, args, thin=(hidden, thin_b))
        ctx.save_for_backward(args.scales.scale, inp, hidden, thin_a, thin_b, *saved_weight.tensors)
        ctx.backward_objects = linear_bwd_args(args, weight, bias, saved_input, saved_weight)
        ctx.adapter = scaling, lora_a.dtype
        return out.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        args: LinearBwdArgs = ctx.backward_objects
        scaling, kind = ctx.adapter
        scale, inp, hidden, thin_a, thin_b, *weight = saved_tensors(ctx)
        grad_hidden, columns = thin_products(_matrix(grad), thin_b, hidden)
        grad_a = (grad_hidden.t() @ _matrix(inp)).to(kind)
        _, grad_inp, grad_bias = linear_backward(
            args, grad, [], weight, scale, thin=(grad_hidden, thin_a.t())
        )
        return None, grad_inp, grad_bias, grad_a, (columns * scaling).to(kind), None, None


def adapter_inputs(inp: Tensor, lora_as: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Return for each adapter the input for the layer beside it, and its product (M, r) for :func:`adapter_output`.

    Args:
        inp: (*lead, K), bf16 or fp16; all these layers read it.
        lora_as: (r, K) each, of one dtype; multiplied in the dtype of ``inp``.
    """
    if not (inp.requires_grad and torch.is_grad_enabled()):
        return [(inp, product) for product in _Inputs.apply(False, inp, *lora_as)]
    made = _Inputs.apply(True, inp, *lora_as)
    return list(zip(made[: len(lora_as)], made[len(lora_as) :]))


def adapter_product(inp: Tensor, lora_a: Tensor) -> Tensor:
    """Return the product (M, r) alone; for an input that the layer does not read, such as after dropout."""
    return _Inputs.apply(False, inp, lora_a)[0]  # type: ignore[no-any-return]


def adapter_output(out: Tensor, hidden: Tensor, lora_b: Tensor, scaling: float) -> Tensor:
    """Return ``out + hidden (s B)^T``, ``s B`` and the product rounded to the dtype of ``hidden``.

    Args:
        out: (*lead, N), of the layer.
        hidden: (M, r), of :func:`adapter_inputs`.
        lora_b: (N, r).
        scaling: s.
    """
    return _Output.apply(out, hidden, lora_b, scaling)  # type: ignore[no-any-return]
