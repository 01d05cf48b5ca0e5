"""Operators that quantize and dequantize: ``narrowcast::quantize``, its in-place form, and what the others build on.

Every quantizing operator ends in ``seed``, ``scale`` and ``amax``. ``seed``: int64[1], for stochastic rounding.
``scale`` and ``amax``: fp32 (n,), the state of delayed scaling of one layer and direction; a delayed quantizer reads
its slot of ``scale`` and raises its slot of ``amax`` to max|x|, the others read neither. Without ``amax`` nothing is
collected. Only current scaling takes ``amax`` without ``scale``, for what it would find out itself.

The schemas do not declare that write. Declared, it would make the compiler hand a backward a clone of the buffer, in
which what the backward collects is lost, and an operator that mutates cannot return a list. It need not be declared:
nothing in the same graph reads the buffer afterwards, and raising it twice changes nothing.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ._library import QUANTIZER, always, define
from .numerics import numerics_for
from .quantizer_value import QuantizerValue

STATE = "Tensor? seed=None, Tensor? scale=None, Tensor? amax=None"
"""Schema of the arguments that every quantizing operator ends in."""


def describe(
    like: Tensor, shape: tuple[int, ...], dtype: torch.dtype, quantizer: QuantizerValue
) -> list[Tensor]:
    """Empty buffers as quantizing a tensor of that shape and dtype yields."""
    described = quantizer._describe_buffers(shape, dtype)
    return [like.new_empty(size, dtype=kind) for size, kind in described.values()]


def encode(
    numerics: Any,
    x: Any,
    quantizer: QuantizerValue,
    seed: Tensor | None,
    scale: Tensor | None,
    amax: Tensor | None,
) -> list[Tensor]:
    """Quantize a tensor, or a source of ``numerics`` where the quantizer takes sources; flatten order.

    Raises:
        ValueError: a delayed quantizer without ``scale``.
    """
    if scale is not None and quantizer._is_delayed():
        return quantizer._encode_scaled(numerics, x, scale, amax)
    if scale is None and amax is not None and quantizer._needs_amax:
        return quantizer._encode_again(numerics, x, amax)
    return quantizer._encode(numerics, x, seed)


def encode_source(
    numerics: ModuleType,
    source: Any,
    quantizer: QuantizerValue,
    seed: Tensor | None,
    scale: Tensor | None,
    amax: Tensor | None,
    column_sums: bool = False,
) -> list[Tensor]:
    """Quantize what a source describes, in one pass where the quantizer's kernels take sources.

    With ``column_sums`` the sums over all but the last dim, fp32 (K,), are the last output.
    """
    x = source if quantizer._takes_sources else numerics.sources.materialize(source)
    if scale is not None and quantizer._is_delayed():
        buffers = quantizer._encode_scaled(numerics, x, scale, amax)
    else:
        buffers = quantizer._encode(numerics, x, seed)
    return [*buffers, numerics.sources.column_sum(x)] if column_sums else buffers


def _quantize(
    x: Tensor,
    quantizer: QuantizerValue,
    seed: Tensor | None = None,
    scale: Tensor | None = None,
    amax: Tensor | None = None,
) -> list[Tensor]:
    numerics = numerics_for(x)  # from here on as encode(), in line: this operator runs the most
    if scale is not None and quantizer._is_delayed():
        return quantizer._encode_scaled(numerics, x, scale, amax)
    if scale is None and amax is not None and quantizer._needs_amax:
        return quantizer._encode_again(numerics, x, amax)
    return quantizer._encode(numerics, x, seed)


def _quantize_fake(x: Tensor, quantizer: QuantizerValue, *state: Tensor | None) -> list[Tensor]:
    return describe(x, tuple(x.shape), x.dtype, quantizer)


quantize = define(
    f"quantize(Tensor x, {QUANTIZER} quantizer, {STATE}) -> Tensor[]",
    _quantize,
    _quantize_fake,
    inlined=always,
)
"""Quantize ``x`` (*lead, K), fp32, bf16 or fp16: the quantizer's buffers in the order of its description."""


quantize_operand = define(
    f"quantize_operand(Tensor x, {QUANTIZER} quantizer, {STATE}) -> Tensor[]",
    _quantize,
    _quantize_fake,
    inlined=always,
    shared=True,
)
"""As :data:`quantize`, for what GEMMs alone read: layers of a graph that quantize a tensor alike share the result."""


amax_to_share = define(
    f"amax_to_share(Tensor x, {QUANTIZER} quantizer, Tensor? seed) -> Tensor",
    lambda x, quantizer, seed: quantizer._amax_to_share(numerics_for(x), x, seed),
    lambda x, quantizer, seed: x.new_empty(2, dtype=torch.float32),
    inlined=always,
)
"""Amaxes of ``x``, row-wise and column-wise, fp32 (2,).

Reduced over the processes that hold parts of a tensor, they are the ``scale`` that :data:`quantize` takes for a
quantizer ``with_amax_reduction``."""


def _quantize_keeping_amax(x: Tensor, quantizer: QuantizerValue) -> list[Tensor]:
    return quantizer._encode_keeping_amax(numerics_for(x), x)


