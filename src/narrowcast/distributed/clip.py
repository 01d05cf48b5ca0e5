"""``clip_grad_norm_``: the norm of all gradients of a model, whatever ranks share its parameters."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import _checks
from ..functional.collectives import registered_name
from ..layers.described import ParameterRecord, describe_parameters
from ..upstream.c10d import group_named


@torch.no_grad()
def clip_grad_norm_(
    model: nn.Module,
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
    pipeline: Any = None,
) -> Tensor:
    """Clip the norm of a model's gradients, which is that of one process with the whole model; every rank calls it.

    As ``torch.nn.utils.clip_grad_norm_``, over ranks: parts of layers with a ``tp_group``, of local experts and of
    DTensors, on one mesh or several, are added, and what ranks hold in common counts once. Sum gradients of
    ``sequence_parallel`` parameters first. Of layers with ``fuse_wgrad_accumulation`` it reads ``main_grad``.

    Args:
        max_norm: the largest norm.
        norm_type: p of the norm; ``inf`` for the largest magnitude.
        error_if_nonfinite: raise if the norm is NaN or infinite.
        pipeline: group of the ranks that hold the other stages of a pipeline.
    Returns:
        The norm before clipping, fp32, equal on all ranks.
    Raises:
        ValueError: a norm is negative, or it is not known how ranks share a parameter.
        RuntimeError: ``error_if_nonfinite``, and the norm is not finite.
    """
    _checks.module("model", model)
    _checks.numbers(max_norm=max_norm, norm_type=norm_type)
    _checks.flags(error_if_nonfinite=error_if_nonfinite)
    if not (max_norm >= 0 and norm_type > 0):
        raise ValueError(
            f"max_norm is {max_norm} and norm_type is {norm_type}; give at least 0, and more than 0 or inf"
        )
    most = norm_type == torch.inf
    once = {id(one.parameter): one for one in describe_parameters(model).values()}.values()
    shared: dict[tuple[str, ...], list[Tensor]] = {}  # gradients by the groups whose ranks hold other parts
    for record in once:
        # in the order of the splits, which all ranks have: names differ between ranks, and so would their order
        groups = tuple(dict.fromkeys(registered_name(split.group) for split in record.splits))
        own = shared.setdefault(groups, [])
        grad = _local_gradient(record)
        own += [grad] if grad is not None and grad.numel() else []  # an empty shard has no largest magnitude
    device = next((one.device for own in shared.values() for one in own), torch.device("cpu"))
    powers = [torch.zeros((), dtype=torch.float32, device=device)]
    for names, own in shared.items():
        found = torch._foreach_norm(own, norm_type, dtype=torch.float32) if own else []
        norms = [one.to(device) for one in found]
        together = torch.stack([*norms, powers[0]])
        power = together.amax() if most else together.pow(norm_type).sum()
        powers.append(_over([group_named(name) for name in names], power, most))
    total = torch.stack(powers).amax() if most else torch.stack(powers).sum()
    norm = _over([] if pipeline is None else [pipeline], total, most)
    norm = norm if most else norm.pow(1 / norm_type)
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"the norm of the gradients is {norm.item()}; lower the learning rate, or skip the step"
        )
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    grads = [grad for own in shared.values() for grad in own]
    for device in {grad.device for grad in grads}:
        torch._foreach_mul_([grad for grad in grads if grad.device == device], factor.to(device))
    return norm


def _local_gradient(record: ParameterRecord) -> Tensor | None:
    """Return what this rank holds of a parameter's gradient, whose sum over ranks has been made."""
    parameter: Any = record.parameter
    if getattr(record.layer, "fuse_wgrad_accumulation", False) and hasattr(parameter, "main_grad"):
        return parameter.main_grad
    grad = parameter.grad
    if record.mesh is not None and grad is not None and grad.placements != parameter.placements:
        parameter.grad = grad = grad.redistribute(placements=parameter.placements)
    return None if grad is None else record.of(grad).held


def _over(groups: list[Any], value: Tensor, most: bool) -> Tensor:
    """Return the sum or the largest of a value over the ranks of all groups."""
    for group in groups:
        dist.all_reduce(value, op=dist.ReduceOp.MAX if most else dist.ReduceOp.SUM, group=group)
    return value
