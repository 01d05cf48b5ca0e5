"""Weights whose codes an optimizer writes: it has them in registers, and they change in no other place.

A layer quantizes its weight for each GEMM, in the forward and again in the backward, so it reads it twice or more in a
step. An optimizer that quantizes what it has just stepped reads it no time beside its own. The codes are what a layer
keeps for several microbatches (``functional/kept_weights.py``): a training forward takes them while the weight is what
they were made from, and quantizes it itself otherwise.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..autograd.groups import by_direction, quantize_weights
from ..functional import empty_weights, note_written
from ..functional.grouped_decoded import ALIGNMENT
from ..quantizers import Operand, OperandBuffers
from ..recipe import LinearPlan, linear_plan
from ..tensors import GroupedTensor, QuantizedTensor, grouped_layout
from ..upstream.fsdp import is_distributed, is_managed
from .linear_layer import LinearLayer, Stage


class WrittenWeight(NamedTuple):
    """``weight``: the parameter. ``operand``: how it is quantized. ``buffers``: what comes of that, to be written.
    ``layout``: of the buffers of groups (G, N, K); "" for a matrix.
    """

    weight: Tensor
    operand: Operand
    buffers: list[Tensor]
    layout: str = ""

    def quantize(self) -> None:
        """Write the buffers in a pass of its own."""
        if self.layout:
            made = quantize_weights([self.weight.detach()], self.operand)
        else:
            made = self.operand.quantize(self.weight.detach())
        for old, new in zip(self.directions()[:2], made[:2]):
            for buffer, values in zip(old, new, strict=True):
                buffer.copy_(values)

    def directions(self) -> OperandBuffers:
        """Return the buffers by direction."""
        return by_direction(self.buffers, self.operand) if self.layout else self.operand.split(self.buffers)

    def note(self) -> None:
        """Note that the buffers are of the weight as it is now."""
        torch.autograd.graph.increment_version(self.buffers)
        note_written(self.directions().rowwise[-1], [self.weight.detach()])

    def matrices(self, x: Tensor) -> list[Tensor]:
        """Return a tensor of the weight's shape as the matrices that are quantized one by one."""
        if self.layout == "tensor":
            return list(x.unbind(0))
        return [x.view(-1, x.shape[-1])]  # groups in blocks are the blocks of one matrix

    def buffers_of_matrices(self) -> list[Tensor]:
        """Return the buffers of :meth:`matrices`, one matrix after the other."""
        if self.layout != "tensor":
            return self.buffers
        *codes, scale_inv = self.buffers
        groups = range(len(scale_inv))
        return [part for g in groups for part in (*[x[g] for x in codes], scale_inv[g : g + 1])]


class WeightCodes:
    """The weights of a model whose codes its optimizer writes.

    Left out, and quantized by their layers, are weights in several parameters, sharded ones, those stored quantized or
    rounded stochastically, groups in four bits or in blocks whose rows are no multiple of 128, converted experts that
    are transposed or exchange tokens, and layers without a recipe of their own.

    Args:
        model: its layers have their recipes, and are on their device.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers = [layer for layer in model.modules() if isinstance(layer, LinearLayer)]
        self._kept: dict[tuple[int, str], tuple[tuple[str, OperandBuffers], list[Tensor]]] = {}
        weakref.finalize(self, _leave, self._layers).atexit = False

    def weights(self) -> list[WrittenWeight]:
        """Return the weights; those that have no codes, or codes under another recipe, are quantized now."""
        return [found for layer in self._layers for found in self._of(layer)]

    def _of(self, layer: LinearLayer) -> Iterator[WrittenWeight]:
        recipe, layer.codes_are_written = layer._recipe, False
        if recipe is None or not layer.takes_codes() or is_managed(layer):
            return
        for stage in layer._stages:
            plan = linear_plan(recipe, stage.name, True, True, module_type=layer._module_type)
            weights = layer._parts_of(stage.weight)
            if len(weights) == 1 and _is_written(weights[0], plan):
                layer.codes_are_written = True
                yield self._written(layer, stage, weights[0], plan)

    def _written(self, layer: LinearLayer, stage: Stage, weight: Tensor, plan: LinearPlan) -> WrittenWeight:
        operand = plan.kept_weight
        layout = grouped_layout(operand.storage_name) if weight.dim() == 3 else ""
        kept = self._kept.get((id(layer), stage.weight))
        if kept is None or layer._fp8_workspaces[stage.weight] is not kept[0] or kept[0][0] != operand.value:
            if layout:
                buffers = empty_weights(weight.detach(), operand.quantizer, layout)
            else:
                described = operand.quantizer._describe_buffers(tuple(weight.shape), weight.dtype)
                buffers = [weight.new_empty(shape, dtype=dtype) for shape, dtype in described.values()]
            made = WrittenWeight(weight, operand, buffers, layout)
            kept = (operand.value, made.directions()), buffers
            self._kept[id(layer), stage.weight] = kept
            layer._fp8_workspaces[stage.weight] = kept[0]
            made.quantize()
            made.note()
        return WrittenWeight(weight, operand, kept[1], layout)


def _leave(layers: list[LinearLayer]) -> None:
    """Let layers quantize their weights again: the optimizer is gone."""
    for layer in layers:
        layer.codes_are_written = False
        layer._drop_workspaces()


def _is_written(weight: Tensor, plan: LinearPlan) -> bool:
    return (
        plan.quantized
        and not plan.kept_weight.stochastic
        and (weight.dim() == 2 or (weight.dim() == 3 and _is_one_by_one(weight, plan)))
        and not isinstance(weight, (GroupedTensor, QuantizedTensor))
        and not is_distributed(weight)
    )


def _is_one_by_one(weight: Tensor, plan: LinearPlan) -> bool:
    """Return whether groups (G, N, K) are quantized as matrices, each into a part of the buffers."""
    layout = grouped_layout(plan.kept_weight.storage_name)
    return layout == "tensor" or (layout == "padded" and weight.shape[1] % ALIGNMENT[layout] == 0)
