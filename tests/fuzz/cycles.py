"""Train, evaluate, offload, over and over: memory, live tensors and compiled graphs stay as they were."""

from __future__ import annotations

import gc
import io
import os
from pathlib import Path

import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import narrowcast as nc

from .draw import Draw

CYCLES = 1000
FEATURES = 64
MIB = 2.0**20


def case(draw: Draw) -> dict[str, float]:
    recipe = draw.recipe()
    dtype = draw.pick("dtype", (torch.float32, torch.bfloat16))
    place = {"device": draw.device, "dtype": dtype}
    model = nn.Sequential(
        nc.LayerNormLinear(FEATURES, FEATURES, **place),
        nc.LayerNormMLP(FEATURES, 2 * FEATURES, activation="swiglu", **place),
        nc.Linear(FEATURES, FEATURES, **place),
    )
    nc.set_recipe(model, recipe)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    forward = torch.compile(model, backend=counter) if draw.chance("compile") else model
    cycles = max(30, round(CYCLES * draw.effort))
    x = torch.randn(48, FEATURES, device=draw.device).to(dtype)
    before: dict[str, float] = {}
    for cycle in range(cycles):
        loss = _cycle(forward, model, optimizer, x, cycle)
        if cycle == cycles // 3:
            before = _held(draw.device, counter)
    after = _held(draw.device, counter)
    grown = {name: after[name] - before[name] for name in before}
    assert loss == loss, "the loss is NaN"
    for name, allowed in (("tensors", 0), ("graphs", 0), ("device bytes", 0), ("MiB of the process", 64)):
        assert grown[name] <= allowed, f"{name} grew in {cycles - cycles // 3} cycles: {before}, then {after}"
    return {
        "cycles": float(cycles),
        "tensors grown": grown["tensors"],
        "device bytes grown": grown["device bytes"],
        "MiB grown": round(grown["MiB of the process"], 1),
        "graphs": after["graphs"],
    }


def _cycle(
    forward: nn.Module, model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, cycle: int
) -> float:
    model.train()
    for microbatch in range(2):
        forward(x[24 * microbatch :][:24]).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    model.eval()
    with torch.no_grad():
        loss = forward(x[:24]).float().square().mean().item()
    device = x.device
    if device.type == "cuda":
        model.cpu()
        model.to(device)
    if cycle % 10 == 0:
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        model.load_state_dict(torch.load(file, weights_only=True))
    return loss


def _held(device: str, counter: CompileCounterWithBackend) -> dict[str, float]:
    gc.collect()
    tensors = sum(1 for thing in gc.get_objects() if issubclass(type(thing), Tensor))
    pages = int(Path("/proc/self/statm").read_text().split()[1]) if Path("/proc/self/statm").exists() else 0
    if device == "cuda":
        torch.cuda.synchronize()
    return {
        "tensors": float(tensors),
        "graphs": float(counter.frame_count),
        "device bytes": float(torch.cuda.memory_allocated()) if device == "cuda" else 0.0,
        "MiB of the process": pages * os.sysconf("SC_PAGE_SIZE") / MIB,
    }
