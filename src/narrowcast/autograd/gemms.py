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
from typing import Any

import torch
from torch import Tensor

from .._tracing import after, is_known, record, release
from ..functional import (
    draw_seed,
    gemm,
    gemm_batch_invariant,
    gemm_few_rows,
    gemm_with_product,
    product,
    quantize,
    quantize_dbias,
    quantize_operand,
)
from ..functional.collectives import arrived, gather_rows, group_size
from ..functional.wgrad_store import DeferredWgrad
from ..quantizers import IdentityQuantizer, OperandBuffers, buffers_of
from ..recipe import LinearPlan
from ..tensors import QuantizedTensorStorage, TensorOrQuantized, plain
from .arguments import LinearBwdArgs, LinearFwdArgs
from .groups import GroupedRows
from .operands import (
    SavedOperand,
    in_high_precision,
    plain_or_rowwise,
    rows_of,
    saved_operand,
    weight_of_dgrad,
    weight_operand,
    with_columnwise,
)
from .shared_input import quantize_shared
from .tensor_parallel import TensorParallel
from .weight_gradient import weight_gradient

Gradients = tuple[Any, Tensor | None, Tensor | None]
"""(wgrad, dgrad, grad_bias), each None if it is not needed, or goes elsewhere.

Of groups, wgrad is (G, N, K), or a list of what autograd gets in its place where it goes elsewhere.
"""

_PLAIN = IdentityQuantizer()


def fprop(
    plan: LinearPlan,
    inp: OperandBuffers,
    weight: OperandBuffers,
    bias: Any,
    dtype: torch.dtype,
    rows: int,
    out_features: int,
    grouped: GroupedRows | None = None,
    thin: tuple[Tensor, Tensor] | None = None,
    processes: int = 1,
) -> Tensor:
    """y = x w^T + bias, (rows, out_features) of ``dtype``, as the plan accumulates it; ``thin``: added.

    ``processes``: over which the contraction is split.
    """
    operands = inp.rowwise, inp.quantizer, weight.rowwise, weight.quantizer
    if thin is None and grouped is None and not plan.batch_invariant:
        how = plan.fast_fprop, plan.emulate
        return gemm("fprop", *operands, bias, dtype, rows, out_features, *how)  # type: ignore[no-any-return]
    if thin is not None:
        how = dtype, rows, out_features, plan.fast_fprop, plan.emulate
        out = gemm_with_product("fprop", *operands, *thin, *how)
        return out if bias is None else out + bias.to(dtype)  # type: ignore[no-any-return]
    if grouped is not None:
        return grouped.gemm("fprop", plan, *operands, bias, dtype, rows)
    how = plan.batch_invariant, processes
    return gemm_batch_invariant("fprop", *operands, bias, dtype, rows, out_features, *how)  # type: ignore[no-any-return]


def has_few_rows(args: LinearFwdArgs, rows: int) -> bool:
    """Return whether the GEMM quantizes an input of so many rows itself: if nothing collects its amax, too."""
    return args.scales.amax is None and args.parallel is None and is_known(rows <= args.plan.few_rows)


def fprop_of_few_rows(
    x: Tensor, weight: Any, bias: Tensor | None, args: LinearFwdArgs, dtype: torch.dtype, out_features: int
) -> Tensor:
    """Return y = x w^T + bias of a matrix in high precision; ``weight``: or None, with buffers in the workspace."""
    plan, (w, _) = args.plan, weight_operand(weight, args)
    return gemm_few_rows(  # type: ignore[no-any-return]
        x, plan.input.quantizer, w.rowwise, w.quantizer, bias, dtype, out_features, args.scales.scale,
        plan.fast_fprop,
    )  # fmt: skip


