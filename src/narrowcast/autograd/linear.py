"""The autograd function of a linear layer: y = x w^T with quantized operands in all three GEMMs.

    fprop   y  = quantize(x) @ quantize(w)^T      both row-wise
    dgrad   dx = quantize(dy) @ quantize(w)       row-wise, column-wise
    wgrad   dw = quantize(dy)^T @ quantize(x)     both column-wise

Rules of this file, each paid for with a compiler experiment: operators do the work and everything saved is an
operator's output or an input; the forward writes to nothing outside itself; nothing symbolic (a size) is put on the
context; every returned tensor is a fresh view or an operator's output; the arguments' groups say who owns them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..functional import dequantize, gemm, gemm_accumulate_, transpose_codes
from ..functional.wgrad_store import DeferredWgrad, WeightGradStore, defer_wgrad
from ..quantizers import (
    IdentityQuantizer,
    OperandHandles,
    QuantizerHandle,
    quantize_gradient,
    quantize_operand,
)
from ..recipe import LinearHandles
from ..tensors import (
    Float8TensorStorage,
    QuantizedTensor,
    QuantizedTensorStorage,
    TensorOrQuantized,
    prepare_for_saving,
    restore_from_func_ctx,
    storage_of,
)

# how an operand that stays in high precision goes through the GEMM operator
_PLAIN = IdentityQuantizer()


@dataclass(slots=True)
class DelayedTensors:
    """State of delayed scaling, owned by the module; None for the other recipes."""

    scale_fwd: Tensor | None = None
    amax_fwd: Tensor | None = None
    scale_bwd: Tensor | None = None
    amax_bwd: Tensor | None = None


@dataclass(slots=True)
class LinearNumerics:
    """How to compute, owned by the recipe and by torch.autocast.

    ``save_original_input``: keep the input as it came, and quantize it again for wgrad.
    """

    activation_dtype: torch.dtype
    weight_dtype: torch.dtype
    backward_override: str | None
    emulate: bool
    fast_fprop: bool
    fast_dgrad: bool
    fast_wgrad: bool
    save_original_input: bool = False


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
class LinearWgrad:
    """Where the weight gradient goes, owned by the module and its parameter; by default autograd takes it.

    ``main_grad``: accumulate (or ``overwrite``) this instead. ``dummy``: "empty" or "zeros" is returned in place of
    what went there; "" returns None. ``store``: queue it, and the bias gradient, for ``backward_dw``; ``ticket``: of
    that store.
    """

    main_grad: Tensor | None = None
    overwrite: bool = False
    dummy: str = ""
    store: WeightGradStore | None = None
    ticket: Tensor | None = None


@dataclass(slots=True)
class LinearTensors:
    """The operands; bound inside the boundary."""

    weight: Tensor
    inp: Tensor
    bias: Tensor | None


@dataclass(slots=True)
class LinearFwdArgs:
    """Everything the forward reads. ``tensors`` is None until :meth:`bind`; no quantizers: high precision."""

    quantizers: LinearHandles | None
    delayed: DelayedTensors
    numerics: LinearNumerics
    needs: LinearNeeds
    caching: LinearCaching
    tensors: LinearTensors | None = None
    wgrad: LinearWgrad = field(default_factory=LinearWgrad)

    def bind(self, weight: Tensor, inp: Tensor, bias: Tensor | None) -> LinearFwdArgs:
        """These arguments with their operands; the original is left alone, as a traced forward must."""
        return LinearFwdArgs(
            self.quantizers,
            self.delayed,
            self.numerics,
            self.needs,
            self.caching,
            LinearTensors(weight, inp, bias),
            self.wgrad,
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
    wgrad: LinearWgrad = field(default_factory=LinearWgrad)
    input_handles: OperandHandles | None = None
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
            self.wgrad,
            self.input_handles,
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
    if args.quantizers is None:
        return _high_precision_forward(args)
    tensors, numerics = args.tensors, args.numerics
    assert tensors is not None
    rows = 1
    for size in tensors.inp.shape[:-1]:
        rows = rows * size
    weight_handles = args.quantizers.weight
    keep_columns = (args.needs.inp and numerics.backward_override is None) or args.caching.cache_weight
    inputmat = _input_operand(args, args.quantizers.input, rows)
    weight, new_workspace = quantize_weight(
        tensor=tensors.weight,
        handle=weight_handles.both if keep_columns else weight_handles.rowwise,
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
        rows,
        tensors.weight.shape[0],
        numerics.fast_fprop,
        numerics.emulate,
    )
    out = out.view(*tensors.inp.shape[:-1], tensors.weight.shape[0])
    return out, new_workspace, _tensors_to_save(args, inputmat, weight)


def _high_precision_forward(
    args: LinearFwdArgs,
) -> tuple[Tensor, None, tuple[TensorOrQuantized | None, TensorOrQuantized | None]]:
    """The layer without quantization, where its weight gradient goes somewhere else than autograd's way."""
    tensors, dtype = args.tensors, args.numerics.activation_dtype
    assert tensors is not None
    inp, weight = _storage_or_tensor(tensors.inp), _storage_or_tensor(tensors.weight)
    out = F.linear(
        _in_high_precision(inp, dtype, list(tensors.inp.shape)),
        _in_high_precision(weight, dtype, list(tensors.weight.shape)),
        None if tensors.bias is None else tensors.bias.to(dtype),
    )
    return out, None, (inp if args.needs.weight else None, weight if args.needs.inp else None)


