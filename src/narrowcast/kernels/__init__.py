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
    from . import delayed, float8, float8_block, mxfp8, nvfp4
else:
    delayed = float8 = float8_block = mxfp8 = nvfp4 = None

__all__ = ["AVAILABLE", "delayed", "float8", "float8_block", "mxfp8", "nvfp4"]
