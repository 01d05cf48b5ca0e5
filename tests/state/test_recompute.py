"""Activation recompute: the second forward sees the scales of the first, and changes nothing."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from delayed_simulation import Simulation, buffers, clean_autocast, draw, from_one, make_layer, perturb
from torch.utils.checkpoint import CheckpointError
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import narrowcast as nc
from narrowcast.state import THREAD

__all__ = ["clean_autocast"]
RECIPE = from_one(amax_history_len=3)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
Step = Callable[[torch.Tensor], torch.Tensor]


def torch_inside(layer: nc.Linear, **kwargs: Any) -> Step:
    """The recomputed function enters autocast itself, again in the backward."""

    def block(x: torch.Tensor) -> torch.Tensor:
        with nc.autocast(recipe=RECIPE):
            return layer(x)

    return lambda x: torch_checkpoint(block, x, **kwargs)


def ours_inside(layer: nc.Linear, **kwargs: Any) -> Step:
    def block(x: torch.Tensor) -> torch.Tensor:
        with nc.autocast(recipe=RECIPE):
            return layer(x)

    return lambda x: nc.checkpoint(block, x, **kwargs)


def ours_outside(layer: nc.Linear, **kwargs: Any) -> Step:
    """Autocast is left long before the recomputation."""

    def step(x: torch.Tensor) -> torch.Tensor:
        with nc.autocast(recipe=RECIPE):
            return nc.checkpoint(layer, x, **kwargs)

    return step


def scales_of(layer: nc.Linear) -> list[float]:
    return [0.0] * 4 if layer.scale is None else layer.scale.tolist()  # as it will begin


WAYS = {"torch_inside": torch_inside, "ours_inside": ours_inside, "ours_outside": ours_outside}


@pytest.mark.parametrize(
    "way, use_reentrant",
    [
        ("torch_inside", False),
        ("ours_inside", False),
        ("ours_outside", False),
        ("ours_inside", True),
        ("ours_outside", True),
    ],
)
def test_recompute_equals_no_recompute(way: str, use_reentrant: bool) -> None:
    plain, layer = make_layer(), make_layer()
    run, rule = WAYS[way](layer, use_reentrant=use_reentrant), Simulation(RECIPE)
    calls = []
    layer.register_forward_pre_hook(lambda *_: calls.append(scales_of(layer)))
    for step in range(6):
        x, dy = draw(step, 6, 24).requires_grad_(True), draw(step, 6, 40, salt=1)
        calls.clear()
        run(x).backward(dy)
        ours = [x.grad, layer.weight.grad, layer.bias.grad]
        assert len(calls) == 2
        assert calls[0] == calls[1]

        x.grad = layer.weight.grad = layer.bias.grad = None
        plain.load_state_dict(layer.state_dict())
        with nc.autocast(recipe=RECIPE):  # the scales of this very step
            y = plain(x)
        y.backward(dy)
        rule.collect(input=x, grad_output=dy)
        rule.renew()
        nc.renew_delayed_scaling(layer)
        rule.assert_equals(layer, f"step {step}")
        for a, b in zip(ours, [x.grad, plain.weight.grad, plain.bias.grad]):
            assert a is not None
            assert torch.equal(a, b), f"step {step}"
        plain.weight.grad = plain.bias.grad = None
        perturb(layer, step)


@pytest.mark.parametrize(
    "recipe", [None, nc.recipe.Float8CurrentScaling(), nc.recipe.NVFP4BlockScaling()], ids=type
)
def test_ours_recomputes_under_the_recipe_of_the_first_forward(recipe: Any) -> None:
    layer, seen = make_layer(), []

    def block(x: torch.Tensor) -> torch.Tensor:
        seen.append((THREAD.state.recipe, THREAD.state.group))
        return layer(x)

    x, group = torch.randn(6, 24, requires_grad=True), SimpleNamespace(group_name="ranks")
    results = []
    for run in (block, lambda x: nc.checkpoint(block, x)):
        torch.manual_seed(5)
        with nc.autocast(enabled=recipe is not None, recipe=recipe, amax_reduction_group=group):
            y = run(x)
        with nc.autocast(recipe=nc.recipe.MXFP8BlockScaling()):  # whatever is in force during the backward
            results.append(torch.autograd.grad(y.square().sum(), (x, layer.weight)))
            assert isinstance(THREAD.state.recipe, nc.recipe.MXFP8BlockScaling)
    assert seen == [(recipe, group)] * 3
    for a, b in zip(*results):
        assert torch.equal(a, b)
    assert THREAD.state.recipe is None


HIGH: dict[str, Callable[[], Any]] = {
    "disabled": lambda: nc.autocast(enabled=False),
    "outside": contextlib.nullcontext,
}


def end_step(layers: list[Any]) -> None:
    """What tells that all forwards before have had their backwards; there is nothing to update."""
    torch.optim.SGD([p for layer in layers for p in layer.parameters()], lr=0.0).step()


def gradients_of(y: torch.Tensor, layers: list[Any]) -> list[torch.Tensor]:
    y.square().sum().backward()
    found = [layer.weight.grad for layer in layers]
    for layer in layers:
        layer.zero_grad()
    return found


@pytest.mark.covering(1)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("recipe", [RECIPE, nc.recipe.Float8CurrentScaling()], ids=type)
@pytest.mark.parametrize("high", HIGH)
@pytest.mark.parametrize("reentrant", [False, True])
@torch._dynamo.config.patch(recompile_limit=64)
def test_no_graph_of_high_precision_serves_a_recomputation_outside_of_the_autocast(
    high: str, reentrant: bool, recipe: Any, device: str
) -> None:
    """Graphs for outside of any autocast, of steps in high precision and of other layers, repeated it in silence."""
    layers = [nc.Linear(24, 24, device=device) for _ in range(3)]
    runs = [torch.compile(layer, fullgraph=True, backend="aot_eager") for layer in layers]

    def step(context: Any, checkpoint: Callable[..., Any] = torch_checkpoint, **options: Any) -> list[Any]:
        x = torch.randn(6, 24, generator=torch.Generator().manual_seed(0)).to(device).requires_grad_()
        with context:
            y = x
            for run in runs:
                y = checkpoint(run, y, **options)
        return gradients_of(y, layers)

    def refused() -> None:
        with pytest.raises(Exception, match="ran under an autocast and is recomputed outside of it"):
            step(nc.autocast(recipe=recipe), use_reentrant=reentrant)
        for layer in layers:
            layer.zero_grad()
        end_step(layers)

    refused()
    wanted = step(HIGH[high](), use_reentrant=reentrant)
    another = torch.randn(6, 24, device=device, requires_grad=True)
    with nc.autocast(recipe=recipe), torch.no_grad():
        runs[0].eval()(another)  # as the first run of a reentrant checkpoint
    runs[0].train()
    refused()
    for ours, theirs in zip(step(HIGH[high](), use_reentrant=reentrant), wanted, strict=True):
        assert torch.equal(ours, theirs)
    for context in (HIGH[high], lambda: nc.autocast(recipe=recipe)) * 2:
        found = [step(context(), checkpoint) for checkpoint in (nc.checkpoint, lambda run, x: run(x))]
        assert all(map(torch.equal, *found))
        end_step(layers)
    for layer in layers:
        layer.recipe = recipe  # that of the autocast
    step(nc.autocast(recipe=recipe), use_reentrant=reentrant)
    with nc.autocast(enabled=False):
        y = torch_checkpoint(runs[0], another, use_reentrant=reentrant)
    with pytest.raises(Exception, match="ran under an autocast"):
        y.sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_autocast_around_a_backward_is_not_that_of_the_forward(reentrant: bool) -> None:
    run = torch.compile(nc.Linear(24, 24, device="cpu"), fullgraph=True, backend="aot_eager")
    x = torch.randn(6, 24, requires_grad=True)

    def forward(context: Any) -> torch.Tensor:
        with context:
            return torch_checkpoint(run, x, use_reentrant=reentrant).sum()

    def gradient_of(loss: torch.Tensor) -> Any:
        loss.backward()  # a reentrant checkpoint takes no torch.autograd.grad
        found, run.weight.grad = run.weight.grad, None
        return found

    with nc.autocast(recipe=nc.recipe.Float8CurrentScaling()):
        wanted = gradient_of(forward(contextlib.nullcontext()))
        same = forward(nc.autocast(recipe=nc.recipe.Float8CurrentScaling()))
        assert torch.equal(wanted, gradient_of(same))
        end_step([run])
        another = forward(nc.autocast(enabled=False))
        with pytest.raises(Exception, match="is recomputed outside of it, or under another one"):
            another.backward()
    end_step([run])
    outside = forward(contextlib.nullcontext())
    with nc.autocast(recipe=nc.recipe.Float8CurrentScaling()), pytest.raises(Exception, match="another one"):
        outside.backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_an_autocast_inside_of_the_recomputed_function_is_entered_again(reentrant: bool) -> None:
    layers = [nc.Linear(24, 24, device="cpu") for _ in range(3)]
    runs = [torch.compile(layer, fullgraph=True, backend="aot_eager") for layer in layers]

    def block(x: torch.Tensor) -> torch.Tensor:
        x = runs[0](x)
        with nc.autocast(recipe=nc.recipe.Float8CurrentScaling()):
            x = runs[1](x)
        return runs[2](x)

    x = torch.randn(6, 24, requires_grad=True)
    for _ in range(2):
        repeated = nc.checkpoint(block, x, use_reentrant=reentrant)
        found = [gradients_of(y, layers) for y in (block(x), repeated)]
        assert all(map(torch.equal, *found))
    # the layers share graphs, which PyTorch's checkpoint does not tell under what they ran
    with pytest.raises(Exception, match="use narrowcast.checkpoint"):
        gradients_of(torch_checkpoint(block, x, use_reentrant=reentrant), layers)


LAYERS: dict[str, Callable[[], Any]] = {
    "Linear": lambda: nc.Linear(32, 32),
    "own recipe": lambda: nc.set_recipe(nc.Linear(32, 32), nc.recipe.Float8BlockScaling()),
    "LayerNormMLP": lambda: nc.LayerNormMLP(32, 64),
    "ops": lambda: nc.ops.Sequential(nc.ops.RMSNorm(32), nc.ops.Linear(32, 32)),
}
SEVERAL: dict[str, list[Callable[[], Any]]] = {
    "stateless": [
        lambda: nc.autocast(recipe=nc.recipe.Float8CurrentScaling()),
        contextlib.nullcontext,
        lambda: nc.autocast(recipe=nc.recipe.MXFP8BlockScaling(emulate=True)),
        lambda: nc.autocast(enabled=False),
    ],
    "delayed": [
        lambda: nc.autocast(recipe=RECIPE),
        contextlib.nullcontext,
        lambda: nc.autocast(recipe=nc.recipe.DelayedScaling(amax_history_len=4, margin=1)),
        lambda: nc.autocast(recipe=nc.recipe.Float8CurrentScaling()),
    ],
}


class Function(torch.autograd.Function):
    """A checkpoint as libraries write it."""

    @staticmethod
    def forward(ctx: Any, run: Step, x: torch.Tensor) -> Any:
        ctx.run = run
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.run(x)
        y.backward(grad)
        return None, x.grad


CHECKPOINTS: dict[str, Callable[..., Any]] = {
    "reentrant": functools.partial(torch_checkpoint, use_reentrant=True),
    "not reentrant": functools.partial(torch_checkpoint, use_reentrant=False),
    "function": Function.apply,
    "reentrant in reentrant": lambda run, x: torch_checkpoint(
        CHECKPOINTS["reentrant"], run, x, use_reentrant=True
    ),
    "reentrant in the other": lambda run, x: torch_checkpoint(
        CHECKPOINTS["reentrant"], run, x, use_reentrant=False
    ),
    "the other in reentrant": lambda run, x: torch_checkpoint(
        CHECKPOINTS["not reentrant"], run, x, use_reentrant=True
    ),
    "neither": lambda run, x: torch_checkpoint(CHECKPOINTS["not reentrant"], run, x, use_reentrant=False),
    "ours in reentrant": lambda run, x: torch_checkpoint(nc.checkpoint, run, x, use_reentrant=True),
}


@pytest.mark.covering
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "arounds", [(contextlib.nullcontext, nc.autocast) * 2, (contextlib.nullcontext,) * 4]
)
@pytest.mark.parametrize("several", SEVERAL)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("way", CHECKPOINTS)
def test_forwards_under_several_autocasts_are_repeated_each_under_its_own_or_say_so(
    way: str, name: str, several: str, arounds: Any, device: str
) -> None:
    """Before their backwards a layer remembers the last one alone; PyTorch's check and ours notice another."""
    torch.manual_seed(0)
    with torch.device(device):
        first = LAYERS[name]()
    checkpoint, contexts = CHECKPOINTS[way], SEVERAL[several]

    def thrice(layer: Any, x: torch.Tensor) -> torch.Tensor:
        with nc.autocast(recipe=nc.recipe.Float8BlockScaling()):
            x = layer(x)
        x = layer(x)  # under that around the checkpoint
        with nc.autocast(recipe=nc.recipe.Float8BlockScaling()):
            return layer(x)

    def gradients(function: Any, checkpoint: Any) -> list[torch.Tensor]:
        generator, layer, found = torch.Generator().manual_seed(1), copy.deepcopy(first), []
        for _ in range(2):
            xs = [torch.randn(32, 32, generator=generator).to(device).requires_grad_() for _ in contexts]
            losses = []
            for x, context in zip(xs, contexts):
                with context():
                    losses.append(checkpoint(functools.partial(function, layer), x).square().sum())
            for i, around in zip((1, 3, 0, 2), arounds):
                with around():
                    losses[i].backward()
                found += [xs[i].grad, *(p.grad for p in layer.parameters())]
                layer.zero_grad()
        return found

    for function in (lambda layer, x: layer(x), thrice):
        wanted = gradients(function, lambda run, x: run(x))
        try:
            found = gradients(function, checkpoint)
        except CheckpointError:
            found = gradients(function, nc.checkpoint)
        except RuntimeError as error:
            if "use narrowcast.checkpoint" not in str(error):
                raise
            found = gradients(function, nc.checkpoint)
        for ours, theirs in zip(found, wanted, strict=True):
            assert torch.equal(ours, theirs)


