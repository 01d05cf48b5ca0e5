"""The GEMMs of :class:`BasicLinear` as functions of tensors and quantizers, without autograd.

Both functions also take prototypes (:class:`~narrowcast.dynamo.TensorProto`) instead of all tensors, and then describe
what they would return: they make the same checks, allocate nothing and call no collective. Tensors go to the stages
that the operation itself runs, :func:`~narrowcast.autograd.gemms.linear_forward` and ``linear_backward``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..._environment import read_flag
from ...autograd import DelayedScales, LinearBwdArgs, LinearFwdArgs, LinearWgrad
from ...autograd.gemms import SavedOperand, linear_backward, linear_forward, rows_of, with_columnwise
from ...autograd.tensor_parallel import TensorParallel, tensor_parallel
from ...dynamo import TensorProto
from ...functional.collectives import group_size
from ...quantizers import Operand, Quantizer, buffers_of
from ...recipe import LinearPlan, Recipe, linear_plan
from ...state import THREAD
from ...tensors import QuantizedTensorStorage, TensorOrQuantized
from ...tensors.storage import resolve_storage_class
from .linear_checks import Saved, check_backward, check_forward, check_out, is_quantized, kept_directions


@torch.no_grad()
def functional_forward(
    input: Any,
    weight: Any,
    *,
    alpha: float = 1.0,
    bias: Any = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    out: Any = None,
    beta: float | None = None,
    accumulate_into_out: bool = False,
    tensor_parallel_mode: str | None = None,
    tensor_parallel_group: Any = None,
    sequence_parallel: bool = False,
    with_quantized_compute: bool = False,
    backward_override: str | None = None,
    input_quantizer: Quantizer | None = None,
    weight_quantizer: Quantizer | None = None,
    output_quantizer: Quantizer | None = None,
    input_requires_grad: bool = True,
    weight_requires_grad: bool = True,
) -> tuple[Any, Any, Any]:
    """y = alpha * x w^T + bias (+ beta * out), and what a backward reads.

    Args:
        input: (*lead, K), plain or quantized.
        weight: (N, K), plain or quantized.
        bias: (N,). Or prototypes of them.
        device, dtype: of the GEMM's operands and result; default: the weight's.
        out: written to and returned.
        beta: factor of what is in it (default 1), with ``accumulate_into_out``.
        tensor_parallel_mode, tensor_parallel_group, sequence_parallel: as for :class:`BasicLinear`. With prototypes the
            group may be the number of processes, if there is no group.
        with_quantized_compute: quantize the operands that are not, with ``input_quantizer`` and ``weight_quantizer``.
        backward_override: None, "high_precision" or "dequantized", as of a recipe.
        output_quantizer: quantizes y.
        input_requires_grad, weight_requires_grad: which gradients a backward is to make.
    Returns:
        (y, x_saved, w_saved). x_saved holds only column-wise data, is the plain input where that is gathered again, and
        None without a gradient of the weight; w_saved holds only column-wise data, and is None without a gradient of
        the input. "dequantized" keeps row-wise data, "high_precision" and unquantized compute keep plain tensors.
    Raises:
        ValueError: a missing quantizer, ``beta`` without ``accumulate_into_out`` or that without ``out``, an ``out`` of
            another kind than ``output_quantizer`` makes or of another shape, a bias of a row-parallel layer, or rows
            that do not divide.
        TypeError: a quantized input that would have to be gathered, or a dtype that cannot be quantized.
        RuntimeError: a quantized operand without a direction that is read.
    """
    described = isinstance(input, TensorProto)
    parallel, size = _split(tensor_parallel_mode, tensor_parallel_group, sequence_parallel, described)
    place, kind = _default(device, dtype, weight)
    keep_x, keep_w = kept_directions(backward_override, input_requires_grad, weight_requires_grad)
    operands = (("input", input, input_quantizer, keep_x), ("weight", weight, weight_quantizer, keep_w))
    check_forward(operands, with_quantized_compute, kind, parallel, bias)
    shape = parallel.output_shape(input.shape, weight.shape[0], size)
    check_out("out", out, shape, beta, accumulate_into_out, output_quantizer)
    regathered = parallel.gathers_input and backward_override is None  # gathered rows are not kept
    x, w, workspace = _moved(input, place, kind), _moved(weight, place, kind), None
    if described:
        whole = (input.shape[0] * size, *input.shape[1:]) if parallel.gathers_input else input.shape
        if with_quantized_compute and backward_override != "high_precision":
            if not regathered:
                x = _saved_proto(x, whole, input_quantizer, keep_x)
            w = _saved_proto(w, weight.shape, weight_quantizer, keep_w)
        y = out if out is not None else TensorProto(shape, kind, output_quantizer, device=place)
        return y, x if weight_requires_grad else None, w if input_requires_grad else None
    plan = _plan(with_quantized_compute, backward_override, input_requires_grad, weight_requires_grad)
    if with_quantized_compute:
        if isinstance(w, QuantizedTensorStorage):
            workspace = with_columnwise(w) if keep_w.columnwise else buffers_of(w)
        else:
            plan = replace(plan, weight=Operand.of(weight_quantizer, True, keep_w.columnwise))  # type: ignore[arg-type]
        if not isinstance(x, QuantizedTensorStorage):
            kept = Operand.of(input_quantizer, True, keep_x.columnwise and not regathered)  # type: ignore[arg-type]
            plan = replace(plan, input=kept, save_original_input=regathered)
    split = parallel if parallel.mode else None
    args = LinearFwdArgs(plan, kind, DelayedScales(), workspace, LinearWgrad(), False, parallel=split)
    fused_bias = bias.to(kind) if bias is not None and alpha == 1.0 else None
    y, x_saved, w_saved = linear_forward(w, x, fused_bias, args)
    if alpha != 1.0:
        y = y * alpha if bias is None else y * alpha + bias.to(kind)
    y = _written(y, out, beta, accumulate_into_out, output_quantizer)
    if not with_quantized_compute:
        keep_x = keep_w = Saved(False, False)
    return y, _as_tensor(x_saved, x, keep_x), _as_tensor(w_saved, w, keep_w)


@torch.no_grad()
def functional_backward(
    grad_output: Any,
    input: Any,
    weight: Any,
    *,
    grad_input_alpha: float | None = None,
    input_requires_grad: bool = True,
    grad_weight_alpha: float | None = None,
    weight_requires_grad: bool = True,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    grad_weight: Any = None,
    grad_weight_beta: float | None = None,
    accumulate_into_grad_weight: bool = False,
    grad_input: Any = None,
    grad_input_beta: float | None = None,
    accumulate_into_grad_input: bool = False,
    tensor_parallel_mode: str | None = None,
    tensor_parallel_group: Any = None,
    sequence_parallel: bool = False,
    with_quantized_compute: bool = False,
    input_quantizer: Quantizer | None = None,
    weight_quantizer: Quantizer | None = None,
    grad_output_quantizer: Quantizer | None = None,
    grad_input_quantizer: Quantizer | None = None,
) -> tuple[Any, Any]:
    """dx = grad_input_alpha * dy w and dw = grad_weight_alpha * dy^T x.

    Args:
        grad_output: (*lead, N), plain or quantized.
        input, weight: as :func:`functional_forward` saved them; None for one that no requested gradient reads. Or
            prototypes of all.
        device, dtype: of operands and results; default: the gradient's.
        grad_weight, grad_input: buffers to write to and return; ``*_beta``: factor of what is in them (default 1), with
            ``accumulate_into_*``.
        grad_input_quantizer: quantizes dx.
        others: as of :func:`functional_forward`.
    Returns:
        (dx, dw), each None if not requested.
    Raises:
        As :func:`functional_forward`. ValueError, too: an operand that is missing. TypeError, too: a quantized gradient
            that would have to be gathered.
    """
    described = isinstance(grad_output, TensorProto)
    parallel, size = _split(tensor_parallel_mode, tensor_parallel_group, sequence_parallel, described)
    place, kind = _default(device, dtype, grad_output)
    wanted = (input_requires_grad, weight_requires_grad)
    quantizers = (grad_output_quantizer, input_quantizer, weight_quantizer)
    operands = (grad_output, input, weight)
    outs = (
        (grad_input, grad_input_beta, accumulate_into_grad_input, grad_input_quantizer),
        (grad_weight, grad_weight_beta, accumulate_into_grad_weight, None),
    )
    shapes = check_backward(wanted, with_quantized_compute, operands, quantizers, outs, kind, parallel, size)
    if shapes is None:
        return None, None
    if described:
        dx = grad_input or TensorProto(shapes[0], kind, grad_input_quantizer, device=place)
        dw = grad_weight or TensorProto(shapes[1], kind, device=place)
        return dx if input_requires_grad else None, dw if weight_requires_grad else None
    dy, x, w = [_moved(tensor, place, kind) for tensor in operands]
    into = _accumulator(grad_weight, grad_weight_alpha, grad_weight_beta, accumulate_into_grad_weight)
    plan = _plan(with_quantized_compute, None, *wanted)
    if isinstance(dy, QuantizedTensorStorage):
        if not with_quantized_compute:
            dy = dy.dequantize(dtype=kind)
        elif weight_requires_grad:
            dy = _with_columnwise(dy)
    elif with_quantized_compute:
        operand = Operand.of(grad_output_quantizer, input_requires_grad, weight_requires_grad)  # type: ignore[arg-type]
        plan = replace(plan, grad_output=operand)
    if with_quantized_compute and weight_requires_grad and not isinstance(x, QuantizedTensorStorage):
        plan = replace(plan, original_input=Operand.of(input_quantizer, False, True))  # type: ignore[arg-type]
    saved_x = _saved_columnwise(x, None, with_quantized_compute)
    saved_w = _saved_columnwise(w, weight_quantizer, with_quantized_compute)
    counts = (len(saved_x.tensors), saved_x.quantizer), (len(saved_w.tensors), saved_w.quantizer)
    wgrad = LinearWgrad(main_grad=into)
    split = parallel if parallel.mode else None
    args = LinearBwdArgs(plan, kind, None, wgrad, False, None, kind, shapes[1], *counts, parallel=split)
    dw, dx, _ = linear_backward(args, dy, saved_x.tensors, saved_w.tensors, None)
    if dx is not None:
        dx = _written(_scaled(dx, grad_input_alpha), *outs[0])
    if into is not None:
        dw = grad_weight
    elif dw is not None:
        dw = _written(_scaled(dw, grad_weight_alpha), *outs[1])
    return dx, dw


def _default(device: Any, dtype: torch.dtype | None, like: Any) -> tuple[Any, torch.dtype]:
    place = like.device if device is None else device
    return place if place is None else torch.device(place), dtype or like.dtype


def _split(
    mode: str | None, group: Any, sequence_parallel: bool, described: bool
) -> tuple[TensorParallel, int]:
    """Return how the layer is split, and over how many processes."""
    if not (described and isinstance(group, int)):
        parallel = tensor_parallel(mode, group, sequence_parallel)
        return parallel, group_size(parallel.group)
    tensor_parallel(mode, None, sequence_parallel)  # its checks
    alone = mode is None or group == 1
    return TensorParallel() if alone else TensorParallel(mode, None, sequence_parallel), group


def _moved(tensor: Any, device: Any, dtype: torch.dtype) -> Any:
    """Return an operand, or its prototype, in its place and dtype; what is quantized, or absent, stays as it is."""
    if tensor is None or is_quantized(tensor):
        return tensor
    if not isinstance(tensor, TensorProto):
        return tensor.to(device=device, dtype=dtype)
    there = tensor.dtype == dtype and tensor.device == device
    return tensor if there else TensorProto(tensor.shape, dtype, device=device)


def _scaled(tensor: Tensor, alpha: float | None) -> Tensor:
    return tensor if alpha is None or alpha == 1.0 else tensor * alpha


def _with_columnwise(storage: QuantizedTensorStorage) -> QuantizedTensorStorage:
    """Return a quantized gradient with column-wise data, made where the format can."""
    if storage.get_usages()["columnwise"]:
        return storage
    view = storage._view_of(tuple(attribute for attribute, _ in storage._FLATTEN_TENSOR_BUFFERS))
    view._shape = tuple(storage.size())
    view.update_usage(columnwise_usage=True)
    return view


def _saved_columnwise(tensor: Any, quantizer: Quantizer | None, quantized: bool) -> SavedOperand:
    """Return an operand as the backward reads it: column-wise, or in high precision.

    Args:
        quantizer: of a plain one; None leaves it as it is.
    """
    if tensor is None:
        return SavedOperand([], None)
    if isinstance(tensor, QuantizedTensorStorage):
        if not quantized:
            return SavedOperand([tensor.dequantize()], None)
        operand = with_columnwise(tensor)
        return SavedOperand(operand.columnwise, operand.quantizer)
    if quantized and quantizer is not None:
        return SavedOperand(Operand.of(quantizer, False, True).quantize(tensor).columnwise, quantizer)
    return SavedOperand([tensor], None)


def _as_tensor(saved: SavedOperand, given: Any, kept: Saved) -> TensorOrQuantized | None:
    """Return a saved operand as one object; a storage knows the operand's full shape."""
    if not saved.tensors:
        return None
    if saved.quantizer is None or not (kept.rowwise or kept.columnwise):
        return given
    # by name: the compiler can make instances of a class it finds in a global, not of one it read off a quantizer
    cls = resolve_storage_class(saved.quantizer._storage_name)
    quantizer: Any = saved.quantizer.with_usage(rowwise=kept.rowwise, columnwise=kept.columnwise)
    storage = cls(quantizer=quantizer, fake_dtype=given.dtype, shape=(rows_of(given), given.shape[-1]))
    names = cls._ROWWISE_BUFFERS if kept.rowwise else cls._COLUMNWISE_BUFFERS
    for name, buffer in zip(names, saved.tensors):
        setattr(storage, name, buffer)
    return storage


