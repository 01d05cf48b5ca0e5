"""Training steps in turns: a forward and a backward of each contender, over and over, as a training loop runs them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

import narrowcast as nc

from .machine import Row
from .timing import spread, time_in_turns

Step = Callable[[], None]
RECIPES = {name: nc.recipe.NAMES[name] for name in ("delayed", "current", "block")}
STEPS = 8  # of a contender before the next one's turn


def step_of(
    layer: torch.nn.Module,
    forward: Callable[[Tensor], Tensor],
    x: Tensor,
    dy: Tensor,
    recipe: nc.recipe.Recipe | None,
) -> Step:
    """A forward and backward: ``forward`` is ``layer`` or its compiled form, ``dy`` the gradient of its output."""

    def step() -> None:
        layer.zero_grad(set_to_none=True)
        x.grad = None
        under: AbstractContextManager[None] = nullcontext() if recipe is None else nc.autocast(recipe=recipe)
        with under:
            y = forward(x)
        y.backward(dy)
        if recipe is not None and recipe.delayed():
            nc.renew_delayed_scaling(layer)  # as an optimizer's step does

    return step


def captured(step: Callable[[], object]) -> Callable[[], None]:
    """The replay of a step as a CUDA graph, after three real ones."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's watchdog is another thread
        step()
    return graph.replay


def error_of(actual: Tensor, expected: Tensor) -> float:
    """``||actual - expected|| / ||expected||`` in fp32 where the tensors are, which may be large."""
    difference = torch.linalg.vector_norm(actual.float() - expected.float())
    return (difference / torch.linalg.vector_norm(expected.float())).item()


def measure_steps(steps: Mapping[str, Step], yardstick: str, repeats: int, device: str) -> list[Row]:
    """One row per contender: milliseconds per step as the host issues them, peak memory, ``share`` of the yardstick.

    ``queued_ms``: with the GPU held back until the host has issued everything, so without the host's time.
    """
    for step in steps.values():
        for _ in range(3):  # compile, and let delayed scaling learn its scales
            step()
    peaks = {name: _peak_mib(step) if device == "cuda" else 0.0 for name, step in steps.items()}
    times = time_in_turns(steps, [()], repeats, device=device, launches=STEPS, queued=False)
    queued = time_in_turns(steps, [()], repeats, device=device, launches=2) if device == "cuda" else times
    base = statistics.median(times[yardstick])
    rows: list[Row] = []
    for name, values in times.items():
        row: Row = {"contender": name}
        row |= {
            key: round(float(str(value)), 3) for key, value in spread([t / 1e3 for t in values], "ms").items()
        }
        row["share"] = round(statistics.median(values) / base, 3)
        row["queued_ms"] = round(statistics.median(queued[name]) / 1e3, 3)
        row["queued_share"] = round(statistics.median(queued[name]) / statistics.median(queued[yardstick]), 3)
        row["peak_mib"] = round(peaks[name])
        rows.append(row)
    return rows


def _peak_mib(step: Step) -> float:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def saved_mib(forward: Callable[[], object], parameters: list[Tensor]) -> float:
    """What a forward keeps for its backward besides parameters, each storage counted once."""
    known = {
        buffer.untyped_storage().data_ptr() for parameter in parameters for buffer in _buffers(parameter)
    }
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        alive = forward()
    del alive
    return sum(kept.values()) / 2**20


def _buffers(parameter: Tensor) -> list[Tensor]:
    if isinstance(parameter, nc.QuantizedTensor):
        return [buffer for buffer in parameter.get_data_tensors() if buffer is not None]
    return [parameter]
