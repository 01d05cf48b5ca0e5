"""``Snapshot``: what running a model changes besides its parameters, to be put back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..upstream.autograd import set_versions
from ..upstream.modules import own_buffers, own_parameters
from ..upstream.tensors import version_of
from .delayed import DelayedLayer
from .recipe_owner import RecipeOwner

_OF_MODULES = frozenset(vars(nn.Module()))
"""Attributes of every module: its tables, its hooks and its mode."""
_MARK = "grad_added_to_main_grad"


class Snapshot:
    """The state of modules and all that is in them: buffers, ``main_grad``, queues of weight gradients, fields.

    Fields are the attributes of a layer that runs under a recipe, whatever their names. Parameters and random numbers
    are not part of it.

    Args:
        modules: whose state is kept.
        grads: the ``grad`` of every parameter is part of it: the tensor and its values.
        rest: so are buffers besides those of delayed scaling, ``main_grad`` and the queues.
    """

    def __init__(self, modules: Iterable[nn.Module], *, grads: bool = False, rest: bool = True) -> None:
        self._of = list(dict.fromkeys(module for one in modules for module in one.modules()))
        tables = [own_parameters(module).values() for module in self._of]
        parameters = dict.fromkeys(one for table in tables for one in table if one is not None)
        self._grads = [(parameter, parameter.grad) for parameter in parameters] if grads else []
        self._marks = [(one, vars(one)[_MARK]) for one in parameters if rest and _MARK in vars(one)]
        self._tables = [(module, _buffers_of(module, rest)) for module in self._of]
        owners = [module for module in self._of if isinstance(module, RecipeOwner)]
        self._fields = [(owner, _fields_of(owner)) for owner in owners]
        self._queues = [
            (store, store.waiting())
            for module in self._of
            if rest
            for store in getattr(module, "wgrad_stores", {}).values()
        ]
        tensors = [buffer for _, table in self._tables for buffer in table.values()]
        tensors += [grad for _, grad in self._grads]
        tensors += [getattr(parameter, "main_grad", None) for parameter in parameters if rest]
        kept = {id(one): one for one in tensors if isinstance(one, Tensor)}
        self._values = [(one, one.detach().clone()) for one in kept.values()]
        self._versions = [-1 if one.is_inference() else version_of(one) for one in kept.values()]
        layers = [module for module in self._of if isinstance(module, DelayedLayer)]
        self._without_state = [layer for layer in layers if not layer.delayed_slots()]

    def restore(self) -> None:
        """Put everything back: the tensors that were there, with the values that they had."""
        for owner, fields in self._fields:
            _put_back(owner, fields)
        for module, table in self._tables:
            own_buffers(module).update(table)
        for parameter, grad in self._grads:
            parameter.grad = grad
        self._restore_values()

    def restore_in_place(self) -> None:
        """Put values back into the tensors that are there now, which CUDA graphs read and write.

        Delayed scaling that has begun since then begins anew.
        """
        self._restore_values()
        for layer in self._without_state:
            if slots := layer.delayed_slots():
                layer.reset_delayed_scaling()
                begun = [buffer for slot in slots for buffer in (slot.scale, slot.amax_history, slot.amax)]
                set_versions(begun, [0] * len(begun))  # which they began with, and a forward may have saved

    @torch.no_grad()
    def _restore_values(self) -> None:
        for tensor, value in self._values:
            tensor.detach().copy_(value)
        # a backward may have saved them, whose forward came before
        written = [
            (tensor, version) for (tensor, _), version in zip(self._values, self._versions) if version >= 0
        ]
        set_versions([tensor for tensor, _ in written], [version for _, version in written])
        for parameter, mark in self._marks:
            setattr(parameter, _MARK, mark)
        for store, waiting in self._queues:
            store.put_back(waiting)


def _buffers_of(module: nn.Module, rest: bool) -> dict[str, Tensor | None]:
    state = set(module._state_names()) if isinstance(module, DelayedLayer) else set()
    return {name: buffer for name, buffer in own_buffers(module).items() if rest or name in state}


def _fields_of(owner: RecipeOwner) -> dict[str, tuple[Any, Any]]:
    """Return each attribute, and the content of those that are changed in place."""
    return {
        name: (value, dict(value) if type(value) is dict else list(value) if type(value) is list else None)
        for name, value in vars(owner).items()
        if name not in _OF_MODULES
    }


def _put_back(owner: RecipeOwner, fields: dict[str, tuple[Any, Any]]) -> None:
    for name in vars(owner).keys() - fields.keys() - _OF_MODULES:
        del vars(owner)[name]
    for name, (value, content) in fields.items():
        vars(owner)[name] = value
        if type(value) is dict:
            value.clear()
            value.update(content)
        elif type(value) is list:
            value[:] = content
