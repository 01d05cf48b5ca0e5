"""What is tried without a private name of FSDP2 or c10d: ``loss.py`` calls these in a process for each name."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def _one_rank() -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return init_device_mesh("cpu", (1,))


def collectives() -> list[torch.Tensor]:
    """What layers that are split over processes do, and a mixture of experts, over one rank."""
    from narrowcast.distributed.moe_exchange import Wire, all_to_all, group_of
    from narrowcast.functional import collectives as ours

    _one_rank()
    x = torch.arange(6.0).view(2, 3)
    name, _ = group_of(None)
    started = [ours.start_gather(x, None), ours.start_scatter(x, None), ours.start_sum(x, name)]
    found = [ours.arrived(one) for one in started]
    found.append(ours.largest_of(x, name))
    # two ranks as far as the wire knows: its own rows go to itself
    found.append(all_to_all(x, [2], [2], Wire(name, 2)))
    size = torch.tensor([ours.group_size(name), group_of(name)[1]])
    return [*found, size]


def gathers() -> list[torch.Tensor]:
    """Several gathers at a time, and chunks put together."""
    from narrowcast.functional.collectives import all_gather_single
    from narrowcast.upstream.c10d import run_together
    from narrowcast.upstream.fsdp import cat_chunks

    _one_rank()
    outs = [torch.empty(4), torch.empty(3)]
    ins = [torch.arange(4.0), torch.arange(3.0)]
    starts = [lambda pair=pair: all_gather_single(*pair) for pair in zip(outs, ins)]
    assert run_together(starts, dist.group.WORLD, False) is None
    rows = torch.empty(3, 8)
    cat_chunks([torch.arange(8.0).view(4, 2), torch.arange(10.0)], 0, 3, out=rows)
    return [*outs, rows]


def sharded() -> list[torch.Tensor]:
    """Train a model of stored weights that FSDP2 shards, and one that ``narrowcast.distributed.shard`` does."""
    from torch.distributed.fsdp import fully_shard

    import narrowcast as nc

    mesh, recipe = _one_rank(), nc.recipe.Float8CurrentScaling()
    found = []
    for stored in (True, False):
        torch.manual_seed(0)
        with nc.quantized_model_init(enabled=stored, recipe=recipe):
            layer: Any = nc.Linear(32, 32, device="cpu")
        model = torch.nn.Sequential(layer)
        nc.set_recipe(model, recipe)
        if stored:
            fully_shard(model, mesh=mesh)
        else:
            nc.distributed.shard(model, mesh, reshard_after_forward=True)
        for _ in range(2):
            model(torch.ones(8, 32)).square().sum().backward()
        found += [layer.weight.grad.full_tensor(), layer.weight.full_tensor().dequantize()]
    return found
