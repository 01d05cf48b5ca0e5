"""Rows of FP8 codes with scales per block of a row, as they travel: decoded on the device, or on the way into a kernel.

Codes are uint8 (R, K), of E4M3 or E5M2. Scales lie row by row: fp32 per 128 elements, or E8M0 codes per 32, of
which a row has four for each 128 elements that are begun.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._device import HIGH_PRECISION
from ..formats import FLOAT8_BLOCK, MX_BLOCK, cdiv
from .codecs import decode_fp8, round_to_dtype
from .fused_producers import Source
from .launch import Launcher, check_device
from .scaling import scales_of_rows

ROWS, COLUMNS = 4, 1024
_BLOCKS = {torch.float32: FLOAT8_BLOCK, torch.uint8: MX_BLOCK}


@triton.jit(do_not_specialize=["rows"])
def _coded_rows_kernel(
    codes_ptr,
    scale_ptr,
    out_ptr,
    rows,
    K,
    E5M2: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    start = tl.program_id(1) * COLUMNS
    column = start + tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows)[:, None] & (column < K)
    offsets = row[:, None] * K + column
    code = tl.load(codes_ptr + offsets, mask=inside, other=0)
    scale = scales_of_rows(scale_ptr, row, start, K, row < rows, BLOCK, COLUMNS)
    value = round_to_dtype(decode_fp8(code, E5M2) * scale, out_ptr.dtype.element_ty)
    tl.store(out_ptr + offsets, value, mask=inside)


_rows = Launcher(_coded_rows_kernel, num_warps=4)


def checked(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor, int]:
    """Return codes and scales, contiguous, and how many elements share a scale.

    Raises:
        ValueError: tensors that the kernels cannot reach, or other dtypes and shapes than this file's.
    """
    check_device(codes)
    block = _BLOCKS.get(scales.dtype)
    if codes.dtype != torch.uint8 or block is None:
        raise ValueError(
            f"codes are {codes.dtype} and scales {scales.dtype}; give uint8, and float32 or uint8"
        )
    expected = codes.shape[0], cdiv(codes.shape[1], 128) * (128 // block)
    if tuple(scales.shape) != expected:
        raise ValueError(
            f"scales have shape {tuple(scales.shape)}; codes {tuple(codes.shape)} have {expected}"
        )
    return codes.contiguous(), scales.contiguous(), block


def rows(codes: Tensor, scales: Tensor, e5m2: bool, dtype: torch.dtype) -> Tensor:
    """Compute ``reference.block_scaled_rows.rows``."""
    data, scales, block = checked(codes, scales)
    if dtype not in HIGH_PRECISION:
        raise ValueError(f"cannot decode to {dtype}; use torch.bfloat16, torch.float16 or torch.float32")
    out = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    R, K = codes.shape
    if out.numel():
        _rows(
            (cdiv(R, ROWS), cdiv(K, COLUMNS), 1),
            (data, scales, out, R, K),
            (e5m2, block, ROWS, COLUMNS),
        )
    return out


def source(codes: Tensor, scales: Tensor, e5m2: bool, dtype: torch.dtype) -> Source:
    """Return ``reference.block_scaled_rows.source``, decoded on the way in; only ``grouped_sources`` reads it."""
    data, factors, block = checked(codes, scales)
    constants = ("coded", str(dtype).removeprefix("torch."), e5m2, block, 0.0)
    return Source(
        tuple(codes.shape), dtype, (data, factors), constants, lambda _: rows(codes, scales, e5m2, dtype)
    )
