"""The autograd functions of grouped linear layers: y_g = x_g w_g^T for every group of rows, in one operator per step.

The rules are those of ``autograd.linear``. Groups are quantized as a linear layer of their own would quantize them;
splits are a tensor that nothing here reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..functional import (
    draw_seed,
    grouped_calibrate_,
    grouped_column_sum,
    grouped_dequantize,
    grouped_gemm,
    grouped_mm,
    grouped_quantize,
    grouped_quantize_weights,
)
from ..functional.wgrad_store import DeferredWgrad, WeightGradStore, defer_wgrad
from ..quantizers import IdentityQuantizer, QuantizerHandle
from ..recipe import INPUT_SLOT, WEIGHT_SLOT, LinearHandles
from ..tensors import GroupedTensor, GroupedTensorStorage, grouped_layout
from .arguments import DelayedTensors, LinearNeeds, LinearNumerics, LinearWgrad
from .stages import usage

# what says that an operand of a weight gradient was not quantized
_PLAIN = IdentityQuantizer()


@dataclass(slots=True)
class ResultBuffers:
    """Memory of the caller that results are written to: ``out`` (T, N), ``dgrad`` (T, K)."""

    out: Tensor | None
    dgrad: Tensor | None


def _delivered(result: Tensor, buffer: Tensor | None) -> Tensor:
    """The result, written to the buffer where there is one.

    Eager code goes on with the buffer. Compiled code goes on with the result: that a graph's output and an operand it
    writes to are one memory would cost the output its gradient.
    """
    if buffer is None:
        return result
    written = buffer.copy_(result)
    return result if torch.compiler.is_compiling() else written


@dataclass(slots=True)
class GroupedLinearArgs:
    """What a grouped layer reads beside its tensors.

    ``quantizers`` None: high precision. ``covered``: the splits are known to sum to the rows. ``workspace``: the
    quantized weights that need not be made. ``bias_dtype``: None without bias. ``split_weights``, ``split_biases``: the
    weights and the biases are one tensor per group. ``wgrads``: where the gradient of each weight goes, and whether
    ``main_grad`` is overwritten, alike for all. ``store``: queue the gradients of all weights and biases for
    ``backward_dw``, at once; ``ticket``: of that store. ``buffers``: where output and input gradient are written.
    """

    quantizers: LinearHandles | None
    delayed: DelayedTensors
    numerics: LinearNumerics
    needs: LinearNeeds
    covered: bool
    workspace: GroupedTensorStorage | None
    cache_weight: bool
    out_features: int
    in_features: int
    num_gemms: int
    bias_dtype: torch.dtype | None
    split_weights: bool
    split_biases: bool
    wgrads: list[LinearWgrad]
    store: WeightGradStore | None
    ticket: Tensor | None
    buffers: ResultBuffers


def quantize_rows(
    x: Tensor, splits: Tensor, handle: QuantizerHandle, scale: Tensor | None, amax: Tensor | None
) -> GroupedTensorStorage:
    """Quantize groups of rows (T, K) in traced or eager code, without gradient."""
    layout = grouped_layout(handle.storage_name)
    seed = draw_seed(x) if handle.stochastic else None
    buffers = grouped_quantize(x, splits, handle.quantizer, layout, seed, scale, amax)
    return _storage(buffers, handle, splits.shape[0], (x.shape[0], x.shape[1]), x.dtype, splits)


def quantize_weights(
    weights: list[Tensor],
    handle: QuantizerHandle,
    scale: Tensor | None,
    amax: Tensor | None,
    shape: tuple[int, ...],
) -> GroupedTensorStorage:
    """Quantize weights, G of (N, K) or one (G, N, K), in traced or eager code, without gradient."""
    layout = grouped_layout(handle.storage_name)
    seed = draw_seed(weights[0]) if handle.stochastic else None
    buffers = grouped_quantize_weights(weights, handle.quantizer, layout, seed, scale, amax)
    return _storage(buffers, handle, shape[0], shape, weights[0].dtype, None)


def calibrate_groups_(
    x: Tensor,
    splits: Tensor,
    weights: list[Tensor],
    handles: LinearHandles,
    scale: Tensor | None,
    amax: Tensor | None,
    groups: int,
) -> None:
    """Overwrite the amax of every group's input and weight where they are scaled with delay.

    Args:
        x: (T, K); splits: (G,); weights: G of (N, K) or one (G, N, K); without gradient.
        handles: of the recipe that calibrates.
        scale, groups: not read.
        amax: collects, ``groups`` slots per operand.
    """
    if handles.input.rowwise.delayed:
        assert amax is not None
        grouped_calibrate_([x], splits, amax, INPUT_SLOT)
    if handles.weight.rowwise.delayed:
        assert amax is not None
        grouped_calibrate_(weights, None, amax, WEIGHT_SLOT)


def _storage(
    buffers: list[Tensor],
    handle: QuantizerHandle,
    groups: int,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    splits: Tensor | None,
) -> GroupedTensorStorage:
    return GroupedTensorStorage(
        buffers,
        quantizer=handle.quantizer,
        storage_name=handle.storage_name,
        rowwise=handle.rowwise,
        columnwise=handle.columnwise,
        num_tensors=groups,
        logical_shape=shape,
        fake_dtype=dtype,
        first_dims=splits,
    )


def _multiply(
    kind: str,
    left: list[Tensor],
    left_of: GroupedTensorStorage,
    right: list[Tensor],
    right_of: GroupedTensorStorage,
    splits: Tensor,
    biases: list[Tensor],
    rows: int,
    args: GroupedLinearArgs,
) -> Tensor:
    numerics = args.numerics
    fast = numerics.fast_fprop if kind == "fprop" else numerics.fast_dgrad
    return grouped_gemm(
        kind,
        left,
        left_of.quantizer,
        left_of.group_layout,
        left_of.fake_dtype,
        right,
        right_of.quantizer,
        right_of.group_layout,
        right_of.fake_dtype,
        splits,
        biases,
        numerics.activation_dtype,
        rows,
        args.out_features,
        args.in_features,
        args.covered,
        fast,
        numerics.emulate,
    )


@dataclass(slots=True)
class SavedOperand:
    """Of a saved quantized operand, everything but its buffers."""

    quantizer: Any
    group_layout: str
    fake_dtype: torch.dtype


@dataclass(slots=True)
class GroupedSaved:
    """How to read what :func:`grouped_forward` saved: so many tensors of the input, then those of the weights.

    An operand without description is one in high precision.
    """

    input_count: int
    inputmat: SavedOperand | None
    weight: SavedOperand | None


def saved_layout(args: GroupedLinearArgs) -> GroupedSaved:
    """What :func:`grouped_forward` saves under these arguments."""
    needs, numerics = args.needs, args.numerics
    if args.quantizers is None or numerics.backward_override == "high_precision":
        return GroupedSaved(int(needs.weight), None, None)
    weight = args.workspace
    if weight is None or (_keeps_columns(args) and weight.columnwise_data is None):
        handle = _weight_handle(args, args.quantizers)
        made = SavedOperand(handle.quantizer, grouped_layout(handle.storage_name), numerics.weight_dtype)
    else:
        made = SavedOperand(weight.quantizer, weight.group_layout, weight.fake_dtype)
    if _saves_original(args):
        return GroupedSaved(1, None, made)
    handle = _input_handle(args, args.quantizers)
    layout = grouped_layout(handle.storage_name)
    count = (1 if layout == "split" else 2) if needs.weight else 0
    return GroupedSaved(count, SavedOperand(handle.quantizer, layout, numerics.activation_dtype), made)


def _wants_columns(args: GroupedLinearArgs) -> bool:
    return args.needs.weight and args.numerics.backward_override is None


def _saves_original(args: GroupedLinearArgs) -> bool:
    return _wants_columns(args) and args.numerics.save_original_input


def _input_handle(args: GroupedLinearArgs, quantizers: LinearHandles) -> QuantizerHandle:
    columns = _wants_columns(args) and not _saves_original(args)
    return quantizers.input.both if columns else quantizers.input.rowwise


def _keeps_columns(args: GroupedLinearArgs) -> bool:
    return (args.needs.inp and args.numerics.backward_override is None) or args.cache_weight


def _weight_handle(args: GroupedLinearArgs, quantizers: LinearHandles) -> QuantizerHandle:
    return quantizers.weight.both if _keeps_columns(args) else quantizers.weight.rowwise


_Forward = tuple[Tensor, GroupedTensorStorage | None, list[Tensor]]


def grouped_forward(
    x: Tensor,
    splits: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    args: GroupedLinearArgs,
    bias_scales: Tensor | None = None,
) -> _Forward:
    """(output, new weight workspace or None, what to save), without gradient; arguments as :func:`grouped_linear`.

    Args:
        bias_scales: (T,) to multiply each row's bias with, or None.
    """
    added = biases if bias_scales is None else []
    out, new_workspace, saved = _forward(x, splits, weights, added, args)
    if bias_scales is not None:
        added = biases_of_rows(biases, splits, x.shape[0]).float() * _column(bias_scales)
        out = (out.float() + added).to(out.dtype)
    return _delivered(out, args.buffers.out), new_workspace, saved


def biases_of_rows(biases: list[Tensor], splits: Tensor, rows: int) -> Tensor:
    """The bias of every row's group, (T, N); zeros for rows of no group."""
    whole = biases[0] if biases[0].dim() == 2 else torch.stack(biases)
    group = torch.searchsorted(splits.cumsum(0), torch.arange(rows, device=splits.device), right=True)
    return F.pad(whole, (0, 0, 0, 1)).index_select(0, group)


