"""A weight that was written since its scale was found: evaluations and the first step follow it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import narrowcast as nc
from narrowcast.functional.recomputation import FIRST
from narrowcast.recipe import DelayedScaling

RECIPE = DelayedScaling(amax_history_len=4)


class Grouped(nn.Module):
    def __init__(self, single: bool) -> None:
        super().__init__()
        self.layer = nc.GroupedLinear(2, 32, 48, device="cpu", single_grouped_weight=single)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, [x.shape[0] // 2, x.shape[0] - x.shape[0] // 2])  # type: ignore[no-any-return]


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "Linear": lambda: nc.Linear(32, 48, device="cpu"),
    "parts": lambda: nc.Linear(32, 48, device="cpu", parameters_split=("a_", "b_")),
    "LayerNormLinear": lambda: nc.LayerNormLinear(32, 48, device="cpu"),
    "LayerNormMLP": lambda: nc.LayerNormMLP(32, 64, device="cpu"),
    "grouped": lambda: Grouped(False),
    "one grouped weight": lambda: Grouped(True),
    "ops": lambda: nc.ops.Sequential(nc.ops.Linear(32, 48, device="cpu")),
}


def load(p: Tensor, value: Tensor, model: nn.Module) -> None:
    own = {name: value for name, parameter in model.named_parameters() if parameter is p}
    model.load_state_dict({**{n: q for n, q in model.named_parameters() if q is not p}, **own}, strict=False)


EDITS: dict[str, Callable[[Tensor, Tensor, nn.Module], Any]] = {
    "copy_": lambda p, value, model: p.copy_(value),
    "data": lambda p, value, model: p.data.copy_(value),
    "assigned": lambda p, value, model: setattr(p, "data", value),
    "storage": lambda p, value, model: p.untyped_storage().copy_(value.untyped_storage()),
    "init": lambda p, value, model: (nn.init.ones_(p), p.mul_(value)),
    "loaded": load,
}


def rewrite(model: nn.Module, factor: float = 1000.0, way: str = "data") -> None:
    """Multiply the last weights: the activations behind others would leave the scales that theirs have."""
    with torch.no_grad():
        for p in [p for name, p in model.named_parameters() if p.dim() > 1 and "fc1" not in name]:
            EDITS[way](p, p.detach().clone() * factor, model)


def distance(one: Tensor, other: Tensor) -> float:
    return ((one - other).norm() / other.norm()).item()


def evaluated(run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with torch.no_grad():
        return run(x)


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="aot_eager", fullgraph=True)


def pair(kind: str) -> tuple[nn.Module, nn.Module]:
    """A layer under delayed scaling, and an equal one in high precision."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(LAYERS[kind]())
    return nc.set_recipe(models[0], RECIPE), models[1]


def called(model: nn.Module, how: str, compiles: bool = True) -> Callable[[Tensor], Tensor]:
    """Return what calls a layer that renews its scales in one of the ways that there are."""
    run: Callable[[Tensor], Tensor] = compiled(model) if compiles else model
    if how in ("own", "autocast"):
        model.recipe = RECIPE if how == "own" else None  # type: ignore[assignment]
    elif how == "in a graph" and compiles:  # so that the graph renews for the model
        run = torch.compile(lambda x: model(x), backend="aot_eager", fullgraph=True)

    def call(x: Tensor) -> Tensor:
        with nc.autocast(recipe=RECIPE) if how == "autocast" else nullcontext():
            return run(x)

    return call


