"""The blocks of a model, found by where they are: recipes advise by a block's place in the stack."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from torch import nn


class Place(NamedTuple):
    """The place of a block in its stack, from 0, and how many blocks the stack has."""

    index: int
    blocks: int


def places_in_stacks(model: nn.Module, weighted: Collection[int]) -> dict[int, Place]:
    """Return the place of each module that is inside a block, by the module's id.

    A stack is an outermost list of blocks, a block a module with several weights of GEMMs. The members of an
    ``nn.Sequential`` are blocks if they are of one class; experts are not.

    Args:
        model: what is searched.
        weighted: the ids of the modules that hold weights of GEMMs.
    """
    places: dict[int, Place] = {}
    for stack in _stacks("", model, weighted):
        for index, block in enumerate(stack):
            places.update((id(module), Place(index, len(stack))) for module in block.modules())
    return places


def _stacks(name: str, module: nn.Module, weighted: Collection[int]) -> Iterator[Any]:
    if _is_stack(name, module, weighted):
        yield module
        return
    for child_name, child in module.named_children():
        yield from _stacks(child_name, child, weighted)


def _is_stack(name: str, module: nn.Module, weighted: Collection[int]) -> bool:
    if not isinstance(module, (nn.ModuleList, nn.Sequential)) or len(module) < 2 or "expert" in name:
        return False
    if isinstance(module, nn.Sequential) and len({type(block) for block in module}) > 1:
        return False
    return all(sum(id(one) in weighted for one in block.modules()) > 1 for block in module)
