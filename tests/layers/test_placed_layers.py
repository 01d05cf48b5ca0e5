"""Layers on DTensors: what one of two ranks computes with, without a second one; with it: ``distributed/``."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import narrowcast as nc
from narrowcast.layers.parameters import largest_magnitude
from narrowcast.layers.tensor_parallel import Parallel, on_local

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this PyTorch has no torch.distributed")


@pytest.fixture
def mesh() -> Iterator[Any]:
    """Of this process and one that sends nothing."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        yield DeviceMesh("cpu", [0, 1])
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("mode", ["column", "row"])
def test_a_layer_runs_on_its_part_of_an_input(mode: str, mesh: Any) -> None:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    x, seen = torch.arange(24.0).view(2, 3, 4), []

    def forward(inp: Tensor) -> Tensor:
        seen.append(inp)
        return inp.sum(-1, keepdim=True).expand(*inp.shape[:-1], 5)

    layer = SimpleNamespace(parallel_mode=mode, forward=forward)
    out = on_local(layer, DTensor.from_local(x, mesh, [Replicate()], run_check=False))
    assert out.placements == ((Shard(2) if mode == "column" else Partial()),)
    assert torch.equal(seen[0], x if mode == "column" else x[..., 2:])
    on_local(layer, DTensor.from_local(x, mesh, [Shard(2)], run_check=False))
    assert seen[1].shape == ((2, 3, 8) if mode == "column" else (2, 3, 4))


def test_a_parameter_on_ranks_is_read_in_parts(mesh: Any) -> None:
    from torch.distributed.tensor import DTensor, Replicate

    weight, bias = torch.randn(6, 4), torch.randn(6)
    for mode, divided in (("column", 1), ("row", 2)):
        layer: Any = nc.Linear(4, 6, device="cpu")
        for name, value in (("weight", weight), ("bias", bias)):
            placed = DTensor.from_local(value, mesh, [Replicate()], run_check=False)
            setattr(layer, name, torch.nn.Parameter(placed))
        layer._placed = layer._on_dtensors = True
        layer.parallel_mode = mode
        assert type(layer._part("weight")) is not DTensor and torch.equal(layer._part("weight"), weight)
        assert torch.equal(layer._part("bias"), bias / divided)
        layer.register_parameter("bias", None)
        assert layer._part("bias") is None


def test_the_largest_magnitude_of_groups_on_ranks(mesh: Any) -> None:
    """Of groups that ranks hold whole, those of all ranks one after another; else one number, agreed on."""
    from torch.distributed.tensor import DTensor, Shard

    own = torch.arange(12.0).view(2, 2, 3)
    for dim, shape, size in ((0, (4, 2, 3), (4,)), (1, (2, 4, 3), (2,))):
        weight = DTensor.from_local(
            own, mesh, [Shard(dim)], run_check=False, shape=shape, stride=own.stride()
        )
        assert largest_magnitude(weight, grouped=True).shape == size
        assert largest_magnitude(weight).shape == (1,)


@pytest.mark.parametrize("drawn_by", ["PyTorch", "a method"])
def test_first_values_of_groups_on_ranks(drawn_by: str, mesh: Any) -> None:
    """PyTorch draws a DTensor for all ranks together; a method of the user's gets the groups that this rank holds."""
    from torch.distributed.tensor import DTensor, Shard

    seen: list[Any] = []

    def method(weight: Tensor) -> None:
        seen.append((type(weight), tuple(weight.shape)))
        weight.fill_(7.0)

    layer = nc.GroupedLinear(
        4,
        32,
        16,
        bias=False,
        single_grouped_weight=True,
        init_method=method if drawn_by == "a method" else None,
        device="cpu",
    )
    own = torch.zeros(2, 16, 32)
    layer.weight = torch.nn.Parameter(DTensor.from_local(own, mesh, [Shard(0)], run_check=False))
    seen.clear()
    with mock.patch.object(layer, "_draw", wraps=layer._draw) as draw:
        layer.reset_parameters()
    given = [call.args[1] for call in draw.call_args_list]
    if drawn_by == "PyTorch":
        assert [type(one) for one in given] == [DTensor] and given[0].shape == (4, 16, 32)
    else:
        assert seen == [(Tensor, (16, 32))] * 2
        assert (layer.weight.to_local() == 7.0).all()


def test_a_layer_of_one_process_shares_no_rows() -> None:
    assert Parallel({}).sequence_parallel is False
