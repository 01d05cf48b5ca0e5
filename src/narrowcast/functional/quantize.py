"""Operators that quantize and dequantize a tensor: ``narrowcast::quantize`` and its variants.

Every quantizing operator ends in ``seed``, ``scale`` and ``amax``. ``seed``: int64[1], for stochastic rounding.
``scale`` and ``amax``: fp32 (n,), the state of delayed scaling of one layer and direction; a delayed quantizer reads
its slot of ``scale`` and raises its slot of ``amax`` to max|x|, the others read neither. Without ``amax`` nothing is
collected. Current scaling alone takes ``amax`` without ``scale``, instead of the one that it would compute.

The schemas do not declare that write. Declared, it would make the compiler hand a backward a clone of the buffer, in
which what the backward collects is lost, and an operator that mutates cannot return a list. It need not be declared:
nothing in the same graph reads the buffer afterwards, and raising it twice changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ._library import QUANTIZER, always, define
from ._producers import STATE, Producer, define_quantizing, describe, encode
from .numerics import numerics_for
from .quantizer_value import QuantizerValue


def _quantize_fake(x: Tensor, quantizer: QuantizerValue, *state: Tensor | None) -> list[Tensor]:
    return describe(x, tuple(x.shape), x.dtype, quantizer)


quantize = define(
    f"quantize(Tensor x, {QUANTIZER} quantizer, {STATE}) -> Tensor[]",
    encode,
    _quantize_fake,
    lowered=always,
)
"""Quantize ``x`` (*lead, K), fp32, bf16 or fp16: the quantizer's buffers in the order of its description."""


quantize_operand = define(
    f"quantize_operand(Tensor x, {QUANTIZER} quantizer, {STATE}) -> Tensor[]",
    encode,
    _quantize_fake,
    lowered=always,
    shared=True,
)
"""As :data:`quantize`, for results that only GEMMs read: equal calls in one graph share one result."""


def _amax_to_share(x: Tensor, quantizer: QuantizerValue, seed: Tensor | None) -> Tensor:
    return quantizer._amax_to_share(numerics_for(x), x, seed)


amax_to_share = define(
    f"amax_to_share(Tensor x, {QUANTIZER} quantizer, Tensor? seed) -> Tensor",
    _amax_to_share,
    lambda x, quantizer, seed: x.new_empty(2, dtype=torch.float32),
    lowered=always,
)
"""Amaxes of ``x``, row-wise and column-wise, fp32 (2,).

Reduced over the processes that hold parts of a tensor, they are the ``scale`` that :data:`quantize` takes for a
quantizer ``with_amax_reduction``."""


_TENSOR = Producer(
    name="tensor",
    inputs=("Tensor x",),
    like=0,
    source=None,
    shape=lambda x: tuple(x.shape),
)

quantize_keeping_amax = define_quantizing(_TENSOR, "quantize_keeping_amax", keep_amax=True)
"""As :data:`quantize` with current scaling; the last output is the amax of ``x``, in parts, fp32.

Passed as ``amax`` without ``scale``, it saves a later :data:`quantize` of the same ``x`` the pass that finds it.
"""

quantize_rounded = define_quantizing(
    Producer(
        name="rounded",
        inputs=("Tensor x", "ScalarType dtype"),
        like=0,
        source=lambda numerics, wanted, x, dtype: (numerics.fused_producers.rounded(x, dtype), ()),
        shape=lambda x, dtype: tuple(x.shape),
        dtype=lambda x, dtype: dtype,
    ),
    "quantize_rounded",
)
"""As :data:`quantize` of ``x.to(dtype)``, which is written nowhere if the quantizer's kernels take sources."""

quantize_dbias = define_quantizing(replace(_TENSOR, sums="always"), "quantize_dbias")
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
    lowered=always,
)
"""Decode the buffers of one direction to a tensor of the logical ``shape``."""


draw_seed = define(
    "draw_seed(Tensor like) -> Tensor",
    lambda like: torch.randint(0, 2**63 - 1, (1,), dtype=torch.int64, device=like.device),
    lambda like: like.new_empty((1,), dtype=torch.int64),
    tags=(torch.Tag.nondeterministic_seeded,),
)
"""A fresh int64[1] seed from the default generator of the tensor's device; advances that generator."""
