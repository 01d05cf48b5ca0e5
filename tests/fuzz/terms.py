"""The terms of each gradient: where they cancel, the order of their sum decides what it leaves, and its sign.

A gradient is a sum over the calls of its layer and over the batches of a step. A recomputation adds some terms first.
Adam divides a gradient by its own size: its step has a sign, but not the size of what rounding left.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Terms:
    """How many terms the gradients of a step have, and the sums of their magnitudes.

    It watches a plain run: a checkpoint keeps the terms of what it recomputes in a graph of its own.

    Attributes:
        rooms: by how much each parameter may differ so far, as a norm.
    """

    def __init__(self, model: nn.Module) -> None:
        self.names: dict[Any, str] = {parameter: name for name, parameter in model.named_parameters()}
        self.sums: dict[str, tuple[int, Tensor]] = {}
        self.rooms: dict[str, float] = {}

    def watch(self, loss: Tensor) -> None:
        """Note what each backward of the loss hands to the parameters."""
        seen, nodes = set(), [loss.grad_fn]
        while nodes:
            node = nodes.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            for place, (following, _) in enumerate(node.next_functions):
                name = self.names.get(getattr(following, "variable", None))
                if name is None:
                    nodes.append(following)
                else:
                    node.register_hook(lambda grads, _, place=place, name=name: self._add(name, grads[place]))

    def _add(self, name: str, grad: Tensor | None) -> None:
        if grad is not None:
            terms, total = self.sums.get(name, (0, torch.zeros_like(grad, dtype=torch.float64)))
            self.sums[name] = terms + 1, total + grad.detach().abs()

    def cancelled(self, name: str, grad: Tensor) -> int:
        """Return how many elements of a gradient another order of its terms may turn, by the bound of sums."""
        terms, total = self.sums.get(name, (0, torch.zeros_like(grad)))
        return int((grad.abs() <= (terms - 1) * torch.finfo(grad.dtype).eps * total)[total > 0].sum())

    def make_room(self, optimizer: Any) -> None:
        """Note by how much parameters may differ after a step: a sign of Adam's more in each element that may turn."""
        for parameter, name in self.names.items():
            if parameter.grad is not None:
                turned = self.cancelled(name, parameter.grad)
                step = 2 * optimizer.param_groups[0]["lr"]
                self.rooms[name] = self.rooms.get(name, 0.0) + step * turned**0.5

    def end_of_step(self) -> None:
        self.sums = {}