def _column(scales: Tensor) -> Tensor:
    return scales.reshape(-1, 1).float()


def _forward(
    x: Tensor, splits: Tensor, weights: list[Tensor], biases: list[Tensor], args: GroupedLinearArgs
) -> _Forward:
    if args.quantizers is None:
        weights = [w.dequantize() if isinstance(w, GroupedTensor) else w for w in weights]
        out = grouped_mm(
            "fprop",
            x,
            [w.to(x.dtype) for w in weights],
            splits,
            [b.to(x.dtype) for b in biases],
            args.covered,
        )
        return out, None, _high_precision_saved(x, weights, args.needs)
    delayed = args.delayed
    inputmat = quantize_rows(
        x, splits, _input_handle(args, args.quantizers), delayed.scale_fwd, delayed.amax_fwd
    )
    return forward_of_quantized(inputmat, x, splits, weights, biases, args)


def forward_of_quantized(
    inputmat: GroupedTensorStorage,
    x: Tensor,
    splits: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    args: GroupedLinearArgs,
) -> _Forward:
    """:func:`grouped_forward` under a recipe, of an input that is quantized already; ``x``: what it was made of."""
    assert args.quantizers is not None
    needs, override, delayed = args.needs, args.numerics.backward_override, args.delayed
    keep_columns = _keeps_columns(args)
    new_workspace = None
    weight = args.workspace
    if weight is None or (keep_columns and weight.columnwise_data is None):
        shape = (args.num_gemms, args.out_features, args.in_features)
        handle = _weight_handle(args, args.quantizers)
        weight = quantize_weights(weights, handle, delayed.scale_fwd, delayed.amax_fwd, shape)
        new_workspace = weight if args.cache_weight else None
    out = _multiply(
        "fprop",
        inputmat.rowwise_operand(),
        inputmat,
        weight.rowwise_operand(),
        weight,
        splits,
        biases,
        x.shape[0],
        args,
    )
    if override == "high_precision":
        return out, new_workspace, _high_precision_saved(x, weights, needs)
    dequantized = override == "dequantized"
    from_input: list[Tensor] = []
    from_weight: list[Tensor] = []
    if _saves_original(args):
        from_input = [x]
    elif needs.weight:
        from_input = inputmat.rowwise_operand() if dequantized else inputmat.columnwise_operand()
    if needs.inp:
        from_weight = weight.rowwise_operand() if dequantized else weight.columnwise_operand()
    return out, new_workspace, [*from_input, *from_weight]


