"""``RecipeOwner``: a layer with a recipe, which the current autocast overrides."""

from __future__ import annotations

import warnings
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import nn

from .._tracing import traced_local, while_tracing
from ..recipe import Recipe, recipe_name
from ..state import THREAD, autocast, checked_recipe, entered_in_backward
from ..upstream.autograd import graph_task_id, is_in_backward
from .parameters import named_layer


def not_for_jit(how: str, layer: nn.Module) -> NotImplementedError:
    """Return the error of a layer under ``torch.jit.script`` or ``torch.jit.trace``."""
    return NotImplementedError(
        f"torch.jit.{how} does not take narrowcast's {type(layer).__name__}, whose kernels it cannot write down; use "
        "torch.compile or torch.export, or call narrowcast.revert(model) first"
    )


def refuse_script(layer: nn.Module) -> NoReturn:
    """Refuse ``torch.jit.script``, which calls ``__prepare_scriptable__`` of each module of a model.

    Raises:
        NotImplementedError: always.
    """
    raise not_for_jit("script", layer)


class RecipeOwner(nn.Module):
    """Base of what runs under a recipe.

    ``recipe``: its own, None for high precision; an ``autocast`` overrides it where it is entered, ``enabled=False``
    too. Assigning makes what state the recipe needs.
    """

    _recipe: Recipe | None
    _last_recipe: Recipe | None
    # since the last step: in evaluation, and in training
    _ran_under: tuple[list[Recipe | None], list[Recipe | None]]

    def _init_recipe_owner(self, recipe: Recipe | str | None) -> None:
        self._recipe = self._last_recipe = checked_recipe(recipe, type(self).__name__)
        self._ran_under = [], []

    @property
    def recipe(self) -> Recipe | None:
        """The layer's own recipe."""
        return self._recipe

    @recipe.setter
    def recipe(self, recipe: Recipe | str | None) -> None:
        self._init_recipe_owner(recipe)
        self._prepare_for_recipe()

    def extra_repr(self) -> str:
        """Return the recipe, as printed by the module."""
        return self._with_recipe()

    def _with_recipe(self, *options: str) -> str:
        """Return what is printed of the layer: these options, and its recipe."""
        recipe = () if self._recipe is None else (f"recipe={recipe_name(self._recipe)}",)
        return ", ".join((*options, *recipe))

    def _prepare_for_recipe(self) -> None:
        """Make the state that the layer's own recipe needs."""

    def _recipe_in_force(self) -> Recipe | None:
        """Return the recipe of this forward; a recomputation outside of its autocast uses that of the step's forwards.

        Raises:
            RuntimeError: the layer ran under several recipes, and a recomputation cannot tell which was its own.
        """
        state = THREAD.state
        depth = state.depth
        recipe = state.recipe if depth else self._recipe
        if torch.compiler.is_compiling():
            trains = bool(self.training)  # noqa: F841  # read here, to be guarded
            while_tracing(_check_while_tracing)
            return recipe
        state.reached = True
        if recipe is not None and torch.jit.is_tracing():
            raise not_for_jit("trace", self)
        if graph_task_id() != -1:  # a recomputation
            return recipe if entered_in_backward() else self._recipe_of_forward()
        if recipe is not self._last_recipe:
            if recipe is not None:
                _warn_of_another_kind(self, recipe)
            self.__dict__["_last_recipe"] = recipe
        ran = self._ran_under[self.training]
        if recipe not in ran:
            ran.append(recipe)
        return recipe

    def _recipe_of_forward(self) -> Recipe | None:
        ran = self._ran_under[self.training]
        if len(ran) > 1:
            raise RuntimeError(
                f"this {type(self).__name__} ran under several recipes since the last optimizer step and is recomputed "
                "outside of autocasts, which does not tell the recipe of its forward; use narrowcast.checkpoint, or "
                "enter the autocast inside the checkpointed function"
            )
        return ran[0] if ran else self._last_recipe

    __prepare_scriptable__ = refuse_script

    def end_step(self) -> None:
        """Forget under which recipes the layer ran before an optimizer's step."""
        for ran in self._ran_under:
            ran.clear()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickling and deep copies: without the last forward's recipe, which may be that of an
        autocast.
        """
        return {**self.__dict__, "_last_recipe": self._recipe, "_ran_under": ([], [])}


_FIRST: dict[tuple[str, str, str], str] = {}
"""The first layer that changed its recipe, by the kinds of the layer and of both recipes."""


def _warn_of_another_kind(layer: RecipeOwner, recipe: Recipe) -> None:
    last = layer._last_recipe
    if last is not None and type(recipe) is not type(last):
        own = layer._recipe is None or recipe is layer._recipe
        remedy = (
            ""
            if own
            else "; an autocast's recipe counts before the layers' own: leave it out, or give it recipe="
        )
        kinds = type(layer).__name__, type(last).__name__, type(recipe).__name__
        name = _FIRST.setdefault(kinds, named_layer(layer))
        warnings.warn(  # one text for all layers of a kind, with the first one's name: shown once
            f"the recipe of {name} changed from {kinds[1]} to {kinds[2]} "
            f"between two forwards; numbers change with it{remedy}",
            stacklevel=2,
        )


_OWN: Any = object()
"""In place of an autocast's recipe: there was none."""

