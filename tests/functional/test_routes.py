"""Which route a call takes under each watcher, and that the page's table is the one that decides."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from narrowcast.functional import routes
from narrowcast.functional.routes import watcher

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
