"""``Snapshot`` puts back what running a model changes, by what is there and not by name."""

from __future__ import annotations

import copy

import torch
from torch import nn

import narrowcast as nc
from narrowcast.layers import Snapshot

WIDTH = 48


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nc.Linear(WIDTH, WIDTH, device="cpu", fuse_wgrad_accumulation=True),
        nc.Linear(WIDTH, WIDTH, device="cpu", delay_wgrad_compute=True),
        nn.BatchNorm1d(WIDTH),
        nc.Linear(WIDTH, WIDTH, device="cpu"),
    )


def run(one: nn.Module) -> None:
    with nc.autocast(recipe=nc.recipe.DelayedScaling(amax_history_len=3)):
        out = one(torch.randn(7, WIDTH))
    out.square().sum().backward()


def test_everything_is_put_back() -> None:
    one = model()
    one[0].weight.main_grad = torch.zeros(WIDTH, WIDTH)
    one[0].weight.grad_added_to_main_grad = False
    run(one)
    tensors = dict(one.named_buffers())
    values, main_grad = copy.deepcopy(tensors), one[0].weight.main_grad.clone()
    grad, grads = one[3].weight.grad, one[3].weight.grad.clone()
    fields = {name: dict(vars(layer)) for name, layer in one.named_modules()}
    one[0].weight.grad_added_to_main_grad = False
    waiting = one[1].wgrad_stores["weight"].waiting()
    snapshot = Snapshot([one], grads=True)
    one[0].unknown_to_anyone = True
    for layer in (one[0], one[1], one[3]):
        layer.recipe = nc.recipe.DelayedScaling(amax_history_len=5)
    one[3].weight.grad = None
    for _ in range(2):
        one(torch.randn(7, WIDTH)).sum().backward()
    assert one[0].amax_history.shape[0] == 5 and len(one[1].wgrad_stores["weight"]) == 3
    snapshot.restore()
    after = dict(one.named_buffers())
    assert list(after) == list(tensors)
    for name, buffer in tensors.items():
        assert after[name] is buffer and torch.equal(buffer, values[name])
    assert torch.equal(one[0].weight.main_grad, main_grad) and not one[0].weight.grad_added_to_main_grad
    assert one[3].weight.grad is grad and torch.equal(grad, grads)
    assert all(a is b for a, b in zip(one[1].wgrad_stores["weight"].waiting(), waiting, strict=True))
    for name in "013":
        after_it = vars(one.get_submodule(name))
        assert after_it.keys() == fields[name].keys()
        assert all(value is fields[name][key] for key, value in after_it.items())


def test_graphs_keep_the_tensors_of_now() -> None:
    one = model()
    one[0].weight.main_grad = torch.zeros(WIDTH, WIDTH)
    snapshot = Snapshot([one])
    run(one)
    born = one[3].amax
    assert born.any() and one[0].weight.main_grad.any() and one[2].num_batches_tracked == 1
    snapshot.restore_in_place()
    assert one[3].amax is born and not born.any()
    assert not one[0].weight.main_grad.any() and one[2].num_batches_tracked == 0
    assert len(one[1].wgrad_stores["weight"]) == 0
