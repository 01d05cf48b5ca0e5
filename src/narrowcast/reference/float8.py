"""Per-tensor FP8: one scale for the whole tensor, given (delayed scaling) or taken from its amax (current
scaling).

The column-wise buffer holds the row-wise codes transposed, so both directions share one ``scale_inv``.
"""

import torch
from torch import Tensor

from ..formats import FLT_MAX, ElementFormat
from . import scaling
from .codecs import decode_float8, encode_float8_
from .layout import widen

amax = scaling.amax
amax_parts = (
    scaling.amax
)  # the amax that ``quantize_current`` computes before it encodes; kernels return several parts


def quantize(
    x: Tensor,
    scale: Tensor,
    fmt: ElementFormat,
    *,
    rowwise: bool,
    columnwise: bool,
    amax: Tensor | None = None,
    unseen: float = 0.0,
) -> list[Tensor]:
    """Quantize a tensor with a given scale.

    Args:
        x: fp32, bf16 or fp16, shape (*lead, K), any strides.
        scale: fp32 [1], multiplies when encoding.
        fmt: E4M3 or E5M2.
        rowwise: produce the codes in the order of ``x``.
        columnwise: produce the transposed codes.
        amax: fp32, one element, non-negative; raised in place to max|x| (NaN ignored). None: no amax is taken.
        unseen: what is taken instead of a scale of 0, as in ``scaling.scale_or_first``; 0: a scale of 0 is one.

    Raises:
        TypeError: ``x`` has another dtype.
        ValueError: the format is not FP8.

    Numerics:
        ``[data uint8 (*lead, K)] [transpose uint8 (K, *lead)] scale_inv fp32 [1]``; code = saturating
        ``fmt(RN(x * scale))``, that of NaN where ``x`` is infinite; ``scale_inv = RN(1 / scale)``.
    """
    if amax is not None or unseen != 0.0:
        largest = scaling.amax(x)
        if amax is not None:
            torch.fmax(amax, largest, out=amax)
        if unseen != 0.0:
            scale = scaling.scale_or_first(scale, unseen, largest)
    scale_inv = scaling.reciprocal(scale.reshape(1))
    if not (rowwise or columnwise):
        return [scale_inv]
    # Widened first: a bf16 tensor times a one-element fp32 tensor would be rounded to bf16.
    values = widen(x)
    # Adding 0 times itself changes nothing but an infinity, to NaN: it would saturate and look like a number.
    zero = values.new_zeros(())
    values = (torch.addcmul if values.dtype == x.dtype else Tensor.addcmul_)(values, values, zero)
    data = encode_float8_(values.mul_(scale), fmt)
    out = [data] if rowwise else []
    if columnwise:
        out.append(transpose(data))
    return [*out, scale_inv]


def parts_of(count: int) -> int:
    """Return the length of ``amax_parts`` of so many elements."""
    return 1


def quantize_current(
    x: Tensor,
    fmt: ElementFormat,
    *,
    power_2: bool,
    epsilon: float,
    rowwise: bool,
    columnwise: bool,
    amax: Tensor | None = None,
) -> list[Tensor]:
    """Quantize a tensor with the scale of its own amax.

    Args:
        x, fmt, rowwise, columnwise: as in ``quantize``; so are errors and buffers.
        power_2: round the scale down to a power of two.
        epsilon: lower bound for the amax.
        amax: fp32, one or more, to take the scale of the largest of them instead of the tensor's own.

    Numerics:
        The scale is ``scale_from_amax`` with fp32's maximum on overflow.
    """
    largest = scaling.amax(x) if amax is None else amax.amax().reshape(1)
    scale = scaling.scale_from_amax(largest, fmt.max, power_2=power_2, epsilon=epsilon, overflow=FLT_MAX)
    return quantize(x, scale, fmt, rowwise=rowwise, columnwise=columnwise)


def transpose(data: Tensor, stacked: bool = False) -> Tensor:
    """Move the last dimension to the front, as a new contiguous tensor.

    Args:
        data: any dtype, shape (*lead, K).
        stacked: it is a stack (G, *lead, K), and each of its members is transposed.

    Raises:
        IndexError: ``data`` has no dimension.

    Numerics:
        Shape (K, *lead), or (G, K, *lead); never a view of ``data``, also where the two layouts coincide.
    """
    return data.movedim(-1, int(stacked)).clone(memory_format=torch.contiguous_format)


def dequantize(data: Tensor, scale_inv: Tensor, fmt: ElementFormat, dtype: torch.dtype) -> Tensor:
    """Decode row-wise codes.

    Args:
        data: uint8 codes, any shape.
        scale_inv: fp32 [1].
        fmt: the format of the codes.
        dtype: the nominal dtype of the result.

    Raises:
        ValueError: the format is not FP8.

    Numerics:
        ``RN(code * scale_inv)`` in fp32, then rounded to ``dtype``.
    """
    return decode_float8(data, fmt).mul_(scale_inv).to(dtype)


def dequantize_transpose(
    transpose: Tensor, scale_inv: Tensor, fmt: ElementFormat, dtype: torch.dtype
) -> Tensor:
    """Decode transposed codes (K, *lead) into the logical orientation (*lead, K); the rest as ``dequantize``."""
    return dequantize(transpose.movedim(0, -1).contiguous(), scale_inv, fmt, dtype)