def step(run: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor, dy: float = 0.1) -> list[Tensor]:
    """Output and gradients of a loss whose gradients first scales hold."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = run(x)
    (dy * y).sum().backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None and p.dim() > 1]
    return [y.detach(), x.grad, *grads]  # type: ignore[list-item]


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("trained", [False, True], ids=["untrained", "trained"])
@pytest.mark.parametrize("kind", LAYERS)
def test_an_evaluation_follows_a_weight_that_was_written(kind: str, trained: bool, compiles: bool) -> None:
    model, plain = pair(kind)
    x = torch.randn(8, 32)
    if trained:
        step(model, model, x)
        step(model, model, x)
    model.eval()
    run = compiled(model) if compiles and kind != "ops" else model
    for factor in (1000.0, 1e-6):
        rewrite(model, factor)
        rewrite(plain, factor)
        state = {name: buffer.clone() for name, buffer in model.named_buffers()}
        assert distance(evaluated(run, x), evaluated(plain, x)) < 0.08
        assert all(torch.equal(buffer, state[name]) for name, buffer in model.named_buffers())


@pytest.mark.parametrize("way", EDITS)
def test_every_way_of_writing_is_followed(way: str) -> None:
    model, plain = pair("Linear")
    rewrite(model, 1000.0, way)
    rewrite(plain, 1000.0)
    x = torch.randn(8, 32)
    assert distance(evaluated(model.eval(), x), evaluated(plain, x)) < 0.06


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("how", ["root", "own"])
@pytest.mark.parametrize("kind", [kind for kind in LAYERS if kind != "ops"])
def test_the_first_step_follows_a_weight_that_was_written(kind: str, how: str, compiles: bool) -> None:
    model, plain = pair(kind)
    if how == "own":
        for module in model.modules():
            if isinstance(getattr(type(module), "recipe", None), property):
                module.recipe = RECIPE
    rewrite(model, 30.0)
    rewrite(plain, 30.0)
    x = torch.randn(8, 32) * 0.1
    run = compiled(model) if compiles else model
    for ours, wanted in zip(step(run, model, x), step(plain, plain, x), strict=True):
        assert distance(ours, wanted) < 0.12


@pytest.mark.parametrize("reentrant", [False, True], ids=["again", "reentrant"])
@pytest.mark.parametrize("how", ["root", "in a graph", "own", "autocast"])
@pytest.mark.parametrize("kind", ["Linear", "LayerNormMLP"])
def test_graphs_follow_weights_until_a_step_has_told(kind: str, how: str, reentrant: bool) -> None:
    """A graph without gradients runs again after its weights were written: alone, or as a checkpoint's first run."""
    model, plain = pair(kind)
    call = called(model, how)
    x = torch.randn(8, 32) * 0.1
    evaluated(call, x.clone().requires_grad_())
    for factor in (30.0, 1e-3):
        rewrite(model, factor)
        rewrite(plain, factor)
        assert model._starts  # what that run has collected does not count
        if not reentrant:
            assert distance(evaluated(call, x.clone().requires_grad_()), evaluated(plain, x)) < 0.08
    again = (lambda x: nc.checkpoint(call, x, use_reentrant=True)) if reentrant else call
    for ours, wanted in zip(step(again, model, x), step(plain, plain, x), strict=True):
        assert distance(ours, wanted) < 0.12
    step(again, model, x)
    assert not {slots.amax.data_ptr() for slots in model.delayed_slots()} & FIRST.keys()


@pytest.mark.parametrize("shows", ["no rows", "zeros", "gradients"])
@pytest.mark.parametrize("wrap", ["eager", "compiled", "reentrant", "loaded"])
@pytest.mark.parametrize("how", ["root", "in a graph", "own", "autocast"])
@pytest.mark.parametrize("kind", ["Linear", "LayerNormMLP"])
def test_a_layer_has_not_begun_before_it_has_seen_a_value(kind: str, how: str, wrap: str, shows: str) -> None:
    """Steps without rows or of zeros show nothing: a first step is still to come. Gradients do, of inputs of zeros."""
    model, plain = pair(kind)
    call = called(model, how, compiles=wrap in ("compiled", "reentrant"))
    again = (lambda x: nc.checkpoint(call, x, use_reentrant=True)) if wrap == "reentrant" else call
    x = torch.randn(8, 32) * 0.1
    stage = "fc2_" if kind == "LayerNormMLP" else ""

    def largest() -> float:
        """What the scale of the weight that is written maps its amax to."""
        return float(
            getattr(model, f"{stage}scale_fwd")[1] * getattr(model, f"{stage}weight").detach().abs().max()
        )

    for factor in (1e3, 1e-6):
        step(again, model, torch.zeros(0 if shows == "no rows" else 8, 32), 0.1 * (shows != "zeros"))
        evaluated(call, torch.zeros(8, 32))  # in training mode; compiled, a graph of its own
        if wrap == "loaded":
            model.load_state_dict(copy.deepcopy(model.state_dict()))
        rewrite(model, factor)
        rewrite(plain, factor)
        if shows == "gradients":
            step(again, model, x)
            assert not 448 / 100 < largest() < 448 * 100
    if shows != "gradients":
        for ours, wanted in zip(step(again, model, x), step(plain, plain, x), strict=True):
            assert distance(ours, wanted) < 0.12
    step(again, model, x)
    assert not {slots.amax.data_ptr() for slots in model.delayed_slots()} & FIRST.keys()
    rewrite(model, 1e9)
    evaluated(call, x)
    assert largest() > 448 * 100


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("how", ["root", "in a graph", "own", "autocast"])
@pytest.mark.parametrize("kind", ["Linear", "LayerNormMLP"])
def test_a_weight_that_steps_of_zeros_saw_gives_no_scale(kind: str, how: str, compiles: bool) -> None:
    """Nothing between the steps takes the amax of the weight that they have collected."""
    model, plain = pair(kind)
    call = called(model, how, compiles)
    for factor in (1e3, 1e-6):
        step(call, model, torch.zeros(8, 32), 0.0)
        rewrite(model, factor)
        rewrite(plain, factor)
    x = torch.randn(8, 32) * 0.1
    for ours, wanted in zip(step(call, model, x), step(plain, plain, x), strict=True):
        assert distance(ours, wanted) < 0.12


