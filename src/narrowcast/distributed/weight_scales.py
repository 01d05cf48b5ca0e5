"""``WeightScales``: the scales of sharded weights that have one for the whole tensor, the same on every rank."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import reference
from ..formats import ELEMENT_FORMATS, FLT_MAX
from ..functional.recomputation import run_now
from ..layers import LinearLayer, Stage
from ..layers.fitted_scales import first_scales
from ..layers.set_recipe import renew_layers
from ..quantizers import NVFP4Quantizer
from ..recipe import WEIGHT_SLOT, DelayedScaling, Recipe
from ..reference.scaling import reciprocal, scale_from_amax
from ..state import asks_callables, fp8_max, has_begun, starts_a_step
from ..tensors import local
from ..upstream.fsdp import parameter_groups, reduces_gradients, reshard
from ..upstream.modules import own_parameters
from .sharded_weight import ShardedWeight, WeightGather


class ScaledWeight:
    """A weight with one scale, and where that comes from: the amax of the weight, or the state of its layer.

    Delayed weights of groups have a scale for each of them, of which a rank needs those of its own.
    """

    def __init__(
        self,
        layer: LinearLayer,
        stage: Stage,
        name: str,
        recipe: Recipe,
        delayed: bool,
        gather: WeightGather,
    ) -> None:
        self.layer, self.stage, self.name, self.recipe = layer, stage, name, recipe
        self.delayed, self.gather, self.count = delayed, gather, max(gather.members, 1)
        group = layer._parts[stage.weight].index(name) if stage.weight in layer._parts else 0
        self.first_slot = WEIGHT_SLOT * layer._groups + group
        quantizer: Any = gather.quantizer
        # where the scale comes from: state, the amax itself, or what it is computed with
        self.rule: Any = "state"
        if isinstance(quantizer, NVFP4Quantizer):
            self.rule = "amax"
        elif not delayed:
            self.rule = quantizer.dtype, quantizer.force_pow_2_scales, quantizer.amax_epsilon

    @property
    def shard(self) -> Tensor:
        """This rank's shard of the weight, also while the whole weight is gathered."""
        own = local(own_parameters(self.layer)[self.name])
        if isinstance(own, ShardedWeight):
            self._seen = own
        return self._seen._shard

    def state(self, name: str) -> Tensor:
        """Return the weight's scales or amaxes in the layer's state of delayed scaling."""
        full = f"{self.stage.prefix}{name}_fwd"
        if getattr(self.layer, full) is None:
            self.layer._keep_state_of(self.recipe)
        return getattr(self.layer, full)[self.first_slot : self.first_slot + self.count]

    @property
    def delayed_scaling(self) -> DelayedScaling | None:
        """What renews the layer's state."""
        return self.layer._delayed[self.stage.prefix][0]

    def has_begun(self) -> Tensor:
        """Return whether the state of its stage is of steps, as a tensor; one per scale."""
        # what was collected since differs between ranks
        return has_begun(self.layer._states_of(self.stage.prefix), renewed=True).expand(self.count)

    def own(self, mesh: Any) -> range:
        """Return which of its scales are of this rank's shard."""
        held = max(self.gather.members // mesh.size(), 1)
        return range(mesh.get_local_rank() * held if self.gather.members else 0, self.count)[:held]

    def parts(self, shard: Tensor) -> list[Tensor]:
        """Return the parts of a shard with their own scales."""
        return list(shard.unbind()) if self.gather.members else [shard]


def synchronizes(model: nn.Module) -> bool:
    """Return whether the backward of this forward reduces gradients over ranks."""
    return any(map(reduces_gradients, parameter_groups(model)))


def _has_backward() -> bool:
    """Return whether the forward that begins has a backward; the first run of a reentrant checkpoint records no
    gradients.
    """
    run = None if torch.is_grad_enabled() else run_now()
    return torch.is_grad_enabled() or (run is not None and run.collects(False))


class WeightScales:
    """One scale per weight, the same on every rank: set before every forward of the model."""

    def __init__(self, weights: list[ScaledWeight], mesh: Any, dtype: torch.dtype | None) -> None:
        self.weights, self.mesh, self.dtype = weights, mesh, dtype
        self.shards: list[Tensor] = []
        self.delayed = any(weight.delayed for weight in weights)
        # if all are delayed, the casts compute the shards' amax, which nothing reads earlier
        self.by_casts = all(weight.delayed for weight in weights)
        self.of_shards: Tensor | None = None  # amaxes from the casts
        self.amax: Tensor | None = None  # amaxes of the weights, the same on all ranks
        self.known = False  # both are of the weights as they are
        self.starts = self.delayed  # no training forward yet: scales follow weights that were written
        self.displaces = False  # the forward that runs has other delayed scales, and no backward
        # delayed scales that the backward of the last forward with one reads, to be handed out again
        self.of_backward: list[tuple[Tensor | None, Tensor | None]] = []
        self.counts = [weight.count for weight in weights]
        self.own = [weight.own(mesh) for weight in weights]

    def start(self, model: nn.Module, args: Any) -> None:
        """Compute the hook of a load."""
        self.starts = self.delayed

    def renew(self, model: nn.Module, args: Any) -> None:
        """Compute the forward pre-hook, before FSDP2's own."""
        if not starts_a_step():
            return
        if not self.known:
            self.shards = [weight.shard for weight in self.weights]
            self.amax = None
            for weight in self.weights:
                weight.gather.written = False
            if self.by_casts:
                held = [len(own) for own in self.own]
                self.of_shards = torch.zeros(sum(held), device=self.mesh.device_type)
                for weight, found in zip(self.weights, self.of_shards.split(held)):
                    weight.gather.amax = found
        # in later forwards of a step the weights are what they were: FSDP2 has no gradients for them before the last
        self.known = torch.is_grad_enabled() and not synchronizes(model)
        with torch.no_grad():
            if self.delayed:
                renew_layers(model)
            self._set(evaluates=not model.training)
        self.displaces = self.delayed and not _has_backward()
        if self.delayed and not self.displaces:
            self.of_backward = [(one.gather.scale, one.gather.kept) for one in self.weights if one.delayed]

    def restore(self, model: nn.Module, args: Any, out: Any) -> None:
        """Compute the forward hook, also of a forward that raises: hand out again what an earlier forward's backward
        will read.

        A forward in training without gradients renews the scales, an evaluation has its own. Weights that stay gathered
        have its codes then.
        """
        if self.displaces and starts_a_step():
            self.displaces = False
            delayed = [weight.gather for weight in self.weights if weight.delayed]
            for gather, (scale, kept) in zip(delayed, self.of_backward):
                gather.scale, gather.kept = scale, kept
            if self.of_backward:
                reshard(model)

    def _of_shards(self) -> Tensor:
        """Return the amax of what this rank holds, with zeros instead of other ranks' groups; not by casts: of all
        shards.
        """
        if self.of_shards is not None:
            largest = self.of_shards
            for weight, shard in zip(self.weights, self.shards):
                if weight.gather.amax is not None:
                    # no cast ran: it stayed gathered after an earlier forward
                    weight.gather.amax.copy_(torch.stack(torch._foreach_norm(weight.parts(shard), math.inf)))
        else:
            parts = [p for weight, shard in zip(self.weights, self.shards) for p in weight.parts(shard)]
            largest = torch.stack([norm.float() for norm in torch._foreach_norm(parts, math.inf)])
            largest = largest.to(self.mesh.device_type)
        if len(largest) == sum(self.counts):
            return largest
        found = zip(self.counts, self.own, largest.split([len(own) for own in self.own]))
        return torch.cat([F.pad(a, (own.start, count - own.stop)) for count, own, a in found])

    @torch.no_grad()
    def _amax(self) -> Tensor:
        if self.amax is None:
            largest = self._of_shards()
            if self.mesh.size() > 1:
                torch.distributed.all_reduce(
                    largest, op=torch.distributed.ReduceOp.MAX, group=self.mesh.get_group()
                )
            self.amax = largest if self.dtype is None else largest.to(self.dtype).float()
        return self.amax

    def _set(self, evaluates: bool) -> None:
        by_rule: dict[Any, list[int]] = {}
        for index, weight in enumerate(self.weights):
            by_rule.setdefault(weight.rule, []).append(index)
        for rule, indices in by_rule.items():
            if rule == "state":  # copies: a layer may renew its state before its backward gathers again
                states = [self.weights[index].state("scale") for index in indices]
                scales = torch.cat(states)
                if evaluates:
                    scales = self._fitted(indices, scales)
                elif self.starts:
                    begun = torch.cat([self.weights[index].has_begun() for index in indices])
                    scales = first_scales(scales, self._fitted(indices, scales), begun)
                    torch._foreach_copy_(states, list(scales.split([len(state) for state in states])))
                self._hand_out(indices, scales)
                continue
            amaxes = self._amax().split(self.counts)
            amax = self._amax() if len(by_rule) == 1 else torch.cat([amaxes[index] for index in indices])
            if rule == "amax":  # which the gathered tensor holds itself
                for index, own in zip(indices, amax.split(1)):
                    self.weights[index].gather.scale = self.weights[index].gather.kept = own
                continue
            element, power_2, epsilon = rule
            largest = ELEMENT_FORMATS[element].max
            self._hand_out(
                indices,
                scale_from_amax(amax, largest, power_2=power_2, epsilon=epsilon, overflow=FLT_MAX),
            )

    def _fitted(self, indices: list[int], scales: Tensor) -> Tensor:
        """What an evaluation has in place of the scales in the state: those of the weights as they are."""
        amaxes, states = (
            self._amax().split(self.counts),
            scales.split([self.counts[index] for index in indices]),
        )
        fitted = []
        for index, scale in zip(indices, states):
            recipe = self.weights[index].delayed_scaling
            if recipe is not None and not asks_callables(recipe):
                largest = fp8_max(recipe, "forward")
                scale = reference.delayed.scale_from_amax(amaxes[index], scale, largest, recipe.margin)
            fitted.append(scale)
        return torch.cat(fitted)

    def _hand_out(self, indices: list[int], scales: Tensor) -> None:
        counts = [self.counts[index] for index in indices]
        for index, scale, scale_inv in zip(indices, scales.split(counts), reciprocal(scales).split(counts)):
            gather, own = self.weights[index].gather, self.own[index]
            gather.scale = scale if len(own) == len(scale) else scale[own.start : own.stop]
            gather.kept = scale_inv

    def _collects(self, model: nn.Module) -> bool:
        """Return whether a forward that is no recomputation leaves the amax of weights for delayed scaling."""
        return self.delayed and model.training and torch.is_grad_enabled() and starts_a_step()

    def record(self, model: nn.Module, args: Any, out: Any) -> None:
        """Compute the forward hook: what delayed scaling collects of a weight, once all layers have renewed their
        state.
        """
        if self._collects(model):
            self.starts = False
            amaxes = self._amax().split(self.counts)
            found = [(w.state("amax"), own) for w, own in zip(self.weights, amaxes) if w.delayed]
            torch._foreach_maximum_([amax for amax, _ in found], [own for _, own in found])
