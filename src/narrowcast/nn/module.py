"""What every low-precision module shares: delayed-scaling state, the weight cache, quantized parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .._device import default_device
from ..autograd import DelayedTensors
from ..quantizers import Float8CurrentScalingQuantizer, Quantizer
from ..recipe import DelayedScaling, Recipe
from ..state import DelayedScalingState, register_delayed_state
from ..tensors import QuantizedTensor, QuantizedTensorStorage


class QuantizedModule(nn.Module):
    """Base of the low-precision modules.

    Args:
        name: the module's name in quantizer roles.
        device: where parameters and state are made; None takes the default accelerator, or the CPU without one.
    """

    def __init__(self, name: str | None, device: torch.device | str | None) -> None:
        super().__init__()
        self.name = name or ""
        self.delayed_scaling = DelayedScalingState(self.name, device)
        register_delayed_state(self, self.delayed_scaling)
        # parameter name -> (value of the quantizer that made it, quantized weight)
        self._fp8_workspaces: dict[str, tuple[str, QuantizedTensorStorage]] = {}

    def _delayed_tensors(self, managed: DelayedScaling | None, recipe: Recipe) -> DelayedTensors:
        """State tensors for quantizers that scale with delay; empty without any."""
        if managed is None:
            return DelayedTensors()
        state = self.delayed_scaling
        if not torch.compiler.is_compiling():
            state.ran_under = recipe
        return DelayedTensors(
            state.scale_fwd, state.amax_history_fwd, state.scale_bwd, state.amax_history_bwd
        )

    # -- the weight cache dies with what it was made from -----------------------------------------------------------

    def _apply(self, fn: Any, recurse: bool = True) -> QuantizedModule:
        self._fp8_workspaces.clear()
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        self._fp8_workspaces.clear()
        ours = [key for key in state_dict if key.startswith(prefix)]
        if ours and not any(key.startswith(prefix + "delayed_scaling.") for key in ours):
            self.delayed_scaling.reset()  # saved before its first step, or under another recipe
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Plain tensors only: a quantized parameter is saved as its high-precision value."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, parameter in self._parameters.items():
            if isinstance(parameter, QuantizedTensor):
                destination[prefix + name] = parameter.detach().dequantize()

    def __getstate__(self) -> dict[str, Any]:
        """State for pickling and deep copies; the cache is left behind."""
        return {**self.__dict__, "_fp8_workspaces": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        register_delayed_state(self, self.delayed_scaling)


def quantize_parameter(value: Tensor, recipe: Recipe, preserve: bool, name: str) -> nn.Parameter:
    """Quantized parameter holding ``value`` in the format of the recipe's weights.

    Args:
        value: (N, K) initial value.
        recipe: whose weight quantizer to use; delayed scaling takes current scaling, it has no history yet.
        preserve: keep a CPU copy of ``value`` on the parameter.
        name: module name, for a custom recipe's role.
    """
    quantizer = _weight_quantizer(recipe, name).with_usage(rowwise=True, columnwise=True)
    quantized = quantizer.quantize(value.detach())
    parameter = nn.Parameter(quantized, requires_grad=True)
    if preserve:
        parameter._high_precision_init_val = value.detach().cpu()  # type: ignore[attr-defined]
    return parameter


def _weight_quantizer(recipe: Recipe, name: str) -> Quantizer:
    quantizer = recipe.linear_handles(name).weight.both.quantizer
    if quantizer._is_delayed():
        return Float8CurrentScalingQuantizer(quantizer.dtype)  # type: ignore[attr-defined]
    return quantizer


def parameter_device(device: torch.device | str | None) -> torch.device:
    """Where a module makes its parameters: as asked, else the ambient default device, else the accelerator."""
    if device is not None:
        return (
            default_device()
            if str(device) == "cuda" and not torch.cuda.is_available()
            else torch.device(device)
        )
    ambient = torch.get_default_device()
    return default_device() if ambient.type == "cpu" else ambient
