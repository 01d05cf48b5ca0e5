"""Tensors and checkpoints of quantized weights for servers, and exported programs without this library's operators."""

from .checkpoint_tensors import ExportedWeight
from .decompose import decompose
from .export import Exported, export
from .forward_like import forward_like
from .load import load_quantized
from .weights import weights

__all__ = ["Exported", "ExportedWeight", "decompose", "export", "forward_like", "load_quantized", "weights"]
