"""Delayed scaling under ``DistributedDataParallel`` with its defaults, and with accumulated gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import narrowcast as nc

WORLD, SECONDS = 2, 200
RECIPE = nc.recipe.DelayedScaling(amax_history_len=3)
pytestmark = pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")


def batch(rank: int, step: int) -> torch.Tensor:
    """The rows of rank 1 are a thousand times as large."""
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(7 * step + rank)) * 1000.0**rank


def replicated(how: str, rank: int) -> tuple[nn.Module, Any]:
    torch.manual_seed(rank)  # the constructor broadcasts weights and state
    model = nn.Sequential(nc.Linear(32, 32, device="cpu"))
    if how == "set_recipe":
        nc.set_recipe(model, RECIPE)
    else:
        model[0].recipe = RECIPE
    replica = DistributedDataParallel(model)
    run = torch.compile(replica, backend="aot_eager") if how == "compiled" else replica
    return model, run


def error_of(rank: int, how: str) -> float:
    """Of the output of a rank, in its third step, against high precision."""
    model, run = replicated(how, rank)
    for step in range(3):
        x = batch(rank, step)
        y = run(x)
        y.square().mean().backward()
        wanted = torch.nn.functional.linear(x, model[0].weight, model[0].bias)  # type: ignore[arg-type]
    return float((y - wanted).norm() / wanted.norm())


def accumulated(rank: int) -> bool:
    """Whether ranks hold equal state after steps of two microbatches, reduced after the backward of each."""
    model, run = replicated("set_recipe", rank)
    for step in range(4):
        run(batch(rank, step)).square().mean().backward()
        nc.reduce_delayed_scaling(model)
    ours = torch.cat([buffer.flatten() for buffer in model.buffers()])
    theirs = [torch.empty_like(ours) for _ in range(WORLD)]
    dist.all_gather(theirs, ours)
    return torch.equal(theirs[0], theirs[1])


def work(rank: int) -> Any:
    return {how: error_of(rank, how) for how in ("set_recipe", "own", "compiled")} | {
        "equal": accumulated(rank)
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(work, tmp_path_factory.mktemp("replicas"), WORLD, SECONDS)


@pytest.mark.parametrize("how", ["set_recipe", "own", "compiled"])
def test_each_rank_keeps_what_it_has_collected(ranks: list[dict[str, Any]], how: str) -> None:
    for rank in range(WORLD):
        assert ranks[rank][how] < 0.1, rank


def test_a_reduction_after_every_backward_keeps_ranks_equal(ranks: list[dict[str, Any]]) -> None:
    assert all(results["equal"] for results in ranks)
