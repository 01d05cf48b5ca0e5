"""``narrowcast::observe``: the quantization error of a tensor, for a watched training."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..formats import ELEMENT_FORMATS, DType
from ..upstream.autograd import version_preserved
from ._library import QUANTIZER, define
from .numerics import numerics_for
from .quantizer_value import QuantizerValue

OBSERVED = ("elements", "nonzero", "amax", "squares", "squared_error", "underflows", "saturations")
"""What a row of statistics holds, fp32 each; all but the first as ``reference.observe.loss`` counts them."""


def _largest_code(element: DType) -> int:
    """Return the code of the largest finite value; codes above it are infinities and NaNs."""
    fmt = ELEMENT_FORMATS[element]
    exponent = math.floor(math.log2(fmt.max))
    mantissa = round((fmt.max / 2**exponent - 1) * 2**fmt.mantissa_bits)
    return (exponent + fmt.bias) << fmt.mantissa_bits | mantissa


def _all_largest(data: Tensor, element: DType) -> Tensor:
    """Return ``data`` with the largest code everywhere, packed as its codes are: from the low bits on."""
    bits, code = ELEMENT_FORMATS[element].bits, _largest_code(element)
    if bits == 8:
        return torch.full_like(data, code)
    period = math.lcm(bits, 8)
    word = sum(code << (bits * index) for index in range(period // bits))
    pattern = torch.tensor(list(word.to_bytes(period // 8, "little")), dtype=data.dtype, device=data.device)
    return pattern.repeat(data.numel() // pattern.numel()).view(data.shape)


def _decoded(quantizer: QuantizerValue, buffers: list[Tensor], shape: tuple[int, ...]) -> Tensor:
    values = quantizer._decode(numerics_for(buffers[0]), buffers, False, torch.float32)
    matrix = values.reshape(-1, values.shape[-1])
    return matrix[: math.prod(shape[:-1]), : shape[-1]].reshape(shape)


def _statistics(x: Tensor, quantizer: QuantizerValue, scale: Tensor | None) -> Tensor:
    numerics = numerics_for(x)
    if scale is not None and quantizer._is_delayed():
        buffers = quantizer._encode_scaled(numerics, x, scale, None)
    else:  # one sample of stochastic rounding, from a fixed seed: no generator advances
        buffers = quantizer._encode(numerics, x, torch.zeros(1, dtype=torch.int64, device=x.device))
    shape = tuple(x.shape)
    largest = _all_largest(buffers[0], quantizer.dtype)  # type: ignore[attr-defined]
    ceiling = _decoded(quantizer, [largest, *buffers[1:]], shape)
    read = _decoded(quantizer, buffers, shape)
    beyond = 1 + 2.0 ** -(ELEMENT_FORMATS[quantizer.dtype].mantissa_bits + 2)  # type: ignore[attr-defined]
    return numerics.observe.loss(x, read, ceiling, beyond)


def _observe(
    x: Tensor, quantizer: QuantizerValue, scale: Tensor | None, into: Tensor, through: Tensor
) -> Tensor:
    if x.numel():
        with version_preserved([into]):  # the backwards of several forwards write to it
            into[0] = x.numel()
            into[1:] = _statistics(x, quantizer, scale)
    return through.clone()


def _observe_groups(
    x: Tensor, splits: Tensor, quantizer: QuantizerValue, scale: Tensor | None, into: Tensor, through: Tensor
) -> Tensor:
    rows, first, groups = x.reshape(-1, x.shape[-1]), 0, splits.shape[0]
    found: list[Tensor] = []
    for group, count in enumerate(splits.tolist()):
        own, first = rows[first : first + count], first + count
        if own.numel():
            of_group = None if scale is None else scale.unflatten(-1, (-1, groups))[..., group].contiguous()
            found.append(_statistics(own, quantizer, of_group))
    if found:
        table = torch.stack(found)
        with version_preserved([into]):
            into[0] = min(first, rows.shape[0]) * rows.shape[1]
            into[1:] = table.sum(0)
            into[2] = table[:, 1].max()
    return through.clone()


observe = define(
    f"observe(Tensor x, {QUANTIZER} quantizer, Tensor? scale, Tensor into, Tensor through) -> Tensor",
    _observe,
    lambda x, quantizer, scale, into, through: torch.empty_like(through),
)
"""A copy of ``through``; ``into``, fp32 (7,), gets :data:`OBSERVED`: what quantizing ``x`` row-wise does to it.

An element underflows if it is not 0 and its code is; it saturates where it is larger than the largest code of its
block by more than rounding to that code loses.
The schema does not declare the write, for the reason given in :mod:`.quantize`; a graph keeps the operator as long as
something reads the copy instead of ``through``.

Args:
    x: (*lead, K), fp32, bf16 or fp16. quantizer: of one format, row-wise alone. scale: state of delayed scaling.
"""

observe_groups = define(
    f"observe_groups(Tensor x, Tensor splits, {QUANTIZER} quantizer, Tensor? scale, Tensor into, Tensor through)"
    " -> Tensor",
    _observe_groups,
    lambda x, splits, quantizer, scale, into, through: torch.empty_like(through),
    tags=(torch.Tag.cudagraph_unsafe,),
)
"""As :data:`observe`, of groups of rows that are quantized each as if it were alone; the host reads the splits.

Args:
    splits: int32 or int64 (G,), rows of each group. scale: fp32 (slots * G,).
"""
