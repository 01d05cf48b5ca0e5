"""``RecipeOwner``: a layer with a recipe, which the current autocast overrides."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from .._tracing import traced_local, while_tracing
from ..recipe import Recipe
from ..state import THREAD, checked_recipe
from ..upstream.autograd import graph_task_id, has_forward_mode, top_hooks
from ..upstream.modules import running_modules
from .left_autocast import OWN, UNSEEN, left_autocast, recipe_around, refuse_another_recipe, runs_in_autocast


class RecipeOwner(nn.Module):
    """Base of what runs under a recipe.

    ``recipe``: its own, None for high precision; an ``autocast`` overrides it where it is entered, ``enabled=False``
    too. Assigning makes what state the recipe needs.
    """

    _recipe: Recipe | None
    _last_recipe: Recipe | None
    _trained_under: Recipe | None  # of the last forward in training mode
    # the model that set_recipe was called with renews this layer's delayed scaling
    _renewed_by_root: bool = False
    _root: str | None = None  # which one: only while its forward runs; None: always

    def _init_recipe_owner(self, recipe: Recipe | str | None) -> None:
        self._recipe = self._last_recipe = self._trained_under = checked_recipe(recipe, type(self).__name__)

    @property
    def recipe(self) -> Recipe | None:
        """The layer's own recipe."""
        return self._recipe

    @recipe.setter
    def recipe(self, recipe: Recipe | str | None) -> None:
        self._init_recipe_owner(recipe)
        self._renewed_by_root, self._root = False, None
        self._prepare_for_recipe()

    def _prepare_for_recipe(self) -> None:
        """Make the state that the layer's own recipe needs."""

    def _recipe_in_force(self) -> Recipe | None:
        """Return the recipe of this forward.

        A recomputation goes by the forward that it repeats. If that is not known, it goes by the last forward; in
        training mode by the last one in training mode, which an evaluation in between is not.
        """
        if torch.compiler.is_compiling():
            depth = THREAD.state.depth
            recipe = THREAD.state.recipe if depth else self._recipe
            while_tracing(_check_while_tracing)
            return recipe
        may_be_recomputed = graph_task_id() != -1 or top_hooks(True) is not None or not has_forward_mode()
        if may_be_recomputed:
            recipe = recipe_around()
            if recipe is UNSEEN:
                return self._trained_under if self.training else self._last_recipe
            if recipe is OWN:
                recipe = self._recipe
            if graph_task_id() != -1:
                return recipe
        else:
            recipe = THREAD.state.recipe if THREAD.state.depth else self._recipe
        if recipe is not self._last_recipe:
            if recipe is not None:
                _warn_of_another_kind(self, recipe)
            self.__dict__["_last_recipe"] = recipe
        if recipe is not self._trained_under and self.training:
            self.__dict__["_trained_under"] = recipe
        return recipe

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickling and deep copies: without the last forward's recipe, which may be that of an
        autocast.

        And without the model, of which the copy need not be a part.
        """
        last = dict.fromkeys(("_last_recipe", "_trained_under"), self._recipe)
        return {**self.__dict__, **last, "_renewed_by_root": False, "_root": None}


def forget_ended_roots() -> None:
    """Forget the compiled models that renew scales and whose forward an interrupt (Ctrl-C) has ended: no hook ran."""
    if not THREAD.state.roots:
        return
    running = {module.__dict__.get("_renews_as") for module in running_modules()}
    THREAD.state.roots = tuple(root for root in THREAD.state.roots if root in running)


def _warn_of_another_kind(layer: RecipeOwner, recipe: Recipe) -> None:
    last = layer._last_recipe
    if last is not None and type(recipe) is not type(last):
        warnings.warn(  # one text for all layers of a kind: shown once
            f"the recipe of {type(layer).__name__} changed from {type(last).__name__} to {type(recipe).__name__} "
            "between two forwards; numbers change with it",
            stacklevel=2,
        )


def _check_while_tracing(context: Any) -> None:
    """Remember the recipe of a graph; a recomputation that runs outside of the autocast must not lose it."""
    from ..upstream.dynamo import guard_on_result  # loaded already: this runs in a trace

    forget_ended_roots()  # before traced code reads and guards them
    layer, recipe, depth = (traced_local(context, name) for name in ("self", "recipe", "depth"))
    enters = depth > THREAD.state.depth
    guard_on_result(runs_in_autocast if enters else left_autocast)
    if not enters:
        refuse_another_recipe(type(layer).__name__, recipe, layer._recipe)
    layer.__dict__["_last_recipe"] = recipe
    if layer.training:
        layer.__dict__["_trained_under"] = recipe
