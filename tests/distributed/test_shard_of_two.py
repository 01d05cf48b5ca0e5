"""Sharded models on two ranks, each with rows of its own, beside replicas whose gradients are averaged: bit for bit.

What lies between forwards and steps: evaluations, blocks that do not run, adapters that read the weight, and stored
weights that begin to train.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from convert.test_adapters import adapted
from recipes import QUANTIZED
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import narrowcast as nc
from narrowcast.distributed import shard

from .blocks import make_model
from .ranks_checks import of_all, run_checks
from .test_shard import Chosen, values

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="this PyTorch has no torch.distributed"),
    pytest.mark.slow,
]
CALLS = {
    "an evaluation in between": ("forward", "evaluate", "backward", "step"),
    "behind a step": ("train", "step", "forward", "evaluate", "backward", "evaluate", "step"),
    "without gradients in between": ("forward", "forward without", "backward", "step", "train", "step"),
}
CHOSEN = ((0, 1, 2), (0, 2), (0,), (0, 2), (0, 1, 2), (1, 2))


def rows_of(step: int, width: int, louder: float = 1.0) -> Tensor:
    """Rows of this rank; the second rank's are louder."""
    generator = torch.Generator().manual_seed(2 * step + dist.get_rank())
    return torch.randn(16, width, generator=generator) * (louder if dist.get_rank() else 1.0)


