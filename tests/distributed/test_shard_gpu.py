"""Quantized gathers on an NVIDIA GPU, one rank: the bits of gathers in high precision, eager and compiled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import narrowcast as nc
from narrowcast.distributed import shard
from narrowcast.optimizers import FusedAdam

from .blocks import make_model, train
from .test_data_parallel import fsdp2

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cuda", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recipe", ["current", "delayed", "block", "nvfp4", "mxfp8"])
def test_bits(recipe: str, compiled: bool, mesh: Any) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    losses = []
    for quantized in (False, True):
        model = make_model(recipe, 256, 512, 1, device="cuda")
        if compiled:
            torch.compiler.reset()
            for block in model.blocks:
                block.compile(fullgraph=True)
        if quantized:
            options = {"recompute": False, "reshard_after_forward": True} if recipe == "mxfp8" else {}
            receipt: Any = nc.receipt(
                shard(model, mesh, blocks=model.blocks, mp_policy=policy, **options)
            ).sharding
            assert receipt.gathered_bytes < 0.52 * receipt.plain_bytes
        else:
            fsdp2(model, mesh, mp_policy=policy)
        losses.append(train(model, width=256))
    assert losses[0] == losses[1]


def test_fused_adam_steps_shards(mesh: Any) -> None:
    """Its kernel writes to what a sharded weight holds, which stands beside plain shards of biases and norms."""
    losses = []
    for quantized in (False, True):
        model: Any = make_model("current", 256, 512, 1, device="cuda")
        receipt: Any = nc.receipt(
            shard(model, mesh, blocks=model.blocks, quantized_gather=quantized)
        ).sharding
        assert any(one.quantized for one in receipt.parameters) == quantized
        losses.append(train(model, width=256, optimizer=FusedAdam(model.parameters(), lr=1e-3)))
    assert losses[0] == losses[1] and losses[0][-1] != losses[0][0]
