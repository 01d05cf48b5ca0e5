"""Activations as differentiable functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._tracing import once_differentiable, refuse_in_transform
from ..functional import act, act_backward
from ..upstream.tensors import in_transform


@dataclass(frozen=True)
class ActivationSettings:
    """An activation and its numbers, in the order of its record; no numbers mean its defaults."""

    activation: str
    parameters: tuple[float, ...]


class _ActivationFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, settings: ActivationSettings) -> Tensor:
        ctx.save_for_backward(x)
        ctx.settings = settings
        return act(x, settings.activation, list(settings.parameters))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        settings = ctx.settings
        return act_backward(grad_output, x, settings.activation, list(settings.parameters)), None


def activate(x: Tensor, settings: ActivationSettings) -> Tensor:
    """Return an activation, differentiable; twice is a RuntimeError.

    Args:
        x: (*lead, F), or (*lead, 2F) for a gated activation; fp32, bf16 or fp16.
        settings: which activation.
    Returns:
        (*lead, F) in the dtype of ``x``.
    """
    if in_transform():
        refuse_in_transform(settings.activation)
    return _ActivationFunction.apply(x, settings)
