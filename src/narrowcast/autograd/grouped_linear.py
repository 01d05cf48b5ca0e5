"""Linear layers on groups of rows, as a stage of a boundary and as an autograd function: ``gemms`` with the groups.

y_g = x_g w_g^T for every group of rows, all groups in one operator per step. A group is quantized as a linear layer of
its own would quantize it; the splits, how many rows each group has, are a tensor that nothing here reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..functional import (
    grouped_column_sum,
    grouped_dequantize,
    grouped_gemm,
    grouped_mm,
    grouped_quantize,
    grouped_quantize_keeping_amax,
    grouped_quantize_weights,
    join_weights,
    operand_of,
)
from ..functional.wgrad_store import DeferredWgrad
from ..quantizers import IdentityQuantizer, Operand, OperandBuffers, Quantizer
from ..tensors import grouped_layout, plain
from .arguments import LinearBwdArgs, LinearFwdArgs
from .gemms import saved_operand, transposed
from .linear import saved_tensors
from .weight_gradient import placeholder, queue_wgrad

# what says that an operand of a weight gradient was not quantized
_PLAIN = IdentityQuantizer()


@dataclass(slots=True)
class Groups:
    """What a grouped linear layer reads besides what a linear layer reads.

    ``count`` (G), ``out_features``, ``in_features``: of every weight. ``split_weights``, ``split_biases``: they are one
    tensor per group, else one for all. ``covered``: the splits are known to sum to the rows. ``main_grads`` and
    ``dummies``: of each weight, what ``LinearWgrad`` has of one. ``out`` (T, N), ``dgrad_out`` (T, K): memory of the
    caller that results are written to.
    """

    count: int
    out_features: int
    in_features: int
    split_weights: bool
    split_biases: bool
    covered: bool
    main_grads: list[Tensor | None]
    dummies: list[str]
    out: Tensor | None = None
    dgrad_out: Tensor | None = None


Gradients = tuple[Tensor | None, list[Tensor | None], Tensor | None]
"""(dgrad, wgrad of each weight, grad_bias (G, N)), each None where it is not needed, or goes elsewhere."""


# -- operands ---------------------------------------------------------------------------------------------------------


def quantize_rows(
    x: Tensor, splits: Tensor, operand: Operand, scale: Tensor | None = None, amax: Tensor | None = None
) -> OperandBuffers:
    """Quantize groups of rows (T, K) in traced or eager code, without gradient."""
    layout = grouped_layout(operand.storage_name)
    buffers = grouped_quantize(x, splits, operand.quantizer, layout, operand.seed(x), scale, amax)
    return _by_direction(buffers, operand, layout)


def quantize_weights(
    weights: list[Tensor], operand: Operand, scale: Tensor | None = None, amax: Tensor | None = None
) -> OperandBuffers:
    """Quantize weights, G of (N, K) or one (G, N, K), in traced or eager code, without gradient."""
    layout, seed = grouped_layout(operand.storage_name), operand.seed(weights[0])
    buffers = grouped_quantize_weights(weights, operand.quantizer, layout, seed, scale, amax)
    return _by_direction(buffers, operand, layout)


def _by_direction(buffers: list[Tensor], operand: Operand, layout: str) -> OperandBuffers:
    return OperandBuffers(
        operand_of(buffers, layout, False) if any(operand.rowwise) else [],
        operand_of(buffers, layout, True) if any(operand.columnwise) else [],
        operand.quantizer,
    )


def biases_of_rows(biases: list[Tensor], splits: Tensor, rows: int) -> Tensor:
    """The bias of every row's group, (T, N); zeros for rows of no group."""
    whole = biases[0] if biases[0].dim() == 2 else torch.stack(biases)
    group = torch.searchsorted(splits.cumsum(0), torch.arange(rows, device=splits.device), right=True)
    return F.pad(whole, (0, 0, 0, 1)).index_select(0, group)


# -- forward ----------------------------------------------------------------------------------------------------------


