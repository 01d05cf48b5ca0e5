"""Other libraries' names for what this one has: Transformer Engine's, and those of torchao's FP8 training."""

from . import attributes  # noqa: F401 -- puts names on tensors
from .checkpoint import transformer_engine_state_dict
from .global_state import FP8GlobalStateManager
from .install import install_transformer_engine, uninstall_transformer_engine
from .onnx import onnx_export
from .torchao_float8 import install_torchao_float8, uninstall_torchao_float8

__all__ = [
    "FP8GlobalStateManager",
    "install_torchao_float8",
    "install_transformer_engine",
    "onnx_export",
    "transformer_engine_state_dict",
    "uninstall_torchao_float8",
    "uninstall_transformer_engine",
]
