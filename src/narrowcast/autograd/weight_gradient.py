"""Weight gradients and where they go: to autograd, to ``main_grad``, or into the queue of ``backward_dw``."""

from __future__ import annotations

import torch
from torch import Tensor

from ..functional import gemm, gemm_accumulate_
from ..functional.wgrad_store import DeferredWgrad, defer_wgrad
from .arguments import LinearBwdArgs, LinearWgrad


def weight_gradient(args: LinearBwdArgs, deferred: DeferredWgrad) -> tuple[Tensor | None, Tensor | None]:
    """(wgrad, grad_bias) for autograd, after what goes elsewhere went there."""
    wgrad = args.wgrad
    if wgrad.store is not None:
        queue_wgrad(wgrad, deferred)
        return None, None
    if wgrad.main_grad is None:
        return compute_wgrad(deferred, args.shape, args.weight_dtype), deferred.grad_bias
    add_to_main_grad_(deferred, wgrad.main_grad)
    returned = placeholder(wgrad.dummy, deferred.grad[0], args.shape, args.weight_dtype)
    return returned, deferred.grad_bias


def queue_wgrad(wgrad: LinearWgrad, deferred: DeferredWgrad) -> None:
    """Put a weight gradient into the queue of ``backward_dw``."""
    if torch.compiler.is_compiling():
        defer_wgrad(wgrad.store.key, wgrad.ticket, deferred)  # type: ignore[union-attr,arg-type]
    else:
        wgrad.store.put(deferred)  # type: ignore[union-attr]


def placeholder(dummy: str, like: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
    """What autograd gets in place of a gradient that went to ``main_grad``; ``dummy`` as of ``LinearWgrad``."""
    if not dummy:
        return None
    new = like.new_zeros if dummy == "zeros" else like.new_empty
    return new(shape, dtype=dtype)


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
