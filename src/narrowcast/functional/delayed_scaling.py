"""Operators on the state of delayed scaling: scales, amax histories and the amaxes that a step collects."""

from __future__ import annotations

import torch
from torch import Tensor

from ..formats import E4M3
from ._library import define
from .numerics import numerics_for


def _renew(
    scales: list[Tensor],
    histories: list[Tensor],
    amaxes: list[Tensor],
    fp8_max: float,
    margin: int,
    algorithm: str,
) -> None:
    lengths = {history.shape[0] for history in histories}
    if len(lengths) > 1:
        raise ValueError(f"histories have {sorted(lengths)} rows; renew histories of one length in one call")
    layers_by_width: dict[int, list[int]] = {}
    for layer, scale in enumerate(scales):
        layers_by_width.setdefault(scale.numel(), []).append(layer)
    for layers in layers_by_width.values():
        alike = [[tensors[layer] for layer in layers] for tensors in (scales, histories, amaxes)]
        _renew_alike(alike[0], alike[1], alike[2], fp8_max, margin, algorithm)


def _renew_alike(
    scales: list[Tensor],
    histories: list[Tensor],
    amaxes: list[Tensor],
    fp8_max: float,
    margin: int,
    algorithm: str,
) -> None:
    """All layers of one width as the columns of one state; copied back whole, which takes one launch for many."""
    history = torch.stack(histories, dim=1)  # (L, layers, n)
    torch.stack(amaxes, out=history[0])
    scale, renewed = numerics_for(scales[0]).delayed.update(
        torch.cat(scales), history.flatten(1), fp8_max=fp8_max, margin=margin, algo=algorithm
    )
    torch._foreach_copy_(scales, list(scale.view(len(scales), -1).unbind()))
    torch._foreach_copy_(histories, list(renewed.view(history.shape).transpose(0, 1).contiguous().unbind()))
    torch._foreach_zero_(amaxes)


renew_delayed_scaling = define(
    "renew_delayed_scaling(Tensor(a!)[] scales, Tensor(b!)[] histories, Tensor[] amaxes, float fp8_max, int margin, "
    "str algorithm) -> ()",
    _renew,
    lambda *_: None,
)
"""Renew the delayed scaling of many layers from the amaxes they collected, by the rule of ``reference.delayed.update``.

Every amax becomes row 0 of its history, and is then zeroed, which the schema does not declare (see
:mod:`.quantize`). A tensor whose amax is 0 was not used: it keeps its scale and its history.

Args:
    scales: fp32 (n,) each; histories: fp32 (L, n), of one L; amaxes: fp32 (n,). All on one device.
    fp8_max: the largest value of the element format.
    margin: the scale is 2**-margin below the one that maps amax to ``fp8_max``.
    algorithm: "max" or "most_recent".

Raises:
    ValueError: histories of several lengths, or an unknown algorithm.
"""


read_scales = define(
    "read_scales(Tensor scale) -> Tensor",
    lambda scale: scale.clone(),
    lambda scale: scale.new_empty(scale.shape),
)
"""A copy of ``scale`` (n,) for a forward and its backward, out of reach of a later renewal.

Opaque, because Inductor drops a plain ``clone`` and lets the backward save the buffer itself.
"""


def _calibrate(x: Tensor, amax: Tensor, slot: int) -> None:
    taken = amax.view(-1)[slot : slot + 1].zero_()
    # a cast without outputs raises the amax and nothing else; its scale does not matter
    numerics_for(x).float8.quantize(x, taken, E4M3, rowwise=False, columnwise=False, amax=taken)


calibrate_ = define("calibrate_(Tensor x, Tensor(a!) amax, int slot) -> ()", _calibrate, lambda *_: None)
"""Overwrite one slot of ``amax`` (n,) with max|x|, without quantizing."""
