"""What the modules share that begin with a norm."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..autograd import LinearNeeds, normalize
from ..quantizers import NormSettings
from .module import parameter_device
from .norm import norm_parameters, reset_norm_parameters
from .stages import LinearModule, linear_needs


class NormLinearModule(LinearModule):
    """Base of the modules that begin with a norm: its parameters, and what such modules return.

    Parameters ``layer_norm_weight`` and, for LayerNorm, ``layer_norm_bias``. ``wgrad``: keyword arguments of
    :class:`LinearModule`, about the gradients of the weights.
    """

    layer_norm_weight: nn.Parameter
    layer_norm_bias: nn.Parameter | None

    def __init__(
        self,
        features: int,
        settings: NormSettings,
        name: str | None,
        dtype: torch.dtype,
        place: torch.device,
        return_bias: bool,
        return_layernorm_output: bool,
        **wgrad: Any,
    ) -> None:
        super().__init__(name, place, **wgrad)
        self.norm = settings
        self.return_bias, self.return_layernorm_output = return_bias, return_layernorm_output
        self.layer_norm_weight, norm_bias = norm_parameters(features, settings, dtype, place)
        self.register_parameter("layer_norm_bias", norm_bias)

    def _reset_norm(self, device: torch.device) -> None:
        self._materialize("layer_norm_weight", device)
        self._materialize("layer_norm_bias", device)
        reset_norm_parameters(self.layer_norm_weight, self.layer_norm_bias, self.norm)

    def _initial_device(self) -> torch.device:
        """Where to initialise: parameters on the meta device are made on the default one."""
        norm_weight = self.layer_norm_weight
        return parameter_device(None) if norm_weight.is_meta else norm_weight.device

    def _normalize(self, inp: Tensor) -> Tensor:
        return normalize(inp, self.layer_norm_weight, self.layer_norm_bias, self.norm)

    def _norm_needs(self, inp: Tensor) -> LinearNeeds:
        return linear_needs(inp.requires_grad, self.layer_norm_weight, self.layer_norm_bias)

    def _returned(self, out: Tensor, bias: Tensor | None, normalized: Tensor | None) -> Any:
        """The output alone, or a tuple with the bias and the norm's output as they were asked for."""
        extra = ((bias,) if self.return_bias else ()) + (
            (normalized,) if self.return_layernorm_output else ()
        )
        return (out, *extra) if extra else out


def no_gathered_output(asked: bool) -> None:
    """Check ``return_layernorm_output_gathered``.

    Raises:
        ValueError: it is set; the layer is not sequence parallel.
    """
    if asked:
        raise ValueError(
            "return_layernorm_output_gathered=True needs sequence_parallel and parallel_mode='column'; this layer is "
            "not sequence parallel, use return_layernorm_output=True"
        )