def grouped_forward(
    x: Tensor,
    splits: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    args: LinearFwdArgs,
    groups: Groups,
    bias_scales: Tensor | None = None,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """(output (T, N), what to save of the input, of the weights), without gradient.

    Args:
        x, splits, weights, biases: as of :func:`grouped_linear`.
        bias_scales: (T,) to multiply each row's bias with, or None.
    """
    plan, fused_biases = args.plan, biases if bias_scales is None else []
    if plan.quantized:
        out, saved_input, saved_weight = _forward_quantized(x, splits, weights, fused_biases, args, groups)
    else:
        weights = [plain(weight) for weight in weights]
        operands = [w.to(x.dtype) for w in weights], splits, [b.to(x.dtype) for b in fused_biases]
        out = grouped_mm("fprop", x, *operands, groups.covered, x.dtype)
        saved_input, saved_weight = [x] if plan.needs_weight else [], weights if plan.needs_input else []
    if bias_scales is not None:
        added = biases_of_rows(biases, splits, x.shape[0]).float() * bias_scales.reshape(-1, 1).float()
        out = (out.float() + added).to(out.dtype)
    return _delivered(out, groups.out), saved_input, saved_weight


def _forward_quantized(
    x: Tensor,
    splits: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    args: LinearFwdArgs,
    groups: Groups,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    plan, scales, override = args.plan, args.scales, args.plan.backward_override
    inp = quantize_rows(x, splits, plan.input, scales.scale_fwd, scales.amax_fwd)
    weight, saved_weight = _weight_operands(weights, args)
    left = inp.rowwise, inp.quantizer, grouped_layout(plan.input.storage_name), args.dtype
    right = weight.rowwise, weight.quantizer, grouped_layout(plan.weight.storage_name), weights[0].dtype
    sizes = x.shape[0], groups.out_features, groups.in_features
    how = plan.fast_fprop, plan.emulate
    out = grouped_gemm("fprop", *left, *right, splits, biases, args.dtype, *sizes, *how)
    if override == "high_precision":
        return out, [x] if plan.needs_weight else [], weights if plan.needs_input else []
    saved_input = saved_operand(inp, None, plan.needs_weight, override).tensors
    if plan.save_original_input and plan.needs_weight and override is None:
        saved_input = [x]
    return out, saved_input, saved_weight


def _weight_operands(weights: list[Tensor], args: LinearFwdArgs) -> tuple[OperandBuffers, list[Tensor]]:
    """The weights as fprop reads them, and what to save of them for dgrad: as ``gemms.weight_operand``."""
    plan, weight, scale, amax = args.plan, args.workspace, args.scales.scale_fwd, args.scales.amax_fwd
    repeated = plan.dgrad_weight if weight is None else None
    if repeated is not None and repeated.current:
        *buffers, amax = grouped_quantize_keeping_amax(weights, plan.weight.quantizer)
        weight = _by_direction(buffers, plan.weight, grouped_layout(plan.weight.storage_name))
    elif weight is None:
        weight = quantize_weights(weights, plan.weight, scale, amax)
    if repeated is None:
        return weight, saved_operand(weight, None, plan.needs_input, plan.backward_override).tensors
    state = scale if repeated.delayed else amax if repeated.current else None
    return weight, weights if state is None else [*weights, state]


def _columnwise_weights(
    args: LinearBwdArgs, saved: list[Tensor], layout: str, count: int
) -> tuple[list[Tensor], Quantizer]:
    """The column-wise weights and what reads them, from what :func:`_weight_operands` saved."""
    quantizer, repeated = args.saved_weight[1], args.plan.dgrad_weight
    if quantizer is None and repeated is not None:
        scale = amax = None
        if repeated.delayed:
            *saved, scale = saved
        elif repeated.current:
            *saved, amax = saved
        return quantize_weights(saved, repeated, scale, amax).columnwise, repeated.quantizer
    columnwise = _transposed(saved, args.shape) if args.transpose_weight else saved
    if len(saved) > 2:  # each by itself, as the parameters have them
        columnwise = join_weights(saved, quantizer, layout, True, count, *args.shape, args.weight_dtype)
    return columnwise, quantizer  # type: ignore[return-value]


def _transposed(rowwise: list[Tensor], shape: tuple[int, int]) -> list[Tensor]:
    """Column-wise weights (N, K) from row-wise ones; weights scaled in blocks are stacked as one matrix."""
    codes, scale = rowwise
    if scale.dim() == 1:
        return [codes.transpose(1, 2).contiguous(), scale]
    return transposed(rowwise, shape[1])


def _delivered(result: Tensor, buffer: Tensor | None) -> Tensor:
    """The result, written to the buffer where there is one.

    Eager code goes on with the buffer. Compiled code goes on with the result: that a graph's output and an operand it
    writes to are one memory would cost the output its gradient.
    """
    if buffer is None:
        return result
    written = buffer.copy_(result)
    return result if torch.compiler.is_compiling() else written


def grouped_bwd_args(
    args: LinearFwdArgs, groups: Groups, weight_dtype: torch.dtype, bias_dtype: torch.dtype | None
) -> LinearBwdArgs:
    """What the backward needs besides the groups and saved tensors; depends on metadata only."""
    plan = args.plan
    inp: tuple[int, Quantizer | None] = (int(plan.needs_weight), None)
    weight: tuple[int, Quantizer | None] = (
        (groups.count if groups.split_weights else 1) * plan.needs_input,
        None,
    )
    if plan.quantized and plan.backward_override != "high_precision":
        repeated = plan.dgrad_weight
        if args.workspace is None and repeated is not None:
            weight = (weight[0] + (repeated.delayed or repeated.current), None)
        else:
            quantizer = plan.weight.quantizer if args.workspace is None else args.workspace.quantizer
            weight = (_count(plan.weight) * plan.needs_input, quantizer)
        if not (plan.save_original_input and plan.backward_override is None):
            inp = (_count(plan.input) * plan.needs_weight, plan.input.quantizer)
    return LinearBwdArgs(
        plan,
        args.dtype,
        args.scales.amax_bwd,
        args.wgrad,
        args.needs_bias,
        bias_dtype,
        weight_dtype,
        (groups.out_features, groups.in_features),
        inp,
        weight,
        args.transpose_weight,
    )


def _count(operand: Operand) -> int:
    """How many buffers one direction of grouped operands has."""
    return 1 if grouped_layout(operand.storage_name) == "split" else 2


# -- backward ---------------------------------------------------------------------------------------------------------


def grouped_backward(
    args: LinearBwdArgs,
    groups: Groups,
    dy: Tensor,
    splits: Tensor,
    saved: list[Tensor],
    scale_bwd: Tensor | None,
    bias_scales: Tensor | None = None,
) -> tuple[Tensor | None, list[Tensor | None]]:
    """(dgrad (T, K), gradients of the weights and of the biases), without gradient.

    Args:
        dy: (T, N).
        splits: (G,).
        saved: what :func:`grouped_forward` saved of input and weights.
        scale_bwd: the scales that the forward copied.
        bias_scales: as then.
    """
    plan, count = args.plan, args.saved_input[0]
    inp, weight = saved[:count], saved[count:]
    if not torch.compiler.is_compiling():
        saved.clear()  # what is done with is let go of below
    dgrad: Tensor | None = None
    wgrads: list[Tensor | None] = [None] * len(groups.main_grads)
    grad_bias = None
    if args.needs_bias:
        summed = dy if bias_scales is None else dy.float() * bias_scales.reshape(-1, 1).float()
        grad_bias = grouped_column_sum(summed, splits).to(args.bias_dtype)
    if plan.needs_input or plan.needs_weight:
        if plan.backward_override is None:
            gradients = _quantized_gradients(args, groups, dy, splits, inp, weight, scale_bwd, grad_bias)
        else:
            gradients = _gradients_in_high_precision(args, groups, dy, splits, inp, weight, grad_bias)
        dgrad, wgrads, grad_bias = gradients
    if dgrad is not None:
        dgrad = _delivered(dgrad, groups.dgrad_out)
    if args.bias_dtype is None:
        return dgrad, wgrads
    return dgrad, [*wgrads, *_per_parameter(grad_bias, groups.count, groups.split_biases)]


def _quantized_gradients(
    args: LinearBwdArgs,
    groups: Groups,
    dy: Tensor,
    splits: Tensor,
    inp: list[Tensor],
    weight: list[Tensor],
    scale_bwd: Tensor | None,
    grad_bias: Tensor | None,
) -> Gradients:
    plan, dgrad = args.plan, None
    grad = quantize_rows(dy, splits, plan.grad_output, scale_bwd, args.amax_bwd)
    if plan.needs_input:
        left = grad.rowwise, grad.quantizer, grouped_layout(plan.grad_output.storage_name), dy.dtype
        layout = grouped_layout(plan.weight.storage_name)
        right = *_columnwise_weights(args, weight, layout, groups.count), layout, args.weight_dtype
        how = plan.fast_dgrad, plan.emulate
        dgrad = grouped_gemm("dgrad", *left, *right, splits, [], args.dtype, dy.shape[0], *args.shape, *how)
        del left, right
    if not torch.compiler.is_compiling():  # the memory is free for the weight gradients
        grad.rowwise.clear()
        weight.clear()
    if not plan.needs_weight:
        return dgrad, [None] * len(groups.main_grads), grad_bias
    input_quantizer = args.saved_input[1]
    if input_quantizer is None:
        # column-wise only: the other way than in the forward, so that the compiler finds nothing to merge it with
        original = quantize_rows(inp[0], splits, plan.original_input)
        inp, input_quantizer = original.columnwise, original.quantizer
    deferred = DeferredWgrad(
        grad.columnwise,
        grad.quantizer,
        [*inp, splits, dy.new_empty((dy.shape[0], 0))],
        input_quantizer,
        grad_bias,
        args.wgrad.overwrite,
        plan.fast_wgrad,
        plan.emulate,
    )
    return dgrad, *_weight_gradients(args, groups, deferred)


def _gradients_in_high_precision(
    args: LinearBwdArgs,
    groups: Groups,
    dy: Tensor,
    splits: Tensor,
    inp: list[Tensor],
    weight: list[Tensor],
    grad_bias: Tensor | None,
) -> Gradients:
    """Backward on the original or the dequantized operands; the gradient itself is not quantized."""
    plan, dgrad = args.plan, None
    dy = dy.to(args.dtype)
    if plan.needs_input:
        if args.saved_weight[1] is not None:
            layout = grouped_layout(plan.weight.storage_name)
            shape = [groups.count, *args.shape]
            weight = [
                grouped_dequantize(weight, args.saved_weight[1], layout, None, args.weight_dtype, shape)
            ]
        weight = [w.to(args.dtype) for w in weight]
        dgrad = grouped_mm("dgrad", dy, weight, splits, [], groups.covered, dy.dtype)
    if not plan.needs_weight:
        return dgrad, [None] * len(groups.main_grads), grad_bias
    x = inp[0]
    if args.saved_input[1] is not None:
        layout, shape = grouped_layout(plan.input.storage_name), [dy.shape[0], args.shape[1]]
        x = grouped_dequantize(inp, args.saved_input[1], layout, splits, args.dtype, shape)
    operands = [x.to(args.dtype), splits, dy.new_empty((dy.shape[0], 0))]
    overwrite = args.wgrad.overwrite
    deferred = DeferredWgrad([dy], _PLAIN, operands, _PLAIN, grad_bias, overwrite, False, plan.emulate)
    return dgrad, *_weight_gradients(args, groups, deferred)


# -- where weight gradients go ----------------------------------------------------------------------------------------


def _weight_gradients(
    args: LinearBwdArgs, groups: Groups, deferred: DeferredWgrad
) -> tuple[list[Tensor | None], Tensor | None]:
    """(wgrad of each weight, grad_bias) for autograd, after what goes elsewhere went there."""
    if args.wgrad.store is not None:
        *operand, splits, like = deferred.inp  # the caller may count the next tokens in the same tensor
        queue_wgrad(args.wgrad, deferred._replace(inp=[*operand, splits.clone(), like]))
        return [None] * len(groups.main_grads), None
    if all(main_grad is None for main_grad in groups.main_grads):
        wgrad = compute_grouped_wgrad(deferred, args.shape, args.weight_dtype)
        return _per_parameter(wgrad, groups.count, groups.split_weights), deferred.grad_bias
    add_to_main_grads_(deferred, groups.main_grads, args.shape)
    shape = args.shape if groups.split_weights else (groups.count, *args.shape)
    returned = [placeholder(dummy, deferred.grad[0], shape, args.weight_dtype) for dummy in groups.dummies]
    return returned, deferred.grad_bias


def compute_grouped_wgrad(deferred: DeferredWgrad, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """The weight gradients ``dy_g^T x_g`` of all groups, (G, N, K) of ``dtype``.

    Args:
        deferred: its ``inp`` ends with the splits and an empty (T, 0) tensor of the dtype that was quantized.
        shape: (N, K).
    """
    *inp, splits, like = deferred.inp
    grad_layout = grouped_layout(deferred.grad_quantizer._storage_name)  # type: ignore[attr-defined]
    if grad_layout == "split" and deferred.grad[0].dim() == 2:  # matrices, not an arena of quantized groups
        return grouped_mm("wgrad", deferred.grad[0], inp, splits, [], False, dtype)
    inp_layout = grouped_layout(deferred.inp_quantizer._storage_name)  # type: ignore[attr-defined]
    left = deferred.grad, deferred.grad_quantizer, grad_layout, like.dtype
    right = inp, deferred.inp_quantizer, inp_layout, like.dtype
    how = deferred.fast_accumulation, deferred.emulate
    return grouped_gemm("wgrad", *left, *right, splits, [], dtype, like.shape[0], *shape, *how)


def add_to_main_grads_(
    deferred: DeferredWgrad, main_grads: list[Tensor | None], shape: tuple[int, int]
) -> None:
    """Add the weight gradients to ``main_grads``, or overwrite these if the operands say so.

    Args:
        deferred: as in :func:`compute_grouped_wgrad`.
        main_grads: G of (N, K), or one (G, N, K), fp32 or bf16; None where no gradient is wanted.
        shape: (N, K).
    Numerics:
        ``RN(main_grad + dy_g^T x_g)``, product and sum in fp32.
    """
    wgrad = compute_grouped_wgrad(deferred, shape, torch.float32)
    single = len(main_grads) == 1 and main_grads[0] is not None and main_grads[0].dim() == 3
    values = [wgrad] if single else list(wgrad.unbind(0))
    pairs = [(into, value) for into, value in zip(main_grads, values, strict=True) if into is not None]
    into, added = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    if deferred.overwrite:
        torch._foreach_copy_(into, added)
    else:
        torch._foreach_add_(into, added)


def _per_parameter(grad: Tensor | None, groups: int, split: bool) -> list[Tensor | None]:
    if not split:
        return [grad]
    return [None] * groups if grad is None else list(grad.unbind(0))


# -- the boundary -----------------------------------------------------------------------------------------------------


class _GroupedLinearFunction(torch.autograd.Function):
    """Boundary of :func:`grouped_linear`: input, splits, arguments, then the weights and the biases."""

    @staticmethod
    def forward(
        ctx: Any, inp: Tensor, splits: Tensor, args: LinearFwdArgs, groups: Groups, *parameters: Tensor
    ) -> Tensor:
        x = inp.reshape(-1, inp.shape[-1])
        count = groups.count if groups.split_weights else 1
        weights, biases = list(parameters[:count]), list(parameters[count:])
        out, saved_input, saved_weight = grouped_forward(x, splits, weights, biases, args, groups)
        saved_input = [inp if tensor is x else tensor for tensor in saved_input]
        ctx.save_for_backward(splits, args.scales.scale_bwd, *saved_input, *saved_weight)
        bias_dtype = biases[0].dtype if biases else None
        ctx.backward_objects = grouped_bwd_args(args, groups, weights[0].dtype, bias_dtype)
        ctx.groups = groups
        out = out.view(*inp.shape[:-1], out.shape[-1])
        return out.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        args: LinearBwdArgs = ctx.backward_objects
        splits, scale_bwd, *saved = saved_tensors(ctx)
        lead, features = grad_output.shape[:-1], args.shape[1]
        count, quantizer = args.saved_input  # not compared as a whole: a graph cannot compare quantizers
        if count and quantizer is None:
            saved = [saved[0].reshape(-1, features), *saved[1:]]
        dy = grad_output.reshape(-1, args.shape[0])
        dgrad, grads = grouped_backward(args, ctx.groups, dy, splits, saved, scale_bwd)
        return (None if dgrad is None else dgrad.view(*lead, features), None, None, None, *grads)


def grouped_linear(
    inp: Tensor,
    splits: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    args: LinearFwdArgs,
    groups: Groups,
) -> Tensor:
    """Linear layers on consecutive groups of rows, differentiable in input, weights and biases.

    Args:
        inp: (*lead, K), T rows.
        splits: int32 or int64 (G,) on the device of ``inp``; not read by the host where the GEMMs are native.
        weights: G of (N, K), or one (G, N, K).
        biases: G of (N,), or one (G, N), or none.
        args: as of a linear layer, workspace and state of all groups.
        groups: the groups. Neither is modified.
    Returns:
        (*lead, N) in the activation dtype, zero in rows beyond the sum of the splits.
    """
    plan = args.plan
    if plan.needs_input or plan.needs_weight or args.needs_bias:
        return _GroupedLinearFunction.apply(inp, splits, args, groups, *weights, *biases)
    out = grouped_forward(inp.reshape(-1, inp.shape[-1]), splits, weights, biases, args, groups)[0]
    return out.view(*inp.shape[:-1], out.shape[-1])
