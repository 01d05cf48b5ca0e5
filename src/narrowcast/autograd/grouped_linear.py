"""Linear layers on groups of rows, as a stage of a boundary and as an autograd function: ``gemms`` with the groups."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._tracing import can_overwrite, once_differentiable, release
from ..functional import replay_of
from ..recipe import LinearPlan
from ..tensors import plain
from .arguments import LinearBwdArgs, LinearFwdArgs
from .gemms import SavedOperand, linear_backward, linear_bwd_args, linear_forward
from .groups import GatedActivation, GroupedRows, Groups, Places, biases_of_rows
from .linear import saved_tensors
from .weight_gradient import begin_main_grads_


def grouped_forward(
    x: Tensor,
    splits: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    args: LinearFwdArgs,
    groups: Groups,
    bias_scales: Tensor | None = None,
    activation: GatedActivation | None = None,
) -> tuple[Tensor, SavedOperand, SavedOperand]:
    """Return the output (T, N), the input to save, and the weights to save, without gradient.

    Args:
        x, splits, weights, biases: as of :func:`grouped_linear`.
        bias_scales: (T,) to multiply each row's bias with, or None.
        activation: what the layer is applied to is the activation of ``x`` (T, 2K); None: ``x`` itself.
    """
    if not _reads_codes(args.plan):
        x, activation = plain(x) if activation is None else activation.apply(x), None
    grouped = GroupedRows(groups, splits, x.dtype, weights[0].dtype, None, activation)
    weights = [*weights]
    added = [*biases] if bias_scales is None else []
    forward = replay_of(linear_forward, [x, *weights, *added], (args, grouped, Places(weights)), len(added))
    out, saved_input, saved_weight = forward(weights, x, added, args, grouped)
    if bias_scales is not None:
        scaled = biases_of_rows(biases, splits, x.shape[0]).float() * bias_scales.reshape(-1, 1).float()
        out = (out.float() + scaled).to(out.dtype)
    return _delivered(out, groups.out), saved_input, saved_weight


def _reads_codes(plan: LinearPlan) -> bool:
    """Return whether rows are read by a quantizer alone: codes, or rows before an activation, need not be written."""
    return plan.quantized and plan.backward_override is None and not plan.save_original_input


def _delivered(result: Tensor, buffer: Tensor | None) -> Tensor:
    """Return the result, written to the buffer if there is one.

    Eager code goes on with the buffer. Compiled code goes on with the result: that a graph's output and an operand it
    writes to are one memory would cost the output its gradient.
    """
    if buffer is None:
        return result
    written = buffer.copy_(result)
    return written if can_overwrite() else result


def grouped_backward(
    args: LinearBwdArgs,
    groups: Groups,
    dy: Tensor,
    splits: Tensor,
    saved: list[Tensor],
    scale: Tensor | None,
    bias_scales: Tensor | None = None,
    activation: GatedActivation | None = None,
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Return (dgrad (T, K), gradients of the weights and of the biases), without gradient.

    Args:
        dy: (T, N).
        splits: (G,).
        saved: what :func:`grouped_forward` saved of input and weights.
        scale: as casts read it.
        bias_scales: as then.
        activation: ``dy`` is the gradient of the activation of its ``hidden``, the output; None: of the output.
    """
    if not _reads_codes(args.plan):
        dy, activation = plain(dy) if activation is None else activation.apply(dy), None
    count = args.saved_input[0]
    inp, weight = saved[:count], saved[count:]
    release(saved)  # the stage frees each tensor after its last use
    grouped = GroupedRows(groups, splits, dy.dtype, args.weight_dtype, bias_scales, activation)
    begin_main_grads_(args.wgrad)
    places = Places(weight[: groups.count if groups.split_weights else 1])
    backward = replay_of(linear_backward, [dy, scale, *inp, *weight], (args, grouped, places), len(inp))
    del places
    wgrad, dgrad, grad_bias = backward(args, dy, inp, weight, scale, grouped)
    if dgrad is not None:
        dgrad = _delivered(dgrad, groups.dgrad_out)
    grads = wgrad if isinstance(wgrad, list) else _per_parameter(wgrad, groups.count, groups.split_weights)
    if args.bias_dtype is None:
        return dgrad, grads
    return dgrad, [*grads, *_per_parameter(grad_bias, groups.count, groups.split_biases)]


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
        of_input = [inp if tensor is x else tensor for tensor in saved_input.tensors]
        ctx.save_for_backward(splits, args.scales.scale, *of_input, *saved_weight.tensors)
        bias = biases[0] if biases else None
        ctx.backward_objects = linear_bwd_args(args, weights[0], bias, saved_input, saved_weight)
        ctx.groups = groups
        out = out.view(*inp.shape[:-1], out.shape[-1])
        return out.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        args: LinearBwdArgs = ctx.backward_objects
        splits, scale, *saved = saved_tensors(ctx)
        lead, features = grad_output.shape[:-1], args.shape[1]
        count, quantizer = args.saved_input  # not compared as a whole: a graph cannot compare quantizers
        if count and quantizer is None:
            saved = [saved[0].reshape(-1, features), *saved[1:]]
        dy = grad_output.reshape(-1, args.shape[0])
        dgrad, grads = grouped_backward(args, ctx.groups, dy, splits, saved, scale)
        return (None if dgrad is None else dgrad.view(*lead, features), None, None, None, *grads)


def grouped_linear(
    inp: Tensor,
    splits: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    args: LinearFwdArgs,
    groups: Groups,
) -> Tensor:
    """Return linear layers on consecutive groups of rows, differentiable in input, weights and biases.

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
    # no view: a reentrant checkpoint hands on what it gets
    return out.view(*inp.shape[:-1], out.shape[-1]).detach()
