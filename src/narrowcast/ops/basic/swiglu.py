"""SwiGLU and its kin, whose gate and linear channels may lie interleaved."""

from __future__ import annotations

import math

from torch import Tensor

from .activation import ActivationOperation


def interleave_glu_tensor(tensor: Tensor, glu_interleave_size: int) -> Tensor:
    """Rows of a gated layer's weight or bias from two halves into alternating blocks.

    Args:
        tensor: (2F, ...), the gate's rows first.
        glu_interleave_size: rows per block; must divide F.
    Returns:
        a new tensor of the same shape: a block of gate rows, a block of linear rows, and so on.
    Raises:
        ValueError: the block size is not positive, or the rows do not divide into pairs of blocks.
    """
    _check_blocks("tensor", tensor, 0, glu_interleave_size)
    blocks = tensor.unflatten(0, (2, -1, glu_interleave_size))
    return blocks.transpose(0, 1).flatten(0, 2)


def deinterleave_glu_tensor(tensor: Tensor, glu_interleave_size: int) -> Tensor:
    """Inverse of :func:`interleave_glu_tensor`, with the same arguments and errors."""
    _check_blocks("tensor", tensor, 0, glu_interleave_size)
    blocks = tensor.unflatten(0, (-1, 2, glu_interleave_size))
    return blocks.transpose(0, 1).flatten(0, 2)


def channels_to_halves(x: Tensor, glu_interleave_size: int | None) -> Tensor:
    """Input of a gated activation (*lead, 2F) as the kernels take it: all gates, then all linear channels.

    Raises:
        ValueError: the last dim does not divide into pairs of blocks.
    """
    if glu_interleave_size is None:
        return x
    _check_blocks("input", x, -1, glu_interleave_size)
    return x.unflatten(-1, (-1, 2, glu_interleave_size)).transpose(-3, -2).flatten(-3)


def channels_from_halves(x: Tensor, glu_interleave_size: int | None) -> Tensor:
    """Inverse of :func:`channels_to_halves`."""
    if glu_interleave_size is None:
        return x
    return x.unflatten(-1, (2, -1, glu_interleave_size)).transpose(-3, -2).flatten(-3)


def checked_interleave_size(size: int | None) -> int | None:
    """The option ``glu_interleave_size``.

    Raises:
        ValueError: it is not positive.
    """
    if size is not None and size < 1:
        raise ValueError(f"glu_interleave_size is {size}; use a positive number, or None for two halves")
    return size


def checked_betas(beta1: float, beta2: float) -> tuple[float, float]:
    """The bounds of SiTU.

    Raises:
        ValueError: one that is not a finite number above 0.
    """
    for label, beta in (("beta1", beta1), ("beta2", beta2)):
        if not (math.isfinite(beta) and beta > 0.0):
            raise ValueError(f"{label} is {beta}; use a finite number above 0")
    return float(beta1), float(beta2)


def _check_blocks(what: str, x: Tensor, dim: int, size: int) -> None:
    checked_interleave_size(size)
    if x.dim() == 0 or x.shape[dim] % (2 * size):
        raise ValueError(
            f"{what} has shape {tuple(x.shape)}; with glu_interleave_size={size} its "
            f"{'first' if dim == 0 else 'last'} dim must be a multiple of {2 * size}"
        )


class SwiGLU(ActivationOperation):
    """``y = silu(a) * b``, ``a`` the gate and ``b`` the linear channels of (*lead, 2F); gives (*lead, F).

    Args:
        cache_quantized_input: as of :class:`~narrowcast.ops.basic.activation.ActivationOperation`.
        glu_interleave_size: None: the gate is the first half of the last dim. n: blocks of n gate and n linear channels
            alternate; the kernel reads halves, so the input is rearranged in front of it, and its gradient behind.
    Raises:
        ValueError: ``glu_interleave_size`` is not positive; in forward, the last dim is odd or does not divide into
        pairs of blocks. TypeError: in forward, an input that is not fp32, bf16 or fp16.
    """

    _activation = "swiglu"

    def __init__(
        self, *, cache_quantized_input: bool = False, glu_interleave_size: int | None = None
    ) -> None:
        super().__init__(cache_quantized_input=cache_quantized_input)
        self.glu_interleave_size = checked_interleave_size(glu_interleave_size)

    def extra_repr(self) -> str:
        """Options that are not the default, as printed by the module."""
        size = self.glu_interleave_size
        interleaved = "" if size is None else f"glu_interleave_size={size}"
        return ", ".join(part for part in (super().extra_repr(), interleaved) if part)

    @property
    def moves_channels(self) -> bool:
        return self.glu_interleave_size is not None

    def _halves_of(self, x: Tensor) -> Tensor:
        return channels_to_halves(x, self.glu_interleave_size)

    def _from_halves(self, grad: Tensor) -> Tensor:
        return channels_from_halves(grad, self.glu_interleave_size)


class ClampedSwiGLU(SwiGLU):
    """``y = (a' * sigmoid(alpha * a')) * (b' + glu_linear_offset)`` with a' = min(a, limit), b' = clamp(b, ±limit).

    Args:
        limit: bound of the gate from above, of the linear channels on both sides; clamped values have no gradient.
        alpha: slope of the sigmoid.
        glu_linear_offset: added to the linear channels.
        cache_quantized_input, glu_interleave_size: as of :class:`SwiGLU`; so are the errors.
    """

    _activation = "clamped_swiglu"

    def __init__(
        self,
        *,
        limit: float = 7.0,
        alpha: float = 1.702,
        glu_linear_offset: float = 1.0,
        cache_quantized_input: bool = False,
        glu_interleave_size: int | None = None,
    ) -> None:
        self.limit, self.alpha, self.glu_linear_offset = float(limit), float(alpha), float(glu_linear_offset)
        super().__init__(cache_quantized_input=cache_quantized_input, glu_interleave_size=glu_interleave_size)

    def _parameters_in_order(self) -> tuple[float, ...]:
        return self.limit, self.alpha, self.glu_linear_offset


class SiTUGLU(SwiGLU):
    """``y = (beta1 * tanh(a / beta1) * sigmoid(a)) * (beta2 * tanh(b / beta2))``: a SwiGLU within smooth bounds.

    Args:
        beta1, beta2: bounds of the gate and of the linear channels.
        cache_quantized_input, glu_interleave_size: as of :class:`SwiGLU`; so are the errors.
    Raises:
        ValueError: a beta that is not finite and above 0.
    """

    _activation = "situ_glu"

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

    def _parameters_in_order(self) -> tuple[float, ...]:
        return self.beta1, self.beta2
