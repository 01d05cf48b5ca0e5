"""Quantization as plain PyTorch, written to be compiled: both directions, in the layouts that the kernels write.

Each function takes a bf16 matrix whose sides are multiples of 512, so that nothing needs padding, and returns the
buffers of ``narrowcast.reference``, with the same bytes for finite data that is not all zero. What guards the
reference against NaN, infinities and overflowing scales is left out: nobody would write it into a short expression.
"""

from __future__ import annotations

import torch
from torch import Tensor

from narrowcast.formats import BF16_MAX, E2M1, E4M3, FLT_MAX


def given_scale(x: Tensor, scale: Tensor, amax: Tensor) -> tuple[Tensor, ...]:
    """Per-tensor FP8 under delayed scaling; the raised amax is the last output."""
    data = _float8(x.float() * scale)
    return data, data.t().contiguous(), scale.reciprocal(), torch.maximum(amax, x.abs().amax().float())


def current_scale(x: Tensor) -> tuple[Tensor, ...]:
    """Per-tensor FP8 with the tensor's own amax."""
    scale = _divide(E4M3.max, x.abs().amax().float()).reshape(1)
    data = _float8(x.float() * scale)
    return data, data.t().contiguous(), scale.reciprocal()


def block_1d(x: Tensor) -> tuple[Tensor, ...]:
    """Blocks of 128 with power-of-two scales, along the rows of the matrix and of its transpose."""
    return *_blocks(x), *_blocks(x.t())


def _blocks(x: Tensor) -> tuple[Tensor, Tensor]:
    groups = x.float().unflatten(1, (-1, 128))
    scale = _power_2_scale(groups.abs().amax(2, keepdim=True))
    return _float8(groups * scale).flatten(1).contiguous(), scale.reciprocal().squeeze(2).t().contiguous()


def block_2d(x: Tensor) -> tuple[Tensor, ...]:
    """Tiles of 128 x 128 with power-of-two scales."""
    tiles = x.float().view(x.shape[0] // 128, 128, x.shape[1] // 128, 128)
    scale = _power_2_scale(tiles.abs().amax((1, 3), keepdim=True))
    data = _float8(tiles * scale).view(x.shape)
    scale_inv = scale.reciprocal()[:, 0, :, 0]
    return data, scale_inv, data.t().contiguous(), scale_inv.t().contiguous()


def mxfp8_1d(x: Tensor) -> tuple[Tensor, ...]:
    """Groups of 32 along the rows and along the columns; neither output is transposed."""
    return *_mxfp8(x.unflatten(1, (-1, 32)), 2, x), *_mxfp8(x.unflatten(0, (-1, 32)), 1, x)


def _mxfp8(groups: Tensor, dim: int, x: Tensor) -> tuple[Tensor, Tensor]:
    code = _e8m0(groups.float().abs().amax(dim, keepdim=True))
    return _float8(groups.float() * _e8m0_factor(code)).view(x.shape), code.squeeze(dim).to(torch.uint8)


def mxfp8_2d(x: Tensor) -> tuple[Tensor, ...]:
    """Tiles of 32 x 32, their scales repeated for every row and every column."""
    m, k = x.shape
    tiles = x.float().view(m // 32, 32, k // 32, 32)
    code = _e8m0(tiles.abs().amax((1, 3), keepdim=True))
    data = _float8(tiles * _e8m0_factor(code)).view(x.shape)
    byte = code.to(torch.uint8)
    rows = byte.expand(-1, 32, -1, 1).reshape(m, k // 32)
    columns = byte.expand(-1, 1, -1, 32).reshape(m // 32, k)
    return data, rows, data.clone(), columns


def nvfp4_1d(x: Tensor) -> tuple[Tensor, ...]:
    """Groups of 16 along the rows of the matrix and of its transpose."""
    amax = x.abs().amax().float()
    return _in_order(_nvfp4(x, amax), _nvfp4(x.t(), amax))


def nvfp4_2d(x: Tensor) -> tuple[Tensor, ...]:
    """Tiles of 16 x 16."""
    m, k = x.shape
    tile = x.view(m // 16, 16, k // 16, 16).abs().amax((1, 3)).float()
    rows = tile[:, None].expand(-1, 16, -1).reshape(m, k // 16)
    columns = tile.t()[:, None].expand(-1, 16, -1).reshape(k, m // 16)
    amax = tile.amax()
    return _in_order(_nvfp4(x, amax, rows), _nvfp4(x.t(), amax, columns))


def nvfp4_rht(x: Tensor, rotation: Tensor) -> tuple[Tensor, ...]:
    """As ``nvfp4_1d``, the columns rotated first by a product with the 16 x 16 matrix ``rotation``.

    Where a matrix product adds the 16 terms in an order of its own, a rotated value may differ from the reference's in
    its last bit, and with it a code.
    """
    rotated = torch.matmul(rotation.t(), x.unflatten(0, (-1, 16))).view(x.shape)
    return _in_order(_nvfp4(x, x.abs().amax().float()), _nvfp4(rotated.t(), rotated.abs().amax().float()))


def _in_order(rows: tuple[Tensor, ...], columns: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return *rows[:2], *columns[:2], rows[2], columns[2]


def _nvfp4(x: Tensor, amax: Tensor, block_amax: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    groups = x.float().unflatten(1, (-1, 16))
    size = groups.abs().amax(2) if block_amax is None else block_amax
    global_scale = _divide(E2M1.max * E4M3.max, amax)
    scales = (size * (global_scale * E2M1.max_reciprocal)).clamp(max=E4M3.max).to(torch.float8_e4m3fn)
    factor = (scales.float() * global_scale.reciprocal()).reciprocal().clamp(max=FLT_MAX)
    codes = _e2m1(groups * factor.unsqueeze(2))
    data = (codes[:, :, 0::2] | (codes[:, :, 1::2] << 4)).flatten(1).contiguous()
    return data, scales.view(torch.uint8).contiguous(), amax.clone().reshape(1)


def _float8(x: Tensor) -> Tensor:
    return x.clamp(-E4M3.max, E4M3.max).to(torch.float8_e4m3fn).view(torch.uint8)


def _divide(numerator: float, x: Tensor) -> Tensor:
    # PyTorch turns a number over a tensor into a product with the reciprocal: two roundings.
    return x.new_full((), numerator) / x


def _power_2_scale(amax: Tensor) -> Tensor:
    scale = _divide(E4M3.max, amax).clamp(max=BF16_MAX)
    return torch.where(amax > 0, (scale.view(torch.int32) & -0x800000).view(torch.float32), 1.0)


def _e8m0(amax: Tensor) -> Tensor:
    # Any mantissa bit carries into the exponent: rounding up to a power of two.
    return ((amax * E4M3.max_reciprocal).view(torch.int32) + 0x7FFFFF) >> 23


def _e8m0_factor(code: Tensor) -> Tensor:
    return ((254 - code) << 23).view(torch.float32)


def _e2m1(x: Tensor) -> Tensor:
    """Codes by counting the midpoints below; a tie goes to the even code, so every other comparison is strict."""
    size = x.abs()
    code = (size > 0.25).to(torch.uint8)
    for midpoint in (0.75, 1.75, 3.5):
        code = code + (size >= midpoint)
    for midpoint in (1.25, 2.5, 5.0):
        code = code + (size > midpoint)
    return code | (torch.signbit(x).to(torch.uint8) << 3)