def test_exception_in_the_recomputed_function_restores_the_state() -> None:
    def fail(x: torch.Tensor) -> torch.Tensor:
        raise KeyError("inside")

    with nc.autocast(recipe=RECIPE):
        with pytest.raises(KeyError):
            nc.checkpoint(fail, torch.ones(1, requires_grad=True))
        assert THREAD.state.recipe is RECIPE
    assert THREAD.state.recipe is None


def test_keyword_arguments_reach_the_function() -> None:
    x = torch.ones(2, requires_grad=True)
    assert torch.equal(nc.checkpoint(lambda x, *, factor: x * factor, x, factor=3.0), 3 * x)


def test_recomputing_a_compiled_function_that_enters_autocast() -> None:
    results = []
    for recomputed in (False, True):
        layer = make_layer()

        def block(x: torch.Tensor) -> torch.Tensor:
            with nc.autocast(recipe=RECIPE):
                return layer(x)

        compiled, states = torch.compile(block, fullgraph=True, backend="aot_eager"), []
        for step in range(4):
            x = draw(step, 6, 24).requires_grad_(True)
            y = torch_checkpoint(compiled, x, use_reentrant=False) if recomputed else compiled(x)
            y.backward(draw(step, 6, 40, salt=1))
            nc.renew_delayed_scaling(layer)
            states += [*buffers(layer), x.grad]
        results.append([*states, layer.weight.grad])
    for a, b in zip(*results):
        assert torch.equal(a, b)


