"""Optimizer steps during the backward: a gradient is gone before the next ones come."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .._checks import a_kind, module, typed
from ..functional.collectives import group_size
from ..layers.parameters import accumulates_elsewhere
from ..upstream.fsdp import is_distributed
from .fused_adam import FusedAdam

_WITHOUT = "or leave step_in_backward out"


class BackwardSteps:
    """What :func:`step_in_backward` has set up; :meth:`remove` ends it."""

    def __init__(self, optimizer: torch.optim.Optimizer, parts: list[list[Tensor]]) -> None:
        self._optimizer, self._parts = optimizer, parts
        self._waiting = [{*part} for part in parts]
        """The parameters of each part whose gradients are to come."""
        self._stepped: set[Tensor] = set()
        """Parameters stepped since the loop's own ``step()``."""
        self._inside = False
        self._handles: list[Any] = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]
        here: Any = weakref.ref(self)  # a parameter would keep itself alive through its hook
        for number, part in enumerate(parts):
            hook = functools.partial(_arrived, here, number)
            self._handles += [parameter.register_post_accumulate_grad_hook(hook) for parameter in part]

    def remove(self) -> None:
        """Leave all steps to the loop again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _arrived(self, parameter: Tensor, number: int) -> None:
        if parameter in self._stepped:
            raise RuntimeError(
                "a parameter has a second gradient since the last optimizer.step(), and step_in_backward has stepped "
                "it with the first: gradients do not accumulate; call optimizer.step() after every backward, use "
                "use_reentrant=False for checkpoints that share the parameter, " + _WITHOUT
            )
        self._waiting[number].discard(parameter)
        if self._waiting[number]:
            return
        self._waiting[number] = {*self._parts[number]}
        self._inside = True
        try:
            self._optimizer.step()
        finally:
            self._inside = False
        for one in (one for part in self._parts for one in part if one.grad is not None):
            self._stepped.add(one)
            one.grad = None

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        if getattr(optimizer, "grad_scale", None) is not None:
            raise RuntimeError(
                "the loss was scaled, and step_in_backward has stepped before a GradScaler could divide the gradients; "
                "train in bf16 without a scaler, " + _WITHOUT
            )

    def _after_step(self, *_: Any) -> None:
        if not self._inside:
            self._stepped.clear()
            self._waiting = [{*part} for part in self._parts]


def _arrived(steps: weakref.ref[BackwardSteps], number: int, parameter: Tensor) -> None:
    if (there := steps()) is not None:  # the optimizer has it
        there._arrived(parameter, number)


def step_in_backward(optimizer: torch.optim.Optimizer, parts: Iterable[nn.Module]) -> BackwardSteps:
    """Let an optimizer step the parameters of a part as soon as the backward has their gradients, and drop these.

    Gradients then take the memory of one part, not of the model. The loop stays as it is: its ``optimizer.step()``
    steps what has a gradient left, and begins the next step. Set the learning rate before the backward. Steps, state
    and state dict are those of an optimizer that steps after it, bit for bit.

    All gradients are never there at once: norms over all of them, such as ``clip_grad_norm_``, find none. Nor can they
    be summed over backwards or over reentrant checkpoints that share a parameter, or be those of a scaled loss; all
    raise, after the first step.

    Args:
        optimizer: any of ``torch.optim`` or :mod:`narrowcast.optimizers` whose step takes no closure.
        parts: modules, such as the blocks of a model. Each parameter outside of them is a part of its own.

    Returns:
        What ends it: ``remove()``.

    Raises:
        TypeError: no optimizer, or a part that is no module.
        ValueError: the optimizer is LBFGS, reads ``decoupled_grad``, or has ``weight_codes``; or layers add gradients
            to ``main_grad`` (``fuse_wgrad_accumulation``), which such a step does not read; or the optimizer has no
            parameter of a part.
        NotImplementedError: parameters sharded by FSDP2, or several processes, whose gradients are summed later.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer is {typed(optimizer)}; pass an optimizer")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("LBFGS calls the model several times in a step; use another optimizer, " + _WITHOUT)
    if getattr(optimizer, "use_decoupled_grad", False):
        raise ValueError("the optimizer reads decoupled_grad; make it with use_decoupled_grad=False")
    if isinstance(optimizer, FusedAdam) and optimizer._codes is not None:
        raise ValueError(
            "weight_codes are written by steps of all parameters; make the optimizer without them"
        )
    left = {p for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    fused = next((p for p in left if accumulates_elsewhere(p)), None)
    if fused is not None:
        raise ValueError(
            f"the gradient of a parameter of shape {tuple(fused.shape)} is added to its main_grad, which a step in the "
            "backward ignores; make the layers without fuse_wgrad_accumulation, " + _WITHOUT
        )
    if any(is_distributed(p) for p in left) or group_size(None) > 1:
        raise NotImplementedError(
            "step_in_backward does not wait for gradients of several processes; step after the backward"
        )
    found: list[list[Tensor]] = []
    stepped = {*left}
    for part in parts:
        module("parts", part)
        trained = [p for p in part.parameters() if p.requires_grad]
        if trained and stepped.isdisjoint(trained):
            raise ValueError(
                f"parts has {a_kind(part)} with no parameter of the optimizer; pass blocks of the model that it steps"
            )
        own: list[Tensor] = [p for p in part.parameters() if p in left]
        left.difference_update(own)
        found.append(own)
    alone = [[p] for group in optimizer.param_groups for p in group["params"] if p in left]
    return BackwardSteps(optimizer, [part for part in (*found, *alone) if part])
