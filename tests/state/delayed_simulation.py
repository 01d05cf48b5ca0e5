"""The published rule of delayed scaling in NumPy, one column at a time: what the library must do, written twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import narrowcast as nc
from narrowcast.recipe import DelayedScaling, Format
from narrowcast.state import STATE

FORWARD, BACKWARD = ("input", "weight", "output"), ("grad_output", "grad_input")


@pytest.fixture(autouse=True)
def clean_autocast() -> Iterator[None]:
    """No test starts, or leaves, inside of an autocast."""
    STATE.reset()
    yield
    STATE.reset()


class Column:
    """Scale and history of one tensor."""

    def __init__(self, length: int) -> None:
        self.scale = np.float32(1)
        self.history = [np.float32(0)] * length

    def collect(self, amax: float) -> None:
        self.history[0] = max(self.history[0], np.float32(amax))

    def renew(self, fp8_max: float, margin: int, algo: str) -> None:
        last = self.history[0]
        if last == 0:
            return
        amax = max([last, *self.history[1:]]) if algo == "max" else last
        self.history = [np.float32(0), *self.history[2:], last][: len(self.history)]
        if np.isfinite(amax):
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

    def tensors(self, names: tuple[str, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        scale = torch.tensor([float(self.columns[name].scale) for name in names])
        history = torch.tensor(np.array([self.columns[name].history for name in names]).T.copy())
        return scale, history

    def assert_equals(self, layer: nc.Linear, where: str = "") -> None:
        state, length = layer.delayed_scaling, self.recipe.amax_history_len
        for direction, names in (("fwd", FORWARD), ("bwd", BACKWARD)):
            scale, history = self.tensors(names)
            ours, rows = getattr(state, f"scale_{direction}"), getattr(state, f"amax_history_{direction}")
            assert torch.equal(ours.cpu(), scale), f"{where} {direction}: scale {ours}, expected {scale}"
            assert torch.equal(rows[:length].cpu(), history), (
                f"{where} {direction}: {rows[:length]}, expected {history}"
            )
            assert not rows[length:].any()


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
    """One forward under the recipe and one backward with the given output gradient."""
    with nc.autocast(recipe=recipe):
        y = (layer if run is None else run)(x)
    y.backward(dy)
    return y.detach()


def buffers(layer: nc.Linear) -> list[torch.Tensor]:
    state = layer.delayed_scaling
    return [
        t.clone() for t in (state.scale_fwd, state.amax_history_fwd, state.scale_bwd, state.amax_history_bwd)
    ]


def perturb(layer: nc.Linear, step: int) -> None:
    """Change the weight, as an optimizer would."""
    with torch.no_grad():
        layer.weight.mul_(1.0 + 0.3 * (step % 3 - 1))
