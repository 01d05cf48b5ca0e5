"""FP8 with one fp32 scale per row, or per group of a row's elements, by the rules of training and inference engines.

Training computes the factor that encodes, by the rule that per-tensor and block scaling share:

- ``"training"``: code = fmt(RN(x * s)) with s = RN(max / amax), and scale_inv = RN(1 / s);
- ``"training_power_2"``: the same with s rounded down to a power of two.

An engine stores the factor that decodes, ``amax / 448``, and derives from it what multiplies. These rules are in use,
which differ in the last bit of a scale and in codes at the middle between two values:

- ``"divide"``: code = fmt(RN(x / s)) with s = RN(amax / max);
- ``"reciprocal"``: code = fmt(RN(x * RN(1 / s))) with the same s;
- ``"factors"``: code = fmt(RN(x * RN(max / amax))), and s = RN(amax * RN(1 / max));
- ``"product"``: code = fmt(RN(x / s)) with that s;
- ``"bfloat16"``: as ``"divide"``, with the scale and the quotient rounded to bf16;
- ``"triton"``: as ``"divide"``. On a GPU both divisions are Triton's, ``div.full.f32``, within two units of the last
  place. How they round follows from a table in the GPU, so this reference does not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..formats import FLT_MAX, ElementFormat, cdiv, round_up
from .codecs import decode_float8, encode_float8_
from .layout import as_matrix, magnitude, widen
from .scaling import reciprocal, scale_from_amax

TRAINING_RULES = ("training", "training_power_2")
RULES = ("divide", "reciprocal", "factors", "product", "bfloat16", "triton", *TRAINING_RULES)


def quantize(
    x: Tensor,
    fmt: ElementFormat,
    *,
    rule: str,
    epsilon: float = 0.0,
    smallest: float = 0.0,
    group: int = 0,
    alignment: int = 1,
) -> list[Tensor]:
    """Quantize the rows of a tensor.

    Args:
        x: fp32, bf16 or fp16, shape (*lead, K), any strides; M is the product of ``lead``.
        fmt: E4M3 or E5M2.
        rule: of :data:`RULES`.
        epsilon: lower bound for the amax of a group.
        smallest: lower bound for its scale.
        group: elements of a row that share a scale, the last of a row fewer; 0 for all of them.
        alignment: the scales of as many rows are stored, zeros behind the last.

    Raises:
        TypeError: ``x`` has another dtype.
        ValueError: rank below 2.

    Numerics:
        ``[codes uint8 x.shape, scale_inv fp32 (groups, round_up(M, alignment))]``. NaN is not part of an
        amax and stays one NaN; a group with an infinity decodes to NaN. The scale of a group of zeros is 1 where the
        bounds leave it 0.
    """
    matrix = as_matrix(widen(x))
    rows, columns = matrix.shape
    size = group or max(columns, 1)
    count = cdiv(columns, size) if group else 1
    padded = torch.nn.functional.pad(matrix, (0, count * size - columns)).view(rows, count, size)
    amax = magnitude(padded).amax(-1, keepdim=True).clamp_(min=epsilon)
    if rule in TRAINING_RULES:
        power_2 = rule == "training_power_2"
        scale = scale_from_amax(amax, fmt.max, power_2=power_2, epsilon=epsilon, overflow=FLT_MAX)
        return _stored(
            padded * scale, reciprocal(scale).clamp_(min=smallest), x.shape, columns, fmt, alignment
        )
    if rule in ("factors", "product"):
        scale_inv = amax * reciprocal(torch.full_like(amax, fmt.max))
    else:
        scale_inv = amax / torch.full_like(amax, fmt.max)
    rounded = torch.bfloat16 if rule == "bfloat16" else torch.float32
    scale_inv = scale_inv.to(rounded).float()
    scale_inv = scale_inv.clamp_(min=smallest).masked_fill_(amax == 0.0, smallest or 1.0)
    if rule == "reciprocal":
        scaled = padded * reciprocal(scale_inv)
    elif rule == "factors":
        scaled = padded * torch.where(amax == 0.0, 1.0, torch.full_like(amax, fmt.max).div_(amax))
    else:
        scaled = (padded / scale_inv).to(rounded).float()
    return _stored(scaled, scale_inv, x.shape, columns, fmt, alignment)


def quantize_both(x: Tensor, fmt: ElementFormat, *, rule: str, epsilon: float = 0.0) -> list[Tensor]:
    """Quantize the rows of a tensor, and its columns as the rows of its transpose.

    Args:
        x, fmt, epsilon: as :func:`quantize` takes them.
        rule: of :data:`TRAINING_RULES`.

    Raises:
        TypeError, ValueError: as :func:`quantize`.

    Numerics:
        ``[codes uint8 x.shape, scale_inv fp32 (1, M), codes uint8 (K, M), scale_inv fp32 (1, K)]``.
    """
    rules: dict[str, Any] = {"rule": rule, "epsilon": epsilon}
    return [*quantize(x, fmt, **rules), *quantize(transposed(x), fmt, **rules)]


def _stored(
    scaled: Tensor, scale_inv: Tensor, shape: torch.Size, columns: int, fmt: ElementFormat, alignment: int
) -> list[Tensor]:
    rows, count, size = scaled.shape
    codes = encode_float8_(scaled, fmt).view(rows, count * size)[:, :columns]
    stored = torch.nn.functional.pad(scale_inv.view(rows, count).t(), (0, round_up(rows, alignment) - rows))
    # A transposed column counts as contiguous with the strides of a column.
    return [codes.reshape(shape).contiguous(), stored.reshape(-1).view(stored.shape)]


def dequantize(codes: Tensor, scale_inv: Tensor, fmt: ElementFormat, dtype: torch.dtype) -> Tensor:
    """Decode rows with one scale each.

    Args:
        codes: uint8 (*lead, K).
        scale_inv: fp32, one per row.
        fmt: of the codes.
        dtype: of the result.

    Numerics:
        ``RN(code * scale_inv)`` in fp32, then rounded to ``dtype``.
    """
    values = decode_float8(codes, fmt)
    return values.mul_(scale_inv.view(*codes.shape[:-1], 1)).to(dtype)


def transposed(x: Tensor) -> Tensor:
    """Return a tensor (*lead, K) as the matrix (K, M) whose rows are its columns; nothing is copied."""
    return as_matrix(x).t()
