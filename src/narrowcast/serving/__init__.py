"""Checkpoints of quantized weights, as servers read them: written from the bits that training multiplied, and read."""

from .export import Exported, ExportedWeight, export
from .load import load_quantized

__all__ = ["Exported", "ExportedWeight", "export", "load_quantized"]