def _high_precision_saved(x: Tensor, weights: list[Tensor], needs: LinearNeeds) -> list[Tensor]:
    return [*([x] if needs.weight else []), *(weights if needs.inp else [])]


_Gradients = tuple[Tensor | None, list[Tensor | None], Tensor | None]


def grouped_backward(
    dy: Tensor,
    splits: Tensor,
    saved: list[Tensor],
    layout: GroupedSaved,
    args: GroupedLinearArgs,
    bias_scales: Tensor | None = None,
) -> tuple[Tensor | None, list[Tensor | None]]:
    """(dgrad, gradients of the weights and of the biases), without gradient.

    Args:
        dy: (T, N).
        saved: what :func:`grouped_forward` saved; ``layout``: :func:`saved_layout` of its arguments.
        args: as then; no gradient that they need may need more than was saved.
        bias_scales: as then.
    """
    needs = args.needs
    grad_bias = None
    if needs.bias:
        summed = dy if bias_scales is None else dy.float() * _column(bias_scales)
        grad_bias = grouped_column_sum(summed, splits).to(args.bias_dtype)
    dgrad: Tensor | None = None
    wgrads: list[Tensor | None] = [None] * len(args.wgrads)
    if needs.inp or needs.weight:
        quantized = args.quantizers is not None and args.numerics.backward_override is None
        run = _quantized_gradients if quantized else _high_precision_gradients
        from_input, from_weight = saved[: layout.input_count], saved[layout.input_count :]
        dgrad, wgrads, grad_bias = run(
            dy, splits, from_input, from_weight, layout.inputmat, layout.weight, grad_bias, args
        )
    if dgrad is not None:
        dgrad = _delivered(dgrad, args.buffers.dgrad)
    if args.bias_dtype is None:
        return dgrad, wgrads
    return dgrad, [*wgrads, *_per_parameter(grad_bias, args.num_gemms, args.split_biases)]


