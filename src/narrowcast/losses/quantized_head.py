"""The GEMMs of ``linear_cross_entropy`` under a recipe: each chunk of classes is a linear layer of its own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .._checks import shown
from .._tracing import once_differentiable
from ..autograd import fprop
from ..functional import (
    columns_at_once,
    cross_entropy_gradient_quantize,
    cross_entropy_statistics,
    gemm,
    joined_statistics,
)
from ..quantizers import OperandBuffers
from ..recipe import LinearPlan, Recipe, linear_plan
from .token_loss import Smoothing, token_gradient, token_loss

CHUNK_MULTIPLE = 128
"""Chunks are whole blocks of every format, so that blocks of a chunk are those of the weight."""


def head_plan(recipe: Recipe, hidden: Tensor, weight: Tensor) -> LinearPlan:
    """Return the plan of the head's GEMMs under a recipe.

    Raises:
        ValueError: the recipe keeps state between steps, has a backward in high precision, or rounds weights
            stochastically.
    """
    recording = torch.is_grad_enabled()
    wants = recording and hidden.requires_grad, recording and weight.requires_grad
    plan = linear_plan(recipe, "", *wants, module_type="linear")
    name = type(recipe).__name__
    if plan.delayed is not None:
        raise ValueError(
            f"linear_cross_entropy: recipe is {name}, whose scales are state of a layer, and a function keeps none; "
            "use 'current' or 'block'"
        )
    if plan.backward_override is not None:
        raise ValueError(
            f"linear_cross_entropy: recipe is {name} with backward_override={shown(plan.backward_override)}; the head "
            "quantizes its backward, too: leave backward_override out, or recipe=None"
        )
    if plan.weight.stochastic:
        raise ValueError(
            f"linear_cross_entropy: recipe is {name}, which rounds weights stochastically; the backward quantizes "
            "them again and must see the same: round them to nearest"
        )
    return plan


def chunk_size_of(hidden: Tensor, chunk: int | None) -> int:
    """Return how many classes a chunk has: ``chunk``, or what suits, up to a multiple of 128."""
    classes = chunk or columns_at_once(hidden)
    return -(-classes // CHUNK_MULTIPLE) * CHUNK_MULTIPLE


class QuantizedLinearCrossEntropyFunction(torch.autograd.Function):
    """The loss of each token, fp32 (T,), from quantized operands.

    The forward saves the codes of ``hidden``; it and the backward quantize the weight, chunk by chunk, to equal codes.
    If one chunk holds all classes, its logits and the codes of the weight are saved, and the backward computes neither.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        smoothing: Smoothing,
        chunk: int,
        plan: LinearPlan,
    ) -> Tensor:
        x, parts, kept = plan.input.quantize(hidden), [], None
        whole = chunk >= weight.shape[0]
        operand = plan.kept_weight if whole and plan.needs_input else plan.weight
        for start, rows, part_of_bias in _chunks(weight, bias, chunk):
            w = operand.quantize(rows)
            logits = _logits(plan, x, w, part_of_bias, hidden, rows)
            parts.append(cross_entropy_statistics(logits, target - start))
            kept = (logits, w.columnwise) if whole else None
            del w, logits  # before the next chunk's
        loss, lse = token_loss(joined_statistics(parts), target, weight.shape[0], smoothing)
        whole_logits, columns = kept or (None, [])
        codes = ([] if whole else x.rowwise), x.columnwise, columns
        ctx.save_for_backward(hidden, weight, bias, target, lse, whole_logits, *itertools.chain(*codes))
        ctx.counts, ctx.plan, ctx.smoothing, ctx.chunk = [*map(len, codes)], plan, smoothing, chunk
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, target, lse, whole_logits, *codes = ctx.saved_tensors
        plan, smoothing, (wants_hidden, wants_weight, wants_bias) = (
            ctx.plan,
            ctx.smoothing,
            ctx.needs_input_grad[:3],
        )
        rowwise, columnwise, columns = _split(codes, ctx.counts)
        x = OperandBuffers(rowwise, columnwise, plan.input.quantizer)
        grad = token_gradient(grad_loss, target, smoothing)
        dhidden, dbias = None, []
        dweight = torch.empty_like(weight) if wants_weight and whole_logits is None else None
        for start, rows, part_of_bias in _chunks(weight, bias, ctx.chunk):
            if whole_logits is not None:
                w, logits = OperandBuffers([], columns, plan.kept_weight.quantizer), whole_logits
            else:
                w = (plan.kept_weight if wants_hidden else plan.weight).quantize(rows)
                logits = _logits(plan, x, w, part_of_bias, hidden, rows)
            buffers = cross_entropy_gradient_quantize(
                logits,
                target - start,
                lse,
                grad,
                smoothing.label_smoothing,
                weight.shape[0],
                plan.grad_output.quantizer,
                wants_bias,
                plan.grad_output.seed(logits),
            )
            if wants_bias:
                *buffers, sums = buffers
                dbias.append(sums)
            dy = plan.grad_output.split(buffers)
            if wants_hidden:
                part = _dgrad(plan, dy, w, hidden, whole_logits is not None)
                dhidden = part if dhidden is None else dhidden + part
            if dweight is not None:
                dweight[start : start + ctx.chunk] = _wgrad(plan, dy, x, rows)
            elif wants_weight:
                dweight = _wgrad(plan, dy, x, rows)
            del w, logits, buffers, dy  # before the next chunk's
        return (
            None if dhidden is None else dhidden.to(hidden.dtype),
            dweight,
            torch.cat(dbias).to(bias.dtype) if wants_bias else None,
            None,
            None,
            None,
            None,
        )


def _split(tensors: list[Tensor], counts: list[int]) -> Iterator[list[Tensor]]:
    """Yield so many of the tensors each time."""
    rest = iter(tensors)
    for count in counts:
        yield [*itertools.islice(rest, count)]


def _chunks(weight: Tensor, bias: Tensor | None, chunk: int) -> Iterator[tuple[int, Tensor, Tensor | None]]:
    """Yield the first class, the rows of the weight, and their bias."""
    for start in range(0, weight.shape[0], chunk):
        yield (
            start,
            weight[start : start + chunk],
            None if bias is None else bias[start : start + chunk],
        )


def _logits(
    plan: LinearPlan, x: OperandBuffers, w: OperandBuffers, bias: Tensor | None, hidden: Tensor, rows: Tensor
) -> Tensor:
    return fprop(plan, x, w, bias, hidden.dtype, hidden.shape[0], rows.shape[0])


def _dgrad(plan: LinearPlan, dy: OperandBuffers, w: OperandBuffers, hidden: Tensor, whole: bool) -> Tensor:
    """Return a chunk's part of the gradient of ``hidden``, in fp32 for the sum over chunks; of a whole one, its own."""
    operands = dy.rowwise, dy.quantizer, w.columnwise, w.quantizer
    dtype = hidden.dtype if whole else torch.float32
    return gemm("dgrad", *operands, None, dtype, *hidden.shape, plan.fast_dgrad, plan.emulate)


def _wgrad(plan: LinearPlan, dy: OperandBuffers, x: OperandBuffers, rows: Tensor) -> Tensor:
    operands = dy.columnwise, dy.quantizer, x.columnwise, x.quantizer
    return gemm("wgrad", *operands, None, rows.dtype, *rows.shape, plan.fast_wgrad, plan.emulate)
