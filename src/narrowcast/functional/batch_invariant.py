"""Products and softmax whose rows have the same bits in every batch: a GEMM of operands, and the parts of attention.

On a CPU the reference multiplies, on a GPU a Triton kernel: FP8 codes as they are, others decoded to bf16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import kernels, reference
from .._device import is_fp8_available
from ..formats import FLOAT8_BLOCK
from ._library import QUANTIZER, define, give_backward
from .gemm import decoded_operands, gemm_directions
from .numerics import computed_by, numerics_for
from .quantizer_value import NativeOperand, QuantizerValue


def _gemm(
    kind: str,
    left: list[Tensor],
    left_quantizer: QuantizerValue,
    right: list[Tensor],
    right_quantizer: QuantizerValue,
    bias: Tensor | None,
    dtype: torch.dtype,
    rows: int,
    columns: int,
    most: int,
    processes: int,
) -> Tensor:
    columnwise, numerics = gemm_directions(kind), numerics_for(left[0]).batch_invariant
    a, b = _codes(left, left_quantizer, columnwise[0]), _codes(right, right_quantizer, columnwise[1])
    if a is not None and b is not None and (a.scaling, b.scaling) in _PAIRS:
        out = _multiply_codes(a, b, rows, columns, dtype, (most, processes))
    else:
        x, y, scales = decoded_operands(
            left, left_quantizer, right, right_quantizer, columnwise, rows, columns
        )
        splits = reference.batch_invariant.splits_of(x.shape[1], most, processes)
        out = numerics.matmul(x, y, splits, scales, dtype)
    return out if bias is None else out.add_(bias.to(dtype))


_BLOCKS = {"tensor": 0, "row": 0, "1x128": FLOAT8_BLOCK}
"""Elements of a row on the left that share a scale; 0 for all."""
_PAIRS = (*((scaling, scaling) for scaling in _BLOCKS), ("row", "tensor"), ("1x128", "128x128"))


def _codes(buffers: list[Tensor], quantizer: QuantizerValue, columnwise: bool) -> NativeOperand | None:
    """Return the operand as FP8 codes, if this device multiplies them in the batch-invariant mode."""
    if not (buffers[0].is_cuda and kernels.AVAILABLE and len(buffers) == 2 and is_fp8_available()):
        return None
    return quantizer._native_operand(buffers, columnwise)


def _multiply_codes(
    a: NativeOperand, b: NativeOperand, rows: int, columns: int, dtype: torch.dtype, parts: tuple[int, int]
) -> Tensor:
    # operands may be zero-padded to different lengths, and to more rows than the result has
    contraction = min(a.data.shape[1], b.data.shape[1])
    x, y = a.data[:rows, :contraction], b.data[:columns, :contraction]
    splits = reference.batch_invariant.splits_of(contraction, *parts)
    tiles = b.scaling == "128x128"
    scales = a.scale, b.scale.t() if tiles else b.scale
    blocks = _BLOCKS[a.scaling], FLOAT8_BLOCK if tiles else 1
    return kernels.batch_invariant.multiply_codes(x, scales[0], y, scales[1], splits, dtype, *blocks)


gemm_batch_invariant = define(
    f"gemm_batch_invariant(str kind, Tensor[] left, {QUANTIZER} left_quantizer, Tensor[] right, "
    f"{QUANTIZER} right_quantizer, Tensor? bias, ScalarType dtype, SymInt rows, SymInt columns, "
    "int most, int processes) -> Tensor",
    _gemm,
    lambda kind, left, *arguments: left[0].new_empty(arguments[5:7], dtype=arguments[4]),
)
"""Multiply two operands, quantized or not, so that a row of the left one has the same result in every batch.

Args:
    kind, left, right, bias, dtype, rows, columns: as :data:`gemm` takes them.
    most, processes: as of ``reference.batch_invariant.splits_of``.

Returns:
    (rows, columns) of ``dtype``, contiguous.

