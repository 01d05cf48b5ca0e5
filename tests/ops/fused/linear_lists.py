"""What the tests of the fused linear operations share: one list, fused in either direction, against itself unfused."""

from __future__ import annotations

from collections.abc import Callable

from modules import assert_same, step
from ops_checks import check, make_inputs, only

import narrowcast as nc
from narrowcast.ops.fused import Fusion
from narrowcast.testing import assert_close

K, N = 48, 80
LEAD = (3, 8)

Make = Callable[[], nc.ops.Sequential]


def chosen(module: nc.ops.Sequential, direction: str) -> list[str]:
    """Names of the operations that ran last."""
    (group,) = module.groups()
    return [type(op).__name__ for op, _ in getattr(group._last_fused[1], direction)]  # type: ignore[union-attr]


def run(make: Make, fusions: list[Fusion], recipe: nc.recipe.Recipe | None, extra: bool) -> dict:
    """Outputs and gradients of one step with these fusions only, each of which must have been chosen."""
    module = make()
    inputs = make_inputs([(*LEAD, K), (*LEAD, N)][: 1 + extra])
    with only(
        forward=[fusion for fusion in fusions if fusion.direction == "forward"],
        backward=[fusion for fusion in fusions if fusion.direction == "backward"],
    ):
        results = step(module, inputs, recipe)
    for fusion in fusions:
        assert fusion.name in chosen(module, fusion.direction)
    return results


def compare(
    make: Make,
    fusion: Fusion,
    recipe: nc.recipe.Recipe | None,
    *,
    extra: bool,
    entry: str,
    gradients: str | None = None,
) -> None:
    """Fused against unfused; ``entry`` and ``gradients``: tolerances of outputs and gradients."""
    ours, theirs = run(make, [fusion], recipe, extra), run(make, [], recipe, extra)
    assert ours.keys() == theirs.keys()
    if entry == "exact":
        assert_same(ours, theirs)
    for name in theirs:
        assert ours[name].shape == theirs[name].shape and ours[name].dtype == theirs[name].dtype
        assert_close(ours[name], theirs[name], entry if name.startswith("out") else gradients or entry)


def check_fused(make: Make, recipe: nc.recipe.Recipe | None, *, extra: bool) -> None:
    """Compiled, dynamic, without gradients, backward twice, recomputed: as every operation."""
    check(make, [(40, K), (40, N)][: 1 + extra], recipe)
