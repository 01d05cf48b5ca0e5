"""A module becomes a layer of another class where it is, and turns back: object, parameters and hooks stay.

What refers to the module, and what the module holds, stays as it was: ties, hooks, devices, ``requires_grad``, the
training flag, attributes of the user. Only its class changes, and what the new class keeps beside the parameters is
added. The new class is derived from the old one, so that ``isinstance`` says what it said.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from torch import nn

from .._checks import a_kind, shown
from ..layers import LinearLayer
from ..recipe import Recipe
from ..state import OWNERS
from ..upstream.modules import own_buffers

_KEPT = "_before_conversion"


class _Before(NamedTuple):
    """A module's state before its conversion: class, added and replaced attributes, added buffers."""

    original: type[nn.Module]
    added: tuple[str, ...]
    replaced: dict[str, Any]
    buffers: tuple[str, ...]


class Converted(nn.Module):
    """First base of every class that a module was given."""

    _layer: type[nn.Module]
    _original: type[nn.Module]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """The class is made where it is needed, so copies and pickles name what it is made from."""
        return _blank, (self._layer, self._original), self.__getstate__()


def _blank(layer: type[nn.Module], original: type[nn.Module]) -> nn.Module:
    cls = converted_class(layer, original)
    return cls.__new__(cls)


@functools.cache
def converted_class(layer: type[nn.Module], original: type[nn.Module]) -> type[Converted]:
    """Return the class of an ``original`` that runs as ``layer``, under the original's name."""
    members: dict[str, Any] = {"_layer": layer, "_original": original, "__doc__": layer.__doc__}
    initialise: Any = getattr(original, "reset_parameters", None)
    if initialise is not None:

        def reset_parameters(self: Any) -> None:
            """Initialize parameters as the original class does, and the layer's state."""
            initialise(self)
            if isinstance(self, LinearLayer):
                self._reset_state()

        members["reset_parameters"] = reset_parameters
    return type(original.__name__, (Converted, layer, original), members)


def become(
    module: nn.Module, layer: type[nn.Module], place: str, name: str = "", recipe: Recipe | None = None
) -> None:
    """Turn a module into a converted layer.

    Args:
        place: its name in the model, for messages.
        name: in the quantizer roles of a custom recipe.
    """
    before, buffers = dict(module.__dict__), set(own_buffers(module))
    original = type(module)
    module.__class__ = converted_class(layer, original)
    converted: Any = module
    converted._take_over(name)
    converted._module_name = place
    if recipe is not None:
        converted.recipe = recipe
    added = tuple(key for key in module.__dict__ if key not in before)
    replaced = {key: value for key, value in before.items() if module.__dict__[key] is not value}
    new_buffers = tuple(key for key in own_buffers(module) if key not in buffers)
    module.__dict__[_KEPT] = _Before(original, added, replaced, new_buffers)


def change_recipe(module: Any, name: str, recipe: Recipe | None) -> None:
    """Give a converted layer another recipe; ``name``: in the quantizer roles of a custom recipe."""
    if name != module.name:
        module._take_over(name)
    module.recipe = recipe


def check_turns_back(name: str, module: nn.Module) -> None:
    """Raises:
    RuntimeError: something gave the module yet another class since it was converted.
    """
    before: _Before = module.__dict__[_KEPT]
    if not isinstance(module, Converted) or type(module) is not converted_class(
        module._layer, before.original
    ):
        raise RuntimeError(
            f"{shown(name)} was converted and is {a_kind(module)} now; undo what changed its class "
            "(a parametrization, a data-parallel wrapper) before revert"
        )


def turn_back(module: nn.Module) -> None:
    """Undo :func:`become`: class and attributes are those of before, parameters those of now."""
    before: _Before = module.__dict__.pop(_KEPT)
    for key in before.buffers:
        own_buffers(module).pop(key, None)
    written = [
        key
        for key in module.__dict__
        if key.startswith("_") and hasattr(type(module), key) and not hasattr(before.original, key)
    ]  # in place of the layer's defaults, when it ran
    for key in (*before.added, *written):
        module.__dict__.pop(key, None)
    module.__dict__.update(before.replaced)
    OWNERS.discard(module)  # no step finds state to renew
    module.__class__ = before.original


def is_converted(module: nn.Module) -> bool:
    """Return whether :func:`become` made the module what it is."""
    return _KEPT in module.__dict__
