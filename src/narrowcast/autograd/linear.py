"""The autograd function of a linear layer: y = x w^T with quantized operands in all three GEMMs.

    fprop   y  = quantize(x) @ quantize(w)^T      both row-wise
    dgrad   dx = quantize(dy) @ quantize(w)       row-wise, column-wise
    wgrad   dw = quantize(dy)^T @ quantize(x)     both column-wise

Rules of this file, each paid for with a compiler experiment: operators do the work and everything saved is an
operator's output or an input; the forward writes to nothing outside itself; nothing symbolic (a size) is put on the
context; every returned tensor is a fresh view or an operator's output; the arguments' groups say who owns them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..functional import dequantize, gemm
from ..quantizers import QuantizerHandle, quantize_operand
from ..recipe import LinearHandles
from ..tensors import (
    QuantizedTensorStorage,
    TensorOrQuantized,
    prepare_for_saving,
    restore_from_func_ctx,
)


@dataclass(slots=True)
class DelayedTensors:
    """State of delayed scaling, owned by the module; None for the other recipes."""

    scale_fwd: Tensor | None = None
    amax_fwd: Tensor | None = None
    scale_bwd: Tensor | None = None
    amax_bwd: Tensor | None = None


@dataclass(slots=True)
class LinearNumerics:
    """How to compute, owned by the recipe and by torch.autocast."""

    activation_dtype: torch.dtype
    weight_dtype: torch.dtype
    backward_override: str | None
    emulate: bool
    fast_fprop: bool
    fast_dgrad: bool
    fast_wgrad: bool


@dataclass(slots=True)
class LinearNeeds:
    """Which gradients are wanted, captured before the boundary."""

    inp: bool
    weight: bool
    bias: bool


@dataclass(slots=True)
class LinearCaching:
    """Weight cache, owned by the module: what it holds, and whether to hand back what is made."""

    workspace: QuantizedTensorStorage | None
    cache_weight: bool


@dataclass(slots=True)
class LinearTensors:
    """The operands; bound inside the boundary."""

    weight: Tensor
    inp: Tensor
    bias: Tensor | None


@dataclass(slots=True)
class LinearFwdArgs:
    """Everything the forward reads. ``tensors`` is None until :meth:`bind`."""

    quantizers: LinearHandles
    delayed: DelayedTensors
    numerics: LinearNumerics
    needs: LinearNeeds
    caching: LinearCaching
    tensors: LinearTensors | None = None

    def bind(self, weight: Tensor, inp: Tensor, bias: Tensor | None) -> LinearFwdArgs:
        """These arguments with their operands; the original is left alone, as a traced forward must."""
        return LinearFwdArgs(
            self.quantizers,
            self.delayed,
            self.numerics,
            self.needs,
            self.caching,
            LinearTensors(weight, inp, bias),
        )


@dataclass(slots=True)
class LinearSaved:
    """What the forward left for the backward, restored."""

    inputmat: TensorOrQuantized | None
    weight: TensorOrQuantized | None


@dataclass(slots=True)
class LinearBwdArgs:
    """Everything the backward reads. ``saved`` and ``grad_output`` are None until :meth:`bind`."""

    grad_quantizers: Any
    delayed: DelayedTensors
    numerics: LinearNumerics
    needs: LinearNeeds
    out_features: int
    in_features: int
    bias_dtype: torch.dtype | None
    saved: LinearSaved | None = None
    grad_output: Tensor | None = None

    @property
    def backward_override(self) -> str | None:
        """The recipe's override."""
        return self.numerics.backward_override

    def bind(self, saved: LinearSaved, grad_output: Tensor) -> LinearBwdArgs:
        """A per-call copy, so that a second backward over the same graph finds the original untouched."""
        return LinearBwdArgs(
            self.grad_quantizers,
            self.delayed,
            self.numerics,
            self.needs,
            self.out_features,
            self.in_features,
            self.bias_dtype,
            saved,
            grad_output,
        )


def quantize_weight(
    *,
    tensor: Tensor,
    handle: QuantizerHandle,
    delayed: DelayedTensors,
    workspace: QuantizedTensorStorage | None = None,
    cache: bool = False,
) -> tuple[QuantizedTensorStorage, QuantizedTensorStorage | None]:
    """(weight for the GEMMs, new workspace or None).

    A workspace that holds the directions the handle asks for is used as it is; otherwise the weight is quantized,
    and handed back for caching when ``cache`` is set.
    """
    if workspace is not None and _holds(workspace, handle):
        return workspace, None
    made = quantize_operand(tensor, handle, delayed.scale_fwd, delayed.amax_fwd)
    return made, made if cache else None


