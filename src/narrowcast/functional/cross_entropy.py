"""Cross entropy of logits, and of a linear layer whose logits are made and spent one chunk of columns at a time.

The operators work on a part of a vocabulary: ``target`` counts from its first column, and a target that lies elsewhere
is no column of it. See ``reference.cross_entropy``.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .._determinism import DETERMINISM
from ..reference import batch_invariant
from ._library import define
from ._producers import Producer, define_plain, define_quantizing
from .numerics import computed_by, numerics_for

cross_entropy_statistics = define(
    "cross_entropy_statistics(Tensor logits, Tensor target) -> Tensor",
    computed_by("cross_entropy", "statistics"),
    lambda logits, target: logits.new_empty((3, logits.shape[0]), dtype=torch.float32),
)
"""Per row of ``logits`` (T, V): the log of the sum of exponentials, the target's logit, the sum; fp32 (3, T)."""


def _gradient_source(
    numerics: ModuleType,
    wanted: str,
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    grad: Tensor,
    label_smoothing: float,
    columns: int,
    column_sums: bool = False,
) -> tuple[Any, tuple[Tensor, ...]]:
    shares = 1.0 - label_smoothing, label_smoothing / columns
    producers = numerics.fused_producers
    return producers.cross_entropy_gradient(logits, target, lse, grad, *shares, column_sums=column_sums), ()


_GRADIENT = Producer(
    name="cross_entropy_gradient",
    inputs=(
        "Tensor logits",
        "Tensor target",
        "Tensor lse",
        "Tensor grad",
        "float label_smoothing",
        "SymInt columns",
    ),
    like=0,
    source=_gradient_source,
    shape=lambda logits, *_: tuple(logits.shape),
    sums="asked",
)

cross_entropy_gradient = define_plain(_GRADIENT)
"""Gradient (T, V) in the dtype of ``logits``; ``columns``: of the whole vocabulary, over which targets are smoothed."""

cross_entropy_gradient_quantize = define_quantizing(_GRADIENT)
"""Quantize that gradient; last come its sums over the rows, fp32 (V,), unless ``column_sums`` is False."""


# 256 MiB in bf16: enough columns for a GEMM at full speed, and little memory beside a model
LOGITS_AT_ONCE = 2**27
LEAST_COLUMNS = 1024
COLUMNS_IN_ORDER = 16384


def columns_at_once(hidden: Tensor) -> int:
    """Return how many columns of logits to make at a time for ``hidden`` (T, H); batch-invariant, as many for any T."""
    if DETERMINISM.batch_invariant:
        return COLUMNS_IN_ORDER
    return max(LEAST_COLUMNS, LOGITS_AT_ONCE // max(1, hidden.shape[0]))


def joined_statistics(parts: list[Tensor]) -> Tensor:
    """Return statistics (3, T) of a vocabulary, from those of its parts."""
    if len(parts) == 1:
        return parts[0]
    # all at once: the logarithm takes some forty launches, which cost more than a part's GEMM
    lse = batch_invariant.logsumexp(torch.stack([part[0] for part in parts], 1))
    return torch.cat((lse[None], functools.reduce(torch.add, [part[1:] for part in parts])))


def _chunk(
    weight: Tensor, bias: Tensor | None, hidden: Tensor, start: int, size: int, in_order: int
) -> Tensor:
    rows = weight[start : start + size]
    if in_order:
        splits = batch_invariant.splits_of(hidden.shape[1], in_order)
        logits = numerics_for(hidden).batch_invariant.matmul(hidden, rows, splits, None, hidden.dtype)
        return logits if bias is None else logits + bias[start : start + size]
    if bias is None:
        return torch.mm(hidden, rows.t())
    return torch.addmm(bias[start : start + size], hidden, rows.t())


def _linear_statistics(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, chunk: int, in_order: int = 0
) -> Tensor:
    numerics = numerics_for(hidden).cross_entropy
    chunk = chunk or columns_at_once(hidden)
    parts = []
    for start in range(0, weight.shape[0], chunk):
        logits = _chunk(weight, bias, hidden, start, chunk, in_order)
        parts.append(numerics.statistics(logits, target - start))
        del logits  # before the next chunk's
    return joined_statistics(parts)


linear_cross_entropy_statistics = define(
    "linear_cross_entropy_statistics(Tensor hidden, Tensor weight, Tensor? bias, Tensor target, int chunk, "
    "int in_order) -> Tensor",
    _linear_statistics,
    lambda hidden, *_: hidden.new_empty((3, hidden.shape[0]), dtype=torch.float32),
)
""":data:`cross_entropy_statistics` of ``hidden @ weight.T + bias``, ``chunk`` columns at a time; 0: as many as suit.

``in_order``: not 0 if the rows of the product are those of ``reference.batch_invariant``, in at most so many parts.
"""


def _linear_gradients(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    lse: Tensor,
    grad: Tensor,
    label_smoothing: float,
    chunk: int,
    wanted: list[bool],
    in_order: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    numerics = numerics_for(hidden).cross_entropy
    chunk = chunk or columns_at_once(hidden)
    shares = 1.0 - label_smoothing, label_smoothing / weight.shape[0]
    # Its sum runs over the vocabulary, so over the chunks: in fp32, as one GEMM would sum it.
    dhidden = torch.zeros(hidden.shape if wanted[0] else 0, dtype=torch.float32, device=hidden.device)
    dweight = torch.empty(weight.shape if wanted[1] else 0, dtype=weight.dtype, device=hidden.device)
    dbias = torch.empty(weight.shape[0] if wanted[2] else 0, dtype=torch.float32, device=hidden.device)
    for start in range(0, weight.shape[0], chunk):
        columns = slice(start, start + chunk)
        logits = _chunk(weight, bias, hidden, start, chunk, in_order)
        dlogits = numerics.gradient(logits, target - start, lse, grad, *shares, in_place=True)
        if wanted[0]:
            dhidden += _product(dlogits, weight[columns])
        if wanted[1]:
            torch.mm(dlogits.t(), hidden, out=dweight[columns])
        if wanted[2]:
            torch.sum(dlogits, 0, dtype=torch.float32, out=dbias[columns])
        del logits, dlogits  # before the next chunk's
    return dhidden.to(hidden.dtype), dweight, dbias if bias is None else dbias.to(bias.dtype)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a @ b`` in fp32, whatever their dtype."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a.float(), b.float())


def _linear_gradients_fake(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, *rest: object
) -> tuple[Tensor, Tensor, Tensor]:
    wanted = rest[-2]
    assert isinstance(wanted, list)
    return (
        hidden.new_empty(hidden.shape if wanted[0] else 0),
        weight.new_empty(weight.shape if wanted[1] else 0),
        hidden.new_empty(
            weight.shape[0] if wanted[2] else 0, dtype=torch.float32 if bias is None else bias.dtype
        ),
    )


linear_cross_entropy_gradients = define(
    "linear_cross_entropy_gradients(Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor lse, "
    "Tensor grad, float label_smoothing, int chunk, bool[] wanted, int in_order) -> (Tensor, Tensor, Tensor)",
    _linear_gradients,
    _linear_gradients_fake,
)
"""Gradients with respect to ``hidden``, ``weight`` and ``bias`` in their dtypes; those not wanted are empty.

The logits are recomputed, ``chunk`` columns at a time, and overwritten by their gradient.
"""
