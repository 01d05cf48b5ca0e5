"""Operators on the state of delayed scaling: scales, amax histories and the amaxes that a step collects."""

from __future__ import annotations

from torch import Tensor

from .. import reference
from ..formats import E4M3
from ._library import define
from .grouped_decoded import ALIGNMENT
from .numerics import numerics_for


def _renew(
    scales: list[Tensor],
    histories: list[Tensor],
    amaxes: list[Tensor],
    fp8_maxes: list[float],
    margins: list[int],
    algos: list[str],
) -> None:
    if scales:
        contiguous = all(map(Tensor.is_contiguous, (*scales, *histories, *amaxes)))
        numerics = numerics_for(scales[0]) if contiguous else reference
        rules = {"fp8_maxes": fp8_maxes, "margins": margins, "algos": algos}
        numerics.delayed.renew(scales, histories, amaxes, **rules)


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
    fp8_maxes: two for each: the largest value of the elements of its first n // 2 tensors, and of the rest.
    margins: the scale is 2**-margin below the one that maps amax to that.
    algorithms: "max" or "most_recent".

Raises:
    ValueError: an unknown algorithm.
"""


def _calibrate(x: Tensor, splits: Tensor | None, amax: Tensor) -> None:
    groups = 1 if splits is None else splits.shape[0]
    numerics, own = numerics_for(x), amax.view(-1)[:groups].zero_()
    # casts without codes, whose scale does not matter
    if splits is None:
        numerics.float8.quantize(x, own, E4M3, rowwise=False, columnwise=False, amax=own)
    else:
        options = {"alignment": ALIGNMENT["tensor"], "amax": own}
        numerics.grouped_quantize.quantize(x, splits, own, E4M3, rowwise=True, columnwise=False, **options)


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
