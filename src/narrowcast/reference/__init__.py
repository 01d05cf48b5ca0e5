"""The numerics in plain PyTorch: the one oracle that every kernel and every compiled graph must equal."""

from . import (
    codecs,
    delayed,
    float8,
    float8_block,
    hadamard,
    layout,
    mxfp8,
    nvfp4,
    philox,
    scaling,
    swizzle,
)

__all__ = [
    "codecs",
    "delayed",
    "float8",
    "float8_block",
    "hadamard",
    "layout",
    "mxfp8",
    "nvfp4",
    "philox",
    "scaling",
    "swizzle",
]
