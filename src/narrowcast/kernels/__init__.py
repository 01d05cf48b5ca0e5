"""Triton kernels: the reference's functions, equal bit for bit, for tensors on a GPU.

Modules, functions and signatures are those of ``narrowcast.reference``, where they are described; what a module here
lacks has no kernel, and ``few_rows`` is two operators of the reference in one. Tensors that no kernel can reach, and
dtypes that none reads, are a ValueError. Each module is imported when it is first used, because Triton takes a while:
``import narrowcast`` does not load it. This is the one place that copes with Triton being absent, as it is beside CPU
builds of PyTorch: ``AVAILABLE`` is then False and the modules are None. Setting ``TRITON_INTERPRET=1`` before the first
use runs the kernels on CPU tensors in Triton's interpreter, for tests.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

AVAILABLE: bool = importlib.util.find_spec("triton") is not None

MODULES = (
    "activation",
    "adam",
    "batch_invariant",
    "batch_invariant_attention",
    "block_scaled_rows",
    "cross_entropy",
    "decode_attention",
    "delayed",
    "dequantize",
    "few_rows",
    "float8",
    "float8_block",
    "float8_rows",
    "fused_producers",
    "grouped_gated",
    "grouped_gemm",
    "grouped_mm",
    "grouped_padding",
    "grouped_quantize",
    "grouped_sources",
    "int8_rows",
    "low_rank_products",
    "moe",
    "moe_places",
    "mx",
    "norm",
    "nvfp4",
    "observe",
    "reduction",
    "rope",
    "scaled_activation",
    "swizzle",
)

__all__ = ["AVAILABLE", "MODULES"]


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f".{name}", __name__) if AVAILABLE else None
    globals()[name] = module
    return module