def _quantized_gradients(
    dy: Tensor,
    splits: Tensor,
    from_input: list[Tensor],
    from_weight: list[Tensor],
    inputmat: Any,
    weight: Any,
    grad_bias: Tensor | None,
    args: GroupedLinearArgs,
) -> _Gradients:
    needs, numerics = args.needs, args.numerics
    assert args.quantizers is not None
    handle = usage(args.quantizers.grad_output, needs.inp, needs.weight)
    assert handle is not None
    grad = quantize_rows(dy, splits, handle, args.delayed.scale_bwd, args.delayed.amax_bwd)
    dgrad = None
    if needs.inp:
        dgrad = _multiply(
            "dgrad", grad.rowwise_operand(), grad, from_weight, weight, splits, [], dy.shape[0], args
        )
    if not needs.weight:
        return dgrad, [None] * len(args.wgrads), grad_bias
    if inputmat is None:  # the original: quantized the other way, so not what the forward made
        inputmat = quantize_rows(from_input[0], splits, args.quantizers.input.columnwise, None, None)
        from_input = inputmat.columnwise_operand()
    deferred = DeferredWgrad(
        grad.columnwise_operand(),
        grad.quantizer,
        [*from_input, splits, dy.new_empty((dy.shape[0], 0))],
        inputmat.quantizer,
        grad_bias,
        args.wgrads[0].overwrite,
        numerics.fast_wgrad,
        numerics.emulate,
    )
    return dgrad, *_weight_gradients(args, deferred)


