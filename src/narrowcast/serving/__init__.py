"""Checkpoints of quantized weights for servers, and exported programs without this library's operators."""

from .decompose import decompose
from .export import Exported, ExportedWeight, export
from .load import load_quantized

__all__ = ["Exported", "ExportedWeight", "decompose", "export", "load_quantized"]
