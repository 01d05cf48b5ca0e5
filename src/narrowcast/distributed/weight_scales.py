"""``WeightScales``: the scales of sharded weights that have one for the whole tensor, the same on every rank."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ..formats import ELEMENT_FORMATS, FLT_MAX
from ..functional.numerics import numerics_for
from ..layers import LinearLayer
from ..quantizers import NVFP4Quantizer
from ..reference.scaling import reciprocal, scale_from_amax
from ..state import starts_a_step
from ..tensors import local
from ..upstream.fsdp import parameter_groups, reduces_gradients
from ..upstream.modules import own_parameters
from .sharded_weight import ShardedWeight, WeightGather


class ScaledWeight:
    """A weight with one scale, which follows from its amax."""

    def __init__(self, layer: LinearLayer, name: str, gather: WeightGather) -> None:
        self.layer, self.name, self.gather = layer, name, gather
        quantizer: Any = gather.quantizer
        # the amax itself, or what the scale is computed with
        self.rule: Any = "amax"
        if not isinstance(quantizer, NVFP4Quantizer):
            self.rule = quantizer.dtype, quantizer.force_pow_2_scales, quantizer.amax_epsilon

    @property
    def shard(self) -> Tensor:
        """This rank's shard of the weight, also while the whole weight is gathered."""
        own = local(own_parameters(self.layer)[self.name])
        if isinstance(own, ShardedWeight):
            self._seen = own
        return self._seen._shard


def synchronizes(model: nn.Module) -> bool:
    """Return whether the backward of this forward reduces gradients over ranks."""
    return any(map(reduces_gradients, parameter_groups(model)))


class WeightScales:
    """One scale per weight, the same on every rank: set before every forward of the model."""

    def __init__(self, weights: list[ScaledWeight], mesh: Any, dtype: torch.dtype | None) -> None:
        self.weights, self.mesh, self.dtype = weights, mesh, dtype
        self.amax: Tensor | None = None  # of the weights, the same on all ranks
        self.known = False  # it is of the weights as they are

    def renew(self, model: nn.Module, args: Any) -> None:
        """Compute the forward pre-hook, before FSDP2's own."""
        if not starts_a_step():
            return
        if not self.known:
            self.amax = self._amax()
            for weight in self.weights:
                weight.gather.written = False
            self._set(self.amax)
        # in later forwards of a step the weights are what they were: FSDP2 has no gradients for them before the last
        self.known = torch.is_grad_enabled() and not synchronizes(model)

    @torch.no_grad()
    def _amax(self) -> Tensor:
        shards = [weight.shard for weight in self.weights]
        float8 = numerics_for(shards[0]).float8
        parts = [(float8.amax_parts if shard.numel() else float8.amax)(shard) for shard in shards]
        largest = torch.stack(torch._foreach_norm(parts, math.inf)).to(self.mesh.device_type)
        if self.mesh.size() > 1:
            torch.distributed.all_reduce(
                largest, op=torch.distributed.ReduceOp.MAX, group=self.mesh.get_group()
            )
        return largest if self.dtype is None else largest.to(self.dtype).float()

    def _set(self, amax: Tensor) -> None:
        by_rule: dict[Any, list[int]] = {}
        for index, weight in enumerate(self.weights):
            by_rule.setdefault(weight.rule, []).append(index)
        for rule, indices in by_rule.items():
            own = amax if len(by_rule) == 1 else amax[indices]
            if rule == "amax":  # which the gathered tensor holds itself
                scales = kept = own
            else:
                element, power_2, epsilon = rule
                largest = ELEMENT_FORMATS[element].max
                scales = scale_from_amax(own, largest, power_2=power_2, epsilon=epsilon, overflow=FLT_MAX)
                kept = reciprocal(scales)
            for index, scale, of_gathered in zip(indices, scales.split(1), kept.split(1)):
                self.weights[index].gather.scale, self.weights[index].gather.kept = scale, of_gathered
