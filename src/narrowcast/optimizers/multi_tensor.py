"""Functions over lists of tensors, under Transformer Engine's names, on PyTorch's ``_foreach`` and fused operators.

All take a chunk size, which has no effect, a flag of one element on the device, and lists of tensors of one device.
What is not finite sets the flag to 1. An optimizer's step changes nothing if the flag is set; nothing waits for the
device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._checks import flags, numbers, whole
from ..functional import adam_
from .arguments import check_lists, check_rate

Lists = Sequence[list[Tensor]]


class MultiTensorApply:
    """Calls a function of this module with a chunk size, the flag and the lists."""

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def __call__(
        self, op: Callable[..., Any], noop_flag_buffer: Tensor, tensor_lists: Lists, *args: Any
    ) -> Any:
        """Return ``op(chunk_size, noop_flag_buffer, tensor_lists, *args)``."""
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)


multi_tensor_applier = MultiTensorApply(2048 * 32)
"""The one that everybody uses."""


@torch.no_grad()
def multi_tensor_scale(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, scale: float | Tensor
) -> None:
    """Write ``scale`` times the first list to the second, in fp32 and in its dtype."""
    check_lists(noop_flag, tensor_lists, 2)
    if not isinstance(scale, Tensor):
        numbers(scale=scale)
    elif scale.numel() != 1:
        raise ValueError(f"scale has shape {tuple(scale.shape)}; use a number, or a tensor of one element")
    given, out = tensor_lists
    scale = scale.reshape(()) if isinstance(scale, Tensor) else scale
    filled = [x for x in given if x.numel()]  # an empty tensor has no largest magnitude
    if filled:
        _flag(noop_flag, torch._foreach_norm(filled, math.inf))
    torch._foreach_copy_(out, torch._foreach_mul([x.float() for x in given], scale))


multi_tensor_scale_tensor = multi_tensor_scale
"""The same; there the scale is a tensor of one element."""


@torch.no_grad()
def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the norm of all elements, fp32 (1,), and of each tensor, fp32 (n,), which is empty unless requested."""
    check_lists(noop_flag, tensor_lists, 1)
    flags(per_tensor=per_tensor)
    norms = torch.stack(list(torch._foreach_norm([x.float() for x in tensor_lists[0]], 2)))
    total = torch.linalg.vector_norm(norms).view(1)
    _flag(noop_flag, [total])
    return total, norms if per_tensor else norms.new_empty(0)


@torch.no_grad()
def multi_tensor_unscale_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, inv_scale: Tensor, per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    """Compute :func:`multi_tensor_l2norm` of the tensors times ``inv_scale``."""
    total, norms = multi_tensor_l2norm(chunk_size, noop_flag, tensor_lists, per_tensor)
    return total * inv_scale.float(), norms * inv_scale.float()


@torch.no_grad()
def multi_tensor_adam(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int | Tensor,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    inv_scale: Tensor | None = None,
) -> None:
    """Step Adam.

    Args:
        tensor_lists: gradients, parameters, first and second moments, and optionally fp32 master weights, which are
            stepped instead of the parameters and copied to them.
        step: the number of this step, from 1.
        mode: 0 for Adam, 1 for AdamW.
        bias_correction: 0 omits it.
        inv_scale: factor of the gradients.
    """
    check_lists(noop_flag, tensor_lists, 4)
    flags(bias_correction=bias_correction)
    check_rate("lr", lr)
    if isinstance(step, Tensor):
        check_rate("step", step)
    else:
        whole(step=step)
    numbers(beta1=beta1, beta2=beta2, epsilon=epsilon, weight_decay=weight_decay, mode=mode)
    grads, params, first, second, *others = tensor_lists
    weights, beside = params, others[0] if others else []
    if beside and beside[0].dtype != torch.int16:
        weights, beside = beside, params
    adam_(
        weights,
        grads,
        first,
        second,
        beside,
        lr=lr,
        count=step,
        inv_scale=inv_scale,
        found_inf=noop_flag,
        betas=(beta1, beta2),
        eps=epsilon,
        weight_decay=weight_decay,
        decoupled=mode == 1,
        bias_correction=bool(bias_correction),
    )


multi_tensor_adam_capturable = multi_tensor_adam_capturable_master = multi_tensor_adam
"""The same; there rate and step are tensors, so that a CUDA graph may hold the step, and ``inv_scale`` is given."""
multi_tensor_adam_param_remainder = multi_tensor_adam
"""The same; there parameters are bf16, and the fifth list is the int16 rest of their fp32 master weights."""


@torch.no_grad()
def multi_tensor_sgd(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    weight_decay: float,
    momentum: float,
    dampening: float,
    lr: float,
    nesterov: bool,
    first_run: bool,
    wd_after_momentum: bool,
    scale: float = 1.0,
) -> None:
    """Step SGD.

    Args:
        tensor_lists: gradients, parameters, momenta, and optionally copies of the parameters in another dtype, which
            are also written.
        scale: factor of the gradients. Other arguments as in ``torch.optim.SGD``; the first run sets momenta.
    """
    check_lists(noop_flag, tensor_lists, 3)
    numbers(weight_decay=weight_decay, momentum=momentum, dampening=dampening, lr=lr, scale=scale)
    flags(nesterov=nesterov, first_run=first_run, wd_after_momentum=wd_after_momentum)
    grads, params, momenta, *copies = tensor_lists
    live = 1.0 - noop_flag.float().clamp(max=1.0).view(())
    scaled = list(torch._foreach_mul([g.float() for g in grads], scale))
    if weight_decay and not wd_after_momentum:
        torch._foreach_add_(scaled, [p.float() for p in params], alpha=weight_decay)
    changes = scaled
    if momentum:
        old = [buffer.float() for buffer in momenta]
        new = scaled if first_run else torch._foreach_mul(old, momentum)
        if not first_run:
            torch._foreach_add_(new, scaled, alpha=1.0 - dampening)
        changes = torch._foreach_add(scaled, new, alpha=momentum) if nesterov else [n.clone() for n in new]
        # 0 times what is not finite would be NaN
        torch._foreach_copy_(momenta, [torch.where(live > 0, n, o) for n, o in zip(new, old)])
    if weight_decay and wd_after_momentum:
        torch._foreach_add_(changes, [p.float() for p in params], alpha=weight_decay)
    for index, (p, change) in enumerate(zip(params, changes)):
        p.copy_(torch.where(live > 0, p.float() - lr * change, p.float()))
        for copy in copies:
            copy[index].copy_(p)


def _flag(noop_flag: Tensor, magnitudes: Sequence[Tensor]) -> None:
    """Set the flag where one of these is not finite."""
    finite = torch.stack([m.float().reshape(()) for m in magnitudes]).isfinite().all()
    noop_flag.copy_(torch.where(finite, noop_flag, torch.ones_like(noop_flag)))
