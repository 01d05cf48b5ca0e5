"""Graphs on a CPU that read the scales of delayed scaling as those on a GPU do.

On a CPU a graph holds an operator that returns what its forward reads. On a GPU it holds one for all layers, which asks
the host and tells launches what they are to copy: the state, or what a recomputation reads instead. Here the same
operator enters the graph, and another one stands for the launches, which Triton's interpreter runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from narrowcast import kernels
from narrowcast.functional import _library, delayed_scaling, routes

_OF_LAUNCHES = (
    "launches(Tensor[] scales, Tensor[] histories, Tensor[] amaxes, Tensor starts, int place, float[] fp8_maxes, "
    "int[] margins, str[] algos, float[] unseen) -> Tensor[]"
)


@cache
def _launches() -> Any:
    """The operator in the place of the launches; that it writes to the state is not declared, as theirs is not."""

    def run(
        scales: list[Tensor],
        histories: list[Tensor],
        amaxes: list[Tensor],
        starts: Tensor,
        place: int,
        fp8_maxes: list[float],
        margins: list[int],
        algos: list[str],
        unseen: list[float],
    ) -> list[Tensor]:
        if not histories:
            return kernels.delayed.copy_scales(scales, unseen, starts, place)
        rules: dict[str, Any] = {"fp8_maxes": fp8_maxes, "margins": margins, "algos": algos, "unseen": unseen}
        return kernels.delayed.renew(scales, histories, amaxes, **rules, starts=starts, place=place)

    library = torch.library.Library("narrowcast_fuzz", "DEF")
    library.define(_OF_LAUNCHES, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl("launches", run, "CompositeExplicitAutograd")
    torch.library.register_fake(
        "narrowcast_fuzz::launches",
        lambda scales, *given: delayed_scaling._read_scales_fake(scales, given[-1]),
        lib=library,
    )
    return library, torch.ops.narrowcast_fuzz.launches.default


@contextlib.contextmanager
def read_as_on_a_gpu() -> Iterator[None]:
    """Trace graphs as for a GPU, as far as they read scales."""
    _, launches = _launches()
    functional_tensor, really_read = delayed_scaling.FunctionalTensor, delayed_scaling.read_in_graph
    really_watches = _library.watcher_in_graph

    def watches(mode: Any, given: tuple[Any, ...], inlined: Any, repeats: bool = False) -> Any:
        of_scales = getattr(inlined, "__module__", "") == delayed_scaling.__name__ and len(given) == 11
        if of_scales and not routes.is_export(mode):
            return routes.STATIC
        return really_watches(mode, given, inlined, repeats)

    def read(
        scales: list[Tensor], amaxes: list[Tensor], collects: list[bool], recorded: bool, read: Any
    ) -> list[Tensor]:
        if not isinstance(scales[0], functional_tensor):
            return really_read(scales, amaxes, collects, recorded, read)
        _, histories, _, *rules, root, call = read.args
        rules = [list(rule) for rule in rules]
        given = (*rules, collects, [call] * len(scales), recorded, root)
        enters_graph = torch.ops.narrowcast.enters_graph.default
        starts, place = _library.shared_call(enters_graph, scales, list(histories), amaxes, *given)
        return launches(scales, list(histories), amaxes, starts, place, *rules)

    with (
        patch.object(delayed_scaling, "FunctionalTensor", ()),
        patch.object(delayed_scaling, "read_in_graph", read),
        patch.object(_library, "watcher_in_graph", watches),
    ):
        yield