def _saved_proto(
    proto: TensorProto, whole: tuple[int, ...], quantizer: Quantizer | None, kept: Saved
) -> TensorProto | None:
    if not (kept.rowwise or kept.columnwise):
        return None
    described: Any = proto.quantizer if proto.is_quantized else quantizer
    described = described.with_usage(rowwise=kept.rowwise, columnwise=kept.columnwise).replace(internal=True)
    rows = torch.Size(whole[:-1]).numel()
    return TensorProto((rows, whole[-1]), proto.dtype, described, device=proto.device)


def _written(y: Tensor, out: Any, beta: float | None, accumulate: bool, quantizer: Any) -> Any:
    """Return the result, in ``out`` where that is given."""
    if out is None:
        return y if quantizer is None else quantizer.quantize(y)
    if quantizer is not None:
        return out.quantize_(y)
    if accumulate:
        return out.mul_(1.0 if beta is None else beta).add_(y)
    return out.copy_(y)


def _plan(quantized: bool, override: str | None, needs_input: bool, needs_weight: bool) -> LinearPlan:
    """Return a plan without operands, with the accumulation of the current autocast, else of recipes by default."""
    recipe: Any = THREAD.state.recipe or Recipe
    return replace(
        linear_plan(None, "", needs_input, needs_weight, module_type="linear"),
        quantized=quantized,
        backward_override=override if quantized else "high_precision",
        emulate=recipe.emulate if THREAD.state.recipe else read_flag("EMULATE"),
        fast_fprop=not recipe.fp8_gemm_fprop.use_split_accumulator,
        fast_dgrad=not recipe.fp8_gemm_dgrad.use_split_accumulator,
        fast_wgrad=not recipe.fp8_gemm_wgrad.use_split_accumulator,
    )


def _accumulator(
    grad_weight: Any, alpha: float | None, beta: float | None, accumulate: bool
) -> Tensor | None:
    """Return the buffer, where the GEMM itself can add to it."""
    plain_sum = accumulate and alpha in (None, 1.0) and beta in (None, 1.0)
    return grad_weight if plain_sum and grad_weight.dtype in (torch.float32, torch.bfloat16) else None
