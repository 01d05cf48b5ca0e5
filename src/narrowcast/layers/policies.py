"""Policies: the choice between a recipe and high precision for a layer, by the sizes of its GEMMs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .._checks import not_among, shown
from ..recipe import Recipe

Shapes = list[tuple[int, int, int]]
"""(M, N, K) of every linear layer of a module: rows of a call, output features, input features."""

Policy = Callable[[Recipe, Shapes, torch.dtype], "tuple[Recipe | None, str]"]
"""(recipe, shapes, dtype of the weights) -> (recipe or None for high precision, the reason)."""

POLICIES: dict[str, Policy] = {}
"""By name; :mod:`narrowcast.policy` puts in what it has."""


def policy_named(name: str | None, rows: int | None) -> Policy | None:
    """Return the policy of that name; None for None.

    Raises:
        ValueError: an unknown name, no ``rows`` of a positive number, or ``rows`` without a name.
    """
    if name is None:
        if rows is not None:
            raise ValueError(
                f'rows={shown(rows)} without a policy, which alone reads them; give policy="auto" too'
            )
        return None
    if not isinstance(name, str) or name not in POLICIES:
        raise ValueError(f"policy is {not_among(name, (None, *POLICIES))}")
    if not isinstance(rows, int) or rows < 1:
        raise ValueError(
            f"policy={shown(name)} with rows={rows}; give the rows that a layer sees per call, batch x tokens"
        )
    return POLICIES[name]


def choose(layer: Any, recipe: Recipe | None, policy: str, rows: int) -> Recipe | None:
    """Return the recipe or None for a layer of narrowcast; grouped and other layers that were not measured keep the
    recipe.
    """
    stages = [getattr(layer, stage.weight, None) for stage in getattr(layer, "_stages", ())]
    if recipe is None or not stages or any(weight is None or weight.dim() != 2 for weight in stages):
        return recipe
    shapes = [(rows, weight.shape[0], weight.shape[1]) for weight in stages]  # type: ignore[union-attr]
    return POLICIES[policy](recipe, shapes, stages[0].dtype)[0]  # type: ignore[union-attr]