def linear_forward(
    weight: Any,
    inp: TensorOrQuantized,
    bias: Any,
    args: LinearFwdArgs,
    grouped: GroupedRows | None = None,
    dtype: torch.dtype | None = None,
    thin: tuple[Tensor, Tensor] | None = None,
    processes: int = 1,
) -> tuple[Tensor, SavedOperand, SavedOperand]:
    """Return the output (*lead, N), the input to save, and the weight to save.

    Args:
        weight: (N, K), plain or quantized.
        inp: (*lead, K), plain or quantized.
        bias: (N,) or None.
        grouped: the groups of the rows, or None. With them inp is (T, K), weight a list, G of (N, K) or one
            (G, N, K), and bias a list, G of (N,), or one (G, N), or none.
        dtype: of the output; default: of the activations.
        thin: (M, r) and (N, r), whose product is added to the output; the plan is quantized, and nothing is split.
        processes: over which the contraction is split.
    """
    plan, scales, rows = args.plan, args.scales, rows_of(inp)
    if args.parallel is not None:
        return _split_forward(weight, inp, bias, args, args.parallel)
    if not plan.quantized:
        return _forward_in_high_precision(weight, inp, bias, args, grouped, dtype or args.dtype, processes)
    if (
        plan.few_rows
        and grouped is None
        and thin is None
        and not isinstance(inp, QuantizedTensorStorage)
        and has_few_rows(args, rows)
    ):
        x = inp.reshape(rows, inp.shape[-1])
        out = fprop_of_few_rows(x, weight, bias, args, dtype or args.dtype, weight.shape[0])
        nothing = SavedOperand([], None)
        return out if inp.dim() == 2 else out.view(*inp.shape[:-1], out.shape[-1]), nothing, nothing
    if grouped is not None:
        x = grouped.quantize(inp, plan.input, scales.scale, scales.amax)
    elif isinstance(inp, QuantizedTensorStorage):
        wants_columns = plan.needs_weight and plan.backward_override is None
        x = with_columnwise(inp) if wants_columns else buffers_of(inp)
    else:
        operand, flat = plan.input, inp if inp.dim() == 2 else inp.reshape(rows, inp.shape[-1])
        stored = isinstance(weight, QuantizedTensorStorage) and not plan.needs_weight
        if stored and not (operand.stochastic or operand.unseen is not None):
            buffers = quantize_shared(inp, flat, operand)
        else:
            seed = draw_seed(flat) if operand.stochastic else None
            buffers = quantize_operand(flat, operand.quantizer, seed, scales.scale, scales.amax)
        x = operand.split(buffers)
    w, saved_weight = weight_operand(weight, args)
    features = weight.shape[0] if grouped is None else grouped.groups.out_features
    out = fprop(plan, x, w, bias, dtype or args.dtype, rows, features, grouped, thin, processes)
    if (
        plan.save_original_input
        and not isinstance(inp, QuantizedTensorStorage)
        and not plan.backward_override
    ):
        saved_input = SavedOperand([inp] if plan.needs_weight else [], None)
    else:
        saved_input = saved_operand(x, inp, plan.needs_weight, plan.backward_override)
    if len(inp.shape) != 2:
        out = out.view(*inp.shape[:-1], features)
    return out, saved_input, saved_weight


def _split_forward(
    weight: TensorOrQuantized,
    inp: TensorOrQuantized,
    bias: Tensor | None,
    args: LinearFwdArgs,
    parallel: TensorParallel,
) -> tuple[Tensor, SavedOperand, SavedOperand]:
    """Run :func:`linear_forward` for a layer split over processes; gathered operands are saved as received.

    Raises:
        TypeError: a quantized input that would have to be gathered.
    """
    plan, alone = args.plan, args._replace(parallel=None)
    if not parallel.gathers_input:
        dtype = parallel.dtype_of_part(args.dtype, plan.batch_invariant)
        how = {"dtype": dtype, "processes": parallel.processes_of_sum}
        out, saved_input, saved_weight = linear_forward(weight, inp, bias, alone, **how)  # type: ignore[arg-type]
        return parallel.reduced_output(out, args.dtype, plan.batch_invariant), saved_input, saved_weight
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
        share = parallel.share(flat, operand, operand.seed(flat), scales.scale, scales.amax)
    x, saved_input, rows = split_operand(args, parallel, share, inp, rows)
    w, saved_weight = weight_operand(weight, args)
    out = fprop(args.plan, x, w, bias, args.dtype, rows, weight.shape[0])
    return out.view(-1, *inp.shape[1:-1], weight.shape[0]), saved_input, saved_weight


