"""Operators that quantize and dequantize: ``narrowcast::quantize``, its in-place form, and what the others build on.

Every quantizing operator ends in ``seed``, ``scale`` and ``amax``. ``seed``: int64[1], for stochastic rounding.
``scale`` and ``amax``: fp32 (n,), the state of delayed scaling of one layer and direction; a delayed quantizer reads
its slot of ``scale`` and raises its slot of ``amax`` to max|x|, the others read neither. Without ``amax`` nothing is
collected. Current scaling alone takes ``amax`` without ``scale``, in place of the one that it would compute.

The schemas do not declare that write. Declared, it would make the compiler hand a backward a clone of the buffer, in
which what the backward collects is lost, and an operator that mutates cannot return a list. It need not be declared:
nothing in the same graph reads the buffer afterwards, and raising it twice changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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
    x: Any,
    quantizer: QuantizerValue,
    seed: Tensor | None = None,
    scale: Tensor | None = None,
    amax: Tensor | None = None,
    numerics: Any = None,
) -> list[Tensor]:
    """Quantize a tensor, or a source of ``numerics`` where the quantizer takes sources; flatten order.

    Args:
        numerics: what computes; None: what suits the tensor's device.
    Raises:
        ValueError: a delayed quantizer without ``scale``.
    """
    if numerics is None:
        numerics = numerics_for(x)
    if scale is not None and quantizer._is_delayed():
        return quantizer._encode_scaled(numerics, x, scale, amax)
    if scale is None and amax is not None and quantizer._needs_amax:
        return quantizer._encode_again(numerics, x, amax)
    return quantizer._encode(numerics, x, seed)


def _quantize_fake(x: Tensor, quantizer: QuantizerValue, *state: Tensor | None) -> list[Tensor]:
    return describe(x, tuple(x.shape), x.dtype, quantizer)


quantize = define(
    f"quantize(Tensor x, {QUANTIZER} quantizer, {STATE}) -> Tensor[]",
    encode,
    _quantize_fake,
    inlined=always,
)
"""Quantize ``x`` (*lead, K), fp32, bf16 or fp16: the quantizer's buffers in the order of its description."""


quantize_operand = define(
    f"quantize_operand(Tensor x, {QUANTIZER} quantizer, {STATE}) -> Tensor[]",
    encode,
    _quantize_fake,
    inlined=always,
    shared=True,
)
"""As :data:`quantize`, for results that only GEMMs read: equal calls in one graph share one result."""


amax_to_share = define(
    f"amax_to_share(Tensor x, {QUANTIZER} quantizer, Tensor? seed) -> Tensor",
    lambda x, quantizer, seed: quantizer._amax_to_share(numerics_for(x), x, seed),
    lambda x, quantizer, seed: x.new_empty(2, dtype=torch.float32),
    inlined=always,
)
"""Amaxes of ``x``, row-wise and column-wise, fp32 (2,).

Reduced over the processes that hold parts of a tensor, they are the ``scale`` that :data:`quantize` takes for a
quantizer ``with_amax_reduction``."""


def _quantize_keeping_amax_fake(x: Tensor, quantizer: QuantizerValue) -> list[Tensor]:
    parts = numerics_for(x).float8.parts_of(x.numel())
    return [*describe(x, tuple(x.shape), x.dtype, quantizer), x.new_empty((parts,), dtype=torch.float32)]


quantize_keeping_amax = define(
    f"quantize_keeping_amax(Tensor x, {QUANTIZER} quantizer) -> Tensor[]",
    lambda x, quantizer: quantizer._encode_keeping_amax(numerics_for(x), x),
    _quantize_keeping_amax_fake,
    inlined=always,
)
"""As :data:`quantize` with current scaling; the last output is the amax of ``x``, in parts, fp32.

Passed as ``amax`` without ``scale``, it saves a later :data:`quantize` of the same ``x`` the pass that finds it.
"""


def _quantize_rounded(
    x: Tensor, dtype: torch.dtype, quantizer: QuantizerValue, *state: Tensor | None
) -> list[Tensor]:
    numerics = numerics_for(x)
    source = numerics.sources.rounded(x, dtype) if quantizer._takes_sources else x.to(dtype)
    return encode(source, quantizer, *state, numerics=numerics)


quantize_rounded = define(
    f"quantize_rounded(Tensor x, ScalarType dtype, {QUANTIZER} quantizer, {STATE}) -> Tensor[]",
    _quantize_rounded,
    lambda x, dtype, quantizer, *_: describe(x, tuple(x.shape), dtype, quantizer),
    inlined=always,
)
"""As :data:`quantize` of ``x.to(dtype)``, which is written nowhere if the quantizer's kernels take sources."""


def _quantize_dbias(x: Tensor, quantizer: QuantizerValue, *state: Tensor | None) -> list[Tensor]:
    numerics = numerics_for(x)
    source = numerics.sources.tensor(x, column_sums=True) if quantizer._takes_sources else x
    buffers = encode(source, quantizer, *state, numerics=numerics)
    return [*buffers, numerics.sources.column_sum(source)]


def _quantize_dbias_fake(x: Tensor, quantizer: QuantizerValue, *state: Tensor | None) -> list[Tensor]:
    return [*_quantize_fake(x, quantizer), x.new_empty(x.shape[-1:], dtype=torch.float32)]


quantize_dbias = define(
    f"quantize_dbias(Tensor x, {QUANTIZER} quantizer, {STATE}) -> Tensor[]",
    _quantize_dbias,
    _quantize_dbias_fake,
    inlined=always,
)
"""As :data:`quantize`, with the sums of ``x`` over all but its last dim, fp32 (K,), as the last output."""


def overwrite(
    buffers: Sequence[Tensor | None], values: Sequence[Tensor | None], noop_flag: Tensor | None = None
) -> None:
    """Copy values into the buffers that are there.

    Args:
        noop_flag: fp32, one element; non-zero leaves all as it is. Decided on the device: no synchronization,
            and a CUDA graph can capture it.
    """
    for buffer, value in zip(buffers, values, strict=True):
        if buffer is not None and value is not None:
            buffer.copy_(value if noop_flag is None else torch.where(noop_flag != 0, buffer, value))


quantize_into = define(
    f"quantize_into(Tensor x, Tensor(a!)[] out, {QUANTIZER} quantizer, Tensor? noop_flag, Tensor? seed) -> ()",
    lambda x, out, quantizer, noop_flag, seed: overwrite(out, encode(x, quantizer, seed), noop_flag),
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
    # packed or padded formats hold more rows and columns than the logical tensor
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
