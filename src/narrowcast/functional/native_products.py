"""``PRODUCTS``: every product of quantized operands that PyTorch's library multiplies, with what its call takes.

``gemm`` derives from these rows which pairs are native on a GPU, and each call. A test compares the calls with the
checks of PyTorch 2.11 to 2.15 in aten/src/ATen/native/cuda/ScaledBlas.cpp, aten/src/ATen/native/ScaledBlasUtils.cpp and
torch/_meta_registrations.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import ScalingType, SwizzleType

from .._device import HIGH_PRECISION

Numbers = tuple[int, ...]


class NativeProduct(NamedTuple):
    """One pair of scalings, as the left and the right operand of ``left @ right.T`` have them.

    Args:
        format: the GPUs that multiply it, as ``_device.NATIVE`` lists them.
        scale_dtype: of the scales, or of the first if an operand has two.
        outputs: dtypes of results.
        rows, columns, contraction: the multiples to which the left operand's rows, the right operand's rows and the
            contraction are padded, in elements of the codes' dtype; one element of NVFP4 is two codes.
        bias: dtypes of results to which the library adds a bias.
        e5m2: one of the two operands may be E5M2.
        fast: the library has a faster and less precise accumulation.
        recipes: each operand's scalings for ``torch._scaled_mm_v2``; None for ``torch._scaled_mm``, which infers them
            from the scales.
        swizzles: of an operand's scales, one per scale.
        ran: compute capabilities of the GPUs on which tests ran it.
    """

    format: str
    scale_dtype: torch.dtype
    outputs: tuple[torch.dtype, ...]
    rows: int
    columns: int
    contraction: int
    bias: tuple[torch.dtype, ...] = ()
    e5m2: bool = False
    fast: bool = False
    recipes: tuple[Numbers, Numbers] | None = None
    swizzles: Numbers = ()
    ran: tuple[tuple[int, int], ...] = ()


def _numbers(*names: ScalingType | SwizzleType) -> Numbers:
    return tuple(one.value for one in names)


_ROW, _TILE = _numbers(ScalingType.BlockWise1x128), _numbers(ScalingType.BlockWise128x128)
_MICRO = _numbers(ScalingType.BlockWise1x16, ScalingType.TensorWise)

_HOPPER = ((9, 0),)
_PER_TENSOR = NativeProduct(
    "FP8",
    torch.float32,
    HIGH_PRECISION,
    1,
    16,
    16,
    bias=(torch.bfloat16, torch.float16),
    e5m2=True,
    fast=True,
    ran=_HOPPER,
)
# other dtypes of results, and sizes off these multiples, go to a kernel of narrowcast
_PER_ROW = _PER_TENSOR._replace(outputs=(torch.bfloat16,), bias=(torch.bfloat16,))
_BLOCKS = NativeProduct(
    "128-block FP8", torch.float32, HIGH_PRECISION, 16, 128, 128, recipes=(_ROW, _ROW), ran=_HOPPER
)
# by its older entry: torch._scaled_mm_v2 refuses MXFP8 with E5M2 on a side
_MXFP8 = NativeProduct("MXFP8", torch.float8_e8m0fnu, HIGH_PRECISION, 32, 32, 32, e5m2=True)
_NVFP4 = NativeProduct(
    "NVFP4",
    torch.float8_e4m3fn,
    HIGH_PRECISION,
    32,
    32,
    16,
    recipes=(_MICRO, _MICRO),
    swizzles=_numbers(SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE),
)

PRODUCTS = {
    ("tensor", "tensor"): _PER_TENSOR,
    ("row", "row"): _PER_ROW,
    ("row", "tensor"): _PER_ROW._replace(ran=()),
    ("tensor", "row"): _PER_ROW._replace(ran=()),
    ("1x128", "1x128"): _BLOCKS,
    ("1x128", "128x128"): _BLOCKS._replace(recipes=(_ROW, _TILE)),
    # the checks of graphs before 2.14 count whole tiles
    ("128x128", "1x128"): _BLOCKS._replace(recipes=(_TILE, _ROW), rows=128, ran=()),
    ("1x32", "1x32"): _MXFP8,
    ("1x16", "1x16"): _NVFP4,
}
"""By the ``scaling`` of the two native operands."""
