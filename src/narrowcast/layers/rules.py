"""``keeps_rule``: whether a forward changes the rule by which the scales of a layer are renewed."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..functional.recomputation import RUNNING
from ..recipe import DelayedScaling
from ..state import starts_a_step
from .recipe_owner import RecipeOwner

Rules = tuple[DelayedScaling | None, DelayedScaling | None]
"""Of a stage: forward and backward."""

_RULE = ("fp8_format", "margin", "amax_history_len", "amax_compute_algo", "scaling_factor_compute_algo")


def keeps_rule(
    layer: RecipeOwner,
    known: Rules | None,
    wanted: Rules,
    amaxes: Sequence[Tensor | None],
    roots: tuple[str, ...],
) -> bool:
    """Return whether a forward leaves the rule of a stage as it is: no step begins, and no buffers are missing.

    Args:
        known, wanted: the rule, and that of the forward's recipe.
        amaxes: the buffers, forward and backward.
        roots: models whose forward is traced.
    Raises:
        RuntimeError: the model that renews the scales has begun its forward under another rule.
    """
    if not (layer.training and starts_a_step()):
        return all(rule is None or amax is not None for rule, amax in zip(wanted, amaxes))
    root = layer._root
    if known is None or root is None or not (root in roots or RUNNING.runs(root)):
        return False
    differ = {
        f"{name}={getattr(new, name)!r}"
        for old, new in zip(known, wanted)
        for name in _RULE
        if old is not None and new is not None and getattr(old, name) != getattr(new, name)
    }
    if differ:
        raise RuntimeError(
            f"{type(layer).__name__} got a DelayedScaling of another rule ({', '.join(sorted(differ))}) from an "
            "autocast inside the forward of the model that set_recipe was called with, whose scales were renewed "
            "before; enter the autocast around the model's call, or call narrowcast.set_recipe with that recipe"
        )
    return False
