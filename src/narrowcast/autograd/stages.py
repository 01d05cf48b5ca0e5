"""One linear layer as a stage of a boundary: how its operands are quantized, what is saved, its three GEMMs.

``args`` are those of :mod:`.arguments`, one group of options per layer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..functional import gemm, norm
from ..functional.wgrad_store import DeferredWgrad
from ..quantizers import NormSettings, OperandHandles, QuantizerHandle, quantize_norm, quantize_operand
from ..recipe import LinearHandles
from ..tensors import QuantizedTensor, QuantizedTensorStorage, TensorOrQuantized, storage_of
from .arguments import LinearBwdArgs, LinearFwdArgs, LinearSaved
from .weight_gradient import weight_gradient

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


@dataclass(slots=True)
class Normalized:
    """What a norm in front of a GEMM leaves: the operand, the statistics and, where somebody wants it, the output."""

    operand: QuantizedTensorStorage
    output: Tensor | None
    mean: Tensor
    rstd: Tensor


def usage(handles: OperandHandles, rowwise: bool, columnwise: bool) -> QuantizerHandle | None:
    """The handle that makes these directions; None for neither."""
    if rowwise:
        return handles.both if columnwise else handles.rowwise
    return handles.columnwise if columnwise else None


def quantizers_of(args: LinearFwdArgs) -> LinearHandles:
    """The quantizers of a stage that runs under a recipe."""
    assert args.quantizers is not None
    return args.quantizers


def input_usage(args: LinearFwdArgs, fprop: bool = True) -> QuantizerHandle | None:
    """How the input is quantized, for fprop or only for what the backward reads."""
    override, wgrad = args.numerics.backward_override, args.needs.weight
    return usage(
        quantizers_of(args).input, fprop or (wgrad and override == "dequantized"), wgrad and override is None
    )


def weight_usage(args: LinearFwdArgs, fprop: bool = True) -> QuantizerHandle | None:
    """How the weight is quantized, for fprop or only for what the backward reads."""
    override, dgrad = args.numerics.backward_override, args.needs.inp
    return usage(
        quantizers_of(args).weight, fprop or (dgrad and override == "dequantized"), dgrad and override is None
    )


def stage_weight(args: LinearFwdArgs, weight: Tensor, fprop: bool = True) -> QuantizedTensorStorage | None:
    """The weight as the GEMMs read it: from the cache, a quantized parameter, or made now."""
    handle = weight_usage(args, fprop)
    return None if handle is None else _quantized_weight(args, weight, handle)


def _quantized_weight(args: LinearFwdArgs, weight: Tensor, handle: QuantizerHandle) -> QuantizedTensorStorage:
    workspace = args.caching.workspace
    if workspace is not None and _holds(workspace, handle):
        return workspace
    return quantize_operand(weight, handle, args.delayed.scale_fwd, args.delayed.amax_fwd)


def _holds(workspace: QuantizedTensorStorage, handle: QuantizerHandle) -> bool:
    usages = workspace.get_usages()
    return (usages["rowwise"] or not handle.rowwise) and (usages["columnwise"] or not handle.columnwise)


def with_cached_weight(
    args: LinearFwdArgs, weight: Tensor
) -> tuple[LinearFwdArgs, QuantizedTensorStorage | None]:
    """Quantize a weight that the module asks to keep, in front of the boundary.

    Returns:
        arguments that use it, and the freshly quantized weight; None when there is nothing new to keep.
    """
    caching = args.caching
    if not caching.cache_weight:
        return args, None
    used = _quantized_weight(args, weight.detach(), quantizers_of(args).weight.both)
    made = None if used is caching.workspace else used
    return replace(args, caching=replace(caching, workspace=used, cache_weight=False)), made


def normalize_operand(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    settings: NormSettings,
    args: LinearFwdArgs,
    keep_output: bool,
) -> Normalized:
    """Norm of ``x`` (M, K) as the input of a GEMM: in one step, unless the output itself is wanted."""
    handle = input_usage(args)
    assert handle is not None
    scale, amax = args.delayed.scale_fwd, args.delayed.amax_fwd
    if not (keep_output or (args.needs.weight and args.numerics.backward_override == "high_precision")):
        operand, mean, rstd = quantize_norm(x, weight, bias, settings, handle, scale, amax)
        return Normalized(operand, None, mean, rstd)
    output, mean, rstd, _ = norm(
        x, None, weight, bias, settings.eps, settings.normalization, settings.zero_centered_gamma
    )
    return Normalized(quantize_operand(output, handle, scale, amax), output, mean, rstd)


def storage_or_tensor(tensor: TensorOrQuantized) -> TensorOrQuantized:
    """What can be saved and read in traced code: the storage behind a quantized tensor, a plain tensor as it is."""
    return storage_of(tensor).rowwise_view() if isinstance(tensor, QuantizedTensor) else tensor


def saved_operands(
    args: LinearFwdArgs,
    operand: TensorOrQuantized | None,
    high_precision: TensorOrQuantized | None,
    weight: QuantizedTensorStorage | None,
    parameter: Tensor,
) -> tuple[TensorOrQuantized | None, TensorOrQuantized | None]:
    """(input, weight) as the backward of the stage reads them; None what it does not read.

    Args:
        operand: the quantized input, or the plain one that the backward quantizes again.
        high_precision: the input that a backward in high precision reads.
        weight: the quantized weight. parameter: what it was made from.
    """
    override, needs = args.numerics.backward_override, args.needs
    if override == "high_precision":
        return high_precision if needs.weight else None, storage_or_tensor(parameter) if needs.inp else None
    return (
        _direction(operand, override) if needs.weight else None,
        _direction(weight, override) if needs.inp else None,
    )


def _direction(operand: Any, override: str | None) -> TensorOrQuantized:
    if not isinstance(operand, QuantizedTensorStorage):
        return operand
    return operand.rowwise_view() if override == "dequantized" else operand.columnwise_view()


def fprop(
    args: LinearFwdArgs,
    operand: QuantizedTensorStorage,
    weight: QuantizedTensorStorage,
    bias: Tensor | None,
    rows: int,
    out_features: int,
) -> Tensor:
    """y = x w^T + bias, (rows, out_features) in the activation dtype."""
    return gemm(
        "fprop",
        operand.rowwise_operand(),
        operand._quantizer,
        weight.rowwise_operand(),
        weight._quantizer,
        bias,
        args.numerics.activation_dtype,
        rows,
        out_features,
        args.numerics.fast_fprop,
        args.numerics.emulate,
    )


def quantized_gradients(
    args: LinearBwdArgs,
    saved: LinearSaved,
    grad: QuantizedTensorStorage,
    grad_bias: Tensor | None,
    rows: int,
) -> Gradients:
    """(wgrad, dgrad, grad_bias) for autograd from the quantized gradient of the output, each where it is needed.

    ``grad_bias`` comes back, or goes with the weight gradient where ``args.wgrad`` sends that.
    """
    dx = _dgrad(args, grad, saved.weight, rows) if args.needs.inp else None
    if not args.needs.weight:
        return None, dx, grad_bias
    dw, grad_bias = _wgrad(args, grad, saved.inputmat, grad_bias)
    return dw, dx, grad_bias


def _dgrad(args: LinearBwdArgs, grad: QuantizedTensorStorage, weight: Any, rows: int) -> Tensor:
    """dx = dy w, (rows, in_features) in the activation dtype."""
    return gemm(
        "dgrad",
        grad.rowwise_operand(),
        grad._quantizer,
        weight.columnwise_operand(),
        weight._quantizer,
        None,
        args.numerics.activation_dtype,
        rows,
        args.in_features,
        args.numerics.fast_dgrad,
        args.numerics.emulate,
    )


def _wgrad(
    args: LinearBwdArgs, grad: QuantizedTensorStorage, operand: Any, grad_bias: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """(dw = dy^T x, bias gradient) for autograd: (out_features, in_features) in the weight's dtype, and as given.

    None for what ``args.wgrad`` sends elsewhere.
    """
    deferred = DeferredWgrad(
        grad.columnwise_operand(),
        grad._quantizer,
        operand.columnwise_operand(),
        operand._quantizer,
        grad_bias,
        args.wgrad.overwrite,
        args.numerics.fast_wgrad,
        args.numerics.emulate,
    )
    return weight_gradient(args, deferred)


def after(grad: TensorOrQuantized, tensor: Tensor) -> Tensor:
    """``tensor``, available only once ``grad`` is.

    Else the compiler finds the operators of the forward again, and saves their results instead of repeating them.
    """
    if not torch.compiler.is_compiling():
        return tensor
    seen = grad if isinstance(grad, Tensor) else next(b for b in grad.get_data_tensors() if b is not None)
    return torch.where(seen.reshape(-1)[:1].float().sum().isnan(), tensor, tensor)
