"""Which route a call takes under each watcher, and that the page's table is the one that decides."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import narrowcast as nc
from narrowcast.functional import _library, routes
from narrowcast.functional.routes import watcher

from .test_collectives import OnGpu

PAGE = Path(__file__).resolve().parents[2] / "docs" / "architecture-call.md"


def test_the_page_has_the_table() -> None:
    section = PAGE.read_text().split("## The route of an operator's call")[1].split("\n## ")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in section.splitlines()
        if line[:1] == "|"
    ]
    told = [(name, route, stage == "is replayed") for name, route, stage in rows[2:]]
    assert told == [tuple(row) for row in routes.TABLE]
    assert all(f"**{row.operator}**" in section for row in routes.TABLE)


@pytest.mark.parametrize(
    "context, found",
    [
        (nullcontext, routes.NOBODY),
        (torch.enable_grad, routes.AUTOGRAD),
        (lambda: torch.autocast("cpu", dtype=torch.bfloat16), routes.AUTOCAST),
        (lambda: FlopCounterMode(display=False), routes.MODES),
        (torch.autograd.profiler.profile, routes.MODES),
    ],
    ids=["nobody", "autograd", "autocast", "modes", "profiler"],
)
def test_who_watches_eager_code(context: Any, found: routes.Watcher) -> None:
    with torch.no_grad(), context():
        assert watcher() is found
        assert watcher(of_state=True) is (routes.NOBODY if found is routes.AUTOGRAD else found)


def told(x: Tensor) -> Tensor:
    route = watcher().operator
    return x + {routes.DISPATCHED: 1, routes.TEXT: 2}.get(route, 0)


def test_a_trace_knows_it_as_a_constant() -> None:
    x = torch.zeros(2)
    assert torch.compile(told, fullgraph=True, backend="eager")(x).tolist() == [1, 1]


class Told(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return told(x)


@pytest.mark.parametrize("strict", [True, False])
def test_an_export_gets_texts(strict: bool) -> None:
    program = torch.export.export(Told(), (torch.zeros(2),), strict=strict)
    assert program.module()(torch.zeros(2)).tolist() == [2, 2]


def arguments_of(schema: Any, other: Any) -> Iterator[tuple[str, list[Any]]]:
    """Yield each place, first "" for none, and arguments of GPU memory with ``other`` in that place."""
    memory = torch.zeros(2).as_subclass(OnGpu)
    plain = [
        [memory, memory] if str(one.type) == "List[Tensor]" else memory if "Tensor" in str(one.type) else None
        for one in schema.arguments
    ]
    yield "", plain
    for at, one in enumerate(schema.arguments):
        if plain[at] is not None:
            put = [memory, other] if isinstance(plain[at], list) else other
            yield one.name, [*plain[:at], put, *plain[at + 1 :]]


@pytest.mark.parametrize("name", sorted(_library._DEFINED))
def test_a_kernel_gets_plain_memory_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quantized tensor in any place is dispatched: the memory that it has of its own is at the address 0."""
    monkeypatch.setattr(_library, "PLAIN", (OnGpu,))
    monkeypatch.setattr(_library, "_PLAIN_ALONE", frozenset({OnGpu}))
    monkeypatch.setattr(_library, "_PLAIN_OR_NONE", frozenset({OnGpu, type(None)}))
    monkeypatch.setattr(_library, "eager_watcher", lambda of_state: routes.NOBODY)
    monkeypatch.setattr(torch.autograd.graph, "increment_version", lambda _: None)
    schema = getattr(torch.ops.narrowcast, name).default._schema
    overload = mock.Mock(_schema=schema, return_value="dispatched")
    call = _library._with_shortcut(SimpleNamespace(default=overload), lambda *_: "implementation")
    quantized = nc.Float8CurrentScalingQuantizer(nc.DType.kFloat8E4M3).quantize(torch.ones(16, 16))
    ways = {place: call(*arguments) for place, arguments in arguments_of(schema, quantized)}
    some = any("Tensor" in str(one.type) for one in schema.arguments)
    assert ways.pop("") == ("implementation" if some else "dispatched")
    assert set(ways.values()) <= {"dispatched"}
