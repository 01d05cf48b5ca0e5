"""Cross entropy of a linear layer's output, without that output."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._checks import is_one_of, not_among, positive, shape_of, tensors
from .._determinism import DETERMINISM
from .._device import HIGH_PRECISION
from .._tracing import once_differentiable
from ..functional import linear_cross_entropy_gradients, linear_cross_entropy_statistics
from ..layers.parameters import casts
from ..recipe import Recipe
from ..state.autocast import checked_recipe
from ..tensors import QuantizedTensor
from .quantized_head import QuantizedLinearCrossEntropyFunction, chunk_size_of, head_plan
from .token_loss import Smoothing, check_target, mean_loss, token_gradient, token_loss

_REDUCTIONS = ("mean", "sum", "none")


class _LinearCrossEntropyFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        smoothing: Smoothing,
        chunk: int,
    ) -> Tensor:
        in_order = DETERMINISM.batch_invariant
        statistics = linear_cross_entropy_statistics(hidden, weight, bias, target, chunk, in_order)
        loss, lse = token_loss(statistics, target, weight.shape[0], smoothing)
        ctx.save_for_backward(hidden, weight, bias, target, lse)
        ctx.smoothing, ctx.chunk, ctx.in_order = smoothing, chunk, in_order
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, target, lse = ctx.saved_tensors
        wanted = list(ctx.needs_input_grad[:3])
        grad = token_gradient(grad_loss, target, ctx.smoothing)
        gradients = linear_cross_entropy_gradients(
            hidden,
            weight,
            bias,
            target,
            lse,
            grad,
            ctx.smoothing.label_smoothing,
            ctx.chunk,
            wanted,
            ctx.in_order,
        )
        return (
            *(gradient if needed else None for gradient, needed in zip(gradients, wanted)),
            None,
            None,
            None,
        )


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    reduction: str = "mean",
    chunk_size: int | None = None,
    recipe: Recipe | str | None = None,
) -> Tensor:
    """Compute ``cross_entropy(linear(hidden, weight, bias), target)`` without storing the full logits.

    Forward and backward compute the logits of ``chunk_size`` classes at a time, T x chunk_size numbers in the dtype of
    ``hidden``, and drop them; in the backward the gradient overwrites them. Besides operands and gradients it needs one
    chunk, T x H numbers in fp32 for the gradient of ``hidden``, and three numbers per token. It costs four GEMMs
    instead of three. The softmax is computed in fp32. Compiles with ``fullgraph=True``.

    Args:
        hidden: (*lead, H), fp32, bf16 or fp16.
        weight: (V, H), in the same dtype; a quantized one is dequantized. Under ``torch.autocast`` they are cast.
        target: lead, int64 or int32.
        bias: (V,), or None.
        label_smoothing: as in ``torch.nn.functional.cross_entropy``.
        reduction: "mean", "sum" or "none".
        ignore_index: a token with this target has no loss and no gradient; the mean is over the others. If all tokens
            are ignored, it is 0; torch returns NaN.
        chunk_size: classes at a time; None for as many as make 2**27 logits, and at least 1024. With a recipe it is
            rounded up to a multiple of 128; if it holds all classes, their logits and the codes of the weight are kept
            for the backward, which computes three GEMMs in place of four.
        recipe: a recipe or its name, which quantizes the operands of the four GEMMs; None is high precision. Each chunk
            of classes is quantized like the weight of a separate linear layer. The logits stay in the dtype of
            ``hidden``; their gradient is quantized while it is computed, if the format's kernels can.

    Returns:
        fp32: a scalar, or the shape of ``target``.

    Raises:
        ValueError: shapes or dtypes do not match, the reduction is unknown, a chunk has no classes, the smoothing is
            outside [0, 1], a target is out of range on a CPU (on a GPU, and in compiled code, the token's loss and
            gradients are NaN), or the recipe keeps state or has a ``backward_override``.
        TypeError: ``recipe`` is not a recipe.
        RuntimeError: the gradient is differentiated.
    """
    if not is_one_of(reduction, _REDUCTIONS):
        raise ValueError(f"reduction is {not_among(reduction, _REDUCTIONS)}")
    if chunk_size is not None:
        positive(chunk_size=chunk_size)
    tensors(hidden=hidden)
    if not isinstance(weight, QuantizedTensor):
        tensors(weight=weight)
    if bias is not None:
        tensors(bias=bias)
    hidden, weight, bias = _operands(hidden, weight, bias)
    smoothing = Smoothing(label_smoothing, ignore_index)
    check_target(target, weight.shape[0], smoothing, "hidden", hidden)
    rows = target.reshape(-1)
    matrix = hidden.reshape(-1, hidden.shape[-1])
    recipe = checked_recipe(recipe, "linear_cross_entropy")
    if recipe is None:
        loss = _LinearCrossEntropyFunction.apply(matrix, weight, bias, rows, smoothing, chunk_size or 0)
    else:
        plan, chunk = head_plan(recipe, matrix, weight), chunk_size_of(matrix, chunk_size)
        loss = QuantizedLinearCrossEntropyFunction.apply(matrix, weight, bias, rows, smoothing, chunk, plan)
    if reduction == "mean":
        return mean_loss(loss, rows, ignore_index)
    return loss.sum() if reduction == "sum" else loss.view(target.shape)


def _operands(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the operands in one dtype, checked."""
    if isinstance(weight, QuantizedTensor):
        weight = weight.dequantize()
    if casts(hidden):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    if hidden.dim() < 1 or weight.dim() != 2 or hidden.shape[-1] != weight.shape[1] or not weight.shape[0]:
        raise ValueError(
            f"hidden {shape_of(hidden)} and weight {shape_of(weight)} do not multiply; use (*lead, H) and (V, H)"
        )
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise ValueError(f"bias has shape {shape_of(bias)}; use ({weight.shape[0]},), one number per class")
    for name, tensor in (("hidden", hidden), ("weight", weight), ("bias", bias)):
        if tensor is None:
            continue
        if tensor.dtype != hidden.dtype or tensor.dtype not in HIGH_PRECISION:
            raise ValueError(
                f"{name} has dtype {tensor.dtype} and hidden {hidden.dtype}; use one of torch.float32, torch.bfloat16 "
                "and torch.float16 for all, or torch.autocast"
            )
    return hidden, weight, bias
