"""RMSNorm as an operation."""

from __future__ import annotations

from .norm import NormOperation


class RMSNorm(NormOperation):
    """``y = x / sqrt(mean(x**2) + eps) * gamma`` over the last dim, with fp32 statistics; there is no bias.

    Takes (*lead, K), gives the same shape and dtype, or quantizes the result in the same kernel for the operation
    behind. Arguments and errors are those of :class:`~narrowcast.ops.basic.norm.NormOperation`.
    """

    _normalization = "RMSNorm"