def _holds(workspace: QuantizedTensorStorage, handle: QuantizerHandle) -> bool:
    usages = workspace.get_usages()
    return (usages["rowwise"] or not handle.rowwise) and (usages["columnwise"] or not handle.columnwise)


def _linear_forward_impl(
    args: LinearFwdArgs,
) -> tuple[Tensor, QuantizedTensorStorage | None, tuple[TensorOrQuantized | None, TensorOrQuantized | None]]:
    """(output, new weight workspace or None, (input, weight) to save). Pure; reads only ``args``."""
    tensors, numerics, needs = args.tensors, args.numerics, args.needs
    assert tensors is not None
    quantized_backward = numerics.backward_override is None
    x = tensors.inp.reshape(-1, tensors.inp.shape[-1])

    input_handles, weight_handles = args.quantizers.input, args.quantizers.weight
    input_handle = input_handles.both if needs.weight and quantized_backward else input_handles.rowwise
    keep_columns = (needs.inp and quantized_backward) or args.caching.cache_weight
    weight_handle = weight_handles.both if keep_columns else weight_handles.rowwise

    inputmat = quantize_operand(x, input_handle, args.delayed.scale_fwd, args.delayed.amax_fwd)
    weight, new_workspace = quantize_weight(
        tensor=tensors.weight,
        handle=weight_handle,
        delayed=args.delayed,
        workspace=args.caching.workspace,
        cache=args.caching.cache_weight,
    )
    out = gemm(
        "fprop",
        inputmat.rowwise_operand(),
        inputmat._quantizer,
        weight.rowwise_operand(),
        weight._quantizer,
        tensors.bias,
        numerics.activation_dtype,
        x.shape[0],
        tensors.weight.shape[0],
        numerics.fast_fprop,
        numerics.emulate,
    )
    out = out.view(*tensors.inp.shape[:-1], tensors.weight.shape[0])
    return out, new_workspace, _tensors_to_save(args, inputmat, weight)


def _tensors_to_save(
    args: LinearFwdArgs, inputmat: QuantizedTensorStorage, weight: QuantizedTensorStorage
) -> tuple[TensorOrQuantized | None, TensorOrQuantized | None]:
    tensors, override = args.tensors, args.numerics.backward_override
    assert tensors is not None
    if override == "high_precision":
        saved = tensors.inp, tensors.weight
    elif override == "dequantized":
        saved = inputmat.rowwise_view(), weight.rowwise_view()
    else:
        saved = (
            inputmat.columnwise_view() if args.needs.weight else None,
            weight.columnwise_view() if args.needs.inp else None,
        )
    return saved[0] if args.needs.weight else None, saved[1] if args.needs.inp else None


def _linear_setup_ctx(fwd: LinearFwdArgs) -> LinearBwdArgs:
    """What the backward needs besides saved tensors; depends on metadata only."""
    tensors = fwd.tensors
    assert tensors is not None
    return LinearBwdArgs(
        fwd.quantizers.grad_output,
        fwd.delayed,
        fwd.numerics,
        fwd.needs,
        tensors.weight.shape[0],
        tensors.weight.shape[1],
        None if tensors.bias is None else tensors.bias.dtype,
    )