def _input_operand(args: LinearFwdArgs, handles: OperandHandles, rows: int) -> QuantizedTensorStorage:
    """The input as the GEMMs read it, column-wise only if the wgrad will read that."""
    tensors, numerics = args.tensors, args.numerics
    assert tensors is not None
    wanted = args.needs.weight and numerics.backward_override is None
    if isinstance(tensors.inp, QuantizedTensor):
        given = storage_of(tensors.inp)
        return with_columnwise(given) if wanted else given
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


def _storage_or_tensor(tensor: Tensor) -> TensorOrQuantized:
    """What can be saved and read in traced code: the storage behind a quantized tensor, a plain tensor as it is."""
    return storage_of(tensor).rowwise_view() if isinstance(tensor, QuantizedTensor) else tensor


def _tensors_to_save(
    args: LinearFwdArgs, inputmat: QuantizedTensorStorage, weight: QuantizedTensorStorage
) -> tuple[TensorOrQuantized | None, TensorOrQuantized | None]:
    tensors, numerics = args.tensors, args.numerics
    assert tensors is not None
    saved: tuple[TensorOrQuantized, TensorOrQuantized]
    if numerics.backward_override == "high_precision":
        saved = _storage_or_tensor(tensors.inp), _storage_or_tensor(tensors.weight)
    elif numerics.backward_override == "dequantized":
        saved = inputmat.rowwise_view(), weight.rowwise_view()
    else:
        original = numerics.save_original_input and not isinstance(tensors.inp, QuantizedTensor)
        saved = tensors.inp if original else inputmat.columnwise_view(), weight.columnwise_view()
    return saved[0] if args.needs.weight else None, saved[1] if args.needs.inp else None


def _linear_setup_ctx(fwd: LinearFwdArgs) -> LinearBwdArgs:
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


