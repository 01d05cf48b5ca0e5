"""Operators on the state of delayed scaling: scales, amax histories and the amaxes that a step collects."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import kernels
from ..formats import E4M3
from ..upstream.autograd import is_in_backward, version_preserved
from ..upstream.functionalization import FunctionalTensor
from ._library import always, define, shared_call
from .grouped_decoded import ALIGNMENT
from .numerics import computed_by, numerics_for
from .recomputation import ASIDE, RUNNING, fit_first, put_back, read_in_graph, run_now
from .replay import replay_of

# Up to so many states are renewed two per launch. For more, kernels read a table of addresses; else they are joined.
_FEW = 16


_RULES = ("fp8_maxes", "margins", "algos")


def _renew(
    scales: Sequence[Tensor], histories: Sequence[Tensor], amaxes: Sequence[Tensor], *rules: Sequence[Any]
) -> None:
    if not scales or is_in_backward():  # a graph that runs again inside a backward
        return
    if ASIDE:
        put_back(amaxes)
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
    scale, renewed = delayed.update(torch.cat(scales), history.flatten(1), **rule)
    torch._foreach_copy_(scales, list(scale.view(len(scales), -1).unbind()))
    torch._foreach_copy_(histories, list(renewed.view(history.shape).transpose(0, 1).contiguous().unbind()))
    with version_preserved(amaxes):
        torch._foreach_zero_(amaxes)


def _in_place(scales: Sequence[Tensor], histories: Sequence[Tensor], amaxes: Sequence[Tensor]) -> bool:
    return all(map(Tensor.is_contiguous, (*scales, *histories, *amaxes)))


renew_delayed_scaling = define(
    "renew_delayed_scaling(Tensor(a!)[] scales, Tensor(b!)[] histories, Tensor[] amaxes, float[] fp8_maxes, "
    "int[] margins, str[] algorithms) -> ()",
    _renew,
    lambda *_: None,
    tags=(torch.Tag.cudagraph_unsafe,),
    of_state=True,
)
"""Renew the delayed scaling of many layers from the amaxes they collected, by the rule of ``reference.delayed.update``.

Every amax becomes row 0 of its history, and is then zeroed, which the schema does not declare (see
:mod:`.quantize`). A tensor whose amax is 0 was not used: it keeps its scale and its history. Nothing is renewed inside
a backward, which recomputes and sees the scales of the first forward. What an evaluation in training mode has collected
is taken back before. Both are found on the host, so that no CUDA graph may hold the operator.

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
    saved=True,
)
"""Copies of ``scales``, (n,) each, for a forward and its backward, out of reach of a later renewal.

``unseen``: of each, what its copy has instead of a scale of 0, as ``reference.delayed.copy_scales`` takes it.

No plain ``clone``, for Inductor drops it and lets the backward save the buffer itself; of both directions at once, for
the compiler moves what only the backward reads into the backward.
"""


def _renewed_scales(
    scales: list[Tensor], histories: list[Tensor], amaxes: list[Tensor], *rules: list[Any]
) -> list[Tensor]:
    states = tuple(scales), tuple(histories), tuple(amaxes), *map(tuple, rules)
    if is_in_backward():
        return _read_scales(scales, rules[-1])  # type: ignore[no-any-return]
    if ASIDE:
        put_back(amaxes)
    stage = replay_of(_renewed_and_read, [*scales, *histories, *amaxes], (), *states[3:], of_state=True)
    return stage(*states)  # type: ignore[no-any-return]


def _renewed_and_read(
    scales: tuple[Tensor, ...],
    histories: tuple[Tensor, ...],
    amaxes: tuple[Tensor, ...],
    *rules: tuple[Any, ...],
    **asks: Any,
) -> list[Tensor]:
    if not _in_place(scales, histories, amaxes):
        _renew(scales, histories, amaxes, *rules[:3])
        return _read_scales(scales, rules[3])  # type: ignore[no-any-return]
    options = {**dict(zip((*_RULES, "unseen"), rules)), **asks}
    return numerics_for(scales[0]).delayed.renew(scales, histories, amaxes, **options)  # type: ignore[no-any-return]


renewed_scales = define(
    "renewed_scales(Tensor[] scales, Tensor[] histories, Tensor[] amaxes, float[] fp8_maxes, int[] margins, "
    "str[] algorithms, float[] unseen) -> Tensor[]",
    _renewed_scales,
    lambda scales, *given: _read_scales_fake(scales, given[-1]),
    of_state=True,
)
"""Renew the state of a layer that renews its own, one entry per direction, and read its scales.

As :data:`renew_delayed_scaling` renews, but inside a backward, which recomputes and sees the scales of the first
forward, only copies. No write is declared: order is given by the data flow through the result.
"""