def _linear_backward(args: LinearBwdArgs) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(wgrad, dgrad, grad_bias). Reads only ``args``."""
    assert args.grad_output is not None and args.saved is not None
    grad_output = args.grad_output
    dy = grad_output.reshape(-1, grad_output.shape[-1])
    run = _quantized_gradients if args.numerics.backward_override is None else _high_precision_gradients
    wgrad, dgrad = run(args, dy)
    if dgrad is not None:
        dgrad = dgrad.view(*grad_output.shape[:-1], args.in_features)
    grad_bias = dy.sum(dim=0, dtype=torch.float32).to(args.bias_dtype) if args.needs.bias else None
    return wgrad, dgrad, grad_bias


def _quantized_gradients(args: LinearBwdArgs, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
    numerics, needs, saved = args.numerics, args.needs, args.saved
    assert saved is not None
    if not (needs.inp or needs.weight):
        return None, None
    handles = args.grad_quantizers
    handle = (
        handles.both if needs.inp and needs.weight else (handles.rowwise if needs.inp else handles.columnwise)
    )
    grad = quantize_operand(dy, handle, args.delayed.scale_bwd, args.delayed.amax_bwd)
    dgrad = wgrad = None
    if needs.inp:
        weight: Any = saved.weight
        dgrad = gemm(
            "dgrad",
            grad.rowwise_operand(),
            grad._quantizer,
            weight.columnwise_operand(),
            weight._quantizer,
            None,
            numerics.activation_dtype,
            dy.shape[0],
            args.in_features,
            numerics.fast_dgrad,
            numerics.emulate,
        )
    if needs.weight:
        inputmat: Any = saved.inputmat
        wgrad = gemm(
            "wgrad",
            grad.columnwise_operand(),
            grad._quantizer,
            inputmat.columnwise_operand(),
            inputmat._quantizer,
            None,
            numerics.weight_dtype,
            args.out_features,
            args.in_features,
            numerics.fast_wgrad,
            numerics.emulate,
        )
    return wgrad, dgrad


def _high_precision_gradients(args: LinearBwdArgs, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Backward on the original or the dequantized operands; the gradient itself is not quantized."""
    saved, dtype = args.saved, args.numerics.activation_dtype
    assert saved is not None
    wgrad = dgrad = None
    if args.needs.inp:
        weight = _in_high_precision(saved.weight, dtype, [args.out_features, args.in_features])
        dgrad = dy.to(dtype) @ weight
    if args.needs.weight:
        x = _in_high_precision(saved.inputmat, dtype, [dy.shape[0], args.in_features])
        wgrad = (dy.to(dtype).t() @ x).to(args.numerics.weight_dtype)
    return wgrad, dgrad


def _in_high_precision(tensor: Any, dtype: torch.dtype, shape: list[int]) -> Tensor:
    if isinstance(tensor, QuantizedTensorStorage):
        return dequantize(tensor.rowwise_operand(), tensor._quantizer, False, dtype, shape)
    return tensor.reshape(shape).to(dtype)


class _LinearFunction(torch.autograd.Function):
    """Boundary of :func:`linear`: four operands in, four gradients out; tensors are saved here and nowhere else."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, inp: Tensor, bias: Tensor | None, fwd_args: LinearFwdArgs) -> Any:
        args = fwd_args.bind(weight, inp, bias)
        out, new_workspace, tensors_to_save = _linear_forward_impl(args)
        flat, objects = prepare_for_saving(*tensors_to_save)
        ctx.save_for_backward(*flat)
        ctx.tensor_objects = objects
        ctx.backward_objects = _linear_setup_ctx(args)
        out = out.view_as(out)
        if new_workspace is None:
            return out
        buffers = [buffer for buffer in new_workspace.get_data_tensors() if buffer is not None]
        ctx.mark_non_differentiable(*buffers)
        return (out, *buffers)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor, *workspace_grads: Any) -> Any:
        inputmat, weight = restore_from_func_ctx(ctx)
        args = ctx.backward_objects.bind(LinearSaved(inputmat, weight), grad_output)
        return (*_linear_backward(args), None)


def linear(
    weight: Tensor, inp: Tensor, bias: Tensor | None, args: LinearFwdArgs
) -> tuple[Tensor, QuantizedTensorStorage | None]:
    """Quantized linear layer, differentiable in its three tensors.

    Args:
        weight: (N, K), plain or quantized. inp: (*lead, K). bias: (N,) or None.
        args: quantizers, state and options; not modified.
    Returns:
        (*lead, N) in the activation dtype, and the freshly quantized weight when ``args.caching`` asks for it.
    """
    if not (torch.is_grad_enabled() and (args.needs.inp or args.needs.weight or args.needs.bias)):
        out, new_workspace, _ = _linear_forward_impl(args.bind(weight, inp, bias))
        return out, new_workspace
    result = _LinearFunction.apply(weight, inp, bias, args)
    if isinstance(result, Tensor):
        return result, None
    return result[0], args.quantizers.weight.both.assemble(list(result[1:]), weight.dtype)
