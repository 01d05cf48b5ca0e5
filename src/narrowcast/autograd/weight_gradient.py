"""Weight gradients and where they go: to autograd, to ``main_grad``, or into the queue of ``backward_dw``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..functional import begin_main_grad_, gemm, gemm_accumulate_, grouped_gemm, grouped_mm
from ..functional.wgrad_store import DeferredWgrad, defer_wgrad
from ..tensors import grouped_layout
from .arguments import LinearBwdArgs, LinearWgrad


def begin_main_grads_(wgrad: LinearWgrad) -> None:
    """Drop what a first microbatch finds in ``main_grad``, before the backward's stage, which may be replayed, runs."""
    if not wgrad.begins:
        return
    main_grads = wgrad.main_grad if isinstance(wgrad.main_grad, list) else [wgrad.main_grad]
    wanted = [main_grad for main_grad in main_grads if main_grad is not None]
    outer = wgrad.recomputed_in
    if isinstance(outer, int):
        outer = torch.full((), outer, dtype=torch.int64)
    for main_grad, weight in zip(wanted, wgrad.begins, strict=True):
        begin_main_grad_(main_grad, weight, outer)


def weight_gradient(args: LinearBwdArgs, deferred: DeferredWgrad) -> tuple[Any, Tensor | None]:
    """Return wgrad and grad_bias for autograd, after what goes elsewhere went there; of groups, wgrad may be a list."""
    wgrad, into = args.wgrad, args.wgrad.main_grad
    if wgrad.store is not None:
        queue_wgrad(wgrad, deferred)
        return None, None
    if into is None:
        return compute_wgrad(deferred, args.shape, args.weight_dtype), deferred.grad_bias
    add_to_main_grad_(deferred, into)
    like, dtype = deferred.grad[0], args.weight_dtype
    if not isinstance(into, list):
        return placeholder(wgrad.dummy, like, args.shape, dtype), deferred.grad_bias
    shapes = [() if one is None else one.shape for one in into]
    returned = [placeholder(dummy, like, shape, dtype) for dummy, shape in zip(wgrad.dummy, shapes)]
    return returned, deferred.grad_bias


def queue_wgrad(wgrad: LinearWgrad, deferred: DeferredWgrad) -> None:
    """Put a weight gradient into the queue of ``backward_dw``."""
    if torch.compiler.is_compiling():
        defer_wgrad(wgrad.store.key, wgrad.ticket, deferred)  # type: ignore[union-attr,arg-type]
        return
    if deferred.groups:  # the caller may count the next tokens in the same tensor
        splits, like = deferred.groups
        deferred = deferred._replace(groups=[splits.clone(), like])
    wgrad.store.put(deferred)  # type: ignore[union-attr]


def placeholder(dummy: str, like: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
    """Return autograd's stand-in for a gradient added to ``main_grad``; ``dummy`` as in ``LinearWgrad``."""
    if not dummy:
        return None
    new = like.new_zeros if dummy == "zeros" else like.new_empty
    return new(shape, dtype=dtype)


def compute_wgrad(deferred: DeferredWgrad, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Return the weight gradient ``dy^T x``, of ``shape`` (N, K) and ``dtype``; of groups ``dy_g^T x_g`` of all, (G, N,
    K).
    """
    grad, inp, how = deferred.grad, deferred.inp, (deferred.fast_accumulation, deferred.emulate)
    if not deferred.groups:
        operands = grad, deferred.grad_quantizer, inp, deferred.inp_quantizer
        return gemm("wgrad", *operands, None, dtype, shape[0], shape[1], *how)
    splits, like = deferred.groups
    layout = grouped_layout(deferred.grad_quantizer._storage_name)  # type: ignore[attr-defined]
    if layout == "split" and grad[0].dim() == 2:  # matrices, not an arena of quantized groups
        return grouped_mm("wgrad", grad[0], inp, splits, [], False, dtype)
    left = grad, deferred.grad_quantizer, layout, like.dtype
    layout = grouped_layout(deferred.inp_quantizer._storage_name)  # type: ignore[attr-defined]
    right = inp, deferred.inp_quantizer, layout, like.dtype
    return grouped_gemm("wgrad", *left, *right, splits, [], dtype, like.shape[0], *shape, *how)


def add_to_main_grad_(deferred: DeferredWgrad, main_grad: Any) -> None:
    """Add the weight gradient to ``main_grad``, or overwrite it if the operands say so.

    Args:
        main_grad: (N, K), fp32 or bf16. Of groups a list: G of these or one (G, N, K), fp32 or bf16; None if no
            gradient is wanted.
    Numerics:
        ``RN(main_grad + dy^T x)``, product and sum in fp32.
    """
    if deferred.groups:
        _add_groups_(deferred, main_grad)
    elif deferred.overwrite:
        main_grad.copy_(compute_wgrad(deferred, (main_grad.shape[0], main_grad.shape[1]), main_grad.dtype))
    else:
        operands = deferred.grad, deferred.grad_quantizer, deferred.inp, deferred.inp_quantizer
        gemm_accumulate_("wgrad", main_grad, *operands, deferred.fast_accumulation, deferred.emulate)


def _add_groups_(deferred: DeferredWgrad, main_grads: list[Tensor | None]) -> None:
    wanted = [main_grad for main_grad in main_grads if main_grad is not None]
    wgrad = compute_wgrad(deferred, (wanted[0].shape[-2], wanted[0].shape[-1]), torch.float32)
    values = [wgrad] if wanted[0].dim() == 3 else wgrad.unbind(0)
    added = [value for into, value in zip(main_grads, values, strict=True) if into is not None]
    if deferred.overwrite:
        torch._foreach_copy_(wanted, added)
    else:
        torch._foreach_add_(wanted, added)
