"""``WeightScales``: one scale per sharded weight, which follows from the weight."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from recipes import QUANTIZED
from torch import nn

import narrowcast as nc
from narrowcast.distributed import shard
from narrowcast.distributed.sharded_weight import ShardedWeight
from narrowcast.tensors import local

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="this PyTorch has no torch.distributed"),
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module"),
]


# "recent" has another scale after every step
RECIPES = {
    **QUANTIZED,
    "recent": nc.recipe.DelayedScaling(amax_history_len=2, amax_compute_algo="most_recent"),
}


@pytest.fixture(autouse=True)
def one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Refusing(nn.Sequential):
    """Raises after its layers when it is told to."""

    refuses = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if self.refuses:
            raise ValueError("refused")
        return y


def make(
    recipe: str = "delayed", sharded: bool = True, reshard: bool | None = False, block: bool = True
) -> Any:
    """``block``: the first layer is sharded by itself, else with the model."""
    torch.manual_seed(0)
    # fp32: of a weight gathered as codes a write sees values that bf16 rounds again
    place: Any = {"device": "cpu", "dtype": torch.float32}
    model = Refusing(nc.Linear(64, 64, **place), nc.Linear(64, 64, **place))
    nc.set_recipe(model, RECIPES[recipe])
    if sharded:
        shard(model, blocks=[model[0]] if block else [], reshard_after_forward=reshard)
    return model


def gathers(model: Any) -> list[Any]:
    own = [local(parameter) for parameter in model.parameters()]
    return [one._gather for one in own if isinstance(one, ShardedWeight)]


def batch(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(32, 64, generator=generator, dtype=torch.float32) * (1 + 3 * step)


def unwatched(model: Any, x: torch.Tensor) -> None:
    with torch.no_grad():
        model(x)


def refused(model: Any, x: torch.Tensor) -> None:
    model.refuses = True
    with torch.no_grad(), pytest.raises(ValueError, match="refused"):
        model(x)
    model.refuses = False


def evaluated(model: Any, x: torch.Tensor) -> None:
    model.eval()
    unwatched(model, x)
    model.train()


@pytest.mark.parametrize("between", [unwatched, refused, evaluated])
@pytest.mark.parametrize("reshard", [None, False, True])
@pytest.mark.parametrize("block", [True, False], ids=["a block", "whole"])
def test_a_backward_reads_the_scales_of_its_forward(between: Any, reshard: bool | None, block: bool) -> None:
    """Also where weights stay gathered, and other forwards ran in between."""
    gradients: list[list[torch.Tensor]] = []
    for sharded in (False, True):
        model, found = make("recent", sharded, reshard, block), []
        for step in range(4):
            loss = model(batch(step)).square().mean()
            between(model, 7 * batch(step))
            between(model, 9 * batch(step))
            loss.backward()
            found += [local(parameter.grad).clone() for parameter in model.parameters()]
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            model.zero_grad()
        gradients.append(found)
    assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("reshard", [None, False, True])
def test_an_evaluation_follows_weights_that_were_written(reshard: bool | None, trained: bool) -> None:
    outputs = []
    for sharded in (False, True):
        model = make(sharded=sharded, reshard=reshard)
        if trained:
            for step in (0, 1):
                model(batch(step)).square().mean().backward()
                nc.renew_delayed_scaling(model)
                evaluated(model, batch(1))
        with torch.no_grad():
            model[1].weight.mul_(1000.0)
            outputs.append(model.eval()(batch(0)))
            if not sharded:
                nc.set_recipe(model, None)
                wanted = model(batch(0))
    assert torch.equal(*outputs) and (outputs[0] - wanted).norm() < 0.06 * wanted.norm()


@pytest.mark.parametrize("how", ["written", "loaded", "loaded later", "loaded with state"])
@pytest.mark.parametrize("reshard", [None, True])
def test_a_first_step_follows_weights_that_were_written(reshard: bool | None, how: str) -> None:
    """After the model was sharded, as weights of a checkpoint are; those of a state with steps have scales."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    whole = make(sharded=False)
    whole(batch(1)).square().mean().backward()
    nc.renew_delayed_scaling(whole)
    trained = {name: value.clone() for name, value in whole.state_dict().items()}
    if how != "loaded with state":
        trained = {name: value for name, value in trained.items() if "weight" in name or "bias" in name}
    results, options = [], StateDictOptions(full_state_dict=True, strict=False)
    for sharded in (False, True):
        model = make(sharded=sharded, reshard=reshard)
        if how == "loaded later":
            model(batch(2)).sum().backward()
            for one in model:
                one.reset_delayed_scaling()
        if how == "written":
            with torch.no_grad():
                model[1].weight.mul_(1000.0)
        else:
            given = {name: 1000.0 * value if name == "1.weight" else value for name, value in trained.items()}
            set_model_state_dict(model, given, options=options)
        model.zero_grad()
        y = model(batch(0))
        y.square().mean().backward()
        own = (local(parameter.grad).clone() for parameter in model.parameters())
        results.append([y.detach(), *own, *(value.clone() for value in model.buffers())])
    assert all(map(torch.equal, *results))
    exact = make("current", sharded=False)
    with torch.no_grad():
        exact[1].weight.mul_(1000.0)
    assert torch.equal(results[1][0], exact(batch(0))) == (how != "loaded with state")


def test_a_model_in_a_reentrant_checkpoint() -> None:
    """Its first run records no gradients and is the forward all the same."""
    gradients = []
    for sharded in (False, True):
        model, found = make(sharded=sharded), []
        for step in range(3):
            x = batch(step).requires_grad_()
            y = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=True)  # type: ignore[attr-defined]
            y.square().mean().backward()
            nc.renew_delayed_scaling(model)
            found.append(x.grad)
        gradients.append(found)
    assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_the_scale_is_that_of_the_whole_weight(recipe: str) -> None:
    model = make(recipe, reshard=True)
    model(batch(0))
    for gather, layer in zip(gathers(model), model, strict=True):
        largest = local(layer.weight)._shard.abs().max()
        assert gather.scale == torch.tensor(448.0, dtype=torch.float32) / largest
        assert gather.kept == gather.scale.reciprocal()


def test_later_microbatches_ask_for_no_new_scale() -> None:
    model = make("current", reshard=True)
    model.set_requires_gradient_sync(False)
    model(batch(0)).sum().backward()
    before = [gather.scale for gather in gathers(model)]
    model.set_requires_gradient_sync(True)
    model(batch(1)).sum().backward()
    assert all(torch.equal(a, b.scale) for a, b in zip(before, gathers(model), strict=True))
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model(batch(2))
    assert not any(torch.equal(a, b.scale) for a, b in zip(before, gathers(model), strict=True))


def test_a_shard_that_was_written_has_no_scale() -> None:
    model = make("current", reshard=True)
    model(batch(0))
    with torch.no_grad():
        model[0].weight.mul_(2)
    with pytest.raises(RuntimeError, match="was written to, and has no scale yet: call the model"):
        model[0].unshard()
