"""Tensor parallel layers compiled on one GPU: with collectives that move nothing, for the graphs and their shapes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from recipes import DEVICE, RECIPES

import narrowcast as nc

WORLD, ROWS, HIDDEN, FFN = 2, 256, 256, 512


@pytest.fixture
def group() -> Iterator[Any]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["none", "current", "delayed", "block", "mxfp8"])
def test_steps_compile(name: str, group: Any) -> None:
    torch._dynamo.reset()
    split: dict[str, Any] = {
        "tp_group": group,
        "sequence_parallel": True,
        "device": DEVICE,
        "params_dtype": torch.bfloat16,
    }
    model = torch.nn.Sequential(
        nc.LayerNormLinear(HIDDEN, FFN, parallel_mode="column", **split),
        nc.Linear(FFN, HIDDEN, parallel_mode="row", **split),
        nc.LayerNormMLP(HIDDEN, FFN, set_parallel_mode=True, activation="swiglu", **split),
    )
    if RECIPES[name] is not None:
        nc.set_recipe(model, RECIPES[name])
    step = torch.compile(model, fullgraph=True)
    for _ in range(2):
        x = torch.randn(ROWS, 1, HIDDEN, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        y = step(x)
        assert y.shape == x.shape
        y.sum().backward()
        assert x.grad is not None and x.grad.shape == x.shape
        for key, parameter in model.named_parameters():
            assert parameter.grad is not None and parameter.grad.shape == parameter.shape, key
            parameter.grad = None
