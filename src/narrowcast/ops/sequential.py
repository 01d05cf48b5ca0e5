"""``Sequential``: operations and other modules in a row, adjacent operations behind one fuser."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from .. import _checks
from .._keywords import refuse_keywords
from ..recipe import Recipe
from .explain import Explanation, explain
from .fuser import OperationFuser, taken_apart
from .op import BasicOperation, CompositeOperation

OperationKwargs = Mapping["BasicOperation | int", Mapping[str, Any]]


class Sequential(nn.Sequential):
    """Runs modules in order, like ``torch.nn.Sequential``; adjacent operations run fused, in one autograd function.

    Edit it like ``torch.nn.Sequential``: ``append``, ``extend``, ``insert``, ``pop``, ``+``, ``+=``, indices, slices,
    ``del``. Other modules may be anywhere; they take and return one tensor. A channel may lead past them: its source is
    the last previous operation that provides it. Module hooks of operations do not run, since operations are not called
    one by one.

    Args:
        *args: modules, or one ``OrderedDict`` of them.

    Errors are raised in forward, before any kernel runs.

    Raises:
        ValueError: another number of extra inputs than the operations take, or ``op_kwargs`` for a module that is not
            an operation here.
        KeyError: ``op_kwargs`` for a number that no basic operation has.
    """

    _groups: list[OperationFuser | nn.Module] | None = None
    _grouped: tuple[nn.Module, ...] = ()

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Add a module at the end.

        Raises:
            TypeError: it is none.
        """
        if module is not None:
            _checks.module(f"operation {name}", module)
        super().add_module(name, module)

    def forward(  # type: ignore[override]
        self, input: Any, *extra_inputs: Tensor, op_kwargs: OperationKwargs | None = None, **unknown: NoReturn
    ) -> Any:
        """Run everything.

        Args:
            input: main input of the first module.
            extra_inputs: those of all operations, in order, that no channel feeds.
            op_kwargs: keyword arguments by operation: the operation itself, or its number among all basic operations.
        Returns:
            the output of the last module; with extra outputs a tuple of it and them.
        """
        if unknown:
            refuse_keywords(self, unknown)
        groups, wanted = self.groups(), 0
        for group in groups:
            if isinstance(group, OperationFuser):
                wanted += group.extra_input_channels.count(None)
        if len(extra_inputs) != wanted:
            raise ValueError(f"got {len(extra_inputs)} extra inputs, the operations take {wanted}")
        kwargs = _kwargs_by_number(groups, op_kwargs) if op_kwargs else {}
        given = list(extra_inputs)
        x, extra_outputs = input, []
        channels: dict[str | None, Tensor] = {}
        basic = 0
        for group in groups:
            if not isinstance(group, OperationFuser):
                x = group(x)
                continue
            extra = []
            for name in group.extra_input_channels:
                extra.append(given.pop(0) if name is None else channels[name])
            numbers = range(basic, basic + len(group.basic_ops))
            basic_op_kwargs = [kwargs.get(number, {}) for number in numbers] if kwargs else None
            x = group(x, *extra, basic_op_kwargs=basic_op_kwargs)
            basic += len(group.basic_ops)
            if group.extra_outputs:
                for (channel, to_user), output in zip(group.extra_outputs, x[1:]):
                    channels[channel] = output
                    if to_user:
                        extra_outputs.append(output)
                x = x[0]
        return (x, *extra_outputs) if extra_outputs else x

    def explain(self, recipe: Recipe | str | None = None) -> Explanation:
        """Print which operations are fused under a recipe, and which are not although they nearly are.

        Args:
            recipe: None for high precision.
        Returns:
            what was printed, as records.
        """
        return explain([group for group in self.groups() if isinstance(group, OperationFuser)], recipe)

    @property
    def _module_groups(self) -> list[OperationFuser | nn.Module]:
        """:meth:`groups` by Transformer Engine's name."""
        return self.groups()

    def groups(self) -> list[OperationFuser | nn.Module]:
        """Return the modules in order, adjacent operations as one fuser."""
        modules = tuple(self)
        if torch.compiler.is_compiling():
            return _group(modules)
        if self._groups is None or modules != self._grouped:
            self._groups, self._grouped = _group(modules), modules  # type: ignore[assignment, arg-type]
        return self._groups

    def insert(self, idx: int, module: nn.Module) -> Sequential:  # type: ignore[override]
        """Put a module before the one at ``idx``.

        Raises:
            IndexError: there is no such place.
        """
        super().insert(idx, module)
        return self

    def pop(self, idx: int | slice) -> nn.Module:  # type: ignore[override]
        """Take out a module, or a slice of them, and return it.

        Raises:
            IndexError: there is none at ``idx``.
        """
        return super().pop(idx)

    def __add__(self, other: Any) -> Sequential:
        if not isinstance(other, nn.Sequential):
            raise ValueError(f"cannot add {_checks.a_kind(other)} to a Sequential; wrap it in one")
        return type(self)(*self, *other)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickling and deep copies; the fusers are made again."""
        return {**self.__dict__, "_groups": None, "_grouped": ()}


def _group(modules: tuple[Any, ...]) -> list[Any]:
    runs: list[Any] = []
    for module in modules:
        if not isinstance(module, (BasicOperation, CompositeOperation)):
            runs.append(module)
        elif runs and isinstance(runs[-1], list):
            runs[-1].append(module)
        else:
            runs.append([module])
    ops_of = [taken_apart(run) if isinstance(run, list) else [] for run in runs]
    given = [[name for op in ops for name in op._output_channels.values()] for ops in ops_of]
    wanted = [  # channels without a source within the run
        [name for op in ops for name in op._input_channels.values() if name not in own]
        for ops, own in zip(ops_of, given)
    ]
    return [
        OperationFuser(run, incoming=[*chain(*given[:at])], outgoing=[*chain(*wanted[at + 1 :])])
        if isinstance(run, list)
        else run
        for at, run in enumerate(runs)
    ]


def _kwargs_by_number(groups: list[Any], op_kwargs: OperationKwargs) -> dict[int, dict[str, Any]]:
    """Return keyword arguments by number of the basic operation."""
    ops = [op for group in groups if isinstance(group, OperationFuser) for op in group.basic_ops]
    found: dict[int, dict[str, Any]] = {}
    for key, kwargs in op_kwargs.items():
        number = key if isinstance(key, int) else next((at for at, op in enumerate(ops) if op is key), None)
        if number is None:
            raise ValueError(
                f"op_kwargs has {_checks.a_kind(key)} as key; use a basic operation of this Sequential, or its number"
            )
        if not 0 <= number < len(ops):
            raise KeyError(f"op_kwargs has key {number}; there are {len(ops)} basic operations")
        if number in found:
            raise ValueError(f"op_kwargs names operation {number} twice, by itself and by its number")
        found[number] = dict(kwargs)
    return found
