"""Operators that quantize and dequantize: ``narrowcast::quantize`` and its stateful and in-place forms."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ._library import QUANTIZER, define
from .numerics import numerics_for
from .quantizer_value import QuantizerValue


def describe(
    like: Tensor, shape: tuple[int, ...], dtype: torch.dtype, quantizer: QuantizerValue
) -> list[Tensor]:
    """Empty buffers as quantizing a tensor of that shape and dtype yields."""
    described = quantizer._describe_buffers(shape, dtype)
    return [like.new_empty(size, dtype=kind) for size, kind in described.values()]


def _described(x: Tensor, quantizer: QuantizerValue) -> list[Tensor]:
    return describe(x, tuple(x.shape), x.dtype, quantizer)


def encode_source(
    numerics: ModuleType, source: Any, quantizer: QuantizerValue, seed: Tensor | None
) -> list[Tensor]:
    """Quantize what a source of ``numerics`` describes, in one pass where the quantizer's kernels take sources."""
    return quantizer._encode(numerics, _taken(numerics, source, quantizer), seed)


def encode_with_sums(
    numerics: ModuleType, source: Any, quantizer: QuantizerValue, seed: Tensor | None
) -> list[Tensor]:
    """:func:`encode_source`, with the sums over all but the last dim, fp32 (K,), as the last output."""
    x = _taken(numerics, source, quantizer)
    return [*quantizer._encode(numerics, x, seed), numerics.sources.column_sum(x)]


def _taken(numerics: ModuleType, source: Any, quantizer: QuantizerValue) -> Any:
    return source if quantizer._takes_sources else numerics.sources.materialize(source)


def _quantize(x: Tensor, quantizer: QuantizerValue, seed: Tensor | None = None) -> list[Tensor]:
    return quantizer._encode(numerics_for(x), x, seed)


def _quantize_fake(x: Tensor, quantizer: QuantizerValue, seed: Tensor | None = None) -> list[Tensor]:
    return _described(x, quantizer)


quantize = define(
    f"quantize(Tensor x, {QUANTIZER} quantizer, Tensor? seed=None) -> Tensor[]", _quantize, _quantize_fake
)
"""Quantize ``x``; buffers in the order of the quantizer's description. ``seed``: int64[1] for stochastic rounding."""


def encode_slots(
    numerics: ModuleType, x: Any, scale: Tensor, amax: Tensor, quantizer: QuantizerValue
) -> tuple[Tensor, ...]:
    """(data, transpose, scale_inv) of a delayed quantizer; an absent direction is an empty tensor.

    An operator that mutates cannot return a list, so those that max-accumulate into ``amax`` return all three.
    """
    *codes, scale_inv = quantizer._encode_scaled(numerics, x, scale, amax)
    made = dict(zip(quantizer._directions(), codes, strict=True))
    data, transpose = (made[c] if c in made else _absent(scale) for c in (False, True))
    return data, transpose, scale_inv


def describe_slots(
    like: Tensor, shape: tuple[int, ...], dtype: torch.dtype, quantizer: QuantizerValue
) -> tuple[Tensor, ...]:
    """What :func:`encode_slots` returns for a tensor of that shape and dtype."""
    present = quantizer._describe_buffers(shape, dtype)
    return tuple(
        like.new_empty(present[name][0], dtype=present[name][1]) if name in present else _absent(like)
        for name in _DELAYED_SLOTS
    )


_DELAYED_SLOTS = ("_data", "_transpose", "_scale_inv")


def _absent(like: Tensor) -> Tensor:
    return like.new_empty(0, dtype=torch.uint8)


def _quantize_delayed(
    x: Tensor, scale: Tensor, amax: Tensor, quantizer: QuantizerValue
) -> tuple[Tensor, ...]:
    return encode_slots(numerics_for(x), x, scale, amax, quantizer)


def _quantize_delayed_fake(
    x: Tensor, scale: Tensor, amax: Tensor, quantizer: QuantizerValue
) -> tuple[Tensor, ...]:
    return describe_slots(x, tuple(x.shape), x.dtype, quantizer)


quantize_delayed = define(
    f"quantize_delayed(Tensor x, Tensor scale, Tensor(a!) amax, {QUANTIZER} quantizer) -> (Tensor, Tensor, Tensor)",
    _quantize_delayed,
    _quantize_delayed_fake,
)
"""Quantize with the scale in the quantizer's slot, max-accumulating into that slot of ``amax``.

Returns data, transpose and scale_inv; a direction the quantizer does not ask for is an empty tensor.
"""


def _quantize_dbias(x: Tensor, quantizer: QuantizerValue, seed: Tensor | None = None) -> list[Tensor]:
    numerics = numerics_for(x)
    return encode_with_sums(numerics, numerics.sources.tensor(x, column_sums=True), quantizer, seed)


def _quantize_dbias_fake(x: Tensor, quantizer: QuantizerValue, seed: Tensor | None = None) -> list[Tensor]:
    return [*_described(x, quantizer), x.new_empty(x.shape[-1:], dtype=torch.float32)]


quantize_dbias = define(
    f"quantize_dbias(Tensor x, {QUANTIZER} quantizer, Tensor? seed=None) -> Tensor[]",
    _quantize_dbias,
    _quantize_dbias_fake,
)
"""As :data:`quantize`, with the sums of ``x`` over all but its last dim, fp32 (K,), as the last output."""


def _quantize_dbias_delayed(
    x: Tensor, scale: Tensor, amax: Tensor, quantizer: QuantizerValue
) -> tuple[Tensor, ...]:
    numerics = numerics_for(x)
    source = numerics.sources.tensor(x, column_sums=True)
    return (*encode_slots(numerics, source, scale, amax, quantizer), numerics.sources.column_sum(source))


def _quantize_dbias_delayed_fake(
    x: Tensor, scale: Tensor, amax: Tensor, quantizer: QuantizerValue
) -> tuple[Tensor, ...]:
    return (
        *_quantize_delayed_fake(x, scale, amax, quantizer),
        x.new_empty(x.shape[-1:], dtype=torch.float32),
    )


quantize_dbias_delayed = define(
    f"quantize_dbias_delayed(Tensor x, Tensor scale, Tensor(a!) amax, {QUANTIZER} quantizer) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _quantize_dbias_delayed,
    _quantize_dbias_delayed_fake,
)
"""As :data:`quantize_delayed`, with the column sums of ``x`` as the last output."""


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
    decoded = quantizer._decode(numerics_for(buffers[0]), buffers, columnwise, dtype)
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
