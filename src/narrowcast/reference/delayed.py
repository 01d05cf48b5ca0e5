"""Delayed scaling: how the next scale follows from a history of past amaxes.

``history`` is fp32 (L, n), one column per tensor. Row 0 collects the amax of the current step, row 1 is the
oldest past value and row L - 1 the newest.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .._checks import shown
from ..formats import FLT_MAX

AmaxAlgorithm = str | Callable[[Tensor], Tensor]
ScaleAlgorithm = Callable[[Tensor, Tensor, Tensor, object], Tensor]


def update(
    scale: Tensor,
    history: Tensor,
    *,
    fp8_max: float | Tensor,
    margin: int,
    algo: AmaxAlgorithm,
    always_roll: bool = False,
    scale_algo: ScaleAlgorithm | None = None,
    recipe: object = None,
) -> tuple[Tensor, Tensor]:
    """Advance scales and histories by one step.

    Args:
        scale: fp32 [n], the scales of the step that ended.
        history: fp32 (L, n).
        fp8_max: the largest value of the element format; of each tensor its own if it is fp32 [n].
        margin: the default scale is 2**-margin below the one that maps amax to ``fp8_max``.
        algo: "max" over the whole history, "most_recent", or a function from the history (row 0 the newest amax) to
            amaxes [n].
        always_roll: advance tensors that were not used, too: the rule for functions of the user.
        scale_algo: a function of (amax, scale, fp8_max, recipe) giving the new scales; None for the default.
        recipe: passed to ``scale_algo`` untouched.

    Raises:
        ValueError: an unknown ``algo``.

    Numerics:
        New tensors (scale, history). A column whose newest amax is 0 keeps both, unless ``always_roll``. Else the
        history rolls by one row, row 0 is cleared, and the scale becomes ``RN(fp8_max * 2**-margin / amax)``, fp32's
        maximum on overflow; an amax that is 0, infinite or NaN keeps the scale. "max" ignores NaN, and with
        ``always_roll`` propagates it.
    """
    if callable(algo):
        amax = algo(history)
    elif algo == "max":
        amax = (history if always_roll else history.nan_to_num(nan=0.0, posinf=math.inf)).amax(0)
    elif algo == "most_recent":
        amax = history[0]
    else:
        raise ValueError(f"unknown amax_compute_algo {shown(algo)}; use 'max', 'most_recent' or a function")
    if scale_algo is None:
        new_scale = scale_from_amax(amax, scale, fp8_max, margin)
    else:
        new_scale = scale_algo(amax, scale, torch.ones_like(scale) * fp8_max, recipe)
    if always_roll:
        return new_scale, _rolled(history)
    used = history[0] != 0.0
    return torch.where(used, new_scale, scale), torch.where(used, _rolled(history), history)


def _rolled(history: Tensor) -> Tensor:
    rolled = history.roll(-1, 0)
    rolled[0] = 0.0
    return rolled


def scale_from_amax(amax: Tensor, scale: Tensor, fp8_max: float | Tensor, margin: int) -> Tensor:
    """Return the scale that maps ``amax`` to ``fp8_max * 2**-margin``; ``scale`` if ``amax`` is 0, infinite or NaN."""
    quotient = (torch.ones_like(amax) * fp8_max * 2.0**-margin).div_(amax).clamp_(max=FLT_MAX)
    return torch.where((amax > 0.0) & (amax < math.inf), quotient, scale)


def of_halves(like: Tensor, first: float, rest: float) -> Tensor:
    """Return a vector with one number in its first n // 2 places, and another in the rest."""
    return torch.where(torch.arange(len(like), device=like.device) < len(like) // 2, first, rest)


def renew(
    scales: list[Tensor],
    histories: list[Tensor],
    amaxes: list[Tensor],
    *,
    fp8_maxes: list[float],
    margins: list[int],
    algos: list[str],
) -> None:
    """Advance states in place: ``amax`` becomes row 0 of its history, 0 if it is infinite or NaN, and is then zeroed.

    Args:
        scales, amaxes: fp32 (n,) each.
        histories: fp32 (L, n).
        margins, algos: as :func:`update`. fp8_maxes: two for each state, of its first n // 2 tensors and of the rest.

    Raises:
        ValueError: an unknown ``algo``.
    """
    for at, (scale, history, amax) in enumerate(zip(scales, histories, amaxes)):
        rule = {"fp8_max": of_halves(scale, *fp8_maxes[2 * at : 2 * at + 2]), "margin": margins[at]}
        history[0].copy_(amax.nan_to_num(nan=0.0, posinf=0.0))
        renewed_scale, renewed_history = update(scale, history, algo=algos[at], **rule)
        scale.copy_(renewed_scale)
        history.copy_(renewed_history)
        amax.zero_()
