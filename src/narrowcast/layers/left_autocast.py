"""The autocast that a forward ran under, where its recomputation runs outside of it.

PyTorch's checkpoints recompute in the backward, outside of an ``autocast`` around the forward, and perhaps under
another one. A layer leaves a note on the forward that runs, for its recomputation. A graph that is there already runs
no code of a layer, and layers of one kind share it. But the compiler calls the functions that a graph is guarded on,
every time: two of them do the same.
"""

from __future__ import annotations

from typing import Any

from ..functional.recomputation import run_now
from ..recipe import Recipe
from ..state import THREAD
from ..upstream.autograd import graph_task_id
from ..upstream.private import UpstreamError

OWN: Any = object()
"""In place of an autocast's recipe: there is none."""

UNSEEN: Any = object()
"""In place of an autocast's recipe: this runs in a backward, and which forward it repeats is not known."""

_LEFT: list[Any] = []  # recipes, or OWN, that recomputations must run under, by number


def recipe_around() -> Any:
    """Return the recipe of the autocast in force, or of that which a recomputation runs outside of; or OWN, or UNSEEN.

    A recomputation enters again what its function has entered. Where it has entered nothing, it is as deep in autocasts
    as its function was when it began: the least of all layers there. An autocast around the backward is not in force.
    Eager layers call this only where a recomputed function may run: in a backward, under hooks for saved tensors, or in
    the forward of a function.

    Raises:
        UpstreamError: a recomputation will run outside of this autocast, and this release keeps its forward in a way
            that is not known.
    """
    state, backward = THREAD.state, graph_task_id()
    around = bool(state.entered) and state.entered[-1].backward != backward
    depth = 0 if around else state.depth
    recipe = state.recipe if depth else OWN
    try:
        run = run_now()
    except UpstreamError:
        if depth and state.recomputes is None:
            raise
        run = None
    first_runs = []
    while run is not None and not run.rerun:
        first_runs.append(run.forward)
        run = run.around
    if not depth and (run is not None or backward != -1):
        known = None if run is None else run.forward.autocast
        recipe = known[1] if known is not None else state.recipe if state.depth else UNSEEN
    for forward in first_runs:
        if forward.autocast is None or depth < forward.autocast[0]:
            forward.autocast = depth, recipe
    return recipe


def runs_in_autocast() -> bool:
    """Return True. A graph that enters an autocast is guarded on it."""
    recipe_around()
    return True


def left_autocast() -> int:
    """Return a number of the recipe that a recomputation must run under; 0 where it is the one in force.

    A graph that enters no autocast is guarded on it.
    """
    recipe, in_force = recipe_around(), THREAD.state.recipe if THREAD.state.depth else OWN
    if recipe is UNSEEN or recipe is in_force or recipe == in_force:
        return 0
    if recipe not in _LEFT:
        _LEFT.append(recipe)
    return 1 + _LEFT.index(recipe)


def refuse_another_recipe(name: str, recipe: Recipe | None, own: Recipe | None) -> None:
    """Refuse to recompute a layer under another recipe than that of its forward.

    Args:
        name: of the layer's class.
        recipe: that it is traced under.
        own: the layer's.
    """
    number = left_autocast()
    if number and recipe != (own if _LEFT[number - 1] is OWN else _LEFT[number - 1]):
        raise RuntimeError(
            f"this compiled {name} ran under an autocast and is recomputed outside of it, or under another one; run "
            "the backward outside of autocasts, and give the layer its own recipe (narrowcast.set_recipe), compile the "
            "checkpoint, too, or enter autocast inside it"
        )
