"""Scales of weights that follow from the weights as they are, without memory: before a first step, and in evaluation.

Delayed scaling takes a weight's scale from what earlier steps saw. A weight may be written since: loaded, initialised,
averaged. A training step then tells the next one. An evaluation has no next one, and before the first step there is no
earlier one. So these two look at the weight itself: one pass more over it.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from .._tracing import PLAIN
from ..autograd import DelayedScales
from ..functional import fit_to_weights
from ..functional.recomputation import FIRST
from ..recipe import FORWARD_TENSOR_TYPES, WEIGHT_SLOT, DelayedScaling, LinearPlan
from ..state import DelayedSlots, asks_callables, fp8_max, has_begun, is_readable
from ..tensors import GroupedTensor, QuantizedTensor
from ..upstream.autograd import version_preserved
from ..upstream.fsdp import is_distributed

_ROUNDED = 2**-7


class DelayedWeights(Protocol):
    """A layer with weights under delayed scaling."""

    _groups: int
    codes_are_written: bool  # an optimizer writes codes of its weights

    def _weight_amax(self, prefix: str) -> Tensor:
        """The amax of a stage's weights, by group."""
        ...

    def _states_of(self, prefix: str) -> list[DelayedSlots]:
        """The state of a stage, by direction."""
        ...

    def _weights_by_group(self, prefix: str) -> list[tuple[int, Tensor]]:
        """The weights of a stage, each with its group; parts of one weight share a group."""
        ...


def fit_in_evaluation(
    layer: DelayedWeights,
    prefixes: tuple[str, ...],
    plans: tuple[LinearPlan, ...],
    scales: list[DelayedScales],
) -> None:
    """Give the weights of an evaluation their own scales, whatever steps have seen; the state stays as it is."""
    for prefix, plan, own in zip(prefixes, plans, scales):
        if plan.forward_state is not None and own.scale_fwd is not None:
            own.scale_fwd = fitted_to_weights(layer, prefix, plan.forward_state, plan, own.scale_fwd)


@torch.no_grad()
def fit_first_scales(
    layer: DelayedWeights, prefix: str, plan: LinearPlan, states: list[DelayedSlots]
) -> None:
    """Let first scales follow weights that were written since, unless steps have told others.

    Args:
        states: of the stage, the forward's first. Of one that has not begun, the amaxes of weights are dropped: a
            renewal would put them in the place of what was fitted. Where an optimizer writes codes, so that no forward
            collects them again, they are those of the weights as they are.
    """
    slots = states[0]
    if not slots.scale.is_meta:
        begun = has_begun(states)
        fitted = fitted_to_weights(layer, prefix, slots.recipe, plan, slots.scale)
        amax = slots.amax[WEIGHT_SLOT * layer._groups :][: layer._groups]
        with version_preserved([slots.scale, slots.amax]):  # a graph may have saved them for its backward
            slots.scale.copy_(first_scales(slots.scale, fitted, begun))
            if layer.codes_are_written:
                amax.copy_(torch.where(begun | (amax == 0), amax, layer._weight_amax(prefix)))
            else:
                amax.masked_fill_(~begun, 0.0)


def first_scales(scale: Tensor, fitted: Tensor, begun: Tensor) -> Tensor:
    """Return scales of the weights as they are instead of known ones, unless these are of steps."""
    # a weight that was only rounded to a smaller dtype keeps its scale, as its shards do
    is_alike = (fitted / scale - 1).abs() < _ROUNDED
    return torch.where(is_alike | begun, scale, fitted)


def fit_in_graphs(layer: Any, prefixes: tuple[str, ...], plans: tuple[LinearPlan, ...]) -> None:
    """Let first scales follow the weights of a layer that is traced: now, and in its graphs until it has begun.

    Args:
        layer: a ``DelayedLayer``.
    """
    for prefix, plan in zip(prefixes, plans):
        if plan.forward_state is None:
            continue
        states = layer._states_of(prefix)
        fit_first_scales(layer, prefix, plan, states)
        amax = states[0].amax
        if type(amax) in PLAIN and not amax.is_meta:
            key = amax.data_ptr()
            FIRST[key] = partial(_fit_in_graph, weakref.ref(layer, partial(_forget, key)), prefix, plan, key)


def _forget(key: int, known: weakref.ref[Any]) -> None:
    """Forget a layer that is gone, unless another has taken its place."""
    fit: Any = FIRST.get(key)
    if fit is not None and fit.args[0] is known:
        del FIRST[key]


def _fit_in_graph(
    known: weakref.ref[Any], prefix: str, plan: LinearPlan, key: int, scales: dict[int, Tensor], counts: bool
) -> bool:
    """Fit the first scales unless a run that counts has ended them; return whether none is to be fitted any more.

    Args:
        scales: by address of their amax; a graph around a model may have copied them.
        counts: the graph collects. The host then asks what the run before has; where it may not, this one is the last.
    """
    layer: Any = known()
    states = [] if layer is None else layer._states_of(prefix)
    if (
        layer is None or not states or states[0].amax is None or states[0].amax.data_ptr() != key
    ):  # gone, or moved
        return True
    states = [slots._replace(scale=scales.get(slots.amax.data_ptr(), slots.scale)) for slots in states]
    asks = counts and is_readable(states[0].scale)
    if asks and has_begun(states):
        return True
    with torch.inference_mode(False):
        fit_first_scales(layer, prefix, plan, states)
    return counts and not asks


_FIRST = (1.0, 16.0, 512.0, 65536.0)
"""Scales with which states began before 0 did: Transformer Engine's, and ours of E4M3 and E5M2."""


@torch.no_grad()
def forget_first_scales(
    scale: Tensor | None, history: Tensor | None, amax: Tensor | None, kinds: tuple[str, ...]
) -> None:
    """Set the scales of a loaded state of which nothing was seen to 0, but for those of weights.

    The history alone does not tell: one of one row is empty between steps, and still is when it gets more rows.

    Args:
        kinds: the tensor types that the state is of.
    """
    if scale is None or history is None or amax is None:
        return
    first = ~(history.any(0) | (amax != 0)) & torch.isin(scale, scale.new_tensor(_FIRST))
    if kinds == FORWARD_TENSOR_TYPES:
        first.view(len(kinds), -1)[WEIGHT_SLOT] = False
    scale.masked_fill_(first, 0.0)


def fitted_to_weights(
    layer: DelayedWeights, prefix: str, recipe: DelayedScaling, plan: LinearPlan, scale: Tensor
) -> Tensor:
    """Return a stage's forward scales, those of its weights from the weights as they are."""
    weights = layer._weights_by_group(prefix)
    if not weights or asks_callables(recipe) or not plan.weight.delayed:
        return scale
    # a quantized weight has its scale; a shard is no weight, and its ranks need not all come here
    if any(isinstance(one, (GroupedTensor, QuantizedTensor)) or is_distributed(one) for _, one in weights):
        return scale
    slots = [WEIGHT_SLOT * layer._groups + group for group, _ in weights]
    return fit_to_weights(  # type: ignore[no-any-return]
        scale, [one.detach() for _, one in weights], slots, fp8_max(recipe, "forward"), recipe.margin
    )
