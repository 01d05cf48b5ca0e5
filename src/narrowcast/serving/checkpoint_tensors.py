"""``CheckpointTensors``: the tensors of a checkpoint for servers, made one at a time from a model.

What a layer multiplies by in training is its weight, quantized under its recipe. Those codes and scales are served. The
plan, made without reading a value, says which tensors there are, under which names and in which format. Iterating makes
them, weight by weight: at any time there are the tensors of one weight besides the model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from .._checks import shown
from ..convert.conv1d import Conv1DLayer
from ..convert.experts import StackedExpertsLayer
from ..convert.find_modules import Found, gemm_modules
from ..convert.stored import DECODED, uses_of_parameters
from ..distributed.together import ALONE, Together
from ..formats import cdiv
from ..functional.collectives import gather_rows, registered_name
from ..layers import DelayedLayer, GroupedLinearLayer, LinearLayer, Stage
from ..layers.described import ParameterRecord, describe_parameters
from ..layers.extra_state import EXTRA_STATE
from ..quantizers import Operand
from ..recipe import Recipe, linear_plan, recipe_name
from ..upstream.c10d import group_named
from ..upstream.fsdp import compute_dtypes
from ..upstream.modules import own_parameters
from .formats import CHECKPOINT_FORMATS, CheckpointFormat, Packed, WeightFormat, is_codes
from .matrices import Matrix, Rows, input_scale, input_scales, packed, shape_of
from .names import CheckpointNames
from .shards import sent, split_of


@dataclass(frozen=True)
class ExportedWeight:
    """One GEMM weight: ``name`` is its key, ``format`` its format, ``reason`` why it was not quantized."""

    name: str
    format: str
    reason: str = ""


@dataclass(frozen=True)
class _Sum(ParameterRecord):
    """A parameter whose values are made each time that they are asked for."""

    make: Callable[[], Any]

    @property
    def held(self) -> Any:
        """What this rank stores."""
        return self.make()


class CheckpointTensors:
    """A model's served tensors; iterating makes them, in the order of the state dict.

    Args:
        model: whose parameters are not on the meta device.
        format: a key of :data:`CHECKPOINT_FORMATS`.
        recipe: instead of the recipes of layers that have one.
        dtype: of tensors in high precision; None leaves each in its own.
        together: the processes that end together if one cannot go on.
        sums: by the id of a parameter, what makes the values that are served in place of its own.

    Attributes:
        weights: every GEMM weight of the model, with its format or the reason why it has none.
        modules: format of each quantized weight, by the name of the module that has it in the checkpoint.
        kept: names of the modules whose weights stay in high precision.
        aliases: names of tied tensors, with the name that is served.

    Raises:
        ValueError: the format cannot hold a recipe's weights, or nothing can be quantized.
    """

    def __init__(
        self,
        model: nn.Module,
        format: str,
        recipe: Recipe | None,
        dtype: torch.dtype | None,
        together: Together = ALONE,
        sums: Mapping[int, Callable[[], Any]] = MappingProxyType({}),
    ) -> None:
        self.kind, self.format, self.recipe = CHECKPOINT_FORMATS[format], format, recipe
        self._together = together
        self.dtype = torch.bfloat16 if format == "bf16" and dtype is None else dtype
        self.state, self.aliases = _each_once(_state(model))
        self.names = CheckpointNames(model, self.state)
        self.weights: list[ExportedWeight] = []
        self.modules: dict[str, WeightFormat] = {}
        self.kept: list[str] = []
        self._matrices: dict[str, list[Matrix]] = {}  # by the first key whose parameter they are made of
        self._parts: set[str] = set()  # other keys of the same weights
        self._dtypes = compute_dtypes(model)
        self._records = {id(one.parameter): one for one in describe_parameters(model, buffers=True).values()}
        for key, make in sums.items():
            self._records[key] = _Sum(**vars(self._records[key]), make=make)
        uses = uses_of_parameters(model)
        for found in gemm_modules(model):
            self._plan(found, uses)
        if self.kind.weights and not self.modules:
            raise ValueError(
                "no layer of the model has a weight to quantize; convert the model, or use format='bf16'"
            )

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for key, value in self.state.items():
            if key in self._matrices:
                yield from self._of_matrices(self._matrices[key], value)
            elif key not in self._parts:
                yield from self.names.converted(key, self._plain(value))

    def _of_matrices(self, matrices: list[Matrix], value: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of a weight's matrices; those that only one rank has come from that rank."""
        layer, stage, owners = matrices[0].layer, matrices[0].stage, matrices[0].owners
        if owners is None:
            seen = input_scales(layer, stage) if matrices[0].format.static else None
            for matrix in matrices:
                yield from self._quantized(matrix, seen, self._together)
            return
        seen = gather_rows(input_scales(layer, stage), owners.group) if matrices[0].format.static else None
        group = group_named(registered_name(owners.group))
        for sender in range(owners.ranks):
            for matrix in matrices:
                make = partial(self._quantized, matrix, seen, ALONE)
                yield from sent(make, sender, group, value.device, self._together)

    def plain_bytes(self) -> int:
        """Return bytes of the model's tensors without quantization."""
        return sum(value.numel() * self._dtype_of(value).itemsize for value in self.state.values())

    def _dtype_of(self, value: Tensor) -> torch.dtype:
        return self.dtype if self.dtype is not None and value.is_floating_point() else value.dtype

    @torch.no_grad()
    def _plain(self, value: Any) -> Tensor:
        record = self._records.get(id(value))  # None of what a hook has added to the state
        whole = value.detach() if record is None else record.whole()
        return whole.to(self._dtype_of(whole)).contiguous()

    def _plan(self, found: Found, uses: Counter[int]) -> None:
        """Decide on the weights of a module."""
        layer: Any = found.module
        stages = layer._stages if isinstance(layer, LinearLayer) else ()
        made: dict[str, tuple[list[Matrix], str]] = {}  # by a weight's name: its matrices, or why it has none
        for stage in stages:
            reason = _why_not(found, stage, self.kind, uses)
            keys = self._keys(found, stage)
            made[stage.weight] = ([], reason) if reason else self._matrices_of(found, stage, keys)
        reasons = [reason for _, reason in made.values() if reason]
        planned: dict[str, tuple[str, str]] = {}  # by a parameter's name: its format and why it has none
        for stage in stages:
            matrices, reason = made[stage.weight]
            if reasons and isinstance(layer, StackedExpertsLayer):  # servers run all experts in one format
                matrices, reason = [], reasons[0]
            if matrices:
                first, *others = self._keys(found, stage)
                owners = matrices[0].owners
                begin = 0 if owners is None else owners.rank * layer._groups
                self._matrices[first] = [
                    one._replace(group=i) for i, one in enumerate(matrices[begin : begin + layer._groups])
                ]
                self._parts.update(others)
                for rows in (rows for matrix in matrices for rows in matrix.rows):
                    name = rows.name.removesuffix(".weight") if rows.name.endswith(".weight") else found.name
                    self.modules[name] = matrices[0].format
            chosen = (matrices[0].format.name, "") if matrices else ("high precision", reason)
            planned |= dict.fromkeys(layer._names_of(stage.weight), chosen)
        for weight in found.weights:
            own = planned.get(weight.name) or ("high precision", _why_not(found, None, self.kind, uses))
            self.weights.append(ExportedWeight(f"{found.name}.{weight.name}".lstrip("."), *own))
        if all(one.reason for one in self.weights[-len(found.weights) :]):
            keys = [f"{found.name}.{weight.name}".lstrip(".") for weight in found.weights]
            self.kept += self._kept_names(found.name, keys)

    def _kept_names(self, module: str, keys: list[str]) -> list[str]:
        """Return the names of a module in high precision.

        Of experts that the checkpoint holds one by one, those of the checkpoint, which servers read, come after that of
        the module, which Transformers reads.
        """
        named = [name.removesuffix(".weight") for key in keys for name in self.names.all_of(key)]
        if len(named) == 1 and named != keys:
            return named
        return [module, *(name for name in named if name not in keys)]

    def _keys(self, found: Found, stage: Stage) -> list[str]:
        layer: Any = found.module
        return [f"{found.name}.{name}".lstrip(".") for name in layer._names_of(stage.weight)]

    def _matrices_of(self, found: Found, stage: Stage, keys: list[str]) -> tuple[list[Matrix], str]:
        """Return the matrices of a weight, or why its rows cannot be served.

        Raises:
            ValueError: its recipe, or the one given instead, makes what the format cannot hold.
        """
        layer: Any = found.module
        operand, written_as = self._operand(found, stage)
        parts = [self._records[id(own_parameters(layer)[name])] for name in layer._names_of(stage.weight)]
        apart, (rows, columns) = split_of(layer, stage, parts[0]), shape_of(layer, parts)
        if columns % written_as.multiple:
            raise ValueError(
                f"{found.name or 'the model'} has a weight of {(rows, columns)}, and format={shown(self.format)} "
                f"takes multiples of {written_as.multiple} columns; give it no recipe before exporting: "
                "set_recipe(model, {name: None})"
            )
        named = self._rows_of(layer, stage, keys, rows)
        if named is None:
            return [], "its checkpoint arranges it otherwise"
        granule = written_as.granule
        if any(one.first % granule for group in named for one in group):
            return [], f"its parts begin within tiles of {granule} rows"
        made = [
            Matrix(layer, stage, i, parts, apart, operand, written_as, own) for i, own in enumerate(named)
        ]
        return made, ""

    def _operand(self, found: Found, stage: Stage) -> tuple[Operand, WeightFormat]:
        layer: Any = found.module
        if self.recipe is None and layer._decodes:  # as it is stored, if the format holds that
            stored = Operand.of(DECODED[layer._decodes], True, False)
            as_stored = self.kind.weight_format(stored.quantizer)
            if as_stored is not None:
                return stored, as_stored
        recipe = self.recipe or layer.recipe
        plan = linear_plan(recipe, stage.name, False, False, module_type=layer._module_type)
        operand = Operand.of(plan.kept_weight.quantizer, True, False) if plan.quantized else None
        written_as = (
            None if operand is None else self.kind.weight_format(operand.quantizer, plan.input.quantizer)
        )
        if operand is None or written_as is None:
            raise ValueError(
                f"{shown(found.name or 'the model')} has the recipe {recipe_name(recipe)}; format={shown(self.format)} "
                f"holds the weights of {self.kind.recipes}: choose another format, or give export a recipe="
            )
        return operand, written_as

    def _rows_of(self, layer: Any, stage: Stage, keys: list[str], rows: int) -> list[list[Rows]] | None:
        """Return for each matrix the weights that its rows are; None if the checkpoint arranges them otherwise."""
        if isinstance(layer, StackedExpertsLayer):
            stack = layer.stack_of(layer)
            experts = self.names.of_experts(keys[0], int(layer.num_experts), one_by_one=stack.every)  # type: ignore[arg-type]
            elsewhere = stack.transposed and not stack.every  # GPT-OSS, whose parts alternate row by row
            if experts is None or elsewhere or any(rows % len(one) for one in experts):
                return None
            return [
                [Rows(i * rows // len(one), rows // len(one), name) for i, name in enumerate(one)]
                for one in experts
            ]
        if isinstance(layer, GroupedLinearLayer):
            if len(keys) == 1:
                owner = keys[0].rpartition(".")[0]
                keys = [f"{owner}.{group}.weight".lstrip(".") for group in range(layer.num_gemms)]
            return [[Rows(0, rows, key)] for key in keys]
        if len(keys) == 1:
            name = self.names.of(keys[0])
            return None if name is None else [[Rows(0, rows, name)]]
        counts = [part.shape[0] for part in layer._parts_of(stage.weight)]
        return [[Rows(sum(counts[:i]), counts[i], key) for i, key in enumerate(keys)]]

    @torch.no_grad()
    def _quantized(
        self, matrix: Matrix, seen: Tensor | None, together: Together
    ) -> Iterator[tuple[str, Tensor]]:
        pieces, rows = packed(matrix, self._dtypes, together), matrix.rows
        if len(pieces) < len(rows):
            pieces = [_sliced(pieces[0], own, matrix.format.granule) for own in rows]
        for own, tensors in zip(rows, pieces, strict=True):
            for suffix, tensor in tensors.items():
                suffix = suffix.replace("_scale", "_scale_inv") if self.kind.fine_grained else suffix
                yield own.name + suffix, tensor.contiguous()
            if seen is not None:
                yield f"{own.name.removesuffix('weight')}input_scale", input_scale(matrix, seen)


def _sliced(tensors: Packed, rows: Rows, granule: int) -> Packed:
    """Return rows of a packed matrix; ``granule``: how many share a row of scales."""
    end = rows.first + rows.count
    return {
        suffix: tensor[rows.first : end]
        if is_codes(suffix)
        else tensor[rows.first // granule : cdiv(end, granule)]
        if tensor.dim() > 1
        else tensor
        for suffix, tensor in tensors.items()
    }


def _state(model: nn.Module) -> dict[str, Any]:
    """Return the state dict's tensors themselves, without what only training reads."""
    left_out = {
        f"{name}.{own}".lstrip(".")
        for name, module in model.named_modules()
        if isinstance(module, DelayedLayer)
        for own in module._state_names()
    }
    return {
        key: value
        for key, value in model.state_dict(keep_vars=True).items()
        if isinstance(value, Tensor) and key not in left_out and not key.endswith(EXTRA_STATE)
    }


def _each_once(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a state with tied tensors under their first name alone, and the names left out with that name."""
    once: dict[str, Any] = {}
    names: dict[int, str] = {}
    aliases = {}
    for key, tensor in state.items():
        if id(tensor) in names:
            aliases[key] = names[id(tensor)]
        else:
            once[key], names[id(tensor)] = tensor, key
    return once, aliases


def _why_not(found: Found, stage: Stage | None, kind: CheckpointFormat, uses: Counter[int]) -> str:
    """Return why a weight stays in high precision; "" where it does not."""
    layer: Any = found.module
    if not kind.weights:
        return "the format has no quantized weights"
    if not isinstance(layer, LinearLayer) or layer.recipe is None or stage is None:
        return "its layer has no recipe"
    if found.note:
        return found.note
    if isinstance(layer, Conv1DLayer):
        return f"{type(layer).__name__} has a transposed weight"
    return "it is tied" if any(uses[id(part)] > 1 for part in layer._parts_of(stage.weight)) else ""
