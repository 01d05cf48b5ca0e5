"""Several parameters as one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._tracing import has_addresses, once_differentiable
from ..upstream.tensors import in_transform


class _Adjacent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *parts: Tensor) -> Tensor:
        ctx.sizes = [part.shape[0] for part in parts]
        ctx.set_materialize_grads(False)  # there is no gradient where the weight gradient goes elsewhere
        first = parts[0].detach()
        return first.as_strided((sum(ctx.sizes), *first.shape[1:]), first.stride())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None,) * len(ctx.sizes) if grad is None else grad.split(ctx.sizes)


def concatenate(parts: list[Tensor]) -> Tensor:
    """Return the parts along dim 0, differentiable; without a copy where they lie one after another in memory.

    Args:
        parts: (N_i, ...) of one dtype, device and trailing shape. Compiled code and the transforms of
            torch.func always copy: they know no addresses.
    """
    if has_addresses() and not in_transform() and _are_adjacent(parts):
        return _Adjacent.apply(*parts)
    return torch.cat(parts)


def _are_adjacent(parts: list[Tensor]) -> bool:
    expected = parts[0].data_ptr()
    storage = parts[0].untyped_storage().data_ptr()
    for part in parts:
        same_storage = part.untyped_storage().data_ptr() == storage
        if not (part.is_contiguous() and same_storage and part.data_ptr() == expected):
            return False
        expected += part.numel() * part.element_size()
    return True
