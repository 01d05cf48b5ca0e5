"""Converted models under ``fully_shard``: the same bits, and every GEMM finds its layer; conversion comes first."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from recipes import QUANTIZED
from torch import nn

import narrowcast as nc

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this PyTorch has no torch.distributed")


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Any]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def make() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 32))


@pytest.mark.parametrize("name", ["current", "delayed"])
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
def test_sharded_after_conversion(name: str, mesh: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    plain, x = make(), torch.randn(8, 32)
    model = copy.deepcopy(plain)
    nc.convert(plain, QUANTIZED[name])
    receipt = nc.receipt(nc.convert(model, QUANTIZED[name]))
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh)
    with receipt.recording():
        out = model(x)
        out.sum().backward()
    assert torch.equal(out, plain(x))
    gemms = {("0", "fprop"), ("0", "wgrad"), ("1", "fprop"), ("1", "dgrad"), ("1", "wgrad")}
    assert {(one.name, one.gemm) for one in receipt.ran()} == gemms
    with pytest.raises(RuntimeError, match="'0' was converted and is an FSDPLinear now"):
        nc.revert(model)


def test_what_is_sharded_already_raises_and_says_so(mesh: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    with pytest.raises(ValueError, match="'0' and 1 more: weight is a DTensor; convert before sharding"):
        nc.convert(fully_shard(make(), mesh=mesh), QUANTIZED["current"])


@pytest.mark.parametrize("name", ["convert", "revert", "load_quantized"])
def test_what_a_forward_left_gathered_is_sharded_too(name: str, mesh: Any, tmp_path: Path) -> None:
    from torch.distributed.fsdp import fully_shard

    model: Any = make().requires_grad_(False)
    if name == "revert":
        nc.convert(model, QUANTIZED["current"], weights="stored")
    nc.export(nc.convert(make(), QUANTIZED["current"]), tmp_path / "files", format="compressed-tensors")
    fully_shard(model, mesh=mesh)
    out = model(torch.ones(1, 32))
    calls: dict[str, Any] = {
        "convert": lambda: nc.convert(model, QUANTIZED["current"]),
        "revert": lambda: nc.revert(model),
        "load_quantized": lambda: nc.load_quantized(model, tmp_path / "files"),
    }
    with pytest.raises((ValueError, RuntimeError), match=r"before sharding|revert before fully_shard"):
        calls[name]()
    assert torch.equal(model(torch.ones(1, 32)), out)
