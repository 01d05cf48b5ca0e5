"""Operators on the state of delayed scaling: scales, amax histories and the amaxes that a step collects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..formats import E4M3
from ._library import always, define
from .grouped_decoded import ALIGNMENT
from .numerics import computed_by, numerics_for

# Up to so many states are renewed two per launch. For more, kernels read a table of addresses; else they are joined.
_FEW = 16


_RULES = ("fp8_maxes", "margins", "algos")


def _renew(
    scales: Sequence[Tensor], histories: Sequence[Tensor], amaxes: Sequence[Tensor], *rules: Sequence[Any]
) -> None:
    if not scales:
        return
    delayed = numerics_for(scales[0]).delayed
    in_place = _in_place(scales, histories, amaxes)
    if in_place and len(scales) <= _FEW:
        delayed.renew(scales, histories, amaxes, **dict(zip(_RULES, rules)))
        return
    if in_place and delayed.renew_many(scales, histories, amaxes, *rules):
        return
    groups: dict[Any, list[int]] = {}
    for at, rule in enumerate(zip(*rules)):
        groups.setdefault((histories[at].shape, rule), []).append(at)
    for (_, (fp8_max, margin, algorithm)), places in groups.items():
        some = [[states[at] for at in places] for states in (scales, histories, amaxes)]
        _renew_alike(delayed, some[0], some[1], some[2], fp8_max=fp8_max, margin=margin, algo=algorithm)


def _renew_alike(
    delayed: Any, scales: list[Tensor], histories: list[Tensor], amaxes: list[Tensor], **rule: Any
) -> None:
    """Renew states of one shape and rule as the columns of one; one launch copies many of them back."""
    history = torch.stack(histories, dim=1)  # (L, layers, n)
    torch.stack(amaxes, out=history[0])
    history[0].nan_to_num_(nan=0.0, posinf=0.0)
    scale, renewed = delayed.update(torch.cat(scales), history.flatten(1), **rule)
    torch._foreach_copy_(scales, list(scale.view(len(scales), -1).unbind()))
    torch._foreach_copy_(histories, list(renewed.view(history.shape).transpose(0, 1).contiguous().unbind()))
    torch._foreach_zero_(amaxes)


def _in_place(scales: Sequence[Tensor], histories: Sequence[Tensor], amaxes: Sequence[Tensor]) -> bool:
    return all(map(Tensor.is_contiguous, (*scales, *histories, *amaxes)))


renew_delayed_scaling = define(
    "renew_delayed_scaling(Tensor(a!)[] scales, Tensor(b!)[] histories, Tensor(c!)[] amaxes, float[] fp8_maxes, "
    "int[] margins, str[] algorithms) -> ()",
    _renew,
    lambda *_: None,
    of_state=True,
)
"""Renew the delayed scaling of many layers from the amaxes they collected, by the rule of ``reference.delayed.update``.

Every amax becomes row 0 of its history, and is then zeroed. A tensor whose amax is 0 was not used, and an infinite one
or NaN tells nothing: the tensor keeps its scale and its history.

Args:
    scales: fp32 (n,) each; histories: fp32 (L, n); amaxes: fp32 (n,). All on one device.
    fp8_maxes: the largest value of each one's element format.
    margins: the scale is 2**-margin below the one that maps amax to that.
    algorithms: "max" or "most_recent".

Raises:
    ValueError: an unknown algorithm.
"""


_read_scales = computed_by("delayed", "copy_scales")


def _read_scales_fake(scales: list[Tensor], unseen: list[float]) -> list[Tensor]:
    return [
        scale.new_empty((4, *scale.shape) if m < 0.0 else scale.shape) for scale, m in zip(scales, unseen)
    ]


read_scales = define(
    "read_scales(Tensor[] scales, float[] unseen) -> Tensor[]",
    _read_scales,
    _read_scales_fake,
    inlined=always,
    of_state=True,
)
"""Copies of ``scales``, (n,) each, as casts read them.

``unseen``: of each, what its copy has instead of a scale of 0, as ``reference.delayed.copy_scales`` takes it.
"""


def _calibrate(x: Tensor, splits: Tensor | None, amax: Tensor) -> None:
    numerics, own = numerics_for(x), amax[: 1 if splits is None else splits.shape[0]].zero_()
    # casts without codes, whose scale does not matter
    if splits is None:
        numerics.float8.quantize(x, own, E4M3, rowwise=False, columnwise=False, amax=own)
    else:
        groups = {"alignment": ALIGNMENT["tensor"], "amax": own}
        numerics.grouped_quantize.quantize(x, splits, own, E4M3, rowwise=True, columnwise=False, **groups)


calibrate_ = define(
    "calibrate_(Tensor x, Tensor? splits, Tensor(a!) amax) -> ()",
    _calibrate,
    lambda *_: None,
)
"""Overwrite the first element of ``amax`` with max|x|, or the first G with that of every group of rows.

Args:
    x: of any shape; with ``splits``, (T, K).
    splits: int32 or int64 (G,) on the device of ``x``: rows of each group.
"""
