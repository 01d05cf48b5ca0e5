"""The MX formats: elements of 8, 6 or 4 bits with one power-of-two (E8M0) scale per 32 consecutive elements.

One algorithm serves MXFP8, MXFP6 and MXFP4 (OCP Microscaling Formats v1.0); the element format is its parameter. The
two directions are quantized separately from the source. In the 2-D variant a scale belongs to a 32 x 32 tile and both
directions hold the same codes. Groups at the edges may be short.

The scale is the smallest power of two under which the amax of the group is in range: ``amax / fmt.max`` rounded *up* to
a power of two. The OCP document suggests ``2**(floor(log2(amax)) - emax)`` instead, which is smaller by half whenever
the significand of the amax exceeds that of ``fmt.max``, and then clips the largest elements of the group, those that
weigh most in a product: under E2M1, 7.9 becomes 6. Rounding up clips nothing, costs such groups the smallest code, and
is what MXFP8 does here, so all widths share one rule.

Column-wise codes of one byte keep the logical orientation; packed ones are the transpose, as tensor cores read them. In
the 2-D variant a scale belongs to a 32 x 32 tile and is repeated in the scale buffers.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ..formats import MX_LAYOUTS, MXFP4, MXFP6, MXFP8, ElementFormat, Layout
from . import block_scaling
from .codecs import encode_e8m0, reciprocal_e8m0


def quantize(
    x: Tensor, fmt: ElementFormat, *, rowwise: bool, columnwise: bool, two_d: bool = False
) -> list[Tensor]:
    """Quantize a tensor in one or both directions.

    Args:
        x: fp32, bf16 or fp16, shape (*lead, K), any strides; M is the product of ``lead``.
        fmt: E4M3, E5M2, E2M3, E3M2 or E2M1.
        rowwise: groups of 32 along K.
        columnwise: groups of 32 along M.
        two_d: one scale per 32 x 32 tile, replicated in the scale buffers.

    Raises:
        TypeError: ``x`` has another dtype.
        ValueError: rank below 2.

    Numerics:
        ``b = E8M0_up(RN(amax * RN(1 / fmt.max)))``, code = saturating ``fmt(x * 2**(127 - b))``.
        Row-wise ``[data, scale_inv (round_up(M, 128), round_up(cdiv(K, 32), 4))]``, then column-wise, all uint8.
        Of eight bits: data ``x.shape`` in both directions, column-wise scales (round_up(cdiv(M, 32), 4), round_up(K,
        128)). Packed: data (*lead, round_up(K, 32) * bits / 8) and (K, round_up(M, 32) * bits / 8), column-wise scales
        (round_up(K, 128), round_up(cdiv(M, 32), 4)).
    """

    def power_of_two(amax: Tensor) -> tuple[Tensor, Tensor]:
        code = encode_e8m0(amax.mul_(fmt.max_reciprocal))
        return reciprocal_e8m0(code), code

    return block_scaling.quantize(
        x, MX_LAYOUTS[fmt.bits], fmt, power_of_two, rowwise=rowwise, columnwise=columnwise, tile=two_d
    )


def _dequantize(
    columnwise: bool,
    layouts: tuple[Layout, ...],
    data: Tensor,
    scale_inv: Tensor,
    fmt: ElementFormat,
    dtype: torch.dtype,
) -> Tensor:
    """Decode one direction into the logical orientation.

    Args:
        data: uint8; codes of one byte of shape (*lead, K); packed ones (*lead, C * bits / 8) or, column-wise,
            (K, R * bits / 8), with C and R multiples of 32.
        scale_inv: uint8, compact, as ``quantize`` gives it.
        fmt: the format of the codes.
        dtype: the nominal dtype of the result.

    Raises:
        ValueError: rank below 2, or a format of other bits.

    Numerics:
        ``code * 2**(b - 127)`` in fp32, then rounded to ``dtype``. Packed codes give their padding, too: (*lead, C) or
        (R, K). They have at most four significant bits and none below ``2**-4``, so every value is exact in bf16,
        subnormals of bf16 included, unless it exceeds the range of fp32; it then is infinite.
    """
    # a format of other bits gets the error of the codec
    layout = next((layout for layout in layouts if layout is MX_LAYOUTS[fmt.bits]), layouts[0])
    return block_scaling.dequantize(data, scale_inv, fmt, dtype, layout=layout, columnwise=columnwise)


dequantize_rowwise = partial(_dequantize, False, (MXFP8,))
dequantize_columnwise = partial(_dequantize, True, (MXFP8,))
dequantize_packed_rowwise = partial(_dequantize, False, (MXFP6, MXFP4))
dequantize_packed_columnwise = partial(_dequantize, True, (MXFP6, MXFP4))
