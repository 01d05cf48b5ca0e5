"""FusedSGD is torch.optim.SGD, but for one option."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import narrowcast as nc

FusedSGD = nc.optimizers.FusedSGD


def run(cls: Any, steps: int = 3, **options: Any) -> torch.Tensor:
    p = nn.Parameter(torch.arange(6.0))
    optimizer = cls([p], lr=0.1, **options)
    for step in range(steps):
        p.grad = torch.cos(p.detach() + step)
        optimizer.step()
    return p.detach()


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True}], ids=str)
def test_equals_torch(options: dict[str, Any]) -> None:
    assert torch.equal(run(FusedSGD, **options), run(torch.optim.SGD, **options))


def test_decay_past_the_momentum() -> None:
    p = torch.arange(6.0)
    momentum = torch.zeros(6)
    for step in range(3):
        grad = torch.cos(p + step)
        momentum = grad if step == 0 else 0.9 * momentum + grad
        p = p - 0.1 * (momentum + 0.2 * p)
    ours = run(FusedSGD, momentum=0.9, weight_decay=0.2, wd_after_momentum=True)
    torch.testing.assert_close(ours, p)


def test_closure_and_zero_grad() -> None:
    p = nn.Parameter(torch.ones(2))
    optimizer = FusedSGD([p], lr=1.0, weight_decay=0.5, wd_after_momentum=True, set_grad_none=False)

    def closure() -> float:
        p.grad = torch.ones(2)
        return 7.0

    assert optimizer.step(closure) == 7.0
    assert p.tolist() == [-0.5, -0.5]
    assert optimizer.param_groups[0]["weight_decay"] == 0.5
    optimizer.zero_grad()
    assert p.grad is not None and not p.grad.any()


@pytest.mark.parametrize(
    "options",
    [
        {"lr": None}, {"lr": -0.1}, {"momentum": -1.0}, {"weight_decay": -1.0}, {"nesterov": True},
        {"nesterov": True, "momentum": 0.9, "dampening": 0.1},
    ],
    ids=str,
)  # fmt: skip
def test_bad_options(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        FusedSGD([nn.Parameter(torch.ones(2))], **{"lr": 0.1, **options})
