"""Quantized weights that are kept for later microbatches: reused while the weight is the same, never afterwards."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from modules import LAYERS, Operators, run_layer
from torch import Tensor, nn

from narrowcast.functional import kept_weights
from narrowcast.recipe import DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling

RECIPES: dict[str, Any] = {"current": Float8CurrentScaling(), "mxfp8": MXFP8BlockScaling()}


def run(layer: Any, x: Tensor, first: Any = None, forward: Any = None) -> Tensor:
    return run_layer(layer, x, forward, is_first_microbatch=first)


def last_weight(layer: nn.Module) -> Tensor:
    """One that is quantized; of parts, not the first."""
    return [parameter for name, parameter in layer.named_parameters() if "weight" in name][-1]


def optimizer_step(weight: Any) -> None:
    weight.grad = torch.ones_like(weight)
    torch.optim.SGD([weight], lr=0.5).step()


@torch.no_grad()
def edit(weight: Any) -> None:
    weight.mul_(2)


def assign_data(weight: Any) -> None:
    weight.data = weight.data * 2


def assign_data_twice(weight: Any) -> None:
    """An allocator gives the first address again."""
    weight.data = weight.data * 2
    weight.data = weight.data * 2


@torch.no_grad()
def set_(weight: Any) -> None:
    weight.set_(weight * 2)


def vector(weight: Any) -> None:
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector([weight]) * 2, [weight])


CHANGES = [optimizer_step, edit, assign_data, assign_data_twice, set_, vector]


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("change", CHANGES)
def test_a_later_microbatch_sees_a_changed_weight(change: Any, name: str) -> None:
    layer, x = LAYERS[name](recipe=RECIPES["current"]), torch.randn(8, 32)
    before = run(layer, x, True)
    change(last_weight(layer))
    after = run(layer, x, False)
    assert torch.equal(after, run(layer, x)) and not torch.equal(after, before)
    assert torch.equal(run(layer, x, False), after)


@pytest.mark.parametrize("name", LAYERS)
def test_compiled_code_refuses_a_changed_weight(name: str) -> None:
    layer, x = LAYERS[name](recipe=RECIPES["current"]), torch.randn(8, 32, requires_grad=True)
    forward = torch.compile(layer, fullgraph=True, backend="aot_eager")
    expected = [run(layer, x), run(layer, x)]
    ours = [run(layer, x, first, forward) for first in (True, False)]
    assert all(map(torch.equal, ours, expected))
    sum(y.sum() for y in ours).backward()  # type: ignore[union-attr]
    for change in (edit, assign_data):
        change(last_weight(layer))
        with pytest.raises(RuntimeError, match="changed since is_first_microbatch=True"):
            run(layer, x, False, forward)
        assert torch.equal(run(layer, x, True, forward), run(layer, x))
        assert torch.equal(run(layer, x, False, forward), run(layer, x))
    change(last_weight(layer))
    assert torch.equal(run(layer, x, False), run(layer, x))  # eager code sees what compiled code kept


def test_it_is_quantized_once() -> None:
    layer, x = LAYERS["linear"](recipe=RECIPES["mxfp8"]), torch.randn(8, 32)
    counts = []
    for first in (True, False, False, None):
        with Operators() as operators:
            run(layer, x, first)
        counts.append(sum(n for what, n in operators.seen.items() if what not in ("fprop", "dgrad", "wgrad")))
    assert counts[1] == counts[2] == counts[0] - 1 == counts[3] - 1


@pytest.mark.parametrize("name", ["linear", "grouped"])
def test_flags_that_are_not_quite_bools(name: str) -> None:
    x = torch.randn(8, 32)
    for first, later in ((np.bool_(True), np.bool_(False)), (1, 0)):
        layer = LAYERS[name](recipe=RECIPES["current"], bias=False, fuse_wgrad_accumulation=True)
        twin = copy.deepcopy(layer)
        for module, flags in ((layer, (first, later)), (twin, (True, False))):
            for parameter in module.parameters():
                parameter.main_grad = torch.full_like(parameter, 100.0)
            for flag in flags:
                run(module, x, flag).square().sum().backward()
        for ours, theirs in zip(layer.parameters(), twin.parameters()):
            assert torch.equal(ours.main_grad, theirs.main_grad)
        assert torch.equal(run(layer, x, later), run(layer, x))


@pytest.mark.parametrize("recipe", [*RECIPES.values(), DelayedScaling()], ids=[*RECIPES, "delayed"])
@pytest.mark.parametrize("name", ["linear", "grouped", "layernorm_mlp"])
def test_kept_under_inference_mode_then_trained(name: str, recipe: Any) -> None:
    layer = LAYERS[name](recipe=recipe)
    x = torch.randn(8, 32, requires_grad=True)
    with torch.inference_mode():
        expected = run(layer.eval(), x, True)
        assert torch.equal(run(layer, x, False), expected)
    y = run(layer.train(), x, False)
    y.sum().backward()
    assert torch.equal(y, expected) and last_weight(layer).grad is not None


def test_what_is_gone_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_weights, "_MANY", 0)
    layer, x = LAYERS["linear"](recipe=RECIPES["current"]), torch.randn(8, 32)
    for _ in range(4):
        run(layer, x, True)
    assert len(kept_weights._MADE_FROM) <= 2 + sum(
        not kept.expired() for kept, _ in kept_weights._MADE_FROM.values()
    )


@pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")
@pytest.mark.parametrize("way", ["fully_shard", "FSDP"])
def test_nothing_is_kept_under_fsdp(way: str, tmp_path: Path) -> None:
    """It gathers the weights of every forward into the same memory, and takes the count of versions back."""
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        plain = LAYERS["linear"](recipe=RECIPES["current"])
        twin = copy.deepcopy(plain)
        model: Any = (
            fully_shard(plain, mesh=mesh)
            if way == "fully_shard"
            else FullyShardedDataParallel(plain, device_id=torch.device("cpu"), use_orig_params=True)
        )
        x = torch.randn(8, 32)
        for module in (model, twin):
            optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
            for first in (True, False):
                run(module, x, first).square().sum().backward()
                optimizer.step()
        assert plain._fp8_workspaces == {"weight": None}
        assert torch.equal(run(model, x, False), run(twin, x, False))
    finally:
        dist.destroy_process_group()