_AUTOCASTS: dict[bool, list[Any]] = {True: [], False: []}
"""The recipes of autocasts under which graphs ran that do not enter them, since the last optimizer step: in training,
and in evaluation, which a step may have beside."""

_TRACED_UNDER: WeakKeyDictionary[Any, list[Recipe | None]] = WeakKeyDictionary()
"""By the code that was compiled, the recipes of layers in graphs that do not enter their autocast."""

_SEEN: list[Any] = []
"""That of the autocast around a backward and those in its recomputations, by number."""


def forget_autocasts() -> None:
    """Begin a step, of which no graph has run yet."""
    for recipes in _AUTOCASTS.values():
        recipes.clear()


def in_training() -> int:
    """Return a number of the autocasts of which a recomputation may not be in its own; 0 in a forward, and without any.

    Graphs are guarded on it: it is called before each of their runs, and notes under what they run.
    """
    return _outside(_AUTOCASTS[True])


def in_evaluation() -> int:
    """Return :func:`in_training`, of layers in evaluation."""
    return _outside(_AUTOCASTS[False])


def _outside(recipes: list[Any]) -> int:
    if not autocast.used:
        return 0
    state = THREAD.state
    state.reached = True
    in_force = state.recipe if state.depth else _OWN
    if not is_in_backward():
        if in_force not in recipes:
            recipes.append(in_force)
        return 0
    seen = in_force, list(recipes)
    if seen in ((_OWN, []), (_OWN, [_OWN])) or entered_in_backward():
        return 0
    if seen not in _SEEN:
        _SEEN.append(seen)
    return 1 + _SEEN.index(seen)


def _check_while_tracing(context: Any) -> None:
    """Note the recipe of a graph; refuse to recompute a layer under another than that of its forward.

    A graph that enters the autocast itself does so again. Any other is guarded on whether it is a recomputation, which
    PyTorch's checkpoints run outside of an autocast around the forward, and perhaps under another one.
    """
    from ..upstream.dynamo import compiled_code, guard_on_result  # loaded already: this runs in a trace

    layer, recipe, depth, trains = (
        traced_local(context, name) for name in ("self", "recipe", "depth", "trains")
    )
    if depth <= THREAD.state.depth:
        under = _TRACED_UNDER.setdefault(compiled_code(context), [])
        outside = in_training if trains else in_evaluation
        guard_on_result(outside)
        if outside():
            ran = [layer._recipe if known is _OWN else known for known in _AUTOCASTS[trains] or [_OWN]]
            # graphs of this code are shared, so which of those recipes was this layer's is not known
            if any(known != recipe and known in under for known in ran):
                raise RuntimeError(
                    f"this compiled {type(layer).__name__} ran under an autocast and is recomputed outside of it, or "
                    "under another one; run the backward outside of autocasts, and use narrowcast.checkpoint, give the "
                    "layer its own recipe (narrowcast.set_recipe), or compile the checkpoint, too"
                )
            return
        if recipe not in under:
            under.append(recipe)
    layer.__dict__["_last_recipe"] = recipe
    if recipe not in layer._ran_under[trains]:
        layer._ran_under[trains].append(recipe)
