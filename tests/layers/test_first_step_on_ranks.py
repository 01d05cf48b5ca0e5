"""First steps of models that two processes replicate or shard, after passes that renew the scales."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import narrowcast as nc
from narrowcast.recipe import DelayedScaling, Float8CurrentScaling

WORLD, SECONDS = 2, 240
RECIPE = DelayedScaling(amax_history_len=4)
WRAPS = ["ddp", "ddp in its buckets", "ddp, compiled", "fsdp2", "shard"]
pytestmark = pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")


def made(recipe: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nc.Linear(64, 64, device="cpu"), nc.LayerNormMLP(64, 128, device="cpu"))
    return nc.set_recipe(model, recipe)


def wrapped(model: nn.Module, wrap: str) -> Any:
    if wrap == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for block in (model[0], model):  # type: ignore[index]
            fully_shard(block)
        return model
    if wrap == "shard":
        return nc.distributed.shard(model)
    replica = DistributedDataParallel(model, gradient_as_bucket_view="buckets" in wrap)
    return torch.compile(replica, backend="aot_eager") if "compiled" in wrap else replica


def gradients(run: Any, model: nn.Module, x: Tensor) -> list[Tensor]:
    """Of a sum of outputs: they are 1 at the last layer, where the first scale holds 7/8."""
    model.zero_grad()
    run(x).sum().backward()
    return [full(p.grad).clone() for p in model.parameters()]


def full(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def distance(ours: list[Tensor], wanted: list[Tensor]) -> float:
    one, other = (torch.cat([g.flatten() for g in grads]) for grads in (ours, wanted))
    return ((one - other).norm() / other.norm()).item()


def begun(rank: int, wrap: str) -> dict[str, Any]:
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(rank)) * (1 + 4 * rank)
    plain, current = made(None), made(Float8CurrentScaling())
    wanted, usual = (gradients(wrapped(one, "ddp"), one, x) for one in (plain, current))
    model = made(RECIPE)
    run = wrapped(model, wrap)
    for _ in range(3):  # DDP has its final buckets from the second backward on
        run(x).square().mean().backward()
    for layer in model:  # type: ignore[attr-defined]
        layer.reset_delayed_scaling()
    with torch.no_grad():
        run(x)  # leaves the root of FSDP2 gathered

    for _ in range(2):
        gradients(run, model, x)
        nc.reduce_delayed_scaling(model)
        nc.renew_delayed_scaling(model)
    state = {name: value.clone() for name, value in model.named_buffers()}
    return {
        "error": distance(gradients(run, model, x), wanted),
        "usual": distance(usual, wanted),
        "state": copy.deepcopy(state),
    }


def work(rank: int) -> Any:
    return {wrap: begun(rank, wrap) for wrap in WRAPS}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(work, tmp_path_factory.mktemp("ranks"), WORLD, SECONDS)


@pytest.mark.parametrize("wrap", WRAPS)
def test_the_first_step_is_as_right_as_current_scaling(ranks: list[dict[str, Any]], wrap: str) -> None:
    for rank in ranks:
        assert rank[wrap]["error"] < 1.1 * rank[wrap]["usual"]


@pytest.mark.parametrize("wrap", WRAPS)
def test_ranks_hold_equal_scales(ranks: list[dict[str, Any]], wrap: str) -> None:
    ours, theirs = (rank[wrap]["state"] for rank in ranks)
    assert ours and all(torch.equal(ours[name], theirs[name]) for name in ours)
