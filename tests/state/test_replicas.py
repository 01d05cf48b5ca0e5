"""Delayed scaling, and weights that are stored quantized, under ``DistributedDataParallel`` with its defaults."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import narrowcast as nc
from narrowcast.layers.replicas import PENDING

WORLD, SECONDS = 2, 200
RECIPE = nc.recipe.DelayedScaling(amax_history_len=3)
STORED: dict[str, Any] = {
    "current": nc.recipe.Float8CurrentScaling(),
    "mxfp8": nc.recipe.MXFP8BlockScaling(),
    "mxfp6": nc.recipe.MXFP6BlockScaling(),
    "mxfp4": nc.recipe.MXFP4BlockScaling(),
    "nvfp4": nc.recipe.NVFP4BlockScaling(),
}
LAYERS: dict[str, Any] = {
    "linear": lambda: nc.Linear(64, 96, device="cpu"),
    "grouped": lambda: nc.GroupedLinear(2, 64, 64, bias=False, device="cpu", single_grouped_parameter=True),
}
CASES = [*((recipe, "linear") for recipe in STORED), ("mxfp6", "grouped")]
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
        nc.renew_delayed_scaling(model)
        wanted = torch.nn.functional.linear(x, model[0].weight, model[0].bias)  # type: ignore[arg-type]
    return float((y - wanted).norm() / wanted.norm())


def accumulated(rank: int) -> bool:
    """Whether ranks hold equal state after steps of two microbatches, reduced by the step."""
    model, run = replicated("set_recipe", rank)
    nc.set_recipe(model, RECIPE, amax_group=dist.group.WORLD)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for step in range(4):
        run(batch(rank, step)).square().mean().backward()
        if step % 2:
            optimizer.step()
    ours = torch.cat([buffer.flatten() for buffer in model.buffers()])
    theirs = [torch.empty_like(ours) for _ in range(WORLD)]
    dist.all_gather(theirs, ours)
    return torch.equal(theirs[0], theirs[1])


def bytes_of(module: nn.Module) -> torch.Tensor:
    """All buffers of the weights that a module stores quantized."""
    buffers: list[torch.Tensor] = []
    for parameter in module.parameters():
        if isinstance(parameter, nc.tensors.DequantizingTensor):
            parameter._like(lambda buffer: buffers.append(buffer) or buffer)
    return torch.cat([buffer.contiguous().view(-1).view(torch.uint8) for buffer in buffers]).clone()


def stored(rank: int, recipe: str, kind: str) -> Any:
    """(bytes of rank 0 before the constructor, of this rank after it, masters after a step)."""
    torch.manual_seed(rank)
    with nc.quantized_model_init(recipe=STORED[recipe], preserve_high_precision_init_val=True):
        model = LAYERS[kind]()
    first = bytes_of(model)
    if recipe == "current" and rank == 1:  # the columns follow from the rows, and may be there or not
        model.weight.update_usage(columnwise_usage=False)
    dist.broadcast(first, 0)
    replica = DistributedDataParallel(model)
    if recipe == "current":
        model.weight.update_usage(columnwise_usage=True)
    ours = bytes_of(model)
    nc.set_recipe(model, STORED[recipe])
    optimizer = nc.optimizers.FusedAdam(model.parameters(), lr=1e-3, master_weights=True)
    splits = () if kind == "linear" else ([8, 8],)
    replica(torch.ones(16, 64), *splits).square().mean().backward()
    optimizer.step()
    masters = [optimizer.get_unscaled_state(p, "master_param") for p in model.parameters() if p.dim() > 1]
    return first, ours, torch.cat([master.flatten() for master in masters])


def stored_differently(rank: int) -> str:
    with nc.quantized_model_init(recipe=STORED["mxfp4" if rank else "mxfp8"]):
        model = nc.Linear(64, 64, device="cpu")
    try:
        DistributedDataParallel(model)
    except RuntimeError as error:
        return str(error)
    return ""


def work(rank: int) -> Any:
    found: dict[Any, Any] = {how: error_of(rank, how) for how in ("set_recipe", "own", "compiled")}
    found |= {"equal": accumulated(rank), "differently": stored_differently(rank)}
    return found | {case: stored(rank, *case) for case in CASES}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(work, tmp_path_factory.mktemp("replicas"), WORLD, SECONDS)


@pytest.mark.parametrize("how", ["set_recipe", "own", "compiled"])
def test_each_rank_keeps_what_it_has_collected(ranks: list[dict[str, Any]], how: str) -> None:
    for rank in range(WORLD):
        assert ranks[rank][how] < 0.1, rank


def test_a_reduction_after_every_backward_keeps_ranks_equal(ranks: list[dict[str, Any]]) -> None:
    assert all(results["equal"] for results in ranks)


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_every_rank_holds_the_codes_of_the_first(ranks: list[dict[Any, Any]], case: tuple[str, str]) -> None:
    """Also of columns, and of the unrounded values that masters begin as."""
    (first, zero, masters), (_, one, masters_of_one) = ranks[0][case], ranks[1][case]
    assert torch.equal(zero, first)
    assert torch.equal(one, first)
    assert torch.equal(masters, masters_of_one)


def test_ranks_that_store_weights_differently_are_told(ranks: list[dict[Any, Any]]) -> None:
    assert all("in different formats or directions: weight; build" in one["differently"] for one in ranks)


def test_a_module_that_is_called_module_makes_no_replica() -> None:
    before = len(PENDING)
    parent = nn.Module()
    parent.module = nc.Linear(16, 16, device="cpu", recipe=nc.recipe.DelayedScaling())
    assert len(PENDING) == before
    parent.module(torch.ones(2, 16)).sum().backward()
