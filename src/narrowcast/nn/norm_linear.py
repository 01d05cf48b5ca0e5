"""What the modules share that begin with a norm."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..autograd import NormSettings, normalize
from ..layers import LinearLayer, Stage
from ..layers.norm import norm_parameters, reset_norm_parameters


class NormLinearLayer(LinearLayer):
    """Base of the layers that begin with a norm: its parameters, and what such layers return.

    Parameters ``layer_norm_weight`` and, for LayerNorm, ``layer_norm_bias``. ``options``: keyword arguments of
    :class:`LinearLayer`.
    """

    layer_norm_weight: nn.Parameter
    layer_norm_bias: nn.Parameter | None

    def __init__(
        self,
        features: int,
        settings: NormSettings,
        name: str | None,
        stages: tuple[Stage, ...],
        dtype: torch.dtype,
        place: torch.device,
        return_bias: bool,
        return_layernorm_output: bool,
        **options: Any,
    ) -> None:
        super().__init__(name, stages, place, **options)
        self.norm = settings
        self.return_bias, self.return_layernorm_output = return_bias, return_layernorm_output
        weight, bias = norm_parameters(features, settings, dtype, place)
        self.register_parameter("layer_norm_weight", weight)
        self.register_parameter("layer_norm_bias", bias)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise parameters and state where they are; on the meta device nothing."""
        reset_norm_parameters(self.layer_norm_weight, self.layer_norm_bias, self.norm)
        for stage in self._stages:
            self._reset_linear(stage)
        self._reset_state()

    def _normalize(self, inp: Tensor) -> Tensor:
        return normalize(inp, self.layer_norm_weight, self.layer_norm_bias, self.norm)

    def _norm_has_backward(self, inp: Tensor) -> bool:
        bias = self.layer_norm_bias
        return (
            inp.requires_grad
            or self.layer_norm_weight.requires_grad
            or (bias is not None and bias.requires_grad)
        )

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
