"""Groups of rows of a gated activation, or of its gradient: here ``fused_producers`` has them in memory."""

from .grouped_quantize import amaxes, quantize, quantize_current

__all__ = ["amaxes", "quantize", "quantize_current"]
