"""Transformer Engine's ``graph``: what code that captures layers itself, such as Megatron-LM, takes from it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .._checks import shown
from ..layers import Snapshot
from ..recipe import DelayedScaling
from ..tensors import QuantizedTensor


def save_fp8_tensors(modules: Iterable[nn.Module], recipe: Any) -> Snapshot | None:
    """Return the state of delayed scaling of all layers in modules, for :func:`restore_fp8_tensors`.

    Args:
        modules: that are to be warmed up and captured.
        recipe: whose forwards these are; another than DelayedScaling has no state, and the result is None.
    """
    return Snapshot(modules, rest=False) if isinstance(recipe, DelayedScaling) else None


def restore_fp8_tensors(modules: Iterable[nn.Module], fp8_tensors: Snapshot | None) -> None:
    """Put back, in place, what :func:`save_fp8_tensors` returned; scaling that has begun since then begins anew.

    Args:
        modules: the same as there, which the state knows.
    """
    if fp8_tensors is not None:
        fp8_tensors.restore_in_place()


def set_capture_start() -> None:
    """Do nothing: a forward changes only amax, in a capture too, and :func:`restore_fp8_tensors` puts that back."""


def set_capture_end() -> None:
    """Do nothing, as :func:`set_capture_start`."""


class _Memory:
    """Bytes on a GPU that another tensor owns."""

    def __init__(self, tensor: Tensor) -> None:
        reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride())) + 1
        self.__cuda_array_interface__ = {
            "shape": (reach * tensor.element_size(),),
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def make_weak_ref(x: Any) -> Any:
    """Return tensors on the memory of those in ``x``, which it no longer keeps from being freed.

    Read the result only while something else holds the memory, such as a CUDA graph's pool. Tensors on the CPU, empty
    ones and quantized ones are returned as they are.

    Args:
        x: a tensor, a number, None, or a tuple, list or dict of them.
    Raises:
        TypeError: it is, or has, something else.
    """
    if isinstance(x, Tensor):
        if not x.is_cuda or not x.numel() or isinstance(x, QuantizedTensor):
            return x
        owned = torch.as_tensor(_Memory(x), dtype=torch.uint8, device=x.device)
        return owned.view(x.dtype).as_strided(x.shape, x.stride())
    if isinstance(x, (tuple, list)):
        return type(x)([make_weak_ref(each) for each in x])
    if isinstance(x, dict):
        return {key: make_weak_ref(each) for key, each in x.items()}
    if x is None or isinstance(x, (int, float)):
        return x
    raise TypeError(
        f"make_weak_ref takes tensors, numbers and None, and tuples, lists and dicts of them; got {shown(x)}"
    )
