"""An adapter of two thin matrices beside a linear layer: no product is written before it is added.

An adapter adds ``(x A^T) (s B)^T`` to its layer's output. ``adapter_input`` is before the layer and ``adapter_output``
after it, so that the layer's own gradient of the input comes by the first one, which adds the adapter's to it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._tracing import once_differentiable
from ..functional import add_product, thin_products


def _matrix(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


class _Input(torch.autograd.Function):
    """(x, A) -> (x, x A^T), or x A^T alone; see :func:`adapter_input`."""

    @staticmethod
    def forward(ctx: Any, inp: Tensor, lora_a: Tensor, passes: bool) -> Any:
        thin = lora_a.to(inp.dtype)
        ctx.passes = passes
        ctx.kind = lora_a.dtype
        ctx.save_for_backward(inp, thin)
        (hidden,) = thin_products(_matrix(inp), thin.t(), None)
        return (inp.view_as(inp), hidden) if passes else hidden

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        inp, thin = ctx.saved_tensors
        grad_hidden = grads[-1]
        grad_inp = grad_a = None
        if ctx.needs_input_grad[1]:
            (columns,) = thin_products(_matrix(inp), None, grad_hidden)
            grad_a = columns.t().to(ctx.kind)
        if ctx.passes:
            grad_inp = add_product(_matrix(grads[0]), grad_hidden, thin.t()).view(inp.shape)
        elif ctx.needs_input_grad[0]:
            grad_inp = (grad_hidden @ thin).view(inp.shape)
        return grad_inp, grad_a, None


class _Output(torch.autograd.Function):
    """(y, h, B, s) -> y + h (s B)^T."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, hidden: Tensor, lora_b: Tensor, scaling: float) -> Tensor:
        thin = (lora_b * scaling).to(hidden.dtype)
        ctx.scaling = scaling
        ctx.kind = lora_b.dtype
        ctx.save_for_backward(hidden, thin)
        return add_product(_matrix(out), hidden, thin).view(out.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        hidden, thin = ctx.saved_tensors
        grad_hidden, columns = thin_products(_matrix(grad).to(hidden.dtype), thin, hidden)
        return grad, grad_hidden, (columns * ctx.scaling).to(ctx.kind), None


def adapter_input(inp: Tensor, lora_a: Tensor) -> tuple[Tensor, Tensor]:
    """Return the input for the layer beside the adapter, and the product (M, r) for :func:`adapter_output`.

    Args:
        inp: (*lead, K), bf16 or fp16.
        lora_a: (r, K); multiplied in the dtype of ``inp``.
    """
    if inp.requires_grad and torch.is_grad_enabled():
        return _Input.apply(inp, lora_a, True)  # type: ignore[no-any-return]
    return inp, adapter_product(inp, lora_a)


def adapter_product(inp: Tensor, lora_a: Tensor) -> Tensor:
    """Return the product (M, r) alone; for an input that the layer does not read, such as after dropout."""
    return _Input.apply(inp, lora_a, False)  # type: ignore[no-any-return]


def adapter_output(out: Tensor, hidden: Tensor, lora_b: Tensor, scaling: float) -> Tensor:
    """Return ``RN(out + hidden (s B)^T)``, ``s B`` rounded to the dtype of ``hidden``.

    Args:
        out: (*lead, N), of the layer.
        hidden: (M, r), of :func:`adapter_input`.
        lora_b: (N, r).
        scaling: s.
    """
    return _Output.apply(out, hidden, lora_b, scaling)  # type: ignore[no-any-return]