def split_operand(
    args: LinearFwdArgs,
    parallel: TensorParallel,
    share: OperandBuffers | None,
    inp: Tensor | None,
    rows: int,
) -> tuple[OperandBuffers, SavedOperand, int]:
    """Return the input as fprop reads it, what the backward reads of this process's, and how many rows fprop reads.

    Args:
        share: this process's rows, quantized; None if only rows in high precision make up the whole.
        inp: this process's rows (*lead, K) in high precision; None if nothing reads those.
        rows: how many.
    """
    plan, scales = args.plan, args.scales
    if not parallel.gathers_input:
        saved = saved_operand(share, inp, plan.needs_weight, plan.backward_override)  # type: ignore[arg-type]
        return share, saved, rows  # type: ignore[return-value]
    all_rows = rows * group_size(parallel.group)
    if share is None:
        gathered = gather_rows(inp, parallel.group).reshape(-1, inp.shape[-1])  # type: ignore[arg-type,union-attr]
        whole = plan.input.quantize(gathered, scales.scale, scales.amax)
        if plan.backward_override == "dequantized" and plan.needs_weight:
            flat = inp.reshape(-1, inp.shape[-1])  # type: ignore[union-attr]
            share = parallel.share(flat, plan.input, plan.input.seed(flat), scales.scale, None)
    else:
        whole = parallel.whole_operand(share._replace(columnwise=[]), plan.input)
    if share is None or (plan.save_original_input and not plan.backward_override):
        return whole, SavedOperand([inp] if plan.needs_weight else [], None), all_rows  # type: ignore[list-item]
    return whole, saved_operand(share, inp, plan.needs_weight, plan.backward_override), all_rows


