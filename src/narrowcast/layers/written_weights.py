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

from ..functional import note_written
from ..quantizers import Operand, OperandBuffers
from ..recipe import LinearPlan, linear_plan
from ..tensors import GroupedTensor, QuantizedTensor
from ..upstream.fsdp import is_distributed, is_managed
from .fitted_scales import fitted_to_weights
from .linear_layer import LinearLayer, Stage


class WrittenWeight(NamedTuple):
    """``weight``: the parameter. ``operand``: how it is quantized. ``buffers``: what comes of that, to be written.
    ``scale``, ``amax``: state of delayed scaling, or None.
    """

    weight: Tensor
    operand: Operand
    buffers: list[Tensor]
    scale: Tensor | None
    amax: Tensor | None

    def quantize(self) -> None:
        """Write the buffers in a pass of its own."""
        made = self.operand.quantize(self.weight.detach(), self.scale, self.amax)
        for old, new in zip(self.operand.split(self.buffers)[:2], made[:2]):
            for buffer, values in zip(old, new, strict=True):
                buffer.copy_(values)

    def note(self) -> None:
        """Note that the buffers are of the weight as it is now."""
        torch.autograd.graph.increment_version(self.buffers)
        note_written(self.operand.split(self.buffers).rowwise[-1], [self.weight.detach()])


class WeightCodes:
    """The weights of a model whose codes its optimizer writes.

    Left out, and quantized by their layers, are weights in several parameters, of groups, sharded ones, those stored
    quantized or rounded stochastically, and layers without a recipe of their own.

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
        if recipe is None or layer._groups > 1 or layer._placed or is_managed(layer):
            return
        for stage in layer._stages:
            plan = linear_plan(recipe, stage.name, True, True, module_type=layer._module_type)
            weights = layer._parts_of(stage.weight)
            if len(weights) == 1 and _is_written(weights[0], plan):
                layer.codes_are_written = True
                yield self._written(layer, stage, weights[0], plan)

    def _written(self, layer: LinearLayer, stage: Stage, weight: Tensor, plan: LinearPlan) -> WrittenWeight:
        operand, scale, amax = plan.kept_weight, None, None
        if plan.forward_state is not None:
            layer._keep_state(stage.prefix, plan.forward_state, plan.backward_state)
            slots = layer._slots(stage.prefix, "fwd", "forward", plan.forward_state)
            scale, amax = slots.scale, slots.amax
        kept = self._kept.get((id(layer), stage.weight))
        if kept is None or layer._fp8_workspaces[stage.weight] is not kept[0] or kept[0][0] != operand.value:
            described = operand.quantizer._describe_buffers(tuple(weight.shape), weight.dtype)
            buffers = [weight.new_empty(shape, dtype=dtype) for shape, dtype in described.values()]
            kept = (operand.value, operand.split(buffers)), buffers
            self._kept[id(layer), stage.weight] = kept
            layer._fp8_workspaces[stage.weight] = kept[0]
            first = scale
            if plan.forward_state is not None and first is not None and not layer._has_trained:
                # as the first training forward of a layer, which begins with scales that fit its weights
                first = fitted_to_weights(layer, stage.prefix, plan.forward_state, plan, first)
            made = WrittenWeight(weight, operand, buffers, first, amax)
            made.quantize()
            made.note()
        return WrittenWeight(weight, operand, kept[1], scale, amax)


def _leave(layers: list[LinearLayer]) -> None:
    """Let layers quantize their weights again: the optimizer is gone."""
    for layer in layers:
        layer.codes_are_written = False
        layer._drop_workspaces()


def _is_written(weight: Tensor, plan: LinearPlan) -> bool:
    return (
        plan.quantized
        and not plan.kept_weight.stochastic
        and weight.dim() == 2
        and not isinstance(weight, (GroupedTensor, QuantizedTensor))
        and not is_distributed(weight)
    )