def average(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= 2


def equal(ours: nn.Module, plain: nn.Module) -> list[str]:
    """Return the names of what differs."""
    wanted = values(plain)
    return [name for name, value in values(ours).items() if not torch.equal(value, wanted[name])]


def evaluated(recipe: str, calls: tuple[str, ...], reshard: bool | None) -> dict[str, Any]:
    """K9: evaluations between a forward and its backward, after data that grows fourfold."""
    mesh, models, found = init_device_mesh("cpu", (2,)), [], []
    for sharded in (False, True):
        model: Any = make_model(recipe)
        nc.set_recipe(model, QUANTIZED[recipe], amax_group=dist.group.WORLD)
        if sharded:
            shard(model, mesh, blocks=model.blocks, reshard_after_forward=reshard)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses, pending = [], torch.zeros(())
        for number, call in enumerate(3 * calls):
            if call == "step":
                optimizer.step()
                optimizer.zero_grad()
                continue
            if call != "backward":
                model.train(call != "evaluate")
                with torch.set_grad_enabled(call in ("train", "forward")):
                    loss = model(rows_of(number, 64, 4.0)).square().mean()
                losses.append(loss.item())
                pending = loss if loss.requires_grad else pending
            if call in ("train", "backward"):
                pending.backward()
                if not sharded:
                    average(model)
        models.append(model)
        found.append(losses)
    return {"losses": found, "differ": equal(models[1], models[0])}


def chosen(apart: bool) -> dict[str, Any]:
    """K10: blocks that do not run in a step, under delayed scaling."""
    mesh, models = init_device_mesh("cpu", (2,)), []
    for sharded in (False, True):
        torch.manual_seed(0)
        model = Chosen()
        recipe = nc.recipe.DelayedScaling(amax_history_len=3)
        nc.set_recipe(model, recipe, amax_group=dist.group.WORLD)
        if sharded:
            shard(model, mesh, **({"blocks": list(model.blocks)} if apart else {}))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step, numbers in enumerate(CHOSEN):
            model(rows_of(step, 32, 1.0 + step), numbers).square().mean().backward()
            if not sharded:
                average(model)
            optimizer.step()
            optimizer.zero_grad()
        models.append(model)
    return {"differ": equal(models[1], models[0])}


def read(recipe: str) -> dict[str, Any]:
    """K8: ``train_merged``, whose merge reads the base in every forward."""
    mesh, models, losses = init_device_mesh("cpu", (2,)), [], []
    for sharded in (False, True):
        model = nc.train_merged(adapted(QUANTIZED[recipe], "plain", 128, 128, 128))
        nc.set_recipe(model, QUANTIZED[recipe], amax_group=dist.group.WORLD)
        with torch.no_grad():
            for layer in model.model:
                layer.lora_B["default"].weight.normal_(generator=torch.Generator().manual_seed(1)).mul_(0.1)
        if sharded:
            shard(model, mesh, blocks=list(model.model))
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer, found = torch.optim.SGD(trained, lr=0.1), []
        for step in range(3):
            loss = model(rows_of(step, 128).bfloat16()).square().mean()
            loss.backward()
            if not sharded:
                average(model)
            found.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        models.append(model)
        losses.append(found)
    return {"losses": losses, "differ": equal(models[1], models[0])}


def magnitudes(recipe: str) -> dict[str, Any]:
    """K8: PEFT's DoRA, whose magnitudes read the base in every forward."""
    import peft

    mesh, losses, grads = init_device_mesh("cpu", (2,)), [], []
    for sharded in (False, True):
        torch.manual_seed(0)
        base = nn.Sequential(*(nn.Linear(128, 128) for _ in range(2))).requires_grad_(False)
        nc.convert(base, QUANTIZED[recipe], heads=True)
        config = peft.LoraConfig(r=4, target_modules=["0", "1"], use_dora=True, init_lora_weights=False)
        model: Any = peft.get_peft_model(base, config)
        if sharded:
            shard(model, mesh)
        found = []
        for step in range(3):
            loss = model(rows_of(step, 128)).square().mean()
            loss.backward()
            found.append(loss.item())
        if not sharded:
            average(model)
        whole = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
        grads.append({name: getattr(grad, "full_tensor", lambda g=grad: g)() for name, grad in whole.items()})
        losses.append(found)
    off = [(grads[1][name] - grad).norm() / grad.norm() for name, grad in grads[0].items()]
    return {"losses": losses, "off": max(off).item(), "count": len(off)}


def unfrozen(weights: Any, way: str) -> dict[str, Any]:
    """K7: a stored layer that begins to train, as PEFT's ``modules_to_save`` lets it, by way of both remedies."""
    moved, told = {}, {}
    for remedy in ("none", "masters", "revert"):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(128, 128, bias=False).requires_grad_(False))
        nc.convert(model, QUANTIZED["current"], weights=weights, heads=True)
        if remedy == "revert":
            nc.revert(model)
        model.requires_grad_(True)
        if way == "fsdp2":
            fully_shard(model)
        elif way == "shard":
            shard(model)
        called = nn.parallel.DistributedDataParallel(model) if way == "ddp" else model
        start = nc.distributed.describe_parameter(model, "0.weight").whole().clone()
        if remedy == "masters":
            optimizer: Any = nc.optimizers.FusedAdam(model.parameters(), lr=2e-4, master_weights=True)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, weight_decay=0.0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(50):
                called(rows_of(step, 128)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        told[remedy] = [
            str(one.message) for one in caught if "small steps change nothing" in str(one.message)
        ]
        end = nc.distributed.describe_parameter(model, "0.weight").whole()
        moved[remedy] = end - start
    way_there = moved.pop("revert").flatten()
    share = {
        name: (one.flatten() @ way_there / way_there.square().sum()).item() for name, one in moved.items()
    }
    return {"share": share, "told": told}


UNFROZEN = (("stored", "ddp"), ("stored", "fsdp2"), ("stored", "shard"), ("nvfp4", "shard"))


def checks(folder: str) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, calls in CALLS.items():
        for recipe in ("delayed", "current"):
            for reshard in (None, False):
                made[f"{name} {recipe} {reshard}"] = partial(evaluated, recipe, calls, reshard)
    made |= {f"chosen {apart}": partial(chosen, apart) for apart in (False, True)}
    made |= {f"read {recipe}": partial(read, recipe) for recipe in ("delayed", "current", "mxfp8")}
    made |= {f"magnitudes {recipe}": partial(magnitudes, recipe) for recipe in ("current", "mxfp8")}
    return made | {f"unfrozen {weights} {way}": partial(unfrozen, weights, way) for weights, way in UNFROZEN}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_checks(checks, tmp_path_factory.mktemp("two"), 2)


@pytest.mark.parametrize("reshard", [None, False])
@pytest.mark.parametrize("recipe", ["delayed", "current"])
@pytest.mark.parametrize("name", CALLS)
def test_evaluations_between_a_forward_and_its_backward(
    name: str, recipe: str, reshard: bool | None, two: Any
) -> None:
    for found in of_all(two, f"{name} {recipe} {reshard}"):
        assert found["losses"][0] == found["losses"][1] and not found["differ"]


@pytest.mark.parametrize("apart", [False, True])
def test_blocks_that_did_not_run(apart: bool, two: Any) -> None:
    assert not any(found["differ"] for found in of_all(two, f"chosen {apart}"))


@pytest.mark.parametrize("recipe", ["delayed", "current", "mxfp8"])
def test_merges_of_every_forward(recipe: str, two: Any) -> None:
    for found in of_all(two, f"read {recipe}"):
        assert found["losses"][0] == found["losses"][1] and not found["differ"]


@pytest.mark.parametrize("recipe", ["current", "mxfp8"])
def test_magnitudes_of_dora(recipe: str, two: Any) -> None:
    pytest.importorskip("peft")
    for found in of_all(two, f"magnitudes {recipe}"):
        assert found["losses"][0] == found["losses"][1]
        assert found["count"] == 6 and found["off"] < 1e-6  # sums of three gradients in another order


@pytest.mark.parametrize("weights, way", UNFROZEN)
def test_a_stored_layer_that_begins_to_train_says_how(weights: str, way: str, two: Any) -> None:
    for found in of_all(two, f"unfrozen {weights} {way}"):
        told, share = found["told"], found["share"]
        assert told["none"] and not told["masters"] and not told["revert"]
        assert all("master_weights=True" in one and "revert(model)" in one for one in told["none"])
        assert share["none"] < 0.35 and share["masters"] > 0.5, share
