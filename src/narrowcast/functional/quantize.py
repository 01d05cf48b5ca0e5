"""Operators that quantize and dequantize: ``narrowcast::quantize`` and its stateful and in-place forms."""

from __future__ import annotations

import torch
from torch import Tensor

from ._library import QUANTIZER, define
from .numerics import numerics_for
from .quantizer_value import QuantizerValue


def _described(x: Tensor, quantizer: QuantizerValue) -> list[Tensor]:
    described = quantizer._describe_buffers(tuple(x.shape), x.dtype)
    return [x.new_empty(size, dtype=dtype) for size, dtype in described.values()]


def _quantize(x: Tensor, quantizer: QuantizerValue, seed: Tensor | None = None) -> list[Tensor]:
    return quantizer._encode(numerics_for(x), x, seed)


def _quantize_fake(x: Tensor, quantizer: QuantizerValue, seed: Tensor | None = None) -> list[Tensor]:
    return _described(x, quantizer)


quantize = define(
    f"quantize(Tensor x, {QUANTIZER} quantizer, Tensor? seed=None) -> Tensor[]", _quantize, _quantize_fake
)
"""Quantize ``x``; buffers in the order of the quantizer's description. ``seed``: int64[1] for stochastic rounding."""


def _quantize_delayed(
    x: Tensor, scale: Tensor, amax: Tensor, quantizer: QuantizerValue
) -> tuple[Tensor, ...]:
    return tuple(quantizer._encode_scaled(numerics_for(x), x, scale, amax))


def _quantize_delayed_fake(
    x: Tensor, scale: Tensor, amax: Tensor, quantizer: QuantizerValue
) -> tuple[Tensor, ...]:
    return tuple(_described(x, quantizer))


# an operator that mutates cannot return a list, so there is one per number of buffers
_DELAYED = "(Tensor x, Tensor scale, Tensor(a!) amax, " + QUANTIZER + " quantizer)"
quantize_delayed = define(
    f"quantize_delayed{_DELAYED} -> (Tensor, Tensor)", _quantize_delayed, _quantize_delayed_fake
)
"""Quantize in one direction with the scale in the quantizer's slot, max-accumulating into that slot of ``amax``."""
quantize_delayed_both = define(
    f"quantize_delayed_both{_DELAYED} -> (Tensor, Tensor, Tensor)", _quantize_delayed, _quantize_delayed_fake
)
"""As :data:`quantize_delayed`, in both directions."""


def _quantize_into(
    x: Tensor, out: list[Tensor], quantizer: QuantizerValue, noop_flag: Tensor | None, seed: Tensor | None
) -> None:
    for destination, source in zip(out, _quantize(x, quantizer, seed), strict=True):
        if noop_flag is not None:  # decided on the device: no synchronisation, graph-capturable
            source = torch.where(noop_flag != 0, destination, source)
        destination.copy_(source)


def _quantize_into_fake(
    x: Tensor, out: list[Tensor], quantizer: QuantizerValue, noop_flag: Tensor | None, seed: Tensor | None
) -> None:
    return None


quantize_into = define(
    f"quantize_into(Tensor x, Tensor(a!)[] out, {QUANTIZER} quantizer, Tensor? noop_flag, Tensor? seed) -> ()",
    _quantize_into,
    _quantize_into_fake,
)
"""Overwrite ``out`` with the quantization of ``x``, or leave it when ``noop_flag`` (fp32, one element) is non-zero."""


def _dequantize(
    buffers: list[Tensor], quantizer: QuantizerValue, columnwise: bool, dtype: torch.dtype, shape: list[int]
) -> Tensor:
    decoded = quantizer._decode(buffers, columnwise, dtype)
    if list(decoded.shape) == list(shape):
        return decoded
    # formats that pack or pad hold more than the logical tensor, along the first and the last dim of the matrix
    rows = 1
    for size in shape[:-1]:
        rows *= size
    if rows * shape[-1] == 0:
        return decoded.new_empty(shape)
    matrix = decoded.reshape(-1, decoded.shape[-1])
    return matrix[:rows, : shape[-1]].reshape(shape).contiguous()


def _dequantize_fake(
    buffers: list[Tensor], quantizer: QuantizerValue, columnwise: bool, dtype: torch.dtype, shape: list[int]
) -> Tensor:
    return buffers[0].new_empty(shape, dtype=dtype)


dequantize = define(
    f"dequantize(Tensor[] buffers, {QUANTIZER} quantizer, bool columnwise, ScalarType dtype, SymInt[] shape) -> Tensor",
    _dequantize,
    _dequantize_fake,
)
"""Decode the buffers of one direction to a tensor of the logical ``shape``."""


def _draw_seed(like: Tensor) -> Tensor:
    return torch.randint(0, 2**63 - 1, (1,), dtype=torch.int64, device=like.device)


def _draw_seed_fake(like: Tensor) -> Tensor:
    return like.new_empty((1,), dtype=torch.int64)


draw_seed = define(
    "draw_seed(Tensor like) -> Tensor", _draw_seed, _draw_seed_fake, tags=(torch.Tag.nondeterministic_seeded,)
)
"""A fresh int64[1] seed from the default generator of the tensor's device; advances that generator."""