Numerics:
    ``RN_dtype(RN_dtype(left @ right.T) + RN_dtype(bias))``: the product is rounded before the bias, which a
    row-parallel layer adds after the sum over its processes.
"""

matmul_batch_invariant = define(
    "matmul_batch_invariant(Tensor left, Tensor right) -> Tensor",
    computed_by("batch_invariant", "matmul"),
    lambda left, right: left.new_empty((*left.shape[:-1], right.shape[-2]), dtype=torch.float32),
)
"""``left @ right.mT`` of (*batch, M, K) and (*batch, N, K), fp32."""

mix_batch_invariant = define(
    "mix_batch_invariant(Tensor weights, Tensor values) -> Tensor",
    computed_by("batch_invariant", "mix"),
    lambda weights, values: weights.new_empty((*weights.shape[:-1], values.shape[-1])),
)
"""``weights @ values`` of (*batch, M, K), not negative, and (*batch, K, N), fp32."""

softmax_batch_invariant = define(
    "softmax_batch_invariant(Tensor logits) -> Tensor",
    computed_by("batch_invariant", "softmax"),
    lambda logits: torch.empty_like(logits, memory_format=torch.contiguous_format),
)
"""The softmax over the last dim, fp32; zeros for a row of -inf."""

_MASK = "Tensor? hidden, float scale, int left, int right, SymInt shift"

attention_batch_invariant = define(
    f"attention_batch_invariant(Tensor q, Tensor k, Tensor v, {_MASK}) -> (Tensor, Tensor, Tensor)",
    computed_by("batch_invariant_attention", "attention"),
    lambda q, k, v, *_: (
        q.new_empty((*q.shape[:3], v.shape[-1])),
        *(q.new_empty(q.shape[:3], dtype=torch.float32) for _ in range(2)),
    ),
)
"""The output of attention, and of each query the logarithm of the sum of its exponentials and its largest score."""


def attention_is_one_operator(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether :data:`attention_batch_invariant` takes these dtypes and head dims; on a GPU a kernel has to."""
    if not q.dtype == k.dtype == v.dtype:
        return False
    if not q.is_cuda:
        return True
    half, largest = q.dtype in (torch.bfloat16, torch.float16), max(q.shape[-1], v.shape[-1])
    return kernels.AVAILABLE and half and largest <= kernels.batch_invariant_attention.LARGEST_HEAD  # type: ignore[attr-defined]


_attention_backward_op = define(
    "attention_batch_invariant_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_MASK}) -> (Tensor, Tensor, Tensor)",
    computed_by("batch_invariant_attention", "attention_backward"),
    lambda grad, q, k, v, *_: tuple(x.new_empty(x.shape) for x in (q, k, v)),
)


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _matmul_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    left, right = ctx.saved_tensors
    return (grad @ right.float()).to(left.dtype), (grad.mT @ left.float()).to(right.dtype)


def _mix_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    weights, values = ctx.saved_tensors
    return grad @ values.float().mT, (weights.mT @ grad).to(values.dtype)


def _save_output(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(output)


def _softmax_backward(ctx: Any, grad: Tensor) -> Tensor:
    (weights,) = ctx.saved_tensors
    scaled = grad * weights
    return scaled - weights * scaled.sum(-1, keepdim=True)


def _save_attention(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, hidden, *ctx.window = inputs
    out, lse, top = output
    ctx.mark_non_differentiable(lse, top)
    ctx.save_for_backward(q, k, v, out, lse, hidden)


def _attention_backward(ctx: Any, grad: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    *tensors, hidden = ctx.saved_tensors
    return *_attention_backward_op(grad, *tensors, hidden, *ctx.window), *(None,) * 5


give_backward("attention_batch_invariant", _attention_backward, _save_attention)
give_backward("matmul_batch_invariant", _matmul_backward, _save_inputs)
give_backward("mix_batch_invariant", _mix_backward, _save_inputs)
give_backward("softmax_batch_invariant", _softmax_backward, _save_output)
