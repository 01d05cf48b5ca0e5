"""``policy="auto"``: per distinct size the faster of bf16 and the recipe, as this GPU ran a layer of that size once.

What was timed is kept in a file per GPU, so that it is timed once; :func:`timings` shows it, :func:`forget` drops it.
``"auto"`` times steps issued one after the other, forward and backward, CPU time included. ``"auto-graphs"``
times replays of a CUDA graph: for steps that are captured or run under ``mode="reduce-overhead"``.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ._checks import shown
from ._environment import read_text
from .layers import renew_delayed_scaling, set_recipe
from .layers.policies import POLICIES, Shapes
from .nn import Linear
from .recipe import Recipe, recipes_to_json

SECONDS, ROUNDS = 0.02, 8  # seconds of a round, for each of the two
GAIN = 0.97  # largest accepted share of the high-precision time: closer results vary between runs


class Timing(NamedTuple):
    """The times of a linear layer, forward and backward, in high precision and under the recipe."""

    rows: int
    out_features: int
    in_features: int
    dtype: str
    recipe: str
    replayed: bool
    plain_ms: float
    recipe_ms: float


def timings() -> list[Timing]:
    """Return all measurements of this GPU.

    Raises:
        RuntimeError: there is no GPU.
    """
    return [Timing(*json.loads(key), *times) for key, times in _read(_file()).items()]


def forget() -> None:
    """Drop the measurements of this GPU, for example after an upgrade of its driver.

    Raises:
        RuntimeError: there is no GPU.
    """
    _file().unlink(missing_ok=True)


def _auto(replayed: bool, recipe: Recipe, shapes: Shapes, dtype: torch.dtype) -> tuple[Recipe | None, str]:
    """Return the faster of the two for all linear layers of a module together."""
    times = [_timed(rows, n, k, dtype, recipe, replayed) for rows, n, k in shapes]
    plain, own = (sum(pair) for pair in zip(*times))
    sizes = ", ".join(f"{rows}x{k}->{n}" for rows, n, k in shapes)
    told = f"{sizes} takes {own:.3f} ms, in high precision {plain:.3f}"
    if own <= GAIN * plain:
        return recipe, f"auto: {told}"
    return None, f"auto: high precision is {'as fast' if own < plain else 'faster'}: {told}"


POLICIES["auto"] = partial(_auto, False)
POLICIES["auto-graphs"] = partial(_auto, True)


def _timed(
    rows: int, out_features: int, in_features: int, dtype: torch.dtype, recipe: Recipe, replayed: bool
) -> tuple[float, float]:
    """Return ms in high precision and ms under the recipe, from the file or measured now."""
    file = _file()
    name = repr(recipe) if recipe.custom() else recipes_to_json({"": recipe})
    key = json.dumps([rows, out_features, in_features, str(dtype), name, replayed])
    known = _read(file)
    if key not in known:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OSError(
                f"the timings of policies cannot be kept in {shown(str(file.parent))} ({error.strerror}); set "
                "NARROWCAST_CACHE to a folder that is writable"
            ) from error
        measured = measure(rows, out_features, in_features, dtype, recipe, replayed)
        known = {**_read(file), key: list(measured)}
        part = file.with_suffix(".part")
        part.write_text(json.dumps(known, indent=1))
        part.replace(file)
    plain, own = known[key]
    return plain, own


def _file() -> Path:
    if not torch.cuda.is_available():
        raise RuntimeError(
            "policy='auto' measures layers on a GPU, and torch sees none; run this on a machine with a CUDA GPU, or "
            "leave policy out and give recipes by pattern"
        )
    folder = read_text("CACHE", "") or str(Path.home() / ".cache" / "narrowcast")
    gpu = torch.cuda.get_device_name().replace(" ", "-").replace("/", "-")
    return Path(folder) / "policy" / f"{gpu}-torch-{torch.__version__}.json"


def _read(file: Path) -> dict[str, list[float]]:
    """Return the content of the file; nothing if it is absent or was cut off."""
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError):
        return {}


def measure(
    rows: int, out_features: int, in_features: int, dtype: torch.dtype, recipe: Recipe, replayed: bool
) -> tuple[float, float]:
    """Measure forward and backward of a linear layer in milliseconds: in high precision, and under the recipe.

    Both take turns, and the medians count.

    Args:
        replayed: measure replays of a CUDA graph.
    """
    place: dict[str, Any] = {"device": "cuda", "dtype": dtype}
    x = torch.randn(rows, in_features, **place).requires_grad_()
    grad = torch.randn(rows, out_features, **place)
    plain = nn.Linear(in_features, out_features, bias=False, **place)
    own = Linear(in_features, out_features, bias=False, **place)
    set_recipe(own, recipe)
    with torch.no_grad():  # numbers decide how much power a GEMM takes, and so how fast it runs
        own.weight.copy_(plain.weight)
    with torch.cuda.device(x.device), torch.enable_grad():
        steps = [_step(layer, x, grad, replayed) for layer in (plain, own)]
        first_ms = max([_milliseconds(step, 3) for step in steps for _ in range(2)][1::2])
        count = min(max(int(SECONDS * 1e3 / first_ms), 3), 100)
        times: list[list[float]] = [[], []]
        # The first one after a pause has a cooler GPU, so both start equally often.
        for turn in range(ROUNDS):
            for which in (0, 1) if turn % 2 else (1, 0):
                times[which].append(_milliseconds(steps[which], count))
    return statistics.median(times[0]), statistics.median(times[1])


def _step(layer: nn.Module, x: Tensor, grad: Tensor, replayed: bool) -> Callable[[], Any]:
    weight = next(layer.parameters())

    def step() -> Any:
        return torch.autograd.grad(layer(x), (x, weight), grad)

    step()
    renew_delayed_scaling(layer)  # in a first step delayed scaling takes longer
    if not replayed:
        return step
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def _milliseconds(step: Callable[[], Any], count: int) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / count * 1e3
