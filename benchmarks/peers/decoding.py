"""Dequantization to bf16 as plain PyTorch, written to be compiled; arguments are the buffers of one direction.

As in ``expressions``, sides are multiples of 512 and data is finite.
"""

from __future__ import annotations

import torch
from torch import Tensor

from narrowcast.formats import E2M1, E4M3, round_to_float32

_NVFP4_UNIT = round_to_float32(1.0 / (E2M1.max * E4M3.max))


def per_tensor(data: Tensor, scale_inv: Tensor) -> Tensor:
    """Row-wise codes."""
    return (_float8(data) * scale_inv).bfloat16()


def per_tensor_transposed(data: Tensor, scale_inv: Tensor) -> Tensor:
    """Transposed codes."""
    return per_tensor(data, scale_inv).t().contiguous()


def block_1d(data: Tensor, scale_inv: Tensor) -> Tensor:
    """Blocks of 128 along the rows; the scales are stored transposed."""
    return (_float8(data).unflatten(1, (-1, 128)) * scale_inv.t().unsqueeze(2)).flatten(1).bfloat16()


def block_1d_columns(data: Tensor, scale_inv: Tensor) -> Tensor:
    """Transposed data with blocks of 128 along the columns of the matrix."""
    return block_1d(data, scale_inv).t().contiguous()


def block_2d(data: Tensor, scale_inv: Tensor) -> Tensor:
    """Tiles of 128 x 128."""
    tiles = _float8(data).unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
    return (tiles * scale_inv[:, None, :, None]).flatten(2).flatten(0, 1).bfloat16()


def mxfp8(data: Tensor, scale_inv: Tensor) -> Tensor:
    """Groups of 32 along the rows."""
    return (_float8(data).unflatten(1, (-1, 32)) * _e8m0(scale_inv).unsqueeze(2)).flatten(1).bfloat16()


def mxfp8_columns(data: Tensor, scale_inv: Tensor) -> Tensor:
    """Groups of 32 along the columns; the data is not transposed."""
    return (_float8(data).unflatten(0, (-1, 32)) * _e8m0(scale_inv).unsqueeze(1)).flatten(0, 1).bfloat16()


def nvfp4(data: Tensor, scale_inv: Tensor, amax: Tensor) -> Tensor:
    """Groups of 16 along the rows."""
    codes = torch.stack((data & 15, data >> 4), dim=2).flatten(1).unflatten(1, (-1, 16))
    factor = scale_inv.view(torch.float8_e4m3fn).float() * amax * _NVFP4_UNIT
    return (_e2m1(codes) * factor.unsqueeze(2)).flatten(1).bfloat16()


def nvfp4_columns(data: Tensor, scale_inv: Tensor, amax: Tensor) -> Tensor:
    """Transposed data with groups of 16 along the columns of the matrix."""
    return nvfp4(data, scale_inv, amax).t().contiguous()


def _float8(data: Tensor) -> Tensor:
    return data.view(torch.float8_e4m3fn).float()


def _e8m0(code: Tensor) -> Tensor:
    return (code.int() << 23).view(torch.float32)


def _e2m1(codes: Tensor) -> Tensor:
    # The exponent and mantissa bits as those of an fp32 number whose exponent is 126 too small, subnormals included.
    bits = ((codes & 7).int() << 22) | ((codes & 8).int() << 28)
    return bits.view(torch.float32) * 2.0**126
