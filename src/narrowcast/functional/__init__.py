"""The operators of the library. Nothing outside this room registers one."""

from .delayed_scaling import calibrate_, delayed_scaling_update_
from .gemm import gemm
from .quantize import dequantize, draw_seed, quantize, quantize_delayed, quantize_delayed_both, quantize_into
from .quantizer_value import BufferTable, GemmOperand, NativeOperand, QuantizerValue

__all__ = [
    "BufferTable",
    "GemmOperand",
    "NativeOperand",
    "QuantizerValue",
    "calibrate_",
    "delayed_scaling_update_",
    "dequantize",
    "draw_seed",
    "gemm",
    "quantize",
    "quantize_delayed",
    "quantize_delayed_both",
    "quantize_into",
]
