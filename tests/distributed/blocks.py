"""A small model of blocks and its training, the same on every rank, for comparison with one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from recipes import QUANTIZED
from torch import Tensor, nn

import narrowcast as nc

WIDTH = 64


class Block(nn.Module):
    """A norm with a linear layer, a linear layer and a feed-forward block."""

    def __init__(self, width: int, hidden: int, device: str = "cpu") -> None:
        super().__init__()
        self.up = nc.LayerNormLinear(width, hidden, device=device)
        self.down = nc.Linear(hidden, width, device=device)
        self.mlp = nc.LayerNormMLP(width, hidden, device=device)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x + self.down(torch.tanh(self.up(x))))


class Model(nn.Module):
    """Blocks and a head."""

    def __init__(self, width: int = WIDTH, hidden: int = 96, blocks: int = 2, device: str = "cpu") -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, hidden, device) for _ in range(blocks))
        self.head = nc.Linear(width, width, device=device)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make_model(
    recipe: str,
    width: int = WIDTH,
    hidden: int = 96,
    blocks: int = 2,
    quantized: bool = False,
    device: str = "cpu",
) -> Model:
    """The model with a recipe, the same on every rank; ``quantized``: with weights that are stored so."""
    torch.manual_seed(0)
    with nc.quantized_model_init(enabled=quantized, recipe=QUANTIZED[recipe]):
        model = Model(width, hidden, blocks, device)
    nc.set_recipe(model, QUANTIZED[recipe])
    return model


def train(
    model: nn.Module,
    steps: int = 3,
    microbatches: int = 1,
    width: int = WIDTH,
    before: Callable[[bool], Any] | None = None,
    optimizer: Any = None,
    start: int = 0,
) -> list[float]:
    """Losses of steps on random data, the same on every rank, so that mean gradients are those of one process.

    Args:
        before: called in front of every microbatch with whether it is the step's last. start: steps that were done.
    """
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(start, start + steps):
        generator = torch.Generator().manual_seed(step)
        for microbatch in range(microbatches):
            if before is not None:
                before(microbatch == microbatches - 1)
            x = torch.randn(32, width, generator=generator).to(next(model.parameters()))
            loss = model(x).float().square().mean()
            loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses
