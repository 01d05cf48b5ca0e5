"""New values for a stored weight under the scales that it has: only what has moved by half a step changes its code."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import reference
from ..formats import ELEMENT_FORMATS, ElementFormat, cdiv
from ..quantizers import NVFP4Quantizer, buffers_of
from ..reference.codecs import encode_float8_, encode_subbyte_, pack_codes
from ..tensors import QuantizedTensor


@torch.no_grad()
def requantized(stored: QuantizedTensor, values: Tensor) -> Any:
    """Return ``values`` quantized as ``stored`` is, with its scales where they hold.

    A scale holds if every value that it scales rounds to a code without an error of more than half a step. Other blocks
    get the scale that the format gives them; under one scale per tensor that is the tensor. NVFP4's scale of the tensor
    stays while it holds for the largest value. So the values of ``stored`` give its codes again.

    Args:
        stored: (N, K), row-wise, as ``convert(weights=...)`` keeps a weight.
        values: (N, K), fp32.

    Numerics:
        ``code = RN(value / factor)``, the factor of decoding in fp32.
    """
    held = buffers_of(stored)
    quantizer: Any = held.quantizer
    kept, fmt = held.rowwise, ELEMENT_FORMATS[quantizer.dtype]
    new = quantizer._buffers_of(values)
    ratio = _ratio(quantizer, kept, fmt, values)
    fits = ratio.abs() <= fmt.max + _half_step(fmt)  # False for NaN, that of a block of zeros
    holds = _of_scales(fits, quantizer._format_layout().scale_group)
    if isinstance(quantizer, NVFP4Quantizer):
        same = values.abs().amax() <= kept[2] * ((fmt.max + _half_step(fmt)) / fmt.max)
        options = quantizer._options(None)
        under_kept = reference.nvfp4.quantize(
            values, rowwise=True, columnwise=False, amaxes=(kept[2], kept[2]), **options
        )
        new = [torch.where(same, a, b) for a, b in zip(under_kept, new)]
        holds &= same | holds.all()
        new[2] = torch.where(holds.all(), kept[2], new[2])
    codes = _codes(ratio, fmt).view(new[0].shape)
    padding = (0, new[1].shape[-1] - holds.shape[-1], 0, new[1].shape[0] - holds.shape[0])
    scale_holds = holds if new[1].dim() == 1 else F.pad(holds, padding)
    of_codes = _of_elements(holds, quantizer._format_layout().scale_group, ratio.shape)
    of_codes = of_codes if fmt.bits == 8 else of_codes[:, ::2]  # the codes of a byte share a scale
    buffers = [torch.where(of_codes, codes, new[0]), torch.where(scale_holds, kept[1], new[1]), *new[2:]]
    return quantizer._assemble(buffers, tuple(stored.shape), stored.dtype)


def _ratio(quantizer: Any, kept: list[Tensor], fmt: ElementFormat, values: Tensor) -> Tensor:
    """Return values over the factors that decode their codes, padded as the codes are."""
    one = fmt.bias << (fmt.bits - 1 - fmt.exponent_bits)  # the code of 1.0
    ones = torch.full_like(kept[0], one if fmt.bits == 8 else one | one << 4)
    factor = quantizer._decode(reference, [ones, *kept[1:]], False, torch.float32)
    return F.pad(values.float(), (0, factor.shape[1] - values.shape[1])) / factor


def _half_step(fmt: ElementFormat) -> float:
    """Return half the distance of the two largest values."""
    return float(2 ** (2**fmt.exponent_bits - 1 - fmt.bias - fmt.mantissa_bits)) / 2


def _codes(ratio: Tensor, fmt: ElementFormat) -> Tensor:
    if fmt.bits == 8:
        return encode_float8_(ratio.clone(), fmt)
    return pack_codes(encode_subbyte_(ratio.contiguous().clone(), fmt), fmt.bits)


def _of_scales(fits: Tensor, group: tuple[int, int]) -> Tensor:
    """Return whether all elements of each scale do; (1,) for one scale."""
    rows, columns = group
    if not rows:
        return fits.all().reshape(1)
    m, k = fits.shape
    padded = F.pad(fits, (0, -k % columns, 0, -m % rows), value=True)
    return padded.view(cdiv(m, rows), rows, cdiv(k, columns), columns).all(3).all(1)


def _of_elements(holds: Tensor, group: tuple[int, int], shape: torch.Size) -> Tensor:
    if not group[0]:
        return holds.expand(shape)
    each = holds.repeat_interleave(group[0], 0).repeat_interleave(group[1], 1)
    return each[: shape[0], : shape[1]]
