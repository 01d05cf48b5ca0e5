"""Operators on the state of delayed scaling: scales, amax histories and the amaxes that a step collects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor

from ..formats import E4M3
from ._library import always, define
from .numerics import computed_by, numerics_for
from .replay import replay_of

# Up to so many states are renewed in place, two per launch; more are joined, which takes ten launches in all.
_FEW = 16


_RULES = ("fp8_maxes", "margins", "algos")


def _renew(
    scales: Sequence[Tensor], histories: Sequence[Tensor], amaxes: Sequence[Tensor], *rules: Sequence[Any]
) -> None:
    if not scales or torch._C._current_graph_task_id() != -1:  # a graph that runs again inside a backward
        return
    delayed = numerics_for(scales[0]).delayed
    if len(scales) <= _FEW and _in_place(scales, histories, amaxes):
        delayed.renew(scales, histories, amaxes, **dict(zip(_RULES, rules)), copies=False)
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
    scale, renewed = delayed.update(torch.cat(scales), history.flatten(1), **rule)
    torch._foreach_copy_(scales, list(scale.view(len(scales), -1).unbind()))
    torch._foreach_copy_(histories, list(renewed.view(history.shape).transpose(0, 1).contiguous().unbind()))
    torch._foreach_zero_(amaxes)


def _in_place(scales: Sequence[Tensor], histories: Sequence[Tensor], amaxes: Sequence[Tensor]) -> bool:
    return all(state.is_contiguous() for state in (*scales, *histories, *amaxes))


renew_delayed_scaling = define(
    "renew_delayed_scaling(Tensor(a!)[] scales, Tensor(b!)[] histories, Tensor[] amaxes, float[] fp8_maxes, "
    "int[] margins, str[] algorithms) -> ()",
    _renew,
    lambda *_: None,
    of_state=True,
)
"""Renew the delayed scaling of many layers from the amaxes they collected, by the rule of ``reference.delayed.update``.

Every amax becomes row 0 of its history, and is then zeroed, which the schema does not declare (see
:mod:`.quantize`). A tensor whose amax is 0 was not used: it keeps its scale and its history. Nothing is renewed inside
a backward, which recomputes and sees the scales of the first forward.

Args:
    scales: fp32 (n,) each; histories: fp32 (L, n); amaxes: fp32 (n,). All on one device.
    fp8_maxes: the largest value of each one's element format.
    margins: the scale is 2**-margin below the one that maps amax to that.
    algorithms: "max" or "most_recent".

Raises:
    ValueError: an unknown algorithm.
"""


_read_scales = computed_by("delayed", "copy_scales")


def _read_scales_fake(scales: list[Tensor]) -> list[Tensor]:
    return [scale.new_empty(scale.shape) for scale in scales]


read_scales = define(
    "read_scales(Tensor[] scales) -> Tensor[]",
    _read_scales,
    _read_scales_fake,
    inlined=always,
    of_state=True,
    saved=True,
)
"""Copies of ``scales``, (n,) each, for a forward and its backward, out of reach of a later renewal.

No plain ``clone``, for Inductor drops it and lets the backward save the buffer itself; of both directions at once, for
the compiler moves what only the backward reads into the backward.
"""


starts_a_step = define(
    "starts_a_step(Device device) -> Tensor",
    lambda device: torch.full(
        (1,), torch._C._current_graph_task_id() == -1, dtype=torch.int32, device=device
    ),
    lambda device: torch.empty(1, dtype=torch.int32, device=device),
    of_state=True,
)
"""int32 (1,) on ``device``: 0 inside a backward, whose forwards are recomputations, else 1.

Read by the layers of a graph that renew their own scales: one value for all of them, made when the graph runs.
"""


def _renewed_scales(
    scales: list[Tensor], histories: list[Tensor], amaxes: list[Tensor], *rules: list[Any]
) -> list[Tensor]:
    states = tuple(scales), tuple(histories), tuple(amaxes), *map(tuple, rules)
    if isinstance(scales[0], FunctionalTensor):
        return _renewed_and_read(
            *states, starts=starts_a_step(scales[0].device) if scales[0].is_cuda else None
        )
    if torch._C._current_graph_task_id() != -1:
        return _read_scales(scales)  # type: ignore[no-any-return]
    stage = replay_of(_renewed_and_read, [*scales, *histories, *amaxes], (), *states[3:], of_state=True)
    return stage(*states)  # type: ignore[no-any-return]


def _renewed_and_read(
    scales: tuple[Tensor, ...],
    histories: tuple[Tensor, ...],
    amaxes: tuple[Tensor, ...],
    *rules: tuple[Any, ...],
    starts: Tensor | None = None,
) -> list[Tensor]:
    if not _in_place(scales, histories, amaxes):
        _renew(scales, histories, amaxes, *rules)
        return _read_scales(scales)  # type: ignore[no-any-return]
    options = {**dict(zip(_RULES, rules)), "copies": True, "starts": starts}
    return numerics_for(scales[0]).delayed.renew(scales, histories, amaxes, **options)  # type: ignore[no-any-return]


renewed_scales = define(
    "renewed_scales(Tensor[] scales, Tensor[] histories, Tensor[] amaxes, float[] fp8_maxes, int[] margins, "
    "str[] algorithms) -> Tensor[]",
    _renewed_scales,
    lambda scales, *_: _read_scales_fake(scales),
    inlined=lambda scales, histories, amaxes, *_: _in_place(scales, histories, amaxes),
    of_state=True,
    saved=True,
)
"""Renew the state of a layer that renews its own, one entry per direction, and read its scales.

As :data:`renew_delayed_scaling` renews, but inside a backward, which recomputes and sees the scales of the first
forward, only copies. No write is declared: order is given by the data flow through the result.
"""


def _take_amaxes(amaxes: list[Tensor]) -> list[Tensor]:
    if torch._C._current_graph_task_id() != -1:
        return [torch.zeros_like(amax) for amax in amaxes]
    collected = [amax.clone() for amax in amaxes]
    torch._foreach_zero_(amaxes)
    return collected


take_amaxes = define(
    "take_amaxes(Tensor[] amaxes) -> Tensor[]",
    _take_amaxes,
    lambda amaxes: [torch.empty_like(amax) for amax in amaxes],
    of_state=True,
)
"""Take out what was collected, fp32 (n,) each, for a renewal by functions of the user; zeros are left behind.

Inside a backward, which recomputes, it returns zeros, as if nothing had been collected, and changes nothing. The
schema does not declare the write, as in :data:`renewed_scales`.
"""


def _calibrate(x: Tensor, amax: Tensor, slot: int) -> None:
    own = amax.view(-1)[slot : slot + 1].zero_()
    # a cast without outputs raises the amax and nothing else; its scale does not matter
    numerics_for(x).float8.quantize(x, own, E4M3, rowwise=False, columnwise=False, amax=own)


calibrate_ = define("calibrate_(Tensor x, Tensor(a!) amax, int slot) -> ()", _calibrate, lambda *_: None)
"""Overwrite one slot of ``amax`` (n,) with max|x|, without quantizing."""