def _quantize_keeping_amax_fake(x: Tensor, quantizer: QuantizerValue) -> list[Tensor]:
    parts = numerics_for(x).float8.parts_of(x.numel())
    return [*describe(x, tuple(x.shape), x.dtype, quantizer), x.new_empty((parts,), dtype=torch.float32)]


quantize_keeping_amax = define(
    f"quantize_keeping_amax(Tensor x, {QUANTIZER} quantizer) -> Tensor[]",
    _quantize_keeping_amax,
    _quantize_keeping_amax_fake,
    inlined=always,
)
"""As :data:`quantize` with current scaling; last comes what it found out about ``x`` before it encoded, fp32.

Passed as ``amax`` without ``scale``, that spares :data:`quantize` the pass over the same ``x`` that finds it out.
"""


def _quantize_rounded(
    x: Tensor,
    dtype: torch.dtype,
    quantizer: QuantizerValue,
    seed: Tensor | None = None,
    scale: Tensor | None = None,
    amax: Tensor | None = None,
) -> list[Tensor]:
    numerics = numerics_for(x)
    return encode_source(numerics, numerics.sources.rounded(x, dtype), quantizer, seed, scale, amax)


quantize_rounded = define(
    f"quantize_rounded(Tensor x, ScalarType dtype, {QUANTIZER} quantizer, {STATE}) -> Tensor[]",
    _quantize_rounded,
    lambda x, dtype, quantizer, *_: describe(x, tuple(x.shape), dtype, quantizer),
    inlined=always,
)
"""As :data:`quantize` of ``x.to(dtype)``, which is written nowhere if the quantizer's kernels take sources."""


def _quantize_dbias(
    x: Tensor,
    quantizer: QuantizerValue,
    seed: Tensor | None = None,
    scale: Tensor | None = None,
    amax: Tensor | None = None,
) -> list[Tensor]:
    numerics = numerics_for(x)
    source = numerics.sources.tensor(x, column_sums=True)
    return encode_source(numerics, source, quantizer, seed, scale, amax, column_sums=True)


def _quantize_dbias_fake(x: Tensor, quantizer: QuantizerValue, *state: Tensor | None) -> list[Tensor]:
    return [*_quantize_fake(x, quantizer), x.new_empty(x.shape[-1:], dtype=torch.float32)]


quantize_dbias = define(
    f"quantize_dbias(Tensor x, {QUANTIZER} quantizer, {STATE}) -> Tensor[]",
    _quantize_dbias,
    _quantize_dbias_fake,
    inlined=always,
)
"""As :data:`quantize`, with the sums of ``x`` over all but its last dim, fp32 (K,), as the last output."""


def _quantize_into(
    x: Tensor, out: list[Tensor], quantizer: QuantizerValue, noop_flag: Tensor | None, seed: Tensor | None
) -> None:
    for destination, source in zip(out, _quantize(x, quantizer, seed), strict=True):
        if noop_flag is not None:  # decided on the device: no synchronisation, graph-capturable
            source = torch.where(noop_flag != 0, destination, source)
        destination.copy_(source)


quantize_into = define(
    f"quantize_into(Tensor x, Tensor(a!)[] out, {QUANTIZER} quantizer, Tensor? noop_flag, Tensor? seed) -> ()",
    _quantize_into,
    lambda *_: None,
)
"""Overwrite ``out`` with the quantization of ``x``, or leave it when ``noop_flag`` (fp32, one element) is non-zero."""


def _dequantize(
    buffers: list[Tensor], quantizer: QuantizerValue, columnwise: bool, dtype: torch.dtype, shape: list[int]
) -> Tensor:
    decoded = quantizer._decode(numerics_for(buffers[0]), buffers, columnwise, dtype)
    if list(decoded.shape) == list(shape):
        return decoded
    if not shape:  # a number
        return decoded.reshape(())
    # formats that pack or pad hold more than the logical tensor, along the first and the last dim of the matrix
    rows = math.prod(shape[:-1])
    if rows * shape[-1] == 0:
        return decoded.new_empty(shape)
    matrix = decoded.reshape(-1, decoded.shape[-1])
    return matrix[:rows, : shape[-1]].reshape(shape).contiguous()


dequantize = define(
    f"dequantize(Tensor[] buffers, {QUANTIZER} quantizer, bool columnwise, ScalarType dtype, SymInt[] shape) -> Tensor",
    _dequantize,
    lambda buffers, quantizer, columnwise, dtype, shape: buffers[0].new_empty(shape, dtype=dtype),
    inlined=always,
)
"""Decode the buffers of one direction to a tensor of the logical ``shape``."""


draw_seed = define(
    "draw_seed(Tensor like) -> Tensor",
    lambda like: torch.randint(0, 2**63 - 1, (1,), dtype=torch.int64, device=like.device),
    lambda like: like.new_empty((1,), dtype=torch.int64),
    tags=(torch.Tag.nondeterministic_seeded,),
)
"""A fresh int64[1] seed from the default generator of the tensor's device; advances that generator."""
