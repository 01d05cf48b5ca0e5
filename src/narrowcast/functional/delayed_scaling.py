"""Operators on the state of delayed scaling: scales, amax histories and the amaxes that a step collects."""

from __future__ import annotations

import torch
from torch import Tensor

from ..formats import E4M3
from ._library import always, define
from .numerics import numerics_for

# As many layers are renewed one by one, in a launch each; to join more takes ten, of which most only copy.
_FEW = 6


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
    delayed = numerics_for(scales[0]).delayed
    in_place = all(state.is_contiguous() for state in (*scales, *histories, *amaxes))
    if in_place and len(scales) <= _FEW:
        for scale, history, amax in zip(scales, histories, amaxes):
            delayed.renew(scale, history, amax, fp8_max=fp8_max, margin=margin, algo=algorithm)
        return
    history = torch.stack(histories, dim=1)  # (L, layers, n)
    torch.stack(amaxes, out=history[0])
    joined = torch.cat(scales)
    scale, renewed = delayed.update(
        joined, history.flatten(1), fp8_max=fp8_max, margin=margin, algo=algorithm
    )
    torch._foreach_copy_(scales, list(scale.view(len(scales), -1).unbind()))
    torch._foreach_copy_(histories, list(renewed.view(history.shape).transpose(0, 1).contiguous().unbind()))
    torch._foreach_zero_(amaxes)


renew_delayed_scaling = define(
    "renew_delayed_scaling(Tensor(a!)[] scales, Tensor(b!)[] histories, Tensor[] amaxes, float fp8_max, int margin, "
    "str algorithm) -> ()",
    _renew,
    lambda *_: None,
    of_state=True,
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


def _read_scales(scales: list[Tensor]) -> list[Tensor]:
    return numerics_for(scales[0]).delayed.copy_scales(scales)


def _read_scales_fake(scales: list[Tensor]) -> list[Tensor]:
    return [scale.new_empty(scale.shape) for scale in scales]


read_scales = define(
    "read_scales(Tensor[] scales) -> Tensor[]", _read_scales, _read_scales_fake, inlined=always, of_state=True
)
"""Copies of ``scales``, (n,) each, for a forward and its backward, out of reach of a later renewal.

No plain ``clone``, for Inductor drops it and lets the backward save the buffer itself; of both directions at once, for
the compiler moves what only the backward reads into the backward.
"""


def _renewed_scales(
    scales: list[Tensor],
    histories: list[Tensor],
    amaxes: list[Tensor],
    fp8_maxes: list[float],
    margins: list[int],
    algorithms: list[str],
) -> list[Tensor]:
    # a backward recomputes: it sees the scales of the first forward
    if torch._C._current_graph_task_id() == -1:
        for state in zip(scales, histories, amaxes, fp8_maxes, margins, algorithms):
            scale, history, amax, fp8_max, margin, algorithm = state
            _renew_alike([scale], [history], [amax], fp8_max, margin, algorithm)
    return _read_scales(scales)


renewed_scales = define(
    "renewed_scales(Tensor[] scales, Tensor[] histories, Tensor[] amaxes, float[] fp8_maxes, int[] margins, "
    "str[] algorithms) -> Tensor[]",
    _renewed_scales,
    lambda scales, *_: _read_scales_fake(scales),
    of_state=True,
)
"""Renew the state of a layer that renews its own, one entry per direction, and read its scales.

As :data:`renew_delayed_scaling` renews, but inside a backward only copies. No write is declared: order is given by the
data flow through the result.
"""


def _take_amaxes(amaxes: list[Tensor]) -> list[Tensor]:
    if torch._C._current_graph_task_id() != -1:
        return [torch.zeros_like(amax) for amax in amaxes]
    collected = [amax.clone() for amax in amaxes]
    torch._foreach_zero_(amaxes)
    return collected


def _take_amaxes_fake(amaxes: list[Tensor]) -> list[Tensor]:
    return [torch.empty_like(amax) for amax in amaxes]


take_amaxes = define(
    "take_amaxes(Tensor[] amaxes) -> Tensor[]", _take_amaxes, _take_amaxes_fake, of_state=True
)
"""What was collected, fp32 (n,) each, for a renewal by functions of the user; what is left are zeros.

Inside a backward, which recomputes, it gives zeros, as if nothing had been collected, and leaves all as it is. The
write is not declared, as in :data:`renewed_scales`.
"""


def _calibrate(x: Tensor, amax: Tensor, slot: int) -> None:
    taken = amax.view(-1)[slot : slot + 1].zero_()
    # a cast without outputs raises the amax and nothing else; its scale does not matter
    numerics_for(x).float8.quantize(x, taken, E4M3, rowwise=False, columnwise=False, amax=taken)


calibrate_ = define("calibrate_(Tensor x, Tensor(a!) amax, int slot) -> ()", _calibrate, lambda *_: None)
"""Overwrite one slot of ``amax`` (n,) with max|x|, without quantizing."""