def _high_precision_gradients(
    dy: Tensor,
    splits: Tensor,
    from_input: list[Tensor],
    from_weight: list[Tensor],
    inputmat: Any,
    weight: Any,
    grad_bias: Tensor | None,
    args: GroupedLinearArgs,
) -> _Gradients:
    """On the original or the dequantized operands; the gradient itself is not quantized."""
    dtype = args.numerics.activation_dtype
    dy = dy.to(dtype)
    dgrad = None
    if args.needs.inp:
        weights = from_weight
        if weight is not None:
            shape = [args.num_gemms, args.out_features, args.in_features]
            weights = [
                grouped_dequantize(
                    from_weight, weight.quantizer, weight.group_layout, None, weight.fake_dtype, shape
                )
            ]
        dgrad = grouped_mm("dgrad", dy, [w.to(dtype) for w in weights], splits, [], args.covered)
    if not args.needs.weight:
        return dgrad, [None] * len(args.wgrads), grad_bias
    x = from_input[0]
    if inputmat is not None:
        shape = [dy.shape[0], args.in_features]
        x = grouped_dequantize(
            from_input, inputmat.quantizer, inputmat.group_layout, splits, inputmat.fake_dtype, shape
        )
    deferred = DeferredWgrad(
        [dy],
        _PLAIN,
        [x.to(dtype), splits, dy.new_empty((dy.shape[0], 0))],
        _PLAIN,
        grad_bias,
        args.wgrads[0].overwrite,
        False,
        args.numerics.emulate,
    )
    return dgrad, *_weight_gradients(args, deferred)


def _weight_gradients(
    args: GroupedLinearArgs, deferred: DeferredWgrad
) -> tuple[list[Tensor | None], Tensor | None]:
    """(wgrad of each weight, grad_bias) for autograd, after what goes elsewhere went there."""
    shape, dtype = (args.out_features, args.in_features), args.numerics.weight_dtype
    if args.store is not None:
        if torch.compiler.is_compiling():
            assert args.ticket is not None
            defer_wgrad(args.store.key, args.ticket, deferred)
        else:
            *operand, splits, like = deferred.inp  # the caller may count the next tokens in the same tensor
            args.store.put(deferred._replace(inp=[*operand, splits.clone(), like]))
        return [None] * len(args.wgrads), None
    main_grads = [wgrad.main_grad for wgrad in args.wgrads]
    if all(main_grad is None for main_grad in main_grads):
        wgrad = compute_grouped_wgrad(deferred, shape, dtype)
        return _per_parameter(wgrad, args.num_gemms, args.split_weights), deferred.grad_bias
    add_to_main_grads_(deferred, main_grads, shape)
    if not args.split_weights:
        shape = (args.num_gemms, *shape)
    return [_placeholder(deferred.grad[0], wgrad, shape, dtype) for wgrad in args.wgrads], deferred.grad_bias


