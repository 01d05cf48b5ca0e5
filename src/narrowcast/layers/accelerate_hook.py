"""``AccelerateHook``: refuse accelerate's offloading of stored weights by a map without their codes."""

from __future__ import annotations

from typing import Any

from .._checks import shown
from ..tensors import DequantizingTensor
from ..upstream.modules import own_parameters


class AccelerateHook:
    """The attribute ``_hf_hook`` of a layer, which accelerate sets when it has moved the layer's weights away."""

    def __get__(self, layer: Any, owner: Any = None) -> Any:
        if layer is None or "_hf_hook" not in vars(layer):
            raise AttributeError("_hf_hook")
        return vars(layer)["_hf_hook"]

    def __set__(self, layer: Any, hook: Any) -> None:
        """
        Raises:
            TypeError: the hook would put decoded values where codes were.
        """
        for one in getattr(hook, "hooks", [hook]):
            if getattr(one, "offload", False):
                _check_has_codes(layer, one.weights_map)
        vars(layer)["_hf_hook"] = hook

    def __delete__(self, layer: Any) -> None:
        del vars(layer)["_hf_hook"]


def _check_has_codes(layer: Any, weights_map: Any) -> None:
    stored = (
        name for name, parameter in own_parameters(layer).items() if isinstance(parameter, DequantizingTensor)
    )
    name = next(stored, None)
    if name is not None and not getattr(weights_map[name], "_keeps_codes", False):
        raise TypeError(
            f"accelerate has moved {shown(name)} of a {type(layer).__name__} away and has no codes of it; make the "
            "model again, and give cpu_offload or dispatch_model state_dict=narrowcast.weights_map(model), with a "
            "folder instead of disk_offload"
        )
