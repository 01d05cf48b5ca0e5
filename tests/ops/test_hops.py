"""How far it is from a call of a list of operations to its first operator, and how many Python calls a step takes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from recipes import DEVICE

import narrowcast as nc

ROOT = str(Path(nc.__file__).parent)


def calls_of(run: Callable[[], Any]) -> list[tuple[int, str]]:
    """(depth, file) of every call into this package while ``run()`` runs, without the reference numerics."""
    found: list[tuple[int, str]] = []
    depth = 0

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal depth
        file = frame.f_code.co_filename
        if not file.startswith(ROOT) or "/reference/" in file:
            return
        if event == "call":
            depth += 1
            found.append((depth, file))
        elif event == "return":
            depth -= 1

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def step(module: Any) -> tuple[list[tuple[int, str]], list[tuple[int, str]]]:
    """Calls of the second forward and of its backward."""
    x = torch.randn(32, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    outs: list[Any] = []
    with nc.autocast(recipe=nc.recipe.Float8CurrentScaling()):
        module(x).sum().backward()
        forward = calls_of(lambda: outs.append(module(x)))
    grad = torch.ones_like(outs[0])
    return forward, calls_of(lambda: outs[0].backward(grad))


def to_operator(calls: list[tuple[int, str]]) -> int:
    """Depth of the first operator."""
    return next(depth for depth, file in calls if "/functional/" in file)


def test_a_list_is_four_hops_longer_than_the_module() -> None:
    place: dict[str, Any] = {"device": DEVICE, "dtype": torch.bfloat16}
    listed, single = step(nc.ops.Sequential(nc.ops.Linear(64, 64, **place))), step(nc.Linear(64, 64, **place))
    assert to_operator(listed[0]) <= to_operator(single[0]) + 4 <= 8
    assert len(listed[0]) <= len(single[0]) + 35
    assert len(listed[1]) <= len(single[1]) + 45
