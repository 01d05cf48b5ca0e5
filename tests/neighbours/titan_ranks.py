"""Train the model of the page's torchtitan section on the ranks of ``torchrun``, save it, resume; rank 0 prints JSON.

torchtitan expects a GPU: on a CPU its mesh is told so, and its FlexAttention gives way to its plain attention.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import FSDPModule
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry

STEPS = 8
DTENSORS = "partial_dtensor"  # the backend that needs no sharding of each module


def built(spec: Any) -> torch.nn.Module:
    """The model, sharded over all ranks by torchtitan's function, with its initialization."""
    torch.manual_seed(0)
    for block in spec.model.layers:
        block.attention.inner_attention = ScaledDotProductAttention.Config()
    ranks = dist.get_world_size()
    sizes = {"dp_replicate": 1, "dp_shard": ranks, "cp": 1, "tp": 1, "pp": 1, "ep": 1, "world_size": ranks}
    with torch.device("meta"):
        model = spec.model.build()
    model = spec.parallelize_fn(
        model,
        parallel_dims=ParallelDims(**sizes, spmd_backend=DTENSORS),
        training=TrainingConfig(mixed_precision_param="bfloat16"),
        parallelism=ParallelismConfig(spmd_backend=DTENSORS),
        compile_config=CompileConfig(enable=False),
        ac_config=None,
        dump_folder=".",
    )
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.set_force_sum_reduction_for_comms(True)  # gloo does not scale sums
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_states()
    return model


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """Losses of counting upwards from a random number, the same on all ranks."""
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        tokens = torch.randint(0, 32, (4, 1), generator=generator) + torch.arange(33)
        optimizer.zero_grad()
        logits = model(tokens[:, :-1]).flatten(0, 1).float()
        loss = torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    return losses


def run(spec: Any, folder: Path) -> dict[str, Any]:
    """Losses of a run, and of its second half resumed from a checkpoint."""
    model = built(spec)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = train(model, optimizer, range(STEPS // 2))
    dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=folder)
    losses += train(model, optimizer, range(STEPS // 2, STEPS))
    again = built(spec)
    optimizer = torch.optim.AdamW(again.parameters(), lr=1e-3)
    train(again, optimizer, range(1))  # the optimizer has state from its first step on
    state = {"model": again.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    again.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    layers = [type(part).__name__ for part in model.modules()]
    resumed = train(again, optimizer, range(STEPS // 2, STEPS))
    return {"losses": losses, "resumed": resumed, "converted": layers.count("LowPrecisionLinear")}


def main() -> None:
    sys.path.insert(0, ".")
    from narrowcast_titan import spec

    parallel_dims.device_type = "cpu"
    dist.init_process_group("gloo")
    results = {
        "plain": run(model_registry("debugmodel"), Path("plain")),
        "quantized": run(spec, Path("quantized")),
    }
    if dist.get_rank() == 0:
        print("results: " + json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