def _scales_of_run(
    scales: list[Tensor],
    histories: list[Tensor],
    amaxes: list[Tensor],
    fp8_maxes: list[float],
    margins: list[int],
    algorithms: list[str],
    unseen: list[float],
    collects: list[bool],
    recorded: bool,
    root: str,
    call: int,
) -> list[Tensor]:
    states = tuple(scales), tuple(histories), tuple(amaxes)
    rules = tuple(fp8_maxes), tuple(margins), tuple(algorithms), tuple(unseen)
    if isinstance(scales[0], FunctionalTensor):
        asks: dict[str, Any] = {}
        if scales[0].is_cuda and kernels.AVAILABLE:
            given = (fp8_maxes, margins, algorithms, unseen, collects, [call] * len(scales), recorded, root)
            enters_graph = torch.ops.narrowcast.enters_graph.default
            asks["starts"], asks["place"] = shared_call(enters_graph, scales, histories, amaxes, *given)
        if histories:
            return _renewed_and_read(*states, *rules, **asks)
        return numerics_for(scales[0]).delayed.copy_scales(scales, unseen, **asks)  # type: ignore[no-any-return]

    read = partial(_read_in_run, *states, *rules, root, call)
    return read_in_graph(scales, amaxes, collects, recorded, read)


def _read_in_run(
    scales: tuple[Tensor, ...],
    histories: tuple[Tensor, ...],
    amaxes: tuple[Tensor, ...],
    fp8_maxes: tuple[float, ...],
    margins: tuple[int, ...],
    algorithms: tuple[str, ...],
    unseen: tuple[float, ...],
    root: str,
    call: int,
) -> list[Tensor]:
    """Return copies of the scales, renewed first where that is up to the layers of the graph."""
    if not _renews(histories, root, call):
        return _read_scales(scales, unseen)  # type: ignore[no-any-return]
    return _renewed_and_read(scales, histories, amaxes, fp8_maxes, margins, algorithms, unseen)


def _renews(histories: Sequence[Tensor], root: str, call: int) -> bool:
    """Return whether the layers of a graph renew their scales now.

    Raises:
        RuntimeError: for a second time in the graph.
    """
    renews = bool(histories) and not is_in_backward() and not RUNNING.runs(root)
    if renews and call:
        raise RuntimeError(
            "a layer under delayed scaling that renews its own scales runs twice in one compiled function, which reads "
            "them once; give the model around both calls its recipe with narrowcast.set_recipe and call that model"
        )
    return renews


scales_of_run = define(
    "scales_of_run(Tensor[] scales, Tensor[] histories, Tensor[] amaxes, float[] fp8_maxes, int[] margins, "
    "str[] algorithms, float[] unseen, bool[] collects, bool recorded, str root, int call) -> Tensor[]",
    _scales_of_run,
    lambda *given: _read_scales_fake(given[0], given[6]),
    tags=(torch.Tag.cudagraph_unsafe,),
    # without kernels nothing reads what an address leads to
    inlined=lambda scales, histories, amaxes, *_: kernels.AVAILABLE and _in_place(scales, histories, amaxes),
    of_state=True,
    saved=True,
    numbered=True,
)
"""What a traced forward in training reads: :data:`read_scales`, or with histories :data:`renewed_scales`; in a
recomputation what its first run has read. Which forward is repeated is found when the graph runs.

Args:
    amaxes: of every state; ``collects``: whether the operands of the forward are collected there. What a run that does
        not count collects is taken back.
    recorded: the graph records gradients.
    root: the model that renews instead of the layers while its forward runs in eager code; "" for none.
    call: 0; the graph counts.
Raises:
    RuntimeError: the graph runs in a backward, and which forward it repeats is not known; or a layer renews twice.
"""


def _enters_graph(
    scales: list[Tensor],
    histories: list[Tensor],
    amaxes: list[Tensor],
    fp8_maxes: list[float],
    margins: list[int],
    algorithms: list[str],
    unseen: list[float],
    collects: list[bool],
    calls: list[int],
    recorded: bool,
    root: str,
) -> Tensor:
    rules, run = (tuple(fp8_maxes), tuple(margins), tuple(algorithms), tuple(unseen)), run_now()
    word = int(_renews(histories, root, max(calls)) and recorded and run is None)

    states = tuple(scales), tuple(histories), tuple(amaxes)
    read = partial(_read_in_run, *states, *rules, root, max(calls))
    if is_in_backward() or not recorded or run is not None:
        copies = read_in_graph(scales, amaxes, collects, recorded, read)
        if is_in_backward() and run is not None:
            word = run.show(copies)
    else:
        put_back(amaxes)
        fit_first(scales, amaxes, True)
    return torch.full((1,), word, dtype=torch.int64, device=scales[0].device)