@pytest.mark.parametrize("before", ["steps", "calibrated", "compiled"])
def test_the_first_step_of_a_layer_that_begins_to_train_later(before: str) -> None:
    """Its scale follows its weight until it trains itself, whatever other layers have collected."""
    torch.manual_seed(0)
    model = nn.Sequential(nc.Linear(32, 32, device="cpu"), nc.Linear(32, 32, bias=False, device="cpu"))
    plain = nn.Linear(32, 32, bias=False)
    nc.set_recipe(model, RECIPE)
    x = torch.randn(8, 32)
    model[1].eval()
    run = compiled(model) if before == "compiled" else model
    if before == "calibrated":
        nc.calibrate_delayed_scaling(model, lambda: model(x).sum().backward())
    else:
        step(run, model, x)
        step(run, model, x)
    rewrite(model[1], 30.0)
    plain.weight.data.copy_(model[1].weight)
    for ours, wanted in zip(step(model[1].train(), model[1], x), step(plain, plain, x), strict=True):
        assert distance(ours, wanted) < 0.12


def test_scales_that_steps_have_told_are_left() -> None:
    """In training a written weight is told by the step that sees it."""
    model, _ = pair("Linear")
    x = torch.randn(8, 32)
    step(model, model, x)
    rewrite(model)
    before = model.scale_fwd[1].clone()
    model(x)
    assert model.scale_fwd[1] == before
    model.recipe = RECIPE
    model.reset_delayed_scaling()
    model(x)
    assert model.scale_fwd[1] == torch.div(448, model.weight.abs().max())


def test_a_backward_of_an_evaluation_reads_the_scale_of_its_forward() -> None:
    model, plain = pair("Linear")
    rewrite(model)
    rewrite(plain)
    x = torch.randn(8, 32)
    for ours, wanted in zip(step(model.eval(), model, x), step(plain, plain, x), strict=True):
        assert distance(ours, wanted) < 0.08


class Twice(nn.Module):
    """A layer in two checkpoints, before which the first has random numbers."""

    def __init__(self, compiles: str) -> None:
        super().__init__()
        self.noise, self.layer = nn.Dropout(0.5), nc.Linear(32, 32, device="cpu")
        calls = {"first": lambda x: self.layer(self.noise(x)), "second": lambda x: self.layer(x)}
        self.calls = [self.checkpointed(call, compiles in (name, "both")) for name, call in calls.items()]

    def checkpointed(self, call: Callable[[Tensor], Tensor], compiles: bool) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            return checkpoint(call, x, use_reentrant=False)  # type: ignore[no-any-return]

        return torch.compile(run, backend="aot_eager", fullgraph=True) if compiles else run

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.calls
        return second(first(x))


@pytest.mark.parametrize("compiles", ["both", "first", "second"])
def test_a_layer_of_two_graphs_may_begin_in_both(compiles: str) -> None:
    """The second fits first scales, after the first has saved the amax, which its backward is to find unchanged."""
    torch.compiler.reset()
    model = nc.set_recipe(Twice(compiles), RECIPE)
    for _ in range(2):
        model(torch.randn(8, 32)).sum().backward()
    assert model.layer.weight.grad.isfinite().all()


def test_functions_of_the_user_keep_what_they_have_found() -> None:
    recipe = DelayedScaling(
        amax_history_len=2, scaling_factor_compute_algo=lambda amax, *_: 3.0 / amax.clamp(min=1e-3)
    )
    model = nc.set_recipe(nc.Linear(32, 48, device="cpu"), recipe)
    x = torch.randn(8, 32)
    for _ in range(2):
        model(x).sum().backward()
    scale = model.scale_fwd[1].item()
    y = evaluated(model.eval(), x)
    assert model.scale_fwd[1] == scale and y.isfinite().all()
