"""Triton kernels: the reference's functions, equal bit for bit, for tensors on a GPU.

Modules, functions and signatures are those of ``narrowcast.reference``; what a module here lacks has no kernel.
This is the one place that copes with Triton being absent, as it is beside CPU builds of PyTorch: ``AVAILABLE`` is then
False and the modules are None. Setting ``TRITON_INTERPRET=1`` before the first import runs the kernels on CPU tensors
in Triton's interpreter, for tests.
"""

from __future__ import annotations

import importlib.util

AVAILABLE: bool = importlib.util.find_spec("triton") is not None

if AVAILABLE:
    from . import (
        activation,
        delayed,
        dequantize,
        float8,
        float8_block,
        grouped,
        grouped_gemm,
        grouped_quantize,
        mxfp8,
        norm,
        nvfp4,
        reduction,
        sources,
        swizzle,
    )
else:
    activation = delayed = dequantize = float8 = float8_block = grouped = grouped_gemm = grouped_quantize = (
        None
    )
    mxfp8 = norm = nvfp4 = reduction = sources = swizzle = None

__all__ = [
    "AVAILABLE",
    "activation",
    "delayed",
    "dequantize",
    "float8",
    "float8_block",
    "grouped",
    "grouped_gemm",
    "grouped_quantize",
    "mxfp8",
    "norm",
    "nvfp4",
    "reduction",
    "sources",
    "swizzle",
]