enters_graph = define(
    "enters_graph(Tensor[] scales, Tensor[] histories, Tensor[] amaxes, float[] fp8_maxes, int[] margins, "
    "str[] algorithms, float[] unseen, bool[] collects, int[] calls, bool recorded, str root) -> Tensor",
    _enters_graph,
    lambda scales, *_: scales[0].new_empty(1, dtype=torch.int64),
    # flexible_layout: else Inductor pairs the arguments with those of the first of the shared calls, and drops what the
    # later ones have added (constrain_to_fake_tensors in torch/_inductor/lowering.py zips them)
    tags=(torch.Tag.cudagraph_unsafe, torch.Tag.flexible_layout),
    of_state=True,
    saved=True,
)
"""Make the state of all layers of a graph on a GPU what its launches are to read, once per graph; see
:data:`scales_of_run`. The result, int64 (1,), is 1 where these launches renew the scales, and 0 where they read them as
they are. In a recomputation it is the address of the scales that they read instead, one state's after the other's: what
is in the state stays, for the graph may hold the scales by copies that it writes back when it ends.

It looks at what runs on the host, so that no CUDA graph may hold it.
"""


def _fit_to_weights(
    scales: Tensor, weights: Sequence[Tensor], slots: Sequence[int], fp8_max: float, margin: int
) -> Tensor:
    fitted = scales.clone()
    known = fitted[0] if fitted.dim() == 2 else fitted
    amax = torch.zeros_like(known)
    _raise_amax(weights, None, [amax[slot : slot + 1] for slot in slots])
    rule = {"fp8_maxes": [fp8_max], "margins": [margin], "algos": ["most_recent"]}
    history = torch.zeros_like(amax).unsqueeze(0)
    numerics_for(scales).delayed.renew([known], [history], [amax], **rule)
    return fitted


fit_to_weights = define(
    "fit_to_weights(Tensor scales, Tensor[] weights, int[] slots, float fp8_max, int margin) -> Tensor",
    _fit_to_weights,
    lambda scales, *_: torch.empty_like(scales),
    of_state=True,
)
"""Copies of ``scales``, fp32 (n,) or (4, n), in which those of weights follow from the weights as they are.

Args:
    weights: any shape. slots: of each one's scale; several parts of a weight share one.
    fp8_max, margin: the scale of a weight is ``fp8_max * 2**-margin`` over its amax; one of zeros keeps what it has.
"""


def _take_amaxes(amaxes: list[Tensor], root: str = "") -> list[Tensor]:
    if is_in_backward() or RUNNING.runs(root):
        return [torch.zeros_like(amax) for amax in amaxes]
    put_back(amaxes)
    collected = [amax.clone() for amax in amaxes]
    with version_preserved(amaxes):
        torch._foreach_zero_(amaxes)
    return collected


take_amaxes = define(
    'take_amaxes(Tensor[] amaxes, str root="") -> Tensor[]',
    _take_amaxes,
    lambda amaxes, root="": [torch.empty_like(amax) for amax in amaxes],
    tags=(torch.Tag.cudagraph_unsafe,),
    of_state=True,
)
"""Take out what was collected, fp32 (n,) each, for a renewal by functions of the user; zeros are left behind.

Inside a backward (a recomputation) it returns zeros, as if nothing was collected, and changes nothing; so it does while
the forward of ``root`` runs, which has renewed. The schema does not declare the write, as in :data:`renewed_scales`.
"""


def _calibrate(tensors: list[Tensor], splits: Tensor | None, amax: Tensor, slot: int) -> None:
    groups = len(tensors) if splits is None else splits.shape[0]
    own = amax.view(-1)[slot * groups : (slot + 1) * groups].zero_()
    _raise_amax(tensors, splits, own.split(1) if splits is None else [own])


def _raise_amax(tensors: Sequence[Tensor], splits: Tensor | None, amaxes: Sequence[Tensor]) -> None:
    """Raise each amax to that of its tensor, by casts without codes; their scale does not matter.

    Args:
        splits: rows of the groups in one tensor, whose amaxes are one (G,).
    """
    numerics = numerics_for(tensors[0])
    if splits is None:
        for x, one in zip(tensors, amaxes):
            numerics.float8.quantize(x, one, E4M3, rowwise=False, columnwise=False, amax=one)
    else:
        numerics.grouped_quantize.quantize(
            tensors[0],
            splits,
            amaxes[0],
            E4M3,
            rowwise=True,
            columnwise=False,
            alignment=ALIGNMENT["tensor"],
            amax=amaxes[0],
        )


calibrate_ = define(
    "calibrate_(Tensor[] tensors, Tensor? splits, Tensor(a!) amax, int slot) -> ()",
    _calibrate,
    lambda *_: None,
)
"""Overwrite one slot of ``amax`` (slots * G,) with max|x| of every group, without keeping codes.

Args:
    tensors: G of any shape; with ``splits``, one (T, K) that has the groups one after the other.
    splits: int32 or int64 (G,) on the device of ``tensors``: rows of each group.
"""
