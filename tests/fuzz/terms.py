"""The terms of each gradient: how far another order of their sum may move it.

A gradient is a sum over the calls of its layer and over the batches of a step. A recomputation adds some terms first.
What that changes is a rounding, which a history may let grow: Adam divides a gradient by its own size, so that its step
has a sign but not the size of what rounding left; a softmax of large logits has gradients that are left of far larger
ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Terms:
    """How many terms the gradients of a step have, and the sums of their magnitudes.

    It watches a plain run: a checkpoint keeps the terms of what it recomputes in a graph of its own.

    Args:
        generator: draws how far each gradient is moved; None: all are moved toward zero, as far as may be.
    """

    def __init__(self, model: nn.Module, generator: torch.Generator | None) -> None:
        self.names: dict[Any, str] = {parameter: name for name, parameter in model.named_parameters()}
        self.sums: dict[str, tuple[int, Tensor]] = {}
        self.generator = generator

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

    def bound(self, name: str, grad: Tensor) -> Tensor:
        """Return by how much another order of its terms may move each element of a gradient, by the bound of sums."""
        terms, total = self.sums.get(name, (1, torch.zeros_like(grad)))
        return (terms - 1) * torch.finfo(grad.dtype).eps * total

    def move(self) -> None:
        """Move the gradients of a step as far as another order might, and begin the next."""
        for parameter, name in self.names.items():
            grad = parameter.grad
            if grad is not None:
                if self.generator is None:
                    share = -grad.sign().double()
                else:
                    share = 2 * torch.rand(grad.shape, generator=self.generator, dtype=torch.float64) - 1
                grad.copy_(grad + share.to(grad.device) * self.bound(name, grad))
        self.sums = {}
