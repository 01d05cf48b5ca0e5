"""Block scaling: one algorithm for every format with one level of scales, read from the format's ``Layout``.

The layout says how long a group is in each direction, whether data are transposed and packed, and how scales lie and
are padded. The element format says how a code is rounded. A scale rule turns the amaxes of groups into factors and the
scales to store. Both directions are quantized from the source. Groups at the edges may be short.

- *Codes of one byte* keep a NaN as one NaN.
- *Codes of six or four bits* are packed along the contraction (``codecs.pack_codes``) and zero-padded to whole groups.
  Their formats have no NaN, so a NaN becomes the amax of its group and poisons it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..formats import Buffer, ElementFormat, Layout, cdiv
from .codecs import (
    decode_e8m0,
    decode_float8,
    decode_subbyte,
    encode_float8_,
    encode_subbyte_,
    pack_codes,
    unpack_codes,
)
from .layout import (
    as_matrix,
    group_max,
    magnitude,
    multiply_groups,
    pad_matrix,
    pad_scales,
    spread,
    transpose_bytes,
    widen,
)

ScaleRule = Callable[[Tensor], tuple[Tensor, Tensor]]
"""From the amaxes of groups, fp32: the factors that multiply the elements, fp32, and the scales to store."""


def quantize(
    x: Tensor,
    layout: Layout,
    fmt: ElementFormat,
    rule: ScaleRule,
    *,
    rowwise: bool,
    columnwise: bool,
    tile: bool = False,
) -> list[Tensor]:
    """Quantize a tensor in one or both directions.

    Args:
        x: fp32, bf16 or fp16, shape (*lead, K), any strides; M is the product of ``lead``.
        layout: a layout whose directions each have data and scales.
        fmt: the element format.
        rule: makes factors and scales from amaxes; it may overwrite them.
        rowwise, columnwise: the directions to produce.
        tile: groups are square, so that both directions hold the same codes; the layout's groups may repeat scales.

    Raises:
        TypeError: ``x`` has another dtype.
        ValueError: rank below 2, or codes of other bits than the layout's.

    Numerics:
        The layout's buffers of the directions, in its order. A code is ``fmt(RN(x * factor))``, saturating.
    """
    matrix = as_matrix(widen(x))
    packed = _is_packed(layout)
    size = matrix.abs() if packed else magnitude(matrix)
    sides = [False] * rowwise + [True] * columnwise
    groups = {side: _group(layout, side, tile) for side in sides}
    scaled = {group: rule(group_max(size, *group)) for group in groups.values()}
    encode = encode_subbyte_ if packed else encode_float8_
    # The magnitudes have served; their memory takes the scaled elements of one direction after the other.
    codes = {
        group: encode(multiply_groups(matrix, factors, *group, out=size), fmt)
        for group, (factors, _) in scaled.items()
    }
    out: list[Tensor] = []
    for side in sides:
        group = groups[side]
        data, scales = _buffers(layout, side)
        of_other = side and rowwise and groups[False] == group
        placed = _place_codes(codes[group], data, copy=of_other).view(data.sizes(tuple(x.shape)))
        out += [placed, _place_scales(scaled[group][1], scales, group, matrix.shape)]
    return out


def dequantize(
    data: Tensor,
    scale_inv: Tensor,
    fmt: ElementFormat,
    dtype: torch.dtype,
    *,
    layout: Layout,
    columnwise: bool,
) -> Tensor:
    """Decode one direction into the logical orientation.

    Args:
        data, scale_inv: the buffers of the direction, as ``quantize`` gives them.
        fmt, layout: as in ``quantize``.
        dtype: of the result.
        columnwise: which direction.

    Raises:
        ValueError: rank below 2, or codes of other bits than the layout's.

    Numerics:
        ``RN(code * scale_inv)`` in fp32, then rounded to ``dtype``; packed codes with their padding.
    """
    codes, scales = _buffers(layout, columnwise)
    transposed = codes.shape[0].size == "K"
    if _is_packed(layout):
        values = decode_subbyte(unpack_codes(as_matrix(data), fmt.bits), fmt)
        shape = (*data.shape[:-1], values.shape[1])
        if transposed:
            values = transpose_bytes(values)
            shape = tuple(values.shape)
    else:
        data = data.movedim(0, -1) if transposed else data
        values, shape = decode_float8(as_matrix(data), fmt), data.shape
    group = _group(layout, columnwise)
    factors = _read_scales(scale_inv, scales, group, values.shape)
    return multiply_groups(values, factors, *group, out=values).view(shape).to(dtype)


def _is_packed(layout: Layout) -> bool:
    return layout.buffers[0].shape[-1].bits < 8


def _buffers(layout: Layout, columnwise: bool) -> tuple[Buffer, Buffer]:
    data, scales = [buffer for buffer in layout.buffers if buffer.of_direction(columnwise)]
    return data, scales


def _group(layout: Layout, columnwise: bool, tile: bool = False) -> tuple[int, int]:
    """Return rows and columns of the elements that share a scale."""
    rows, columns = layout.scale_group
    if tile:
        return max(rows, columns), max(rows, columns)
    return (columns, rows) if columnwise else (rows, columns)


def _place_codes(codes: Tensor, buffer: Buffer, *, copy: bool) -> Tensor:
    """Return codes (M, K) as the buffer holds them, in memory of their own; ``copy``: another buffer has them as they
    are.
    """
    if buffer.shape[0].size == "K":
        codes = transpose_bytes(codes)
    elif copy:
        codes = codes.clone()
    last = buffer.shape[-1]
    return codes if last.bits == 8 else pack_codes(pad_matrix(codes, 1, last.multiple), last.bits)


def _place_scales(scales: Tensor, buffer: Buffer, group: tuple[int, int], shape: torch.Size) -> Tensor:
    """Return scales of groups as the buffer holds them: repeated where it has more of them, transposed, padded with
    zeros.
    """
    repeats = _repeats(buffer, group)
    sizes = [cdiv(size, extent // repeat) for size, extent, repeat in zip(shape, group, repeats)]
    scales = spread(scales, *repeats)[: sizes[0], : sizes[1]]
    down, across = buffer.shape
    return pad_scales(scales.t() if down.size == "K" else scales, down.multiple, across.multiple)


def _read_scales(scale_inv: Tensor, buffer: Buffer, group: tuple[int, int], shape: torch.Size) -> Tensor:
    """Return the factors of groups, fp32, from the buffer of their scales."""
    scales = scale_inv.t() if buffer.shape[0].size == "K" else scale_inv
    repeats = _repeats(buffer, group)
    scales = scales[:: repeats[0], :: repeats[1]][: cdiv(shape[0], group[0]), : cdiv(shape[1], group[1])]
    return decode_e8m0(scales) if scales.dtype == torch.uint8 else scales


def _repeats(buffer: Buffer, group: tuple[int, int]) -> tuple[int, int]:
    """Return how often the buffer holds the scale of a group, down and across the matrix."""
    entries = {extent.size: extent.group for extent in buffer.shape}
    return group[0] // entries["M"], group[1] // entries["K"]
