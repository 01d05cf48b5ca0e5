"""The autocast that a forward ran under, where its recomputation runs outside of it.

PyTorch's checkpoints recompute in the backward, outside of an ``autocast`` around the forward. A layer leaves a note on
the forward that runs, for its recomputation. A graph that is there already runs no code of a layer, and layers of one
kind share it. But the compiler calls the functions that a graph is guarded on, every time: two of them do the same.
"""

from __future__ import annotations

from typing import Any

from ..functional.recomputation import run_now
from ..recipe import Recipe
from ..state import THREAD
from ..upstream.autograd import is_in_backward
from ..upstream.private import UpstreamError

OWN: Any = object()
"""In place of an autocast's recipe: there is none."""

UNSEEN: Any = object()
"""In place of an autocast's recipe: this runs in a backward, and which forward it repeats is not known."""

_LEFT: list[Recipe | None] = []  # of autocasts that recomputations were outside of, by number


def recipe_around() -> Any:
    """Return the recipe of the autocast in force, or of that which a recomputation runs outside of; or OWN, or UNSEEN.

    A recomputation enters again what its function has entered. Where it has entered nothing, it is as deep in autocasts
    as its function was when it began: the least of all layers there. Eager layers call this only where a recomputed
    function may run: in a backward, under hooks for saved tensors, or in the forward of a function.

    Raises:
        UpstreamError: a recomputation will run outside of this autocast, and this release keeps its forward in a way
            that is not known.
    """
    state = THREAD.state
    depth, recipe = state.depth, state.recipe if state.depth else OWN
    try:
        run = run_now()
    except UpstreamError:
        if depth and state.recomputes is None:
            raise
        return UNSEEN if not depth and is_in_backward() else recipe
    first_runs = []
    while run is not None and not run.rerun:
        first_runs.append(run.forward)
        run = run.around
    if not depth and run is not None:
        recipe = UNSEEN if run.forward.autocast is None else run.forward.autocast[1]
    elif not depth and is_in_backward():
        recipe = UNSEEN
    for forward in first_runs:
        if forward.autocast is None or depth < forward.autocast[0]:
            forward.autocast = depth, recipe
    return recipe


def runs_in_autocast() -> bool:
    """Return True. A graph that was traced under an autocast is guarded on it."""
    recipe_around()
    return True


def left_autocast() -> int:
    """Return a number of the recipe of the autocast that a recomputation runs outside of; 0 for none.

    A graph that was traced outside of any autocast is guarded on it.
    """
    recipe = recipe_around()
    if THREAD.state.depth or recipe is OWN or recipe is UNSEEN:
        return 0
    if recipe not in _LEFT:
        _LEFT.append(recipe)
    return 1 + _LEFT.index(recipe)


def refuse_another_recipe(name: str, own: Recipe | None) -> None:
    """Refuse to recompute a layer under its own recipe where its forward ran under another.

    Args:
        name: of the layer's class.
    """
    number = left_autocast()
    if number and _LEFT[number - 1] != own:
        raise RuntimeError(
            f"this compiled {name} ran under an autocast and is recomputed outside of it; give it its own recipe "
            "(narrowcast.set_recipe), compile the checkpoint, too, or enter autocast inside it"
        )
