"""``expert_parallel``: the experts of a converted model over ranks, its checkpoint unchanged."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from .. import _checks
from .._checks import shown
from ..layers.described import how_stored
from .moe_dispatch import MoEDispatch


def expert_parallel(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    average_gradients: bool = True,
    has_replicas: bool | None = None,
    **wires: Any,
) -> set[nn.Parameter]:
    """Give each rank a part of the experts of every converted mixture, in place; tokens travel to them.

    The parameters of the experts become ``DTensor``s, sharded by expert. Names and global shapes of the state dict stay
    those of the model. Call it after ``nc.convert``, on every rank, with equal parameters. Shard the other parameters
    afterwards: ``fully_shard(block, ignored_params=expert_parallel(model, mesh))``.

    Args:
        model: converted; its experts are 3-D parameters, as Transformers 5 keeps them.
        mesh: of the ranks that share the experts, or of two dims, whose first counts replicas of the experts. Each rank
            has tokens of its own.
        average_gradients: divide the experts' gradients by the ranks, as data parallelism does; False sums them.
        has_replicas: whether ranks outside a mesh of one dim hold the same experts. Their gradients are summed only if
            you call ``fully_shard`` on the experts over the other dim, before their block; a forward raises if you did
            not. None: if there are ranks outside. Give False for stages of a pipeline.
        wires: options of :class:`MoEDispatch`, without ``num_experts`` and ``group``.

    Returns:
        The parameters that were sharded.

    Raises:
        TypeError: no module, or no mesh.
        ValueError: the mesh has more than two dims, no experts were converted, they do not divide among the ranks, or
            they are stored quantized.
    """
    _checks.module("model", model)
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh is {_checks.a_kind(mesh)}; pass a DeviceMesh, such as init_device_mesh(...)")
    if mesh.ndim > 2:
        raise ValueError(
            f"mesh has {mesh.ndim} dimensions; pass that of the experts, mesh['ep'], or that of replicas before it, "
            "mesh['dp', 'ep']"
        )
    layers: dict[str, Any] = {
        name: layer for name, layer in model.named_modules() if hasattr(layer, "exchange_tokens")
    }
    if not layers:
        raise ValueError(
            "the model has no converted experts; call nc.convert first, on a model whose experts are 3-D parameters"
        )
    for name, layer in layers.items():
        if any(how_stored(getattr(layer, weight)) == "codes" for weight in layer.stack_of(layer).weights):
            raise ValueError(
                f"the experts of {shown(name)} are stored as codes, which ranks do not share; call "
                "narrowcast.revert(model) and convert it with weights='plain'"
            )
    own, replicated = mesh.get_group(mesh.ndim - 1), mesh.ndim == 2 and mesh.size(0) > 1
    replicas = mesh.get_group(0).group_name if replicated else ""
    outside = dist.get_world_size() > mesh.size() if has_replicas is None else has_replicas
    factor = 1 / mesh.size() if average_gradients else 1.0
    sharded: set[nn.Parameter] = set()
    for layer in layers.values():
        exchange = MoEDispatch(int(layer.num_experts), own, **wires)
        stack = layer.stack_of(layer)
        names = [*stack.weights, *(f"{name}_bias" for name in stack.weights if stack.biased)]
        for name in names:
            plain = getattr(layer, name)
            placed = distribute_tensor(plain.detach(), mesh, [*[Replicate()] * (mesh.ndim - 1), Shard(0)])
            parameter: Any = nn.Parameter(placed, requires_grad=plain.requires_grad)
            parameter.has_replicas = mesh.ndim == 1 and outside  # FSDP2 puts another parameter in its place
            layer.register_parameter(name, parameter)
            sharded.add(parameter)
        with torch.no_grad():
            layer.exchange_tokens(exchange, factor, replicas)
    return sharded
