"""accelerate's FSDP2 on two ranks, with weights stored quantized: each trains for itself, and stays stored."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn

import narrowcast as nc

pytest.importorskip("accelerate")
pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this PyTorch has no torch.distributed")
WIDTH, STEPS = 64, 2


class Block(nn.Sequential):
    """What accelerate wraps."""


def model() -> nn.Module:
    torch.manual_seed(0)
    with nc.quantized_model_init(recipe=nc.recipe.Float8CurrentScaling()):
        made = nn.Sequential(*(Block(nc.Linear(WIDTH, WIDTH, device="cpu"), nn.GELU()) for _ in range(2)))
    nc.set_recipe(made, "current")
    return made


def steps(made: Any, optimizer: Any, backward: Any) -> list[float]:
    losses = []
    for step in range(STEPS):
        x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = made(x).square().mean()
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def prepared(efficient: bool) -> dict[str, Any]:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType

    AcceleratorState._reset_state(True)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        cpu_ram_efficient_loading=efficient,
    )
    accelerator = Accelerator(cpu=True)
    # it takes plugins on GPUs alone; the rest of its way is the same here
    vars(accelerator.state).update(distributed_type=DistributedType.FSDP, fsdp_plugin=plugin)
    whole = model()
    sharded, optimizer = accelerator.prepare(whole, torch.optim.SGD(whole.parameters(), lr=0.5))
    kinds = [type(one.to_local()).__name__ for name, one in sharded.named_parameters() if "weight" in name]
    trained = {id(one) for group in optimizer.param_groups for one in group["params"]}
    losses = steps(sharded, optimizer, accelerator.backward)
    return {"kinds": kinds, "trained": len(trained), "losses": losses}


def work(rank: int) -> dict[bool, Any]:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", ACCELERATE_USE_FSDP="1")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29871")
    return {efficient: prepared(efficient) for efficient in (False, True)}


def test_stored_weights_train_apart_and_stay_stored(tmp_path: Path) -> None:
    alone = model()
    expected = steps(alone, torch.optim.SGD(alone.parameters(), lr=0.5), lambda loss: loss.backward())
    for found in run_ranks(work, tmp_path, 2, 240):
        for efficient in (False, True):
            assert found[efficient]["kinds"] == ["Float8Tensor"] * 2
            assert found[efficient]["trained"] == 4
            assert found[efficient]["losses"] == pytest.approx(expected, rel=1e-5), efficient
