"""Parts that the modules with a norm in front share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .._checks import flags
from ..autograd import NormSettings, normalize
from ..autograd.tensor_parallel import gathered
from ..layers import LinearLayer, Stage
from ..layers.norm import norm_parameters, reset_norm_parameters
from ..layers.tensor_parallel import Parallel


class NormLinearLayer(LinearLayer):
    """Base of the layers that begin with a norm: its parameters, and what such layers return.

    Parameters ``layer_norm_weight`` and, for LayerNorm, ``layer_norm_bias``. ``options``: keyword arguments of
    :class:`LinearLayer`.
    """

    layer_norm_weight: nn.Parameter
    layer_norm_bias: nn.Parameter | None
    return_layernorm_output_gathered: bool = False

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

    @property
    def normalization(self) -> str:
        """What the layer begins with, "LayerNorm" or "RMSNorm"."""
        return self.norm.normalization

    @property
    def eps(self) -> float:
        """What the norm adds to the variance."""
        return self.norm.eps

    @property
    def zero_centered_gamma(self) -> bool:
        """Whether gamma is the weight + 1."""
        return self.norm.zero_centered_gamma

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize parameters and state where they are; on the meta device nothing."""
        reset_norm_parameters(self.layer_norm_weight, self.layer_norm_bias, self.norm)
        for stage in self._stages:
            self._reset_linear(stage)
        self._reset_state()

    def _normalize(self, inp: Tensor) -> Tensor:
        return normalize(inp, *self._norm_parameters(), self.norm)

    def _norm_parameters(self) -> tuple[Any, Any]:
        """Return weight and bias as the norm computes with them."""
        return self._part("layer_norm_weight"), self._part("layer_norm_bias")

    def _norm_has_backward(self, inp: Tensor) -> bool:
        bias = self.layer_norm_bias
        return (
            inp.requires_grad
            or self.layer_norm_weight.requires_grad
            or (bias is not None and bias.requires_grad)
        )

    def _returned(
        self, out: Tensor, bias: Tensor | None, normalized: Tensor | None, beside: Sequence[Tensor] = ()
    ) -> Any:
        """Return the output alone, or a tuple with the bias and the norm's output as requested, and
        ``beside``.
        """
        if self.return_layernorm_output_gathered and self._shares_rows:
            normalized = gathered(normalized, self._split_over(self._stages[-1].prefix))  # type: ignore[arg-type]
        extra = ((bias,) if self.return_bias else ()) + (
            (normalized,) if self.return_layernorm_output else ()
        )
        return (out, *extra, *beside) if extra or beside else out


def check_gathered_output(gathered_output: bool, parallel: Parallel, mode: str | None) -> None:
    """Check ``return_layernorm_output_gathered``.

    Raises:
        TypeError: it is neither True nor False.
        ValueError: it is set, and the layer is not sequence parallel.
    """
    flags(return_layernorm_output_gathered=gathered_output)
    if gathered_output and not (parallel.sequence_parallel and mode == "column"):
        raise ValueError(
            "return_layernorm_output_gathered=True needs sequence_parallel and parallel_mode='column'; this layer is "
            "not sequence parallel, use return_layernorm_output=True"
        )


def check_column(parallel: Parallel) -> None:
    """Check how a layer that begins with a norm is to be split.

    Raises:
        ValueError: rows of the input that the norm would not see whole.
    """
    if parallel.mode == "row" and parallel.size > 1:
        raise ValueError(
            "parallel_mode='row' splits the columns that the norm needs whole; use 'column', or LayerNorm and Linear"
        )
