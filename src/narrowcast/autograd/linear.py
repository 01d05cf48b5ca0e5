"""The autograd function of a linear layer: y = x w^T with quantized operands in all three GEMMs.

    fprop   y  = quantize(x) @ quantize(w)^T      both row-wise
    dgrad   dx = quantize(dy) @ quantize(w)       row-wise, column-wise
    wgrad   dw = quantize(dy)^T @ quantize(x)     both column-wise

Rules of this file, each paid for with a compiler experiment: operators do the work and everything saved is an
operator's output or an input; the forward writes to nothing outside itself; nothing symbolic (a size) is put on the
context; every returned tensor is a fresh view or an operator's output; the arguments' groups say who owns them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..functional import dequantize, transpose_codes
from ..functional.wgrad_store import DeferredWgrad
from ..quantizers import IdentityQuantizer, quantize_gradient, quantize_operand
from ..tensors import (
    Float8TensorStorage,
    QuantizedTensor,
    QuantizedTensorStorage,
    TensorOrQuantized,
    prepare_for_saving,
    restore_from_func_ctx,
    storage_of,
)
from .arguments import LinearBwdArgs, LinearFwdArgs, LinearSaved
from .quantized_boundary import plain_gradient
from .stages import (
    Gradients,
    fprop,
    quantized_gradients,
    quantizers_of,
    saved_operands,
    stage_weight,
    storage_or_tensor,
    usage,
    with_cached_weight,
)
from .weight_gradient import weight_gradient

# how an operand that stays in high precision goes through the GEMM operator
_PLAIN = IdentityQuantizer()

_Saved = tuple[TensorOrQuantized | None, TensorOrQuantized | None]


def linear_forward(args: LinearFwdArgs) -> tuple[Tensor, _Saved]:
    """(output, (input, weight) to save). Pure; reads only ``args``."""
    if args.quantizers is None:
        return _high_precision_forward(args)
    tensors, numerics = args.tensors, args.numerics
    assert tensors is not None
    lead, out_features = tensors.inp.shape[:-1], tensors.weight.shape[0]
    rows = 1
    for size in lead:
        rows = rows * size
    inputmat = _input_operand(args, rows)
    weight = stage_weight(args, tensors.weight)
    assert weight is not None
    out = fprop(args, inputmat, weight, tensors.bias, rows, out_features)
    original = numerics.save_original_input and not isinstance(tensors.inp, QuantizedTensorStorage)
    kept = tensors.inp if original and numerics.backward_override is None else inputmat
    saved = saved_operands(args, kept, storage_or_tensor(tensors.inp), weight, tensors.weight)
    return out.view(*lead, out_features), saved


def _high_precision_forward(args: LinearFwdArgs) -> tuple[Tensor, _Saved]:
    """The layer without quantization, where its weight gradient goes somewhere else than autograd's way."""
    tensors, dtype = args.tensors, args.numerics.activation_dtype
    assert tensors is not None
    inp, weight = storage_or_tensor(tensors.inp), storage_or_tensor(tensors.weight)
    out = F.linear(
        _in_high_precision(inp, dtype, list(tensors.inp.shape)),
        _in_high_precision(weight, dtype, list(tensors.weight.shape)),
        None if tensors.bias is None else tensors.bias.to(dtype),
    )
    return out, (inp if args.needs.weight else None, weight if args.needs.inp else None)


def _input_operand(args: LinearFwdArgs, rows: int) -> QuantizedTensorStorage:
    """The input as the GEMMs read it, column-wise only if the wgrad will read that."""
    tensors, numerics = args.tensors, args.numerics
    assert tensors is not None
    wanted = args.needs.weight and numerics.backward_override is None
    if isinstance(tensors.inp, QuantizedTensorStorage):
        given = storage_of(tensors.inp) if isinstance(tensors.inp, QuantizedTensor) else tensors.inp
        return with_columnwise(given) if wanted else given
    handles = quantizers_of(args).input
    handle = handles.both if wanted and not numerics.save_original_input else handles.rowwise
    x = tensors.inp.reshape(rows, tensors.inp.shape[-1])
    return quantize_operand(x, handle, args.delayed.scale_fwd, args.delayed.amax_fwd)


def with_columnwise(storage: QuantizedTensorStorage) -> QuantizedTensorStorage:
    """This storage if it holds column-wise data, else a copy with the transposed codes.

    Raises:
        RuntimeError: the format cannot make one direction from the other.
    """
    if storage.get_usages()["columnwise"]:
        return storage
    if not isinstance(storage, Float8TensorStorage):
        raise RuntimeError(
            f"the quantized input is a {type(storage).__name__} without column-wise data, which the weight gradient "
            "needs; quantize it with columnwise=True"
        )
    made = storage.rowwise_view()
    made._transpose = transpose_codes(storage._data)  # type: ignore[attr-defined]
    return made


def linear_setup_ctx(fwd: LinearFwdArgs) -> LinearBwdArgs:
    """What the backward needs besides saved tensors; depends on metadata only."""
    tensors = fwd.tensors
    assert tensors is not None
    quantizers = fwd.quantizers
    return LinearBwdArgs(
        None if quantizers is None else quantizers.grad_output,
        fwd.delayed,
        fwd.numerics,
        fwd.needs,
        tensors.weight.shape[0],
        tensors.weight.shape[1],
        None if tensors.bias is None else tensors.bias.dtype,
        fwd.wgrad,
        None if quantizers is None else quantizers.input,
    )


