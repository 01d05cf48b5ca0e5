"""A model's state dict as Transformer Engine's own layers load it, strictly."""

from __future__ import annotations

import pickle
from typing import Any

import torch
from torch import Tensor, nn

from .. import _checks
from ..layers import LinearLayer, RecipeOwner
from ..layers.delayed import DelayedLayer
from ..layers.extra_state import EXTRA_STATE, state_names
from ..layers.norm import NormParameters
from ..nn import DotProductAttention
from ..recipe import fp8_max
from ..reference.delayed import scale_from_amax
from ..upstream.modules import own_buffers


def transformer_engine_state_dict(model: nn.Module) -> dict[str, Any]:
    """Return a state dict that Transformer Engine's layers of the same names load strictly.

    Each layer has an ``_extra_state``: empty, or its scales and histories of delayed scaling, as a pickle of tensors.
    Newer versions read that only with ``NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE=1`` in the environment.

    Args:
        model: a model of this library's layers and operations, and others.
    Returns:
        The parameters of ``model.state_dict()``, without the buffers of delayed scaling.
    Raises:
        TypeError: ``model`` is not a module.
    """
    _checks.module("model", model)
    state: dict[str, Any] = dict(model.state_dict())
    for name, layer in model.named_modules():
        if not isinstance(layer, (RecipeOwner, NormParameters, DotProductAttention)):
            continue
        prefix, extra = f"{name}." if name else "", torch.empty(0, dtype=torch.uint8)
        if isinstance(layer, DelayedLayer):
            for own in layer._state_names():
                state.pop(prefix + own, None)
            extra = _extra_state(layer)
        state[prefix + EXTRA_STATE] = extra
    return state


def _extra_state(layer: DelayedLayer) -> Tensor:
    """Return Transformer Engine's state of a layer's delayed scaling, uint8 (n,); empty for a layer without.

    It has one GEMM after the other, the weights of each between its inputs and outputs.
    """
    found: dict[str, list[Tensor]] = {"fwd": [], "bwd": []}
    for prefix, slots in sorted(layer._states().items()):
        buffers = [own_buffers(layer)[name] for name in state_names(prefix)]
        if any(buffer is None for buffer in buffers):
            continue
        scale, history, amax = (buffer.detach().cpu() for buffer in buffers)  # type: ignore[union-attr]
        # a row of scales, and the history, in whose first row the running step collects
        rows, groups = torch.cat([scale[None], amax[None], history[1:]]), layer._groups
        own = rows.new_zeros(len(rows), groups)
        if slots is not None and isinstance(layer, LinearLayer):
            own[1], rule = layer.weight_amax(prefix), slots.recipe
            own[0] = scale_from_amax(own[1], own[0], fp8_max(rule, "forward"), rule.margin)
        forward = torch.cat([rows[:, :groups], own, rows[:, groups : 2 * groups]], -1)
        for direction, part in ("fwd", forward), ("bwd", rows[:, 2 * groups :].clone()):
            part[0].masked_fill_(part[0] == 0.0, 1.0)  # Transformer Engine's before a first step
            found[direction].append(part)
    state: dict[str, Any] = {}
    for direction, parts in found.items():
        if parts and len(parts) == len(layer._stage_names):
            rows = torch.cat(parts, -1)
            state[f"scale_{direction}"], state[f"amax_history_{direction}"] = (
                rows[0].clone(),
                rows[1:].clone(),
            )
    if not state:
        return torch.empty(0, dtype=torch.uint8)
    state["extra_fp8_variables"] = {}
    return torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)
