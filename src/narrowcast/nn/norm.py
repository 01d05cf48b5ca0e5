"""``LayerNorm`` and ``RMSNorm``, and the norm that the fused modules hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..autograd import normalize
from ..quantizers import NormSettings
from ..reference.norm import NORMALIZATIONS
from .module import parameter_device


def norm_settings(normalization: str, eps: float, zero_centered_gamma: bool) -> NormSettings:
    """How a module normalizes.

    Raises:
        ValueError: an unknown normalization.
    """
    if normalization not in NORMALIZATIONS:
        raise ValueError(f"normalization is {normalization!r}; use one of {', '.join(NORMALIZATIONS)}")
    return NormSettings(normalization, float(eps), bool(zero_centered_gamma))


def norm_parameters(
    size: int, settings: NormSettings, dtype: torch.dtype, device: torch.device
) -> tuple[nn.Parameter, nn.Parameter | None]:
    """Uninitialised (weight, bias), each (size,); no bias for RMSNorm."""
    weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device))
    if settings.normalization == "RMSNorm":
        return weight, None
    return weight, nn.Parameter(torch.empty(size, dtype=dtype, device=device))


def reset_norm_parameters(weight: Tensor, bias: Tensor | None, settings: NormSettings) -> None:
    """Fill in place: gamma 1, bias 0."""
    weight.fill_(0.0 if settings.zero_centered_gamma else 1.0)
    if bias is not None:
        bias.zero_()


class NormParameters(nn.Module):
    """The parameters of a norm over the last dim, and how they begin; a subclass names its normalization.

    Arguments and the errors of construction are those of :class:`LayerNorm`.
    """

    _normalization: ClassVar[str]
    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        *,
        zero_centered_gamma: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        if len(shape) != 1 or shape[0] < 1:
            raise ValueError(f"normalized_shape is {normalized_shape!r}; give the size of the last dim")
        super().__init__()
        self.settings = norm_settings(self._normalization, eps, zero_centered_gamma)
        kind, place = dtype or torch.get_default_dtype(), parameter_device(device)
        self.weight, bias = norm_parameters(shape[0], self.settings, kind, place)
        self.register_parameter("bias", bias)
        if place.type != "meta":
            self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set gamma to 1 and the bias to 0; parameters on the meta device are first made on the default device."""
        if self.weight.is_meta:
            self.to_empty(device=parameter_device(None))
        reset_norm_parameters(self.weight, self.bias, self.settings)

    def extra_repr(self) -> str:
        """Size and options, as printed by the module."""
        return (
            f"{self.weight.shape[0]}, eps={self.settings.eps}, "
            f"zero_centered_gamma={self.settings.zero_centered_gamma}"
        )

    def check_features(self, inp: Tensor) -> None:
        """Compare the last dim of an input with the weight.

        Raises:
            ValueError: they differ.
        """
        if inp.shape[-1:] != self.weight.shape:
            raise ValueError(
                f"input has shape {tuple(inp.shape)}; its last dim must be that of the weight, "
                f"{tuple(self.weight.shape)}"
            )


class _Norm(NormParameters):
    def forward(self, inp: Tensor) -> Tensor:
        """Normalize ``inp`` (*lead, K) over its last dim; same shape and dtype."""
        self.check_features(inp)
        return normalize(inp, self.weight, self.bias, self.settings)


class LayerNorm(_Norm):
    """y = (x - mean) / sqrt(variance + eps) * gamma + bias over the last dim, with fp32 statistics.

    Args:
        normalized_shape: size K of the last dim.
        eps: added to the variance.
        zero_centered_gamma: the weight holds gamma - 1.
        device: where the parameters live; default: the accelerator, or the CPU without one.
        dtype: of the parameters; default: torch's default dtype.
    Raises:
        ValueError: more than one dim, or in forward an input of another last dim. TypeError: in forward, an input that
        is not fp32, bf16 or fp16.
    """

    _normalization = "LayerNorm"


class RMSNorm(_Norm):
    """y = x / sqrt(mean(x^2) + eps) * gamma over the last dim, with fp32 statistics; there is no bias.

    Arguments and errors are those of :class:`LayerNorm`.
    """

    _normalization = "RMSNorm"
