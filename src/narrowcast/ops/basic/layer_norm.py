"""LayerNorm as an operation."""

from __future__ import annotations

from .norm import NormOperation


class LayerNorm(NormOperation):
    """``y = (x - mean) / sqrt(variance + eps) * gamma + bias`` over the last dim, with fp32 statistics.

    Takes (*lead, K), gives the same shape and dtype, or quantizes the result in the same kernel for the operation
    behind. Arguments and errors are those of :class:`~narrowcast.ops.basic.norm.NormOperation`.
    """

    _normalization = "LayerNorm"