def test_compiled_recompute_keeps_scales() -> None:
    """Autocast outside of the compiled function, the checkpoint inside."""
    results = []
    for compiled in (False, True):
        layer = make_layer()

        def block(x: torch.Tensor) -> torch.Tensor:
            return nc.checkpoint(layer, x)

        run, states = torch.compile(block, fullgraph=True, backend="aot_eager") if compiled else block, []
        for step in range(4):
            with nc.autocast(recipe=RECIPE):
                y = run(draw(step, 6, 24))
            y.backward(draw(step, 6, 40, salt=1))
            nc.renew_delayed_scaling(layer)
            states += buffers(layer)
        results.append([*states, layer.weight.grad])
    for a, b in zip(*results):
        assert torch.equal(a, b)


class Tracker:
    """Random states of its own, as Megatron's and Transformer Engine's trackers keep them."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(5)

    def get_states(self) -> dict[str, torch.Tensor]:
        return {"model-parallel-rng": self.generator.get_state()}

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        self.generator.set_state(states["model-parallel-rng"])


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_tracker_repeats_its_random_numbers(use_reentrant: bool) -> None:
    tracker, drawn = Tracker(), []

    def dropout(x: torch.Tensor) -> torch.Tensor:
        drawn.append(torch.rand(x.shape, generator=tracker.generator))
        return (x * drawn[-1]).sin()

    options = {"use_reentrant": use_reentrant, "distribute_saved_activations": False, "tp_group": None}
    x = torch.ones(3, requires_grad=True)
    y = nc.checkpoint(dropout, x, get_rng_state_tracker=lambda: tracker, **options)
    torch.rand(3, generator=tracker.generator)  # the rest of the forward draws, too
    before = tracker.generator.get_state()
    y.sum().backward()
    assert torch.equal(drawn[0], drawn[1])
    assert torch.equal(tracker.generator.get_state(), before)
    assert torch.allclose(x.grad, drawn[0] * drawn[0].cos())
    again = nc.checkpoint(dropout, x, get_rng_state_tracker=lambda: tracker, **options)
    assert not torch.equal(drawn[2], drawn[0]) and again.requires_grad


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_keywords_go_to_the_function(use_reentrant: bool) -> None:
    layer = make_layer()

    def block(x: torch.Tensor, *, scale: float, shift: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(layer(x) * scale, 0.5) + shift

    results = []
    for run in (block, nc.checkpoint):
        torch.manual_seed(1)
        x, shift = draw(1, 8, 24).requires_grad_(), torch.tensor(0.5, requires_grad=True)
        options = {} if run is block else {"use_reentrant": use_reentrant, "preserve_rng_state": True}
        function = () if run is block else (block,)
        out = run(*function, x, scale=2.0, shift=shift, **options)
        out.square().sum().backward()
        results.append((out.detach(), x.grad, shift.grad))
    for ours, theirs in zip(*results):
        assert torch.equal(ours, theirs)


def test_what_checkpoint_does_not_do_is_named() -> None:
    x = torch.ones(1, requires_grad=True)
    with pytest.raises(NotImplementedError, match="does not take distribute_saved_activations; leave it out"):
        nc.checkpoint(torch.sin, x, distribute_saved_activations=True, tp_group=object())

    def compiled(x: torch.Tensor) -> torch.Tensor:
        return nc.checkpoint(torch.sin, x, get_rng_state_tracker=Tracker)

    with pytest.raises(
        (NotImplementedError, torch._dynamo.exc.Unsupported), match="get_rng_state_tracker in compiled"
    ):
        torch.compile(compiled, fullgraph=True, backend="aot_eager")(x)
    for given, told in (
        ({"use_reentrent": False}, r"checkpoint\(.*\) takes no 'use_reentrent'; did you mean use_reentrant="),
        ({"context_fn": None}, "^context_fn is None, of type NoneType; pass what can be called"),
        ({"preserve_rng_state": "no"}, "^preserve_rng_state is 'no', of type str; use True or False"),
        ({"get_rng_state_tracker": object}, r"^get_rng_state_tracker returned .*, without get_states\(\)"),
    ):
        for function in (nc.Linear(1, 1, device="cpu"), torch.nn.Linear(1, 1), lambda x, scale=1: x * scale):
            with pytest.raises(TypeError, match=told):
                nc.checkpoint(function, x, **given)
    with pytest.raises(
        TypeError, match=r"^checkpoint\(<lambda>, ...\) takes no 'factor'; it takes .* x, scale"
    ):
        nc.checkpoint(lambda x, scale=1: x * scale, x, factor=2)
    with pytest.raises(ValueError, match="^determinism_check is 'x'; use one of 'default' or 'none'"):
        nc.checkpoint(torch.sin, x, determinism_check="x")
    with pytest.raises(TypeError, match=r"^function is None, .* such as a layer: checkpoint\(layer, x\)"):
        nc.checkpoint(None, x)
    neutral = {"distribute_saved_activations": False, "get_rng_state_tracker": None, "tp_group": None}
    step = torch.compile(
        lambda x: nc.checkpoint(torch.sin, x, **neutral), fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(step(x), x.sin())
