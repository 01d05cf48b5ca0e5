"""The autocast that a compiled layer's forward ran under, where a recomputation runs outside of it.

PyTorch's checkpoints recompute in the backward, outside of an ``autocast`` around the forward. A layer in eager code
remembers its last recipe. A graph that is there already runs no code of a layer, and layers of one kind share it. But
the compiler calls the functions that a graph is guarded on, every time. Two of them find the object that PyTorch keeps
for a forward that it will recompute, and leave a note on it, or read that.
"""

from __future__ import annotations

from typing import Any

import torch

from ..recipe import Recipe
from ..state import THREAD
from ..upstream.autograd import graph_task_id, running_checkpoints, running_functions

_NOTE = "_narrowcast_autocast"
_ENTERED_INSIDE: Any = object()
_LEFT: list[Recipe | None] = []  # of autocasts that recomputations were outside of, by number


def _forwards(runs_again: bool) -> list[Any]:
    """Return the objects of the forwards that run now for the first time, or again, and those around them."""
    running = running_checkpoints()
    # the first run of a reentrant checkpoint records no gradients
    if runs_again or not (torch.is_grad_enabled() or torch.is_inference_mode_enabled()):
        running = running + running_functions()
    return [vars(owner) for owner, run in running if (run is not None) is runs_again]


def runs_in_autocast() -> bool:
    """Return True; note the recipe of the autocast in force on the forwards that will be recomputed.

    A graph that was traced under an autocast is guarded on it.
    """
    if THREAD.state.depth and graph_task_id() == -1:  # or this graph is not the one that will run
        for notes in _forwards(runs_again=False):
            notes.setdefault(_NOTE, THREAD.state.recipe)
    return True


def left_autocast() -> int:
    """Return a number of the recipe of the autocast that a recomputation runs outside of; 0 for none.

    A graph that was traced outside of any autocast is guarded on it. A forward of which a part ran outside of any has
    entered its autocasts itself, and so does the recomputation. That of :func:`narrowcast.checkpoint` enters them, too.
    """
    if THREAD.state.depth:
        return 0
    if graph_task_id() == -1:
        for notes in _forwards(runs_again=False):
            notes[_NOTE] = _ENTERED_INSIDE
        return 0
    if THREAD.state.recomputes:
        return 0
    recipe = next((notes[_NOTE] for notes in _forwards(runs_again=True) if _NOTE in notes), _ENTERED_INSIDE)
    if recipe is _ENTERED_INSIDE:
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
