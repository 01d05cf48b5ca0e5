"""SwiGLU and its kin, whose gate and linear channels may lie interleaved."""

from __future__ import annotations

import math

from ..._checks import numbers
from .activation import FOLLOWS_FROM, ActivationOperation
from .glu_channels import checked_interleave_size


def checked_betas(beta1: float, beta2: float) -> tuple[float, float]:
    """Return the bounds of SiTU.

    Raises:
        ValueError: one that is not a finite number above 0.
    """
    numbers(beta1=beta1, beta2=beta2)
    for label, beta in (("beta1", beta1), ("beta2", beta2)):
        if not (math.isfinite(beta) and beta > 0.0):
            raise ValueError(f"{label} is {beta}; use a finite number above 0")
    return float(beta1), float(beta2)


class SwiGLU(ActivationOperation, values=FOLLOWS_FROM):
    """``y = silu(a) * b``, ``a`` the gate and ``b`` the linear channels of (*lead, 2F); returns (*lead, F).

    Args:
        cache_quantized_input: as in :class:`~narrowcast.ops.basic.activation.ActivationOperation`.
        glu_interleave_size: None: the gate is the first half of the last dim. n: blocks of n gate and n linear channels
            alternate. The kernel reads halves, so the input is rearranged before it, and the gradient after it.
    Raises:
        ValueError: ``glu_interleave_size`` is not positive; in forward, the last dim is odd or does not divide into
            pairs of blocks.
        TypeError: in forward, the input is not fp32, bf16 or fp16.
    """

    _activation = "swiglu"

    def __init__(
        self, *, cache_quantized_input: bool = False, glu_interleave_size: int | None = None
    ) -> None:
        super().__init__(cache_quantized_input=cache_quantized_input)
        self.glu_interleave_size = checked_interleave_size(glu_interleave_size)


class ClampedSwiGLU(SwiGLU, values=FOLLOWS_FROM):
    """``y = (a' * sigmoid(alpha * a')) * (b' + glu_linear_offset)`` with a' = min(a, limit), b' = clamp(b, ±limit).

    Args:
        limit: bound of the gate from above, of the linear channels on both sides; values beyond it have no gradient.
        alpha: slope of the sigmoid.
        glu_linear_offset: added to the linear channels.
        cache_quantized_input, glu_interleave_size: as of :class:`SwiGLU`; so are the errors.
    """

    _activation = "clamped_swiglu"
    _numbers = ("limit", "alpha", "glu_linear_offset")

    def __init__(
        self,
        *,
        limit: float = 7.0,
        alpha: float = 1.702,
        glu_linear_offset: float = 1.0,
        cache_quantized_input: bool = False,
        glu_interleave_size: int | None = None,
    ) -> None:
        numbers(limit=limit, alpha=alpha, glu_linear_offset=glu_linear_offset)
        self.limit, self.alpha, self.glu_linear_offset = float(limit), float(alpha), float(glu_linear_offset)
        super().__init__(cache_quantized_input=cache_quantized_input, glu_interleave_size=glu_interleave_size)


class SiTUGLU(SwiGLU, values=FOLLOWS_FROM):
    """``y = (beta1 * tanh(a / beta1) * sigmoid(a)) * (beta2 * tanh(b / beta2))``: a SwiGLU within smooth bounds.

    Args:
        beta1, beta2: bounds of the gate and of the linear channels.
        cache_quantized_input, glu_interleave_size: as of :class:`SwiGLU`; so are the errors.
    Raises:
        ValueError: a beta that is not finite and above 0.
    """

    _activation = "situ_glu"
    _numbers = ("beta1", "beta2")

    def __init__(
        self,
        *,
        beta1: float = 4.0,
        beta2: float = 25.0,
        cache_quantized_input: bool = False,
        glu_interleave_size: int | None = None,
    ) -> None:
        self.beta1, self.beta2 = checked_betas(beta1, beta2)
        super().__init__(cache_quantized_input=cache_quantized_input, glu_interleave_size=glu_interleave_size)
