"""Checkpoints of quantized weights, as servers read them: written from the bits that training multiplied, and read;
and programs that ``torch.export`` made, without this library's operators."""

from .decompose import decompose
from .export import Exported, ExportedWeight, export
from .load import load_quantized

__all__ = ["Exported", "ExportedWeight", "decompose", "export", "load_quantized"]