def _placeholder(
    like: Tensor, wgrad: LinearWgrad, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor | None:
    """What autograd gets in place of a gradient that went to ``main_grad``."""
    if not wgrad.dummy:
        return None
    make = like.new_zeros if wgrad.dummy == "zeros" else like.new_empty
    return make(shape, dtype=dtype)


def compute_grouped_wgrad(deferred: DeferredWgrad, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """The weight gradients ``dy_g^T x_g`` of all groups, (G, N, K) of ``dtype``.

    Args:
        deferred: its ``inp`` ends with the splits and an empty (T, 0) tensor of the dtype that was quantized.
        shape: (N, K).
    """
    *inp, splits, like = deferred.inp
    grad_layout = grouped_layout(deferred.grad_quantizer._storage_name)  # type: ignore[attr-defined]
    if grad_layout == "split" and deferred.grad[0].dim() == 2:  # matrices, not an arena of quantized groups
        return grouped_mm("wgrad", deferred.grad[0], inp, splits, [], False).to(dtype)
    return grouped_gemm(
        "wgrad",
        deferred.grad,
        deferred.grad_quantizer,
        grad_layout,
        like.dtype,
        inp,
        deferred.inp_quantizer,
        grouped_layout(deferred.inp_quantizer._storage_name),  # type: ignore[attr-defined]
        like.dtype,
        splits,
        [],
        dtype,
        like.shape[0],
        shape[0],
        shape[1],
        False,
        deferred.fast_accumulation,
        deferred.emulate,
    )


def add_to_main_grads_(
    deferred: DeferredWgrad, main_grads: list[Tensor | None], shape: tuple[int, int]
) -> None:
    """Add the weight gradients to ``main_grads``, or overwrite these if the operands say so.

    Args:
        deferred: as in :func:`compute_grouped_wgrad`.
        main_grads: G of (N, K), or one (G, N, K), fp32 or bf16; None where no gradient is wanted.
        shape: (N, K).

    Numerics:
        ``RN(main_grad + dy_g^T x_g)``, product and sum in fp32; a product of operands in high precision is rounded to
        their dtype first.
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


class _GroupedLinearFunction(torch.autograd.Function):
    """Boundary of :func:`grouped_linear`: input, splits, arguments, then the weights and the biases."""

    @staticmethod
    def forward(ctx: Any, inp: Tensor, splits: Tensor, args: GroupedLinearArgs, *parameters: Tensor) -> Any:
        weights, biases = _parted(list(parameters), args)
        out, new_workspace, saved = grouped_forward(inp, splits, weights, biases, args)
        ctx.save_for_backward(splits, *saved)
        ctx.layout = saved_layout(args)
        ctx.backward_objects = args
        out = out.view_as(out)
        if new_workspace is None:
            return out
        buffers = [buffer for buffer in new_workspace.get_data_tensors() if buffer is not None]
        ctx.mark_non_differentiable(*buffers)
        return (out, *buffers)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor, *workspace_grads: Any) -> Any:
        splits, *saved = ctx.saved_tensors
        dgrad, grads = grouped_backward(grad_output, splits, saved, ctx.layout, ctx.backward_objects)
        return (dgrad, None, None, *grads)


def _parted(parameters: list[Tensor], args: GroupedLinearArgs) -> tuple[list[Tensor], list[Tensor]]:
    count = args.num_gemms if args.split_weights else 1
    return parameters[:count], parameters[count:]


def _per_parameter(grad: Tensor | None, groups: int, split: bool) -> list[Tensor | None]:
    if not split:
        return [grad]
    return [None] * groups if grad is None else list(grad.unbind(0))


def grouped_linear(
    inp: Tensor, splits: Tensor, weights: list[Tensor], biases: list[Tensor], args: GroupedLinearArgs
) -> tuple[Tensor, GroupedTensorStorage | None]:
    """Linear layers on consecutive groups of rows, differentiable in input, weights and biases.

    Args:
        inp: (T, K).
        splits: int32 or int64 (G,) on the device of ``inp``; not read by the host where the GEMMs are native.
        weights: G of (N, K), or one (G, N, K).
        biases: G of (N,), or one (G, N), or none.
        args: quantizers, state and options; not modified.

    Returns:
        (T, N) in the activation dtype, zero in rows beyond the sum of the splits; and the freshly quantized weights
        when ``args.cache_weight`` asks for them.
    """
    needs = args.needs
    if not (torch.is_grad_enabled() and (needs.inp or needs.weight or needs.bias)):
        out, new_workspace, _ = grouped_forward(inp, splits, weights, biases, args)
        return out, new_workspace
    result = _GroupedLinearFunction.apply(inp, splits, args, *weights, *biases)
    if isinstance(result, Tensor):
        return result, None
    out, *buffers = result
    assert args.quantizers is not None
    handle = args.quantizers.weight.both
    if grouped_layout(handle.storage_name) == "tensor":  # as the operator ordered them
        buffers = [buffers[0], buffers[2], buffers[1]]
    shape = (args.num_gemms, args.out_features, args.in_features)
    return out, _storage(buffers, handle, args.num_gemms, shape, weights[0].dtype, None)