def _forward_in_high_precision(
    weight: Any,
    inp: TensorOrQuantized,
    bias: Any,
    args: LinearFwdArgs,
    grouped: GroupedRows | None,
    dtype: torch.dtype,
    processes: int,
) -> tuple[Tensor, SavedOperand, SavedOperand]:
    plan = args.plan
    if grouped is not None:
        weight = [plain(one) for one in weight]
    x, w = plain_or_rowwise(inp), plain_or_rowwise(weight)
    if grouped is not None:
        out = grouped.gemm_in_high_precision("fprop", x.tensors[0], w.tensors, bias, plan.batch_invariant)
    elif plan.batch_invariant:
        rows, features = rows_of(inp), weight.shape[0]
        matrix = in_high_precision(x, args.dtype, (rows, inp.shape[-1]))
        left = OperandBuffers([matrix], [], _PLAIN)
        right = OperandBuffers([in_high_precision(w, args.dtype, weight.shape)], [], _PLAIN)
        out = fprop(plan, left, right, bias, dtype, rows, features, processes=processes)
        out = out.view(*inp.shape[:-1], features)
    else:
        out = product(
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
    """Return the backward's arguments besides saved tensors; depends on metadata only.

    Args:
        weight, bias: of groups any weight or bias, or all in one.
    """
    fields = (
        args.plan,
        args.dtype,
        args.scales.amax,
        args.wgrad,
        args.needs_bias,
        None if bias is None else bias.dtype,
        weight.dtype,
        (weight.shape[-2], weight.shape[-1]),
        (len(saved_input.tensors), saved_input.quantizer),
        (len(saved_weight.tensors), saved_weight.quantizer),
        args.transpose_weight,
        args.parallel,
        None if args.stored is None else args.stored.quantizer,
    )
    return record(LinearBwdArgs, fields)


def with_saved(args: LinearBwdArgs, saved_input: SavedOperand, saved_weight: SavedOperand) -> LinearBwdArgs:
    """Return the same arguments for operands that a recomputation made."""
    return args._replace(
        saved_input=(len(saved_input.tensors), saved_input.quantizer),
        saved_weight=(len(saved_weight.tensors), saved_weight.quantizer),
    )


def linear_backward(
    args: LinearBwdArgs,
    grad_output: Any,
    inp: list[Tensor],
    weight: list[Tensor],
    scale: Tensor | None,
    grouped: GroupedRows | None = None,
    thin: tuple[Tensor, Tensor] | None = None,
) -> Gradients:
    """Return gradients of a linear layer, dgrad (*lead, K).

    Args:
        grad_output: (*lead, N), plain or quantized; with groups (T, N). Or a list of it, which is emptied, so that its
            codes are freed once they are read. Python may hold an argument itself until the call returns.
        inp, weight: what was saved of them.
        scale: as casts read it.
        grouped: the groups of the rows, or None.
        thin: (M, r) and (K, r), whose product is added to dgrad, as :func:`linear_forward` takes one.
    """
    grad_output = grad_output.pop() if isinstance(grad_output, list) else grad_output
    plan, lead, rows = args.plan, grad_output.shape[:-1], rows_of(grad_output)
    if args.parallel is not None:
        if args.parallel.gathers_grad_output:
            return _gradients_of_share(args, grad_output, inp, weight, scale, args.parallel)
        if args.parallel.gathers_input:
            lead = torch.Size((-1, *lead[1:]))
    if grouped is None and isinstance(grad_output, QuantizedTensorStorage):
        quantized = buffers_of(grad_output)  # its producer has summed it for the bias, too
        del grad_output
        gradients = quantized_gradients(args, quantized, None, inp, weight, rows)
    elif plan.backward_override is not None or not (plan.needs_input or plan.needs_weight):
        dy = grad_output.reshape(rows, grad_output.shape[-1])
        gradients = _gradients_in_high_precision(args, dy, inp, weight, grouped)
    else:
        dy: Any = grad_output if len(lead) == 1 else grad_output.reshape(rows, grad_output.shape[-1])
        grad_bias, operand = None, plan.grad_output
        seed = draw_seed(dy) if operand.stochastic and grouped is None else None
        if grouped is not None:
            if args.needs_bias:
                grad_bias = grouped.column_sum(dy).to(args.bias_dtype)
            quantized = grouped.quantize(dy, operand, scale, args.amax)
        elif args.needs_bias:
            *buffers, sums = quantize_dbias(dy, operand.quantizer, seed, scale, args.amax)
            grad_bias, quantized = sums.to(args.bias_dtype), operand.split(buffers)
            del buffers
        else:
            quantized = operand.split(quantize(dy, operand.quantizer, seed, scale, args.amax))
        gradients = quantized_gradients(args, quantized, grad_bias, inp, weight, rows, grouped, thin)
    wgrad, dgrad, grad_bias = gradients
    if len(lead) != 1 and dgrad is not None:
        dgrad = dgrad.view(*lead, args.shape[1])
    return wgrad, dgrad, grad_bias


def _gradients_of_share(
    args: LinearBwdArgs,
    grad_output: TensorOrQuantized,
    inp: list[Tensor],
    weight: list[Tensor],
    scale: Tensor | None,
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
        whole = args._replace(parallel=replace(parallel, sequence_parallel=False))
        return linear_backward(whole, gather_rows(grad_output, parallel.group), inp, weight, scale)
    operand, dy = plan.grad_output, grad_output.reshape(rows, grad_output.shape[-1])
    share = parallel.share(dy, operand, operand.seed(dy), scale, args.amax)
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
    grouped: GroupedRows | None = None,
    thin: tuple[Tensor, Tensor] | None = None,
) -> Gradients:
    """Return gradients from the quantized gradient of the output, whose row-wise buffers are let go of; dgrad (rows,
    K).

    ``grad_bias`` comes back, or goes with the weight gradient where ``args.wgrad`` sends that.
    """
    plan, dgrad, parallel, (rowwise, columnwise, quantizer) = args.plan, None, args.parallel, grad
    input_quantizer = args.saved_input[1]
    joins = plan.input.joins[1] if input_quantizer is not None else "r"
    gathers = parallel is not None and parallel.gathers_input and plan.needs_weight
    if gathers:  # meanwhile, the GEMM of dgrad runs
        seen = (rowwise or columnwise)[0]
        inp = parallel.start_joining([after(seen, buffer) for buffer in inp], joins)  # type: ignore[union-attr]
    if plan.needs_input:
        columns, of_weight = weight_of_dgrad(args, weight, grouped, (rowwise or columnwise)[0])
        how = rows, args.shape[1], plan.fast_dgrad, plan.emulate
        if thin is not None:
            operands = rowwise, quantizer, columns, of_weight
            dgrad = gemm_with_product("dgrad", *operands, *thin, args.dtype, *how)
            del operands
        elif grouped is None:
            dgrad = gemm("dgrad", rowwise, quantizer, columns, of_weight, None, args.dtype, *how)
        else:
            dgrad = grouped.gemm("dgrad", plan, rowwise, quantizer, columns, of_weight, [], args.dtype, rows)
        del columns
        if parallel is not None and parallel.mode == "column":  # meanwhile, that of wgrad
            dgrad = parallel.start_grad_input(dgrad)
    release(rowwise, weight)  # the memory is free for the weight gradient
    if not plan.needs_weight:
        return None, dgrad if parallel is None else _arrived(dgrad, parallel), grad_bias
    if gathers:
        inp = parallel.joined(inp, joins)  # type: ignore[union-attr]
    if input_quantizer is None:
        # column-wise only: the other way than in the forward, so that the compiler finds nothing to merge it with
        if grouped is None:
            original = plan.original_input.quantize(inp[0].reshape(-1, args.shape[1]))
        else:
            original = grouped.quantize(inp[0], plan.original_input)
        inp, input_quantizer = original.columnwise, original.quantizer
    operands = columnwise, quantizer, inp, input_quantizer
    main_grad, overwrite, _, store = args.wgrad[:4]
    if main_grad is None and store is None and grouped is None:  # compute_wgrad, in fewer lines of a trace
        how = *args.shape, plan.fast_wgrad, plan.emulate
        wgrad = gemm("wgrad", *operands, None, args.weight_dtype, *how)
    else:
        groups = [] if grouped is None else grouped.of_wgrad(columnwise[0], rows)
        how = overwrite, plan.fast_wgrad, plan.emulate, groups
        wgrad, grad_bias = weight_gradient(args, DeferredWgrad(*operands, grad_bias, *how))
    return wgrad, dgrad if parallel is None else _arrived(dgrad, parallel), grad_bias


def _arrived(dgrad: Tensor | None, parallel: TensorParallel) -> Tensor | None:
    """Return the gradient of the input; that of a column-parallel layer once its reduction is done."""
    return arrived(dgrad) if dgrad is not None and parallel.mode == "column" else dgrad


def _gradients_in_high_precision(
    args: LinearBwdArgs, dy: Tensor, inp: list[Tensor], weight: list[Tensor], grouped: GroupedRows | None
) -> Gradients:
    """Compute the backward on the original or the dequantized operands; the gradient itself is not quantized."""
    plan, wgrad, dgrad, parallel = args.plan, None, None, args.parallel
    rows, gathers = dy.shape[0], parallel is not None and parallel.gathers_input and plan.needs_weight
    if gathers:
        rows = rows // group_size(parallel.group)  # type: ignore[union-attr]
        share = in_high_precision(SavedOperand(inp, args.saved_input[1]), args.dtype, (rows, args.shape[1]))
        inp = parallel.start_joining([after(dy, share)], "r")  # type: ignore[union-attr]
    if plan.needs_input:
        if grouped is not None:
            weights = grouped.decoded_weights(args, weight)
            dgrad = grouped.gemm_in_high_precision("dgrad", dy.to(args.dtype), weights, [])
            del weights
        else:
            dgrad = dy.to(args.dtype) @ in_high_precision(
                SavedOperand(weight, args.saved_weight[1]), args.dtype, args.shape
            )
        if parallel is not None and parallel.mode == "column":
            dgrad = parallel.start_grad_input(dgrad)
    grad_bias = None
    if args.needs_bias:
        grad_bias = dy.sum(dim=0, dtype=torch.float32) if grouped is None else grouped.column_sum(dy)
        grad_bias = grad_bias.to(args.bias_dtype)
    if plan.needs_weight:
        if grouped is not None:
            x, groups = grouped.decoded(args, inp, dy.shape[0]), grouped.of_wgrad(dy, dy.shape[0])
        else:
            quantizer, groups = None if gathers else args.saved_input[1], []
            inp = parallel.joined(inp, "r") if gathers else inp  # type: ignore[union-attr]
            x = in_high_precision(SavedOperand(inp, quantizer), args.dtype, (dy.shape[0], args.shape[1]))
        dy, how = dy.to(args.dtype), (args.wgrad.overwrite, False, plan.emulate)
        wgrad, grad_bias = weight_gradient(
            args, DeferredWgrad([dy], _PLAIN, [x], _PLAIN, grad_bias, *how, groups)
        )
    return wgrad, dgrad if parallel is None else _arrived(dgrad, parallel), grad_bias
