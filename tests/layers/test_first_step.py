"""The first step under delayed scaling is that of current scaling, bit for bit: no scale is a guess."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import narrowcast as nc
from narrowcast.recipe import DelayedScaling, Float8CurrentScaling, Format

MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "Linear": (lambda: nc.Linear(48, 64, device="cpu"), {}),
    "LayerNormLinear": (lambda: nc.LayerNormLinear(48, 64, device="cpu"), {}),
    "LayerNormMLP": (lambda: nc.LayerNormMLP(48, 64, activation="swiglu", device="cpu"), {}),
    "GroupedLinear": (lambda: nc.GroupedLinear(3, 48, 64, device="cpu"), {"m_splits": [7, 0, 26]}),
    "ops": (
        lambda: nc.ops.Sequential(nc.ops.Linear(48, 64, device="cpu"), nc.ops.GELU(), nc.ops.Quantize()),
        {},
    ),
}


@pytest.fixture(autouse=True)
def nothing_is_told() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


def made(name: str, recipe: Any) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    make, given = MODELS[name]
    return nc.set_recipe(make(), recipe), given


def batch(magnitude: float = 100.0) -> Tensor:
    return torch.randn(33, 48, generator=torch.Generator().manual_seed(1)).mul_(magnitude).requires_grad_()


def step(
    run: Callable[..., Tensor], model: nn.Module, x: Tensor, size: float = 1.0, **given: Any
) -> list[Tensor]:
    """Output and gradients of the sum of the outputs, which constants could not hold."""
    model.zero_grad()
    y = run(x, **given)
    (y.sum() * size).backward()
    return [y.detach(), x.grad, *(parameter.grad for parameter in model.parameters())]  # type: ignore[list-item]


def checkpointed(model: nn.Module, reentrant: bool) -> Callable[..., Tensor]:
    return lambda x, **given: checkpoint(lambda x: model(x, **given), x, use_reentrant=reentrant)


HOW: dict[str, Callable[[nn.Module], Any]] = {
    "eager": lambda model: model,
    "checkpoint": lambda model: checkpointed(model, False),
    "reentrant": lambda model: checkpointed(model, True),
    "aot_eager": lambda model: torch.compile(model, backend="aot_eager", fullgraph=True),
}


@pytest.mark.parametrize("rows, initial", [(4, "range"), (1, "one")])
@pytest.mark.parametrize("how", ["eager", "checkpoint", "reentrant", "aot_eager"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.covering(1)
def test_the_first_step_is_that_of_current_scaling(name: str, how: str, rows: int, initial: Any) -> None:
    torch._dynamo.reset()
    delayed, given = made(name, DelayedScaling(amax_history_len=rows, initial_scale=initial))
    current, _ = made(name, Float8CurrentScaling())
    for found, wanted in zip(
        step(HOW[how](delayed), delayed, batch(), **given),
        step(current, current, batch(), **given),
        strict=True,
    ):
        assert torch.equal(found, wanted)


def test_every_backward_of_a_first_step_has_its_own_scale() -> None:
    """Also where two losses have one graph, and gradients of other magnitudes."""
    (delayed, _), (current, _) = made("Linear", DelayedScaling()), made("Linear", Float8CurrentScaling())
    found = []
    for model in (delayed, current):
        x = batch(1e-3)
        y = model(x)
        found.append(
            [torch.autograd.grad(y.sum() * size, x, retain_graph=True)[0] for size in (1e-6, 1.0, 1e5)]
        )
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("fmt, margin", [(Format.HYBRID, 3), (Format.E4M3, 0), (Format.E4M3, -1)])
def test_a_scale_of_its_own_has_the_margin_and_the_format(fmt: Format, margin: int) -> None:
    """The second step reads for equal tensors what the first one found."""
    model, _ = made("Linear", DelayedScaling(fp8_format=fmt, margin=margin))
    first = step(model, model, batch())
    nc.renew_delayed_scaling(model)
    second = step(model, model, batch())
    assert all(map(torch.equal, first, second))
    assert model.scale_fwd[0] == fmt.max_fwd / 2**margin / batch().abs().max()


@pytest.mark.parametrize("name", MODELS)
def test_an_evaluation_before_the_first_step_is_right_and_changes_nothing(name: str) -> None:
    (delayed, given), (current, _) = made(name, DelayedScaling()), made(name, Float8CurrentScaling())
    for gradients in (False, True):
        for training in (False, True):
            before = {key: value.clone() for key, value in delayed.state_dict().items()}
            with torch.set_grad_enabled(gradients):
                outputs = [model.train(training)(batch(), **given) for model in (delayed, current)]
            assert torch.equal(*outputs)
            if not (training or gradients):
                assert all(torch.equal(before[key], value) for key, value in delayed.state_dict().items())


def test_a_state_from_before_is_taken_for_one_that_has_seen_nothing() -> None:
    """Of a run that saved before its first step, with constants or Transformer Engine's ones."""
    for rows in (1, 4):
        model, _ = made("Linear", DelayedScaling(amax_history_len=rows))
        current, _ = made("Linear", Float8CurrentScaling())
        state = model.state_dict()
        for first in (16.0, 1.0):
            state["scale_fwd"], state["scale_bwd"] = torch.full((2,), first), torch.tensor([65536.0, 1.0])
            again, _ = made("Linear", DelayedScaling(amax_history_len=rows))
            again.load_state_dict(state)
            assert all(map(torch.equal, step(again, again, batch()), step(current, current, batch())))
        trained = nc.renew_delayed_scaling(again).state_dict()
        again.load_state_dict(trained)
        assert torch.equal(again.scale_bwd, trained["scale_bwd"])


def test_a_group_without_rows_stays_unseen() -> None:
    model, given = made("GroupedLinear", DelayedScaling())
    for _ in range(2):
        step(model, model, batch(), **given)
        nc.renew_delayed_scaling(model)
    assert model.scale_fwd[:3].bool().tolist() == model.scale_bwd[:3].bool().tolist() == [True, False, True]
    current, _ = made("GroupedLinear", Float8CurrentScaling())
    given = {"m_splits": [0, 33, 0]}  # whose first step is this one
    assert all(
        map(torch.equal, step(model, model, batch(), **given), step(current, current, batch(), **given))
    )