def _linear_backward(args: LinearBwdArgs) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(wgrad, dgrad, grad_bias). Reads only ``args``."""
    assert args.grad_output is not None and args.saved is not None
    grad_output = args.grad_output
    dy = grad_output.reshape(-1, grad_output.shape[-1])
    quantized = args.numerics.backward_override is None and (args.needs.inp or args.needs.weight)
    quantized = quantized and args.grad_quantizers is not None
    run = _quantized_gradients if quantized else _high_precision_gradients
    wgrad, dgrad, grad_bias = run(args, dy)
    if dgrad is not None:
        dgrad = dgrad.view(*grad_output.shape[:-1], args.in_features)
    return wgrad, dgrad, grad_bias


_Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def _quantized_gradients(args: LinearBwdArgs, dy: Tensor) -> _Gradients:
    numerics, needs, saved = args.numerics, args.needs, args.saved
    assert saved is not None
    handles = args.grad_quantizers
    handle = (
        handles.both if needs.inp and needs.weight else (handles.rowwise if needs.inp else handles.columnwise)
    )
    dgrad = wgrad = grad_bias = None
    if needs.bias:
        grad, grad_bias = quantize_gradient(dy, handle, args.delayed.scale_bwd, args.delayed.amax_bwd)
        grad_bias = grad_bias.to(args.bias_dtype)
    else:
        grad = quantize_operand(dy, handle, args.delayed.scale_bwd, args.delayed.amax_bwd)
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
        if isinstance(
            inputmat, Tensor
        ):  # the original: quantized the other way, so not what the forward made
            assert args.input_handles is not None
            original = inputmat.reshape(dy.shape[0], args.in_features)
            inputmat = quantize_operand(original, args.input_handles.columnwise)
        deferred = DeferredWgrad(
            grad.columnwise_operand(),
            grad._quantizer,
            inputmat.columnwise_operand(),
            inputmat._quantizer,
            grad_bias,
            args.wgrad.overwrite,
            numerics.fast_wgrad,
            numerics.emulate,
        )
        wgrad, grad_bias = _weight_gradient(args, deferred)
    return wgrad, dgrad, grad_bias


def _high_precision_gradients(args: LinearBwdArgs, dy: Tensor) -> _Gradients:
    """Backward on the original or the dequantized operands; the gradient itself is not quantized."""
    saved, dtype = args.saved, args.numerics.activation_dtype
    assert saved is not None
    wgrad = dgrad = None
    if args.needs.inp:
        weight = _in_high_precision(saved.weight, dtype, [args.out_features, args.in_features])
        dgrad = dy.to(dtype) @ weight
    grad_bias = dy.sum(dim=0, dtype=torch.float32).to(args.bias_dtype) if args.needs.bias else None
    if args.needs.weight:
        x = _in_high_precision(saved.inputmat, dtype, [dy.shape[0], args.in_features])
        emulate, overwrite = args.numerics.emulate, args.wgrad.overwrite
        deferred = DeferredWgrad([dy.to(dtype)], _PLAIN, [x], _PLAIN, grad_bias, overwrite, False, emulate)
        wgrad, grad_bias = _weight_gradient(args, deferred)
    return wgrad, dgrad, grad_bias


def _weight_gradient(args: LinearBwdArgs, deferred: DeferredWgrad) -> tuple[Tensor | None, Tensor | None]:
    """(wgrad, grad_bias) for autograd, after what goes elsewhere went there."""
    options, shape = args.wgrad, (args.out_features, args.in_features)
    if options.store is None:
        if options.main_grad is None:
            return compute_wgrad(deferred, shape, args.numerics.weight_dtype), deferred.grad_bias
        add_to_main_grad_(deferred, options.main_grad)
    elif torch.compiler.is_compiling():
        assert options.ticket is not None
        defer_wgrad(options.store.key, options.ticket, deferred)
    else:
        options.store.put(deferred)
    grad_bias = deferred.grad_bias if options.store is None else None
    if options.store is not None or not options.dummy:
        return None, grad_bias
    like = deferred.grad[0]
    make = like.new_zeros if options.dummy == "zeros" else like.new_empty
    return make(shape, dtype=args.numerics.weight_dtype), grad_bias


def compute_wgrad(deferred: DeferredWgrad, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """The weight gradient ``dy^T x``, of ``shape`` (N, K) and ``dtype``."""
    return gemm(
        "wgrad",
        deferred.grad,
        deferred.grad_quantizer,
        deferred.inp,
        deferred.inp_quantizer,
        None,
        dtype,
        shape[0],
        shape[1],
        deferred.fast_accumulation,
        deferred.emulate,
    )


def add_to_main_grad_(deferred: DeferredWgrad, main_grad: Tensor) -> None:
    """Add the weight gradient to ``main_grad`` (N, K), fp32 or bf16, or overwrite it if the operands say so."""
    if deferred.overwrite:
        main_grad.copy_(compute_wgrad(deferred, (main_grad.shape[0], main_grad.shape[1]), main_grad.dtype))
        return
    gemm_accumulate_(
        "wgrad",
        main_grad,
        deferred.grad,
        deferred.grad_quantizer,
        deferred.inp,
        deferred.inp_quantizer,
        deferred.fast_accumulation,
        deferred.emulate,
    )


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
        args = ctx.backward_objects.bind(LinearSaved(inputmat, weight), plain_gradient(grad_output))
        return (*_linear_backward(args), None)


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
    if not (torch.is_grad_enabled() and (args.needs.inp or args.needs.weight or args.needs.bias)):
        out, new_workspace, _ = _linear_forward_impl(args.bind(weight, inp, bias))
        return out, new_workspace
    result = _LinearFunction.apply(weight, inp, bias, args)
    if isinstance(result, Tensor):
        return result, None
    assert args.quantizers is not None
    return result[0], args.quantizers.weight.both.assemble(list(result[1:]), weight.dtype)


class _QuantizeOutput(torch.autograd.Function):
    """Quantization of a layer's output with a straight-through gradient."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, handle: QuantizerHandle, delayed: DelayedTensors) -> Any:
        ctx.dtype = out.dtype
        storage = quantize_operand(out, handle, delayed.scale_fwd, delayed.amax_fwd)
        buffers = [buffer for buffer in storage.get_data_tensors() if buffer is not None]
        return handle.quantizer._assemble(buffers, tuple(out.shape), out.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        return plain_gradient(grad_output).to(ctx.dtype), None, None


class _QuantizeInputGradient(torch.autograd.Function):
    """The identity, with a quantized gradient."""

    @staticmethod
    def forward(ctx: Any, inp: Tensor, handle: QuantizerHandle, delayed: DelayedTensors) -> Tensor:
        ctx.handle, ctx.delayed = handle, delayed
        return inp.view_as(inp)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        handle, delayed = ctx.handle, ctx.delayed
        storage = quantize_operand(grad_output, handle, delayed.scale_bwd, delayed.amax_bwd)
        if torch.compiler.is_compiling():  # a compiled graph passes on plain gradients: the quantized values
            operand, shape = storage.rowwise_operand(), list(grad_output.shape)
            return dequantize(operand, storage._quantizer, False, grad_output.dtype, shape), None, None
        buffers = [buffer for buffer in storage.get_data_tensors() if buffer is not None]
        shape = tuple(grad_output.shape)
        return handle.quantizer._assemble(buffers, shape, grad_output.dtype), None, None


def plain_gradient(grad: Tensor) -> Tensor:
    """The gradient in high precision; only eager code ever meets a quantized one."""
    if not torch.compiler.is_compiling() and isinstance(grad, QuantizedTensor):
        return grad.dequantize()
    return grad


def quantize_output(out: Tensor, handle: QuantizerHandle, delayed: DelayedTensors) -> QuantizedTensor:
    """Output of a layer as a quantized tensor; its gradient passes straight through.

    Args:
        out: (*lead, N). handle: how to quantize it. delayed: state, for a delayed quantizer.
    """
    quantized = _QuantizeOutput.apply(out, handle, delayed)
    if (
        torch.compiler.is_compiling()
    ):  # for the next layer in the graph: it cannot read an object off a graph's tensor
        quantized._quantizer = handle.quantizer
    return quantized


def quantize_input_gradient(inp: Tensor, handle: QuantizerHandle, delayed: DelayedTensors) -> Tensor:
    """``inp``, whose gradient will be quantized: a quantized tensor in eager code, its values in compiled code.

    Args:
        inp: (*lead, K). handle: how to quantize the gradient. delayed: state, for a delayed quantizer.
    """
    return _QuantizeInputGradient.apply(inp, handle, delayed)
