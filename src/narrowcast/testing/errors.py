"""Error metrics."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return ||actual - expected|| / ||expected|| in fp64; 0 if both are empty or zero; NaN propagates.

    Args:
        actual, expected: tensors of one shape.
    Raises:
        ValueError: the shapes differ.
    """
    if actual.shape != expected.shape:
        raise ValueError(f"shapes differ: {tuple(actual.shape)} and {tuple(expected.shape)}")
    a, e = actual.detach().double().cpu(), expected.detach().double().cpu()
    difference, size = torch.linalg.vector_norm(a - e).item(), torch.linalg.vector_norm(e).item()
    if difference == 0.0:
        return 0.0
    return difference / size if size else float("inf")


def aliased(outputs: Iterable[Tensor], inputs: Iterable[Tensor]) -> list[tuple[int, int]]:
    """Return pairs of positions whose tensors share storage: outputs counted from 0, inputs from -1 downwards.

    An operator whose outputs alias an input or each other corrupts data silently once compiled.
    """
    tensors = [(i, t) for i, t in enumerate(outputs)] + [(-1 - i, t) for i, t in enumerate(inputs)]
    held = [(i, t.untyped_storage().data_ptr()) for i, t in tensors if t.numel()]
    return [
        (i, j)
        for position, (i, first) in enumerate(held)
        for j, second in held[position + 1 :]
        if first == second and (i >= 0 or j >= 0)
    ]
