"""Reader of Transformer Engine's ``_extra_state`` in checkpoints, if that is safe."""

from __future__ import annotations

import collections
import io
import pickle
import warnings
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..upstream.tensors import REBUILD_TENSOR, rebuild_tensor

EXTRA_STATE = "_extra_state"


def take_extra_state(state_dict: dict[str, Any], prefix: str) -> dict[str, Tensor]:
    """Take a module's extra state out of a state dict: tensors by Transformer Engine's names, or nothing.

    What ``torch.save`` wrote is read with ``weights_only``, and pickles by an unpickler that knows tensors and nothing
    that could run code. What cannot be read in this way is ignored with a warning.
    """
    value = state_dict.pop(prefix + EXTRA_STATE, None)
    if isinstance(value, Tensor):
        value = value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    elif isinstance(value, io.BytesIO):
        value = value.getvalue()
    if not value:
        return {}
    state: Any = None
    if isinstance(value, bytes):
        try:
            if value.startswith(b"PK"):
                state = torch.load(io.BytesIO(value), map_location="cpu", weights_only=True)
            else:
                state = _TensorsOnly(io.BytesIO(value)).load()
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


class _Inert:
    """A stand-in for an object of Transformer Engine's, such as its recipe: takes everything, does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


def _tensor_of_bytes(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


class _TensorsOnly(pickle.Unpickler):
    """Reads a pickle of tensors, containers and numbers; no function of the pickle's choice is ever called."""

    _KNOWN: ClassVar[dict[tuple[str, str], Any]] = {
        ("collections", "OrderedDict"): collections.OrderedDict,
        REBUILD_TENSOR: rebuild_tensor,
        ("torch.storage", "_load_from_bytes"): _tensor_of_bytes,
        ("builtins", "getattr"): _Inert,  # how some versions of Python pickle members of an enum
    }

    def find_class(self, module: str, name: str) -> Any:
        """
        Raises:
            pickle.UnpicklingError: what is neither a tensor's nor of Transformer Engine.
        """
        if (module, name) in self._KNOWN:
            return self._KNOWN[module, name]
        if module.split(".")[0] in ("transformer_engine", "transformer_engine_torch", "narrowcast"):
            return _Inert
        raise pickle.UnpicklingError(f"{module}.{name} is not read")


def delayed_state(extra: dict[str, Tensor], stages: list[str], groups: int) -> dict[str, Tensor]:
    """Return delayed scaling's buffers by our names, from Transformer Engine's, which have the stages one after the
    other.

    Args:
        extra: of :func:`take_extra_state`.
        stages: prefixes in the order of the layer's GEMMs.
        groups: of each stage.
    Returns:
        those of the directions that are there in the layer's sizes.
    """
    ours: dict[str, Tensor] = {}
    for direction, width in (("fwd", 3 * groups), ("bwd", 2 * groups)):
        scale, history = extra.get(f"scale_{direction}"), extra.get(f"amax_history_{direction}")
        total = width * len(stages)
        if scale is None or history is None or scale.shape != (total,) or history.shape[1:] != (total,):
            continue
        for index, stage in enumerate(stages):
            own = slice(index * width, (index + 1) * width)
            ours[f"{stage}scale_{direction}"] = scale[own].float()
            ours[f"{stage}amax_history_{direction}"] = history[:, own].float()
            ours[f"{stage}amax_{direction}"] = history[0, own].float().clone()
    join_directions(ours, "", stages, groups)
    return ours


def state_names(prefix: str) -> tuple[str, str, str]:
    """Scale, history and amax of a stage, in the order of :class:`..state.DelayedSlots`."""
    return f"{prefix}scale", f"{prefix}amax_history", f"{prefix}amax"


def names_apart(prefix: str) -> tuple[str, ...]:
    """The same where each direction has its own, as in Transformer Engine, and in checkpoints of earlier versions."""
    return tuple(f"{name}_{direction}" for name in state_names(prefix) for direction in ("fwd", "bwd"))


def join_directions(state: dict[str, Any], prefix: str, stages: Iterable[str], groups: int) -> None:
    """Join the state of stages that a state dict has by :func:`names_apart`; nothing was seen of what is not there."""
    for names in (state_names(prefix + stage) for stage in stages):
        joined = []
        for name in names:
            forward, backward = state.pop(f"{name}_fwd", None), state.pop(f"{name}_bwd", None)
            if forward is not None and forward.shape[-1:] == (3 * groups,):  # with slots of weights
                forward = torch.cat([forward[..., :groups], forward[..., 2 * groups :]], -1)
            known = backward if forward is None else forward
            if known is not None:
                nothing = known.new_zeros(*known.shape[:-1], 2 * groups)
                halves = [nothing if half is None else half for half in (forward, backward)]
                state[name] = torch.cat(halves, -1)
                joined.append(state[name])
        if len(joined) == len(names) and joined[0].shape == joined[1].shape[1:] == joined[2].shape:
            _forget_first_scales(*joined)


def wrong_value(name: str, saved: Tensor) -> float | None:
    """Return a value that no state has, such as a NaN scale; an amax may be NaN or infinite, as gradients are.

    A scale of 0 is that of a tensor of which nothing was seen.
    """
    if saved.is_meta:
        return None
    wrong = saved < 0 if "amax" in name else ~(saved.isfinite() & (saved >= 0))
    return saved[wrong][0].item() if wrong.any() else None


_FIRST = (1.0, 16.0, 512.0, 65536.0)
"""Scales with which states began before 0 did: Transformer Engine's, and ours of E4M3 and E5M2."""


@torch.no_grad()
def _forget_first_scales(scale: Tensor, history: Tensor, amax: Tensor) -> None:
    """Set the scales of a state of which nothing was seen to 0.

    The history alone does not tell: one of one row is empty between steps, and still is when it gets more rows.
    """
    first = ~(history.any(0) | (amax != 0)) & torch.isin(scale, scale.new_tensor(_FIRST))
    scale.masked_fill_(first, 0.0)
