"""What Transformer Engine keeps in a checkpoint beside parameters: ``_extra_state``, read where that is safe."""

from __future__ import annotations

import io
import warnings
from typing import Any

import torch
from torch import Tensor

EXTRA_STATE = "_extra_state"


def take_extra_state(state_dict: dict[str, Any], prefix: str) -> dict[str, Tensor]:
    """Take a module's extra state out of a state dict: tensors by Transformer Engine's names, or nothing.

    Only what ``torch.save`` wrote is read, with ``weights_only``; a pickle might run code of whoever wrote it. Of one
    that is not empty, a warning says that it is ignored.
    """
    value = state_dict.pop(prefix + EXTRA_STATE, None)
    if isinstance(value, Tensor):
        value = value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    elif isinstance(value, io.BytesIO):
        value = value.getvalue()
    if not value:
        return {}
    state: Any = None
    if isinstance(value, bytes) and value.startswith(b"PK"):
        try:
            state = torch.load(io.BytesIO(value), map_location="cpu", weights_only=True)
        except Exception:  # a damaged file, or one that holds more than tensors
            state = None
    if not isinstance(state, dict):
        warnings.warn(
            "the checkpoint has _extra_state of Transformer Engine in a form that cannot be read safely; it is "
            "ignored, and delayed scaling starts anew",
            stacklevel=2,
        )
        return {}
    return {name: tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}


def delayed_state(
    extra: dict[str, Tensor], stages: list[str], directions: dict[str, int]
) -> dict[str, Tensor]:
    """Delayed scaling's buffers by our names, from Transformer Engine's, which have the stages one behind the other.

    Args:
        extra: of :func:`take_extra_state`.
        stages: prefixes in the order of the layer's GEMMs. directions: "fwd" and "bwd" -> scales of one stage.
    Returns:
        those of the directions that are there in the layer's sizes.
    """
    ours = {}
    for direction, width in directions.items():
        scale, history = extra.get(f"scale_{direction}"), extra.get(f"amax_history_{direction}")
        total = width * len(stages)
        if scale is None or history is None or scale.shape != (total,) or history.shape[1:] != (total,):
            continue
        for index, stage in enumerate(stages):
            own = slice(index * width, (index + 1) * width)
            ours[f"{stage}scale_{direction}"] = scale[own].float()
            ours[f"{stage}amax_history_{direction}"] = history[:, own].float()
            ours[f"{stage}amax_{direction}"] = history[0, own].float().clone()
    return ours