def linear_backward(args: LinearBwdArgs) -> Gradients:
    """(wgrad, dgrad, grad_bias). Reads only ``args``."""
    assert args.grad_output is not None and args.saved is not None
    grad_output = args.grad_output
    if isinstance(grad_output, QuantizedTensorStorage):  # whoever made it summed it for the bias, too
        return _gradients_of_quantized(args, args.saved, grad_output)
    dy = grad_output.reshape(-1, grad_output.shape[-1])
    quantized = args.numerics.backward_override is None and (args.needs.inp or args.needs.weight)
    quantized = quantized and args.grad_quantizers is not None
    run = _quantized_gradients if quantized else _high_precision_gradients
    wgrad, dgrad, grad_bias = run(args, args.saved, dy)
    if dgrad is not None:
        dgrad = dgrad.view(*grad_output.shape[:-1], args.in_features)
    return wgrad, dgrad, grad_bias


def _quantized_gradients(args: LinearBwdArgs, saved: LinearSaved, dy: Tensor) -> Gradients:
    delayed, grad_bias = args.delayed, None
    handle = usage(args.grad_quantizers, args.needs.inp, args.needs.weight)
    assert handle is not None
    if args.needs.bias:
        grad, grad_bias = quantize_gradient(dy, handle, delayed.scale_bwd, delayed.amax_bwd)
        grad_bias = grad_bias.to(args.bias_dtype)
    else:
        grad = quantize_operand(dy, handle, delayed.scale_bwd, delayed.amax_bwd)
    return quantized_gradients(args, _with_quantized_input(args, saved), grad, grad_bias, dy.shape[0])


def _gradients_of_quantized(
    args: LinearBwdArgs, saved: LinearSaved, grad: QuantizedTensorStorage
) -> Gradients:
    lead = grad.shape[:-1]
    rows = 1
    for size in lead:
        rows = rows * size
    dw, dx, _ = quantized_gradients(args, _with_quantized_input(args, saved), grad, None, rows)
    return dw, None if dx is None else dx.view(*lead, args.in_features), None


def _with_quantized_input(args: LinearBwdArgs, saved: LinearSaved) -> LinearSaved:
    """What was saved, with the input quantized where that is still the original."""
    if not isinstance(saved.inputmat, Tensor):
        return saved
    assert args.input_handles is not None
    original = saved.inputmat.reshape(-1, args.in_features)
    # column-wise only: the other way than in the forward, so that the compiler finds nothing to merge it with
    return LinearSaved(quantize_operand(original, args.input_handles.columnwise), saved.weight)


def _high_precision_gradients(args: LinearBwdArgs, saved: LinearSaved, dy: Tensor) -> Gradients:
    """Backward on the original or the dequantized operands; the gradient itself is not quantized."""
    dtype = args.numerics.activation_dtype
    wgrad = dgrad = None
    if args.needs.inp:
        weight = _in_high_precision(saved.weight, dtype, [args.out_features, args.in_features])
        dgrad = dy.to(dtype) @ weight
    grad_bias = dy.sum(dim=0, dtype=torch.float32).to(args.bias_dtype) if args.needs.bias else None
    if args.needs.weight:
        x = _in_high_precision(saved.inputmat, dtype, [dy.shape[0], args.in_features])
        emulate, overwrite = args.numerics.emulate, args.wgrad.overwrite
        deferred = DeferredWgrad([dy.to(dtype)], _PLAIN, [x], _PLAIN, grad_bias, overwrite, False, emulate)
        wgrad, grad_bias = weight_gradient(args, deferred)
    return wgrad, dgrad, grad_bias


def _in_high_precision(tensor: Any, dtype: torch.dtype, shape: list[int]) -> Tensor:
    if isinstance(tensor, QuantizedTensorStorage):
        return dequantize(tensor.rowwise_operand(), tensor._quantizer, False, dtype, shape)
    return tensor.reshape(shape).to(dtype)


class _LinearFunction(torch.autograd.Function):
    """Boundary of :func:`linear`: three operands in, three gradients out; tensors are saved here and nowhere else."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, inp: Tensor, bias: Tensor | None, fwd_args: LinearFwdArgs
    ) -> Tensor:
        args = fwd_args.bind(weight, inp, bias)
        out, tensors_to_save = linear_forward(args)
        flat, objects = prepare_for_saving(*tensors_to_save)
        ctx.save_for_backward(*flat)
        ctx.tensor_objects = objects
        ctx.backward_objects = linear_setup_ctx(args)
        return out.view_as(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        inputmat, weight = restore_from_func_ctx(ctx)
        args = ctx.backward_objects.bind(LinearSaved(inputmat, weight), plain_gradient(grad_output))
        return (*linear_backward(args), None)


def linear(
    weight: Tensor, inp: Tensor, bias: Tensor | None, args: LinearFwdArgs
) -> tuple[Tensor, QuantizedTensorStorage | None]:
    """Quantized linear layer, differentiable in its three tensors.

    Args:
        weight: (N, K), plain or quantized. inp: (*lead, K), plain or quantized. bias: (N,) or None.
        args: quantizers, state and options; not modified.
    Returns:
        (*lead, N) in the activation dtype, and the freshly quantized weight when ``args.caching`` asks for it.
    """
    args, new_workspace = with_cached_weight(args, weight)
    if args.needs.any() and torch.is_grad_enabled():
        return _LinearFunction.apply(weight, inp, bias, args), new_workspace
    out, _ = linear_forward(args.bind(weight, inp, bias))
    return out, new_workspace
