"""The published rule of delayed scaling in NumPy, one column at a time: what the library must do, written twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import narrowcast as nc
from narrowcast.recipe import DelayedScaling, Format
from narrowcast.state import THREAD, AutocastState

KEYS = ["scale", "amax_history", "amax"]
FORWARD, BACKWARD = ("input", "weight", "output"), ("grad_output", "grad_input")
OF_LAYERS = ("input", "output", *BACKWARD)
"""What a layer keeps state of; a ``RecipeState`` may do so of weights, too."""


@pytest.fixture(autouse=True)
def clean_autocast() -> Iterator[None]:
    """No test starts, or leaves, inside of an autocast, and none renews what another made."""
    THREAD.state = AutocastState()
    yield
    THREAD.state = AutocastState()


class Column:
    """Scale and history of one tensor, and the amax of the step that runs."""

    def __init__(self, length: int) -> None:
        self.scale = np.float32(0)
        self.history = [np.float32(0)] * length
        self.amax = np.float32(0)

    def collect(self, amax: float) -> None:
        self.amax = max(self.amax, np.float32(amax))

    def renew(self, fp8_max: float, margin: int, algo: str) -> None:
        last, self.amax = self.amax, np.float32(0)
        if last == 0 or not np.isfinite(last):
            return
        self.history[0] = last
        amax = max([last, *self.history[1:]]) if algo == "max" else last
        self.history = [np.float32(0), *self.history[2:], last][: len(self.history)]
        with np.errstate(over="ignore"):
            scale = np.float32(fp8_max * 2.0**-margin) / amax
        self.scale = np.finfo(np.float32).max if np.isinf(scale) else scale


class Simulation:
    """One module's state, forward and backward."""

    def __init__(self, recipe: DelayedScaling) -> None:
        self.recipe = recipe
        self.columns = {name: Column(recipe.amax_history_len) for name in (*FORWARD, *BACKWARD)}

    def collect(self, **amaxes: float | torch.Tensor) -> None:
        for name, amax in amaxes.items():
            value = float(amax.detach().abs().max()) if isinstance(amax, torch.Tensor) else amax
            self.columns[name].collect(value)

    def renew(self) -> None:
        hybrid = self.recipe.fp8_format is Format.HYBRID
        for name, column in self.columns.items():
            fp8_max = 57344.0 if hybrid and name in BACKWARD else 448.0
            column.renew(fp8_max, self.recipe.margin, self.recipe.amax_compute_algo)  # type: ignore[arg-type]

    def tensors(self, names: tuple[str, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(scale, history, amax), as a layer's buffers."""
        scale = torch.tensor([float(self.columns[name].scale) for name in names], dtype=torch.float32)
        history = torch.tensor(np.array([self.columns[name].history for name in names]).T.copy())
        amax = torch.tensor([float(self.columns[name].amax) for name in names], dtype=torch.float32)
        return scale, history, amax

    def assert_equals(self, layer: nc.Linear, where: str = "") -> None:
        for buffer, value in zip(KEYS, self.tensors(OF_LAYERS)):
            ours = getattr(layer, buffer).cpu()
            assert torch.equal(ours, value), f"{where} {buffer}: {ours}, expected {value}"


def from_one(**fields: Any) -> DelayedScaling:
    """Delayed scaling that starts at scale 1, as the simulation does."""
    return DelayedScaling(initial_scale="one", **fields)


def make_layer(k: int = 24, n: int = 40, seed: int = 1, **kwargs: Any) -> nc.Linear:
    torch.manual_seed(seed)
    kwargs.setdefault("device", "cpu")
    return nc.Linear(k, n, **kwargs)


def draw(step: int, *shape: int, salt: int = 0) -> torch.Tensor:
    """Data whose magnitude wanders from step to step, so that histories matter."""
    generator = torch.Generator().manual_seed(1000 * salt + step)
    magnitude = (3.0, 40.0, 0.02, 7.5, 500.0, 1.25)[step % 6]
    return torch.randn(*shape, generator=generator) * magnitude


def train_step(
    layer: nc.Linear,
    recipe: DelayedScaling,
    x: torch.Tensor,
    dy: torch.Tensor,
    run: Callable[..., Any] | None = None,
) -> torch.Tensor:
    """One forward under the recipe, one backward with the given output gradient, and the renewal of the step."""
    with nc.autocast(recipe=recipe):
        y = (layer if run is None else run)(x)
    y.backward(dy)
    nc.renew_delayed_scaling(layer)
    return y.detach()


def buffers(layer: nc.Linear) -> list[torch.Tensor]:
    """Copies of the layer's state: scales, histories, amaxes."""
    return [getattr(layer, name).clone() for name in KEYS]


def perturb(layer: nc.Linear, step: int) -> None:
    """Change the weight, as an optimizer would."""
    with torch.no_grad():
        layer.weight.mul_(1.0 + 0.3 * (step % 3 - 1))
