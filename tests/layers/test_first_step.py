"""The first step under delayed scaling is that of current scaling, bit for bit: no scale is a guess."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import checkpoint

import narrowcast as nc
from narrowcast._determinism import DETERMINISM
from narrowcast.quantizers import Quantizer
from narrowcast.recipe import (
    DelayedScaling,
    Float8CurrentScaling,
    Format,
    delayed,
    first_scale,
    linear_plan,
)
from narrowcast.recipe.base import Mode

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
    assert model.scale[0] == fmt.max_fwd / 2**margin / batch().abs().max()


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
        for name in model._state_names():
            state[f"{name}_fwd"], state[f"{name}_bwd"] = state.pop(name).split(2, -1)
        for first in (16.0, 1.0):
            state["scale_fwd"], state["scale_bwd"] = torch.full((2,), first), torch.tensor([65536.0, 1.0])
            again, _ = made("Linear", DelayedScaling(amax_history_len=rows))
            again.load_state_dict(state)
            assert all(map(torch.equal, step(again, again, batch()), step(current, current, batch())))
        trained = nc.renew_delayed_scaling(again).state_dict()
        again.load_state_dict(trained)
        assert torch.equal(again.scale, trained["scale"])


def test_a_scale_that_equals_a_first_one_of_before_is_kept() -> None:
    """A history of one row is empty between steps, so that the amax of 28 which gave it is nowhere else."""
    model, _ = made("Linear", DelayedScaling(amax_history_len=1))
    model(torch.full_like(batch(), 28.0))
    state = nc.renew_delayed_scaling(model).state_dict()
    assert state["scale"][0] == 16.0 and not state["amax_history"].any()
    again, _ = made("Linear", DelayedScaling(amax_history_len=1))
    again.load_state_dict(state)
    assert torch.equal(again.scale, model.scale)


def test_a_group_without_rows_stays_unseen() -> None:
    model, given = made("GroupedLinear", DelayedScaling())
    for _ in range(2):
        step(model, model, batch(), **given)
        nc.renew_delayed_scaling(model)
    assert model.scale[:3].bool().tolist() == model.scale[6:9].bool().tolist() == [True, False, True]
    current, _ = made("GroupedLinear", Float8CurrentScaling())
    given = {"m_splits": [0, 33, 0]}  # whose first step is this one
    assert all(
        map(torch.equal, step(model, model, batch(), **given), step(current, current, batch(), **given))
    )


@pytest.mark.parametrize("initial", ["range", "one"])
@pytest.mark.parametrize("compiled", [False, True])
def test_two_passes_find_scales_where_codes_are_joined(
    initial: Any, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last layer's gradients are 1, beyond the first scale's 7/8."""
    of_recipe = delayed.delayed_quantizer

    def told(recipe: DelayedScaling, kind: str) -> Quantizer:
        mode: Mode = "backward" if kind.startswith("grad") else "forward"
        quantizer, scale = of_recipe(recipe, kind), first_scale(recipe, mode)
        return quantizer if kind == "weight" else quantizer.replace(unseen=scale)

    def distance(recipe: Any, passes: int = 0) -> float:
        model, given = made("LayerNormMLP", recipe)
        run: Any = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        for _ in range(passes):
            step(run, model, batch(1.0), **given)
            nc.renew_delayed_scaling(model)
        found, wanted = (
            step(run, model, batch(1.0), **given),
            step(*[made("LayerNormMLP", None)[0]] * 2, batch(1.0)),
        )
        one, other = (torch.cat([x.flatten() for x in tensors]) for tensors in (found, wanted))
        return ((one - other).norm() / other.norm()).item()

    monkeypatch.setattr(delayed, "delayed_quantizer", told)
    # of no other test: equal recipes share what is made here
    recipe = DelayedScaling(amax_history_len=17, initial_scale=initial)
    assert distance(recipe, 2) < 1.1 * distance(Float8CurrentScaling())


def test_quantizers_name_the_first_scale_where_codes_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    def unseen(joins: bool, **options: Any) -> tuple[float | None, float | None]:
        recipe = DelayedScaling(margin=1, **options)
        plan = linear_plan(recipe, "", True, True, module_type="linear", joins=joins)
        return plan.input.unseen, plan.grad_output.unseen

    for joins, found in ((False, (-224.0, -28672.0)), (True, (8.0, 32768.0))):
        assert unseen(joins) == found
    assert unseen(True, initial_scale="one") == (1.0, 1.0)
    monkeypatch.setattr(DETERMINISM, "batch_invariant", 1)
    assert unseen(False) == (8.0, 32768.0)


@pytest.mark.parametrize("name", MODELS)
def test_graphs_have_the_nodes_of_current_scaling(name: str) -> None:
    def nodes(recipe: Any) -> list[int]:
        counts: list[int] = []

        def compiler(graph: Any, _: Any) -> Any:
            counts.append(sum(node.op == "call_function" for node in graph.graph.nodes))
            return make_boxed_func(graph.forward)

        torch._dynamo.reset()
        model, given = made(name, recipe)
        run: Any = torch.compile(model, fullgraph=True, backend=aot_autograd(fw_compiler=compiler))
        step(run, model, batch(), **given)
        return counts

    found = nodes(DelayedScaling())
    assert len(found) == 2 and found == nodes(Float8CurrentScaling())
