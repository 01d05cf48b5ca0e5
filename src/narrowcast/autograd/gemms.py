"""One linear layer as a stage of a boundary: its operands, what is saved of them, its three GEMMs.

    fprop   y  = quantize(x) @ quantize(w)^T      both row-wise
    dgrad   dx = quantize(dy) @ quantize(w)       row-wise, column-wise
    wgrad   dw = quantize(dy)^T @ quantize(x)     both column-wise

Everything here is pure but for amax and ``main_grad``, and runs in traced and eager code alike. What the compiler
demands, as experiments have shown: operators do the work, and everything saved is an operator's output or an input;
nothing symbolic is put on the context; every returned tensor is detached or an operator's output.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..functional import (
    dequantize,
    draw_seed,
    gemm,
    quantize,
    quantize_dbias,
    quantize_keeping_amax,
    quantize_operand,
)
from ..functional.collectives import arrived, gather_rows, group_size
from ..functional.wgrad_store import DeferredWgrad
from ..quantizers import IdentityQuantizer, OperandBuffers, Quantizer, buffers_of
from ..tensors import Float8TensorStorage, QuantizedTensorStorage, TensorOrQuantized, transposed
from .arguments import LinearBwdArgs, LinearFwdArgs
from .tensor_parallel import TensorParallel
from .weight_gradient import weight_gradient

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
"""(wgrad, dgrad, grad_bias), each None where it is not needed, or goes elsewhere."""

_PLAIN = IdentityQuantizer()


class SavedOperand(NamedTuple):
    """What the backward reads of an operand: its buffers of one direction, or one tensor in high precision."""

    tensors: list[Tensor]
    quantizer: Quantizer | None


def rows_of(tensor: Any) -> int:
    """Product of all dims but the last."""
    rows = 1
    for size in tensor.shape[:-1]:
        rows = rows * size
    return rows


def with_columnwise(storage: QuantizedTensorStorage) -> OperandBuffers:
    """Buffers of a storage with column-wise data; per-tensor FP8 has its codes transposed where it lacks them.

    Raises:
        RuntimeError: the format cannot make one direction from the other.
    """
    operand = buffers_of(storage)
    if operand.columnwise:
        return operand
    if not isinstance(storage, Float8TensorStorage):
        raise RuntimeError(
            f"the quantized input is a {type(storage).__name__} without column-wise data, which the weight gradient "
            "needs; quantize it with columnwise=True"
        )
    return OperandBuffers(
        operand.rowwise, transposed(operand.rowwise, operand.rowwise[0].shape[-1]), operand.quantizer
    )


def weight_operand(weight: Any, args: LinearFwdArgs) -> tuple[OperandBuffers, SavedOperand]:
    """The weight (N, K) as fprop reads it, and what to save of it for dgrad.

    A workspace is read as it is, unless it has no row-wise data. Else the weight is quantized for fprop alone: saved is
    the parameter itself, which is there anyway, with the scale or the maxima that give the same codes once more.

    Args:
        weight: None where there is a workspace and nothing else.
    """
    plan, scales, workspace = args.plan, args.scales, args.workspace
    if workspace is not None and (weight is None or workspace.rowwise):
        return workspace, saved_operand(workspace, weight, plan.needs_input, plan.backward_override)
    operand, repeated = plan.weight, plan.dgrad_weight
    if repeated is not None and repeated.current:
        *buffers, amax = quantize_keeping_amax(weight, operand.quantizer)
        return operand.split(buffers), SavedOperand([weight, amax], None)
    seed = draw_seed(weight) if operand.stochastic else None
    w = operand.split(quantize(weight, operand.quantizer, seed, scales.scale_fwd, scales.amax_fwd))
    if w.columnwise:  # made only where dgrad reads it
        return w, SavedOperand(w.columnwise, w.quantizer)
    if repeated is None:
        return w, saved_operand(w, weight, plan.needs_input, plan.backward_override)
    state: list[Any] = [scales.scale_fwd] if repeated.delayed else []
    return w, SavedOperand([weight, *state], None)


def weight_of_dgrad(args: LinearBwdArgs, saved: list[Tensor]) -> tuple[list[Tensor], Quantizer]:
    """The column-wise weight and what reads it, from what :func:`weight_operand` saved."""
    quantizer, repeated = args.saved_weight[1], args.plan.dgrad_weight
    if quantizer is None and repeated is not None:
        weight, *state = saved
        scale, amax = (state[0], None) if repeated.delayed else (None, state[0] if state else None)
        return quantize(weight, repeated.quantizer, None, scale, amax), repeated.quantizer
    columnwise = transposed(saved, args.shape[1]) if args.transpose_weight else saved
    return columnwise, quantizer  # type: ignore[return-value]


def fprop(
    args: LinearFwdArgs,
    inp: OperandBuffers,
    weight: OperandBuffers,
    bias: Tensor | None,
    rows: int,
    out_features: int,
) -> Tensor:
    """y = x w^T + bias, (rows, out_features) in the activation dtype."""
    plan = args.plan
    return gemm(
        "fprop",
        inp.rowwise,
        inp.quantizer,
        weight.rowwise,
        weight.quantizer,
        bias,
        args.dtype,
        rows,
        out_features,
        plan.fast_fprop,
        plan.emulate,
    )


def plain_or_rowwise(tensor: TensorOrQuantized) -> SavedOperand:
    """A tensor as a backward in high precision reads it."""
    if isinstance(tensor, QuantizedTensorStorage):
        operand = buffers_of(tensor)
        return SavedOperand(operand.rowwise, operand.quantizer)
    return SavedOperand([tensor], None)


def saved_operand(
    operand: OperandBuffers, high_precision: TensorOrQuantized | None, needed: bool, override: str | None
) -> SavedOperand:
    """What the backward reads of an operand.

    Args:
        operand: as fprop read it.
        high_precision: what it was made from, for a backward that reads that.
        needed: whether any gradient reads it.
    """
    if not needed:
        return SavedOperand([], None)
    if override == "high_precision":
        if high_precision is None:
            return SavedOperand(operand.rowwise, operand.quantizer)
        return plain_or_rowwise(high_precision)
    kept = operand.columnwise if override is None and operand.columnwise else operand.rowwise
    return SavedOperand(kept, operand.quantizer)


def linear_forward(
    weight: TensorOrQuantized, inp: TensorOrQuantized, bias: Tensor | None, args: LinearFwdArgs
) -> tuple[Tensor, SavedOperand, SavedOperand]:
    """(output (*lead, N), input to save, weight to save).

    Args:
        weight: (N, K), plain or quantized.
        inp: (*lead, K), plain or quantized.
        bias: (N,) or None.
    """
    plan, scales, rows, out_features = args.plan, args.scales, rows_of(inp), weight.shape[0]
    if args.parallel is not None:
        return _split_forward(weight, inp, bias, args, args.parallel)
    if not plan.quantized:
        return _forward_in_high_precision(weight, inp, bias, args)
    if isinstance(inp, QuantizedTensorStorage):
        wants_columns = plan.needs_weight and plan.backward_override is None
        x = with_columnwise(inp) if wants_columns else buffers_of(inp)
    else:
        operand, flat = plan.input, inp if inp.dim() == 2 else inp.reshape(rows, inp.shape[-1])
        seed = draw_seed(flat) if operand.stochastic else None
        x = operand.split(quantize_operand(flat, operand.quantizer, seed, scales.scale_fwd, scales.amax_fwd))
    w, saved_weight = weight_operand(weight, args)
    out = fprop(args, x, w, bias, rows, out_features)
    if (
        plan.save_original_input
        and not isinstance(inp, QuantizedTensorStorage)
        and not plan.backward_override
    ):
        saved_input = SavedOperand([inp] if plan.needs_weight else [], None)
    else:
        saved_input = saved_operand(x, inp, plan.needs_weight, plan.backward_override)
    if len(inp.shape) != 2:
        out = out.view(*inp.shape[:-1], out_features)
    return out, saved_input, saved_weight


def _split_forward(
    weight: TensorOrQuantized,
    inp: TensorOrQuantized,
    bias: Tensor | None,
    args: LinearFwdArgs,
    parallel: TensorParallel,
) -> tuple[Tensor, SavedOperand, SavedOperand]:
    """:func:`linear_forward` of a layer that is split over processes; what was gathered is saved as it came.

    Raises:
        TypeError: a quantized input that would have to be gathered.
    """
    plan, alone = args.plan, replace(args, parallel=None)
    if not parallel.gathers_input:
        out, saved_input, saved_weight = linear_forward(weight, inp, bias, alone)
        return parallel.reduced_output(out), saved_input, saved_weight
    if isinstance(inp, QuantizedTensorStorage):
        raise TypeError(
            "the input of a sequence-parallel 'column' layer is quantized; pass it in high precision, it is gathered "
            "as the layer quantizes it"
        )
    rows = rows_of(inp)
    if not plan.quantized:
        out, saved_input, saved_weight = linear_forward(weight, gather_rows(inp, parallel.group), bias, alone)
        return out, SavedOperand([inp] if plan.needs_weight else [], None), saved_weight
    share, operand, scales = None, plan.input, args.scales
    if parallel.joins(operand, rows):
        flat = inp.reshape(rows, inp.shape[-1])
        share = parallel.share(flat, operand, operand.seed(flat), scales.scale_fwd, scales.amax_fwd)
    x, saved_input, rows = split_operand(args, parallel, share, inp, rows)
    w, saved_weight = weight_operand(weight, args)
    out = fprop(args, x, w, bias, rows, weight.shape[0])
    return out.view(-1, *inp.shape[1:-1], weight.shape[0]), saved_input, saved_weight


def split_operand(
    args: LinearFwdArgs,
    parallel: TensorParallel,
    share: OperandBuffers | None,
    inp: Tensor | None,
    rows: int,
) -> tuple[OperandBuffers, SavedOperand, int]:
    """(the input as fprop reads it, what the backward reads of this process's, how many rows fprop reads).

    Args:
        share: this process's rows, quantized; None where only rows in high precision make up the whole.
        inp: this process's rows (*lead, K) in high precision; None where nothing reads those.
        rows: how many.
    """
    plan, scales = args.plan, args.scales
    if not parallel.gathers_input:
        saved = saved_operand(share, inp, plan.needs_weight, plan.backward_override)  # type: ignore[arg-type]
        return share, saved, rows  # type: ignore[return-value]
    all_rows = rows * group_size(parallel.group)
    if share is None:
        gathered = gather_rows(inp, parallel.group).reshape(-1, inp.shape[-1])  # type: ignore[arg-type,union-attr]
        whole = plan.input.quantize(gathered, scales.scale_fwd, scales.amax_fwd)
        if plan.backward_override == "dequantized" and plan.needs_weight:
            flat = inp.reshape(-1, inp.shape[-1])  # type: ignore[union-attr]
            share = parallel.share(flat, plan.input, plan.input.seed(flat), scales.scale_fwd, None)
    else:
        whole = parallel.whole_operand(share._replace(columnwise=[]), plan.input)
    if share is None or (plan.save_original_input and not plan.backward_override):
        return whole, SavedOperand([inp] if plan.needs_weight else [], None), all_rows  # type: ignore[list-item]
    return whole, saved_operand(share, inp, plan.needs_weight, plan.backward_override), all_rows


def _forward_in_high_precision(
    weight: TensorOrQuantized, inp: TensorOrQuantized, bias: Tensor | None, args: LinearFwdArgs
) -> tuple[Tensor, SavedOperand, SavedOperand]:
    plan = args.plan
    x, w = plain_or_rowwise(inp), plain_or_rowwise(weight)
    out = F.linear(
        in_high_precision(x, args.dtype, inp.shape),
        in_high_precision(w, args.dtype, weight.shape),
        None if bias is None else bias.to(args.dtype),
    )
    none = SavedOperand([], None)
    return out, x if plan.needs_weight else none, w if plan.needs_input else none


def linear_bwd_args(
    args: LinearFwdArgs,
    weight: TensorOrQuantized,
    bias: Tensor | None,
    saved_input: SavedOperand,
    saved_weight: SavedOperand,
) -> LinearBwdArgs:
    """What the backward needs besides saved tensors; depends on metadata only."""
    return LinearBwdArgs(
        args.plan,
        args.dtype,
        args.scales.amax_bwd,
        args.wgrad,
        args.needs_bias,
        None if bias is None else bias.dtype,
        weight.dtype,
        (weight.shape[0], weight.shape[1]),
        (len(saved_input.tensors), saved_input.quantizer),
        (len(saved_weight.tensors), saved_weight.quantizer),
        args.transpose_weight,
        args.parallel,
    )


def with_saved(args: LinearBwdArgs, saved_input: SavedOperand, saved_weight: SavedOperand) -> LinearBwdArgs:
    """The same arguments for operands that a recomputation made."""
    return replace(
        args,
        saved_input=(len(saved_input.tensors), saved_input.quantizer),
        saved_weight=(len(saved_weight.tensors), saved_weight.quantizer),
    )


def linear_backward(
    args: LinearBwdArgs,
    grad_output: TensorOrQuantized,
    inp: list[Tensor],
    weight: list[Tensor],
    scale_bwd: Tensor | None,
) -> Gradients:
    """Gradients of a linear layer, dgrad (*lead, K).

    Args:
        grad_output: (*lead, N), plain or quantized.
        inp, weight: what was saved of them.
        scale_bwd: the scales that the forward copied.
    """
    plan, lead, rows = args.plan, grad_output.shape[:-1], rows_of(grad_output)
    if args.parallel is not None:
        if args.parallel.gathers_grad_output:
            return _gradients_of_share(args, grad_output, inp, weight, scale_bwd, args.parallel)
        if args.parallel.gathers_input:
            lead = torch.Size((-1, *lead[1:]))
    if isinstance(grad_output, QuantizedTensorStorage):  # its producer has summed it for the bias, too
        gradients = quantized_gradients(args, buffers_of(grad_output), None, inp, weight, rows)
    elif plan.backward_override is not None or not (plan.needs_input or plan.needs_weight):
        gradients = _gradients_in_high_precision(
            args, grad_output.reshape(rows, grad_output.shape[-1]), inp, weight
        )
    else:
        dy = grad_output if len(lead) == 1 else grad_output.reshape(rows, grad_output.shape[-1])
        grad_bias, operand = None, plan.grad_output
        seed = draw_seed(dy) if operand.stochastic else None
        if args.needs_bias:
            *buffers, sums = quantize_dbias(dy, operand.quantizer, seed, scale_bwd, args.amax_bwd)
            grad_bias = sums.to(args.bias_dtype)
        else:
            buffers = quantize(dy, operand.quantizer, seed, scale_bwd, args.amax_bwd)
        quantized = operand.split(buffers)
        del buffers
        gradients = quantized_gradients(args, quantized, grad_bias, inp, weight, rows)
    wgrad, dgrad, grad_bias = gradients
    if len(lead) != 1 and dgrad is not None:
        dgrad = dgrad.view(*lead, args.shape[1])
    return wgrad, dgrad, grad_bias


def _gradients_of_share(
    args: LinearBwdArgs,
    grad_output: TensorOrQuantized,
    inp: list[Tensor],
    weight: list[Tensor],
    scale_bwd: Tensor | None,
    parallel: TensorParallel,
) -> Gradients:
    """:func:`linear_backward` where processes share the rows of the output, and so of its gradient.

    Raises:
        TypeError: a quantized gradient.
    """
    if isinstance(grad_output, QuantizedTensorStorage):
        raise TypeError(
            "the gradient of the output of a sequence-parallel 'row' layer is quantized; pass it in high precision, it "
            "is gathered as the layer quantizes it"
        )
    plan, rows = args.plan, rows_of(grad_output)
    quantized = plan.backward_override is None and (plan.needs_input or plan.needs_weight)
    if not (quantized and parallel.joins(plan.grad_output, rows)):
        whole = replace(args, parallel=replace(parallel, sequence_parallel=False))
        return linear_backward(whole, gather_rows(grad_output, parallel.group), inp, weight, scale_bwd)
    operand, dy = plan.grad_output, grad_output.reshape(rows, grad_output.shape[-1])
    share = parallel.share(dy, operand, operand.seed(dy), scale_bwd, args.amax_bwd)
    grad, rows = parallel.whole_operand(share, operand), rows * group_size(parallel.group)
    wgrad, dgrad, _ = quantized_gradients(args, grad, None, inp, weight, rows)
    return wgrad, None if dgrad is None else dgrad.view(-1, *grad_output.shape[1:-1], args.shape[1]), None


def quantized_gradients(
    args: LinearBwdArgs,
    grad: OperandBuffers,
    grad_bias: Tensor | None,
    inp: list[Tensor],
    weight: list[Tensor],
    rows: int,
) -> Gradients:
    """Gradients from the quantized gradient of the output, whose row-wise buffers are let go of; dgrad (rows, K).

    ``grad_bias`` comes back, or goes with the weight gradient where ``args.wgrad`` sends that.
    """
    plan, dgrad, parallel = args.plan, None, args.parallel
    joins = plan.input.joins[1] if args.saved_input[1] is not None else "r"
    gathers = parallel is not None and parallel.gathers_input and plan.needs_weight
    if gathers:  # meanwhile, the GEMM of dgrad runs
        seen = (grad.rowwise or grad.columnwise)[0]
        inp = parallel.start_joining([after(seen, buffer) for buffer in inp], joins)  # type: ignore[union-attr]
    if plan.needs_input:
        columns, quantizer = weight_of_dgrad(args, weight)
        dgrad = gemm(
            "dgrad",
            grad.rowwise,
            grad.quantizer,
            columns,
            quantizer,
            None,
            args.dtype,
            rows,
            args.shape[1],
            plan.fast_dgrad,
            plan.emulate,
        )
        del columns
        if parallel is not None and parallel.mode == "column":  # meanwhile, that of wgrad
            dgrad = parallel.start_grad_input(dgrad)
    if not torch.compiler.is_compiling():  # the memory is free for the weight gradient
        grad.rowwise.clear()
    if not plan.needs_weight:
        return None, dgrad if parallel is None else _arrived(dgrad, parallel), grad_bias
    if gathers:
        inp = parallel.joined(inp, joins)  # type: ignore[union-attr]
    input_quantizer = args.saved_input[1]
    if input_quantizer is None:
        # column-wise only: the other way than in the forward, so that the compiler finds nothing to merge it with
        original = plan.original_input.quantize(inp[0].reshape(-1, args.shape[1]))
        inp, input_quantizer = original.columnwise, original.quantizer
    deferred = DeferredWgrad(
        grad.columnwise,
        grad.quantizer,
        inp,
        input_quantizer,
        grad_bias,
        args.wgrad.overwrite,
        plan.fast_wgrad,
        plan.emulate,
    )
    wgrad, grad_bias = weight_gradient(args, deferred)
    return wgrad, dgrad if parallel is None else _arrived(dgrad, parallel), grad_bias


def _arrived(dgrad: Tensor | None, parallel: TensorParallel) -> Tensor | None:
    """The gradient of the input; that of a column-parallel layer once its reduction is done."""
    return arrived(dgrad) if dgrad is not None and parallel.mode == "column" else dgrad


def _gradients_in_high_precision(
    args: LinearBwdArgs, dy: Tensor, inp: list[Tensor], weight: list[Tensor]
) -> Gradients:
    """Backward on the original or the dequantized operands; the gradient itself is not quantized."""
    plan, wgrad, dgrad, parallel = args.plan, None, None, args.parallel
    rows, gathers = dy.shape[0], parallel is not None and parallel.gathers_input and plan.needs_weight
    if gathers:
        rows = rows // group_size(parallel.group)  # type: ignore[union-attr]
        share = in_high_precision(SavedOperand(inp, args.saved_input[1]), args.dtype, (rows, args.shape[1]))
        inp = parallel.start_joining([after(dy, share)], "r")  # type: ignore[union-attr]
    if plan.needs_input:
        dgrad = dy.to(args.dtype) @ in_high_precision(
            SavedOperand(weight, args.saved_weight[1]), args.dtype, args.shape
        )
        if parallel is not None and parallel.mode == "column":
            dgrad = parallel.start_grad_input(dgrad)
    grad_bias = dy.sum(dim=0, dtype=torch.float32).to(args.bias_dtype) if args.needs_bias else None
    if plan.needs_weight:
        quantizer = None if gathers else args.saved_input[1]
        inp = parallel.joined(inp, "r") if gathers else inp  # type: ignore[union-attr]
        x = in_high_precision(SavedOperand(inp, quantizer), args.dtype, (dy.shape[0], args.shape[1]))
        dy, overwrite = dy.to(args.dtype), args.wgrad.overwrite
        deferred = DeferredWgrad([dy], _PLAIN, [x], _PLAIN, grad_bias, overwrite, False, plan.emulate)
        wgrad, grad_bias = weight_gradient(args, deferred)
    return wgrad, dgrad if parallel is None else _arrived(dgrad, parallel), grad_bias


def in_high_precision(saved: SavedOperand, dtype: torch.dtype, shape: Any) -> Tensor:
    """The values of a saved operand."""
    if saved.quantizer is not None:
        return dequantize(saved.tensors, saved.quantizer, False, dtype, list(shape))
    return saved.tensors[0].reshape(shape).to(dtype)


def after(grad: TensorOrQuantized, tensor: Tensor) -> Tensor:
    """``tensor``, available only once ``grad`` is.

    Else the compiler finds the operators of the forward again, and saves their results instead of repeating them.
    """
    if not torch.compiler.is_compiling():
        return tensor
    seen = grad if isinstance(grad, Tensor) else next(b for b in grad.get_data_tensors() if b is not None)
    return torch.where(seen.reshape(-1)[:1].float().sum().isnan(), tensor, tensor)
