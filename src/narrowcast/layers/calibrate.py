"""``calibrate_delayed_scaling``: the first scales of delayed scaling, from steps whose gradients are thrown away."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .. import _checks
from ..state import renew
from ..upstream.fsdp import reshard
from ..upstream.tensors import version_of
from .renewal import layers_of
from .snapshot import Snapshot


def calibrate_delayed_scaling(model: nn.Module, step: Callable[[], Any], passes: int = 2) -> nn.Module:
    """Compute the scales of delayed scaling from a forward and backward, before the first step.

    The first scales of layers that join codes of several ranks are constants (``initial_scale``), and larger values
    saturate. ``step`` runs ``passes`` times with the same random numbers, and the scales are renewed after each. The
    first pass may saturate; the next one then has scales that fit. Gradients, ``main_grad``, buffers and random states
    are restored.

    Args:
        model: holds the layers, eager or compiled, sharded or not.
        step: runs forward and backward of a batch, under ``autocast`` if the model has no recipe of its own, and
            reduces amax over ranks if training does. It must not call the optimizer.
        passes: at least 1.
    Returns:
        ``model``.
    Raises:
        ValueError: ``passes`` is less than 1.
        RuntimeError: no layer ran under delayed scaling with gradients, or ``step`` has changed a parameter.
    """
    layers = layers_of(model)
    _checks.function("step", step)
    _checks.positive(passes=passes)
    reshard(model)  # an evaluation leaves FSDP2's root gathered, and gradients belong to shards
    parameters = list(model.parameters())
    grads, versions = [parameter.grad for parameter in parameters], list(map(version_of, parameters))
    state = Snapshot([model], scales=False, grads=True)
    try:
        for _ in range(passes):
            # A replayed CUDA graph owns the gradients it allocated: the next pass must not add to them.
            for parameter, grad in zip(parameters, grads):
                parameter.grad = grad
            with torch.random.fork_rng():
                step()
            renew(layers)
        if not any(bool(slots.scale.any()) for layer in layers for slots in layer.delayed_slots()):
            raise RuntimeError(
                f"no layer of this {type(model).__name__} collected an amax under delayed scaling; call "
                "narrowcast.set_recipe(model, 'delayed') first, or enter narrowcast.autocast in the step, and run the "
                "backward in it; if a policy kept every layer in high precision, leave the calibration out"
            )
    finally:
        state.restore()
    if versions != list(map(version_of, parameters)):
        raise RuntimeError(
            "the step that calibrate_delayed_scaling was given has changed a parameter; pass the forward and backward "
            "alone, without the optimizer's step"
        )
    return model
