"""A model's state dict as Transformer Engine's own layers load it, strictly."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..layers import LinearLayer, RecipeOwner
from ..layers.delayed import DelayedLayer
from ..layers.extra_state import EXTRA_STATE, to_extra_state
from ..layers.norm import NormParameters
from ..nn import DotProductAttention
from ..reference.delayed import scale_from_amax
from ..state import fp8_max
from ..upstream.modules import own_buffers


def transformer_engine_state_dict(model: nn.Module) -> dict[str, Any]:
    """Return a state dict that Transformer Engine's layers of the same names load strictly.

    Each layer has an ``_extra_state``: empty, or its scales and histories of delayed scaling, as a pickle of tensors.
    Newer versions read that only with ``NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE=1`` in the environment.

    Args:
        model: a model of this library's layers and operations, and others.
    Returns:
        The parameters of ``model.state_dict()``, without the buffers of delayed scaling.
    """
    state: dict[str, Any] = dict(model.state_dict())
    for name, layer in model.named_modules():
        if not isinstance(layer, (RecipeOwner, NormParameters, DotProductAttention)):
            continue
        prefix, extra = f"{name}." if name else "", torch.empty(0, dtype=torch.uint8)
        if isinstance(layer, DelayedLayer):
            buffers: dict[str, Tensor | None] = {own: own_buffers(layer)[own] for own in layer._state_names()}
            for own in buffers:
                state.pop(prefix + own, None)
            buffers.update(_with_weights(layer, buffers))
            extra = to_extra_state(buffers, sorted(layer._stage_names), ("fwd", "bwd"))
        state[prefix + EXTRA_STATE] = extra
    return state


def _with_weights(layer: DelayedLayer, buffers: dict[str, Tensor | None]) -> dict[str, Tensor]:
    """Return the state of forwards with that of weights, between inputs and outputs, as Transformer Engine has it."""
    found, groups = {}, layer._groups
    for stage in layer._stage_names:
        names = [f"{stage}{kind}_fwd" for kind in ("scale", "amax_history", "amax")]
        known = [state for name in names if (state := buffers[name]) is not None]
        if len(known) < len(names):
            continue
        scale, amax = (torch.zeros_like(known[0][:groups]) for _ in range(2))
        rule, _ = layer._delayed.get(stage, (None, None))
        if rule is not None and isinstance(layer, LinearLayer):
            amax = layer.weight_amax(stage).to(amax.device)
            scale = scale_from_amax(amax, torch.ones_like(amax), fp8_max(rule, "forward"), rule.margin)
        for name, state, own in zip(names, known, (scale, torch.zeros_like(known[1][:, :groups]), amax)):
            found[name] = torch.cat([state[..., :groups], own, state[..., groups:]], -1)
    return found
