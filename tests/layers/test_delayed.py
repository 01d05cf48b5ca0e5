"""Delayed scaling as a property of the model it was set on: its state, its start, checkpoints, orders of use."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from modules import assert_equal
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import narrowcast as nc
from narrowcast.recipe import DelayedScaling, Float8CurrentScaling

RECIPE = DelayedScaling(amax_history_len=3)
STATE = ["scale", "amax_history", "amax"]
WAYS = ("autocast", "own", "set_recipe")
Run = Callable[[Tensor], Tensor]


class Net(nn.Module):
    """``recomputed``: None, or the ``use_reentrant`` of a checkpoint around each of the first two layers."""

    checkpoint = staticmethod(checkpoint)

    def __init__(self, recomputed: bool | None = None) -> None:
        super().__init__()
        self.first = nc.Linear(32, 48, device="cpu")
        self.mlp = nc.LayerNormMLP(48, 64, activation="swiglu", device="cpu")
        self.last = nc.Linear(48, 32, device="cpu")
        self.recomputed = recomputed

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, self.mlp):
            x = (
                layer(x)
                if self.recomputed is None
                else self.checkpoint(layer, x, use_reentrant=self.recomputed)
            )
        return self.last(nn.functional.gelu(x))


def built(how: str = "set_recipe", recomputed: bool | None = None, recipe: Any = RECIPE) -> Net:
    torch.manual_seed(0)
    model = Net(recomputed)
    if how == "set_recipe":
        nc.set_recipe(model, recipe)
    elif how == "own":
        for layer in (model.first, model.mlp, model.last):
            layer.recipe = recipe
    return model


def entered(how: str) -> Any:
    return nc.autocast(recipe=RECIPE) if how == "autocast" else contextlib.nullcontext()


def batch(step: int) -> Tensor:
    values = torch.randn(16, 32, generator=torch.Generator().manual_seed(step))
    return (values * (1 + 3 * step)).requires_grad_()


def snapshot(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Gradients and renewed state; the gradients are dropped."""
    assert x.grad is not None
    results = [x.grad, *(parameter.grad for parameter in model.parameters())]
    nc.renew_delayed_scaling(model)
    model.zero_grad()
    return [tensor.clone() for tensor in (*results, *model.buffers())]  # type: ignore[union-attr]


# -- what the state is -------------------------------------------------------------------------------------------------


def test_no_state_before_the_layer_is_delayed() -> None:
    layer = nc.Linear(16, 16, device="cpu")
    layer(torch.randn(4, 16)).sum().backward()
    with nc.autocast(recipe=Float8CurrentScaling()):
        layer(torch.randn(4, 16)).sum().backward()
    nc.set_recipe(layer, Float8CurrentScaling())
    assert list(layer._buffers) == STATE
    assert not list(layer.buffers())
    assert list(layer.state_dict()) == ["weight", "bias"]


def test_keys_and_sizes_are_there_from_the_moment_it_is() -> None:
    layer = nc.Linear(16, 16, device="cpu")
    nc.set_recipe(layer, RECIPE)
    before = {name: buffer.shape for name, buffer in layer.named_buffers()}
    assert list(before) == STATE
    assert [*before.values()] == [(4,), (3, 4), (4,)]
    for _ in range(2):
        layer(torch.randn(4, 16)).sum().backward()
    layer.eval()
    layer(torch.randn(4, 16))
    assert {name: buffer.shape for name, buffer in layer.named_buffers()} == before
    assert all(buffer.dtype == torch.float32 for buffer in layer.half().buffers())
    assert list(layer.state_dict()) == ["weight", "bias", *STATE]


def test_nobody_keeps_a_layer_alive() -> None:
    model = built("autocast")
    for _ in range(2):
        with nc.autocast(recipe=RECIPE):
            y = model(batch(0))
        y.sum().backward()
    gone = [weakref.ref(layer) for layer in (model, model.first, model.mlp)]
    del model, y
    gc.collect()
    assert [reference() for reference in gone] == [None] * 3


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_who_collects(compiled: bool) -> None:
    """A forward in training mode, or with gradients; and the backward of one with gradients."""
    torch.compiler.reset()
    for training in (True, False):
        for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            model = nc.set_recipe(nc.Linear(32, 16, device="cpu"), RECIPE).train(training)
            run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
            with mode():
                y = run(torch.full((3, 32), 2.0))
            if y.requires_grad:
                y.sum().backward()
            seen = [float(model.amax[0]), float(model.amax[2])]
            gradients = mode is torch.enable_grad
            assert seen == [2.0 * (training or gradients), 1.0 * gradients]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_collects_in_evaluation_what_it_does_in_training(use_reentrant: bool) -> None:
    x, states = 100 * torch.randn(16, 32), []
    model = nc.set_recipe(nn.Sequential(*[nc.Linear(32, 32, device="cpu") for _ in range(2)]), RECIPE)
    for training in (True, False):
        again = copy.deepcopy(model).train(training)
        big = x.clone().requires_grad_()
        torch.utils.checkpoint.checkpoint(again, big, use_reentrant=use_reentrant).sum().backward()
        states.append(list(again.state_dict().values()))
    assert_equal(*states)


SELECTIVE = functools.partial(
    torch.utils.checkpoint.create_selective_checkpoint_contexts, [torch.ops.aten.mm.default]
)


@pytest.mark.parametrize(
    "options",
    [{"use_reentrant": True}, {"use_reentrant": False}, {"use_reentrant": False, "context_fn": SELECTIVE}],
    ids=["reentrant", "not reentrant", "selective"],
)
def test_a_recomputation_changes_no_rule(options: dict[str, Any]) -> None:
    """The step renews by the rule of the last forward, whichever was recomputed last."""
    other, states = DelayedScaling(amax_history_len=5, margin=1), []
    for recomputed in (True, False):
        torch.manual_seed(0)
        layer = nc.set_recipe(nc.Linear(24, 24, device="cpu"), RECIPE)
        outs = []
        for context in (contextlib.nullcontext(), nc.autocast(recipe=other)):
            x = torch.ones(3, 24, requires_grad=True)
            with context:
                outs.append(nc.checkpoint(layer, x, **options) if recomputed else layer(x))
        for y in reversed(outs):
            y.sum().backward()
        states.append(list(nc.renew_delayed_scaling(layer).state_dict().values()))
    assert_equal(*states)


# -- checkpoints and copies --------------------------------------------------------------------------------------------


def trained(count: int = 3) -> Net:
    model = built()
    for step in range(count):
        model(batch(step)).square().sum().backward()
        nc.renew_delayed_scaling(model).zero_grad()
    return model


def assert_goes_on_alike(ours: nn.Module, theirs: nn.Module) -> None:
    for step in (7, 8):
        results = []
        for model in (ours, theirs):
            x = batch(step)
            model(x).square().sum().backward()
            results.append(snapshot(model, x))
        assert_equal(*results)


@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
def test_distributed_checkpoint_into_a_fresh_model(known: bool, tmp_path: Path) -> None:
    """``known``: the fresh model was given its recipe before the load; else DCP alone cannot know of the state."""
    import torch.distributed.checkpoint as dcp

    model = trained()
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    torch.manual_seed(5)
    fresh = nc.set_recipe(Net(), RECIPE) if known else Net()
    if known:
        state = {"model": fresh.state_dict()}
        dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
        fresh.load_state_dict(state["model"])
    else:
        fresh.load_state_dict(model.state_dict())
        nc.set_recipe(fresh, RECIPE)
    assert_goes_on_alike(fresh, model)


def test_state_dict_helpers_of_dcp() -> None:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    model, fresh = trained(), nc.set_recipe(Net(), RECIPE)
    set_model_state_dict(fresh, get_model_state_dict(model))
    assert_goes_on_alike(fresh, model)


def test_deepcopy_goes_its_own_way() -> None:
    model = trained()
    copied = copy.deepcopy(model)
    before = [buffer.clone() for buffer in model.buffers()]
    copied(batch(9)).square().sum().backward()
    nc.renew_delayed_scaling(copied)
    assert all(map(torch.equal, before, model.buffers()))
    assert_goes_on_alike(copy.deepcopy(model), model)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@pytest.mark.parametrize("own", [2, 9])
def test_a_copy_keeps_the_history_of_an_autocast(own: int, how: str) -> None:
    """The layer's own recipe asks for another length; what a shorter one cuts off is lost."""
    layer = nc.Linear(32, 32, device="cpu", recipe=DelayedScaling(amax_history_len=own))

    def run(layer: nn.Module, seed: int, size: float = 1.0) -> None:
        with nc.autocast(recipe=DelayedScaling(amax_history_len=6)):
            layer(size * torch.randn(16, 32, generator=torch.Generator().manual_seed(seed))).sum().backward()
        nc.renew_delayed_scaling(layer)

    for seed in range(5):
        run(layer, seed, 100.0 if not seed else 1.0)
    assert len(layer.amax_history) == 6
    copied = copy.deepcopy(layer) if how == "deepcopy" else pickle.loads(pickle.dumps(layer))
    for name, tensor in layer.state_dict().items():
        assert torch.equal(copied.state_dict()[name], tensor), name
    run(layer, 7)
    wanted = copy.deepcopy(layer.state_dict())
    run(copied, 7)
    for name, tensor in wanted.items():
        assert torch.equal(copied.state_dict()[name], tensor), name
    copied(torch.randn(16, 32))  # under its own recipe
    assert len(copied.amax_history) == own


def test_a_copied_model_with_recipes_renews_by_the_rule_of_the_autocast() -> None:
    model = nc.set_recipe(Net(), DelayedScaling(amax_history_len=2, amax_compute_algo="most_recent"))

    def run(model: nn.Module, seed: int, size: float) -> None:
        with nc.autocast(recipe=DelayedScaling(amax_history_len=4)):
            model(size * batch(seed)).sum().backward()
        nc.renew_delayed_scaling(model)

    run(model, 0, 1.0)  # the largest of the last four
    run(model, 1, 0.1)
    copied = copy.deepcopy(model)
    run(model, 2, 0.1)
    wanted = copy.deepcopy(model.state_dict())
    run(copied, 2, 0.1)
    for name, tensor in wanted.items():
        assert torch.equal(copied.state_dict()[name], tensor), name


@pytest.mark.parametrize("own", [2, 5])
def test_a_loaded_history_has_the_length_of_the_layer_s_recipe(own: int) -> None:
    trained = nc.Linear(32, 32, device="cpu", recipe=DelayedScaling(amax_history_len=3))
    for step in range(4):
        trained(torch.randn(16, 32) * (1 + step)).sum().backward()
        nc.renew_delayed_scaling(trained)
    layer = nc.Linear(32, 32, device="cpu", recipe=DelayedScaling(amax_history_len=own))
    layer.load_state_dict(trained.state_dict())
    kept = min(own, 3)
    assert trained.amax_history[1].any() and layer.amax_history.shape == (own, 4)
    assert torch.equal(layer.amax_history[:kept], trained.amax_history[:kept])
    assert not layer.amax_history[kept:].any()


@pytest.mark.parametrize("kind", ["copied", "loaded"])
def test_a_layer_that_runs_in_the_graph_of_another_is_renewed(kind: str) -> None:
    """A graph of one layer fits its copies, and blocks whose state was loaded: each must get its rule."""

    def run(compiles: bool) -> tuple[list[Tensor], list[Tensor]]:
        torch.manual_seed(0)
        blocks = [nn.Sequential(nc.Linear(32, 32, device="cpu")) for _ in range(3)]
        with nc.autocast(recipe=RECIPE):
            blocks[0](batch(0)[:, :32]).sum().backward()
        nc.renew_delayed_scaling(blocks[0])
        if kind == "copied":
            blocks[1:] = [copy.deepcopy(blocks[0]) for _ in blocks[1:]]
        else:
            for block in blocks[1:]:
                block.load_state_dict(blocks[0].state_dict())
        run: Any = [torch.compile(b, fullgraph=True, backend="aot_eager") if compiles else b for b in blocks]
        outputs = []
        for step in range(3):
            with nc.autocast(recipe=RECIPE):
                y = batch(step)[:, :32] * 5.0**step
                for block in run:
                    y = block(y)
            y.sum().backward()
            for block in blocks:
                nc.renew_delayed_scaling(block)
            outputs.append(y.detach())
        return outputs, [block[0].scale.clone() for block in blocks]  # type: ignore[misc]

    for ours, wanted in zip(run(True), run(False)):
        assert all(map(torch.equal, ours, wanted))


def test_averaged_model() -> None:
    model = built()
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5), use_buffers=True
    )
    for step in range(3):
        model(batch(step)).square().sum().backward()
        nc.renew_delayed_scaling(model).zero_grad()
        average.update_parameters(model)
    names = dict(model.named_buffers())
    averaged = dict(average.module.named_buffers())
    assert list(averaged) == list(names)
    average.eval()
    assert average(batch(0)).isfinite().all()
    assert not torch.equal(averaged["first.scale"], names["first.scale"])  # it keeps its own


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_buffers_that_are_swapped(compiled: bool) -> None:
    """What ``functional_call`` passes is what is read and written; the layer's own does not move."""
    layer, other = (
        nc.Linear(32, 32, device="cpu", recipe=RECIPE),
        nc.Linear(32, 32, device="cpu", recipe=RECIPE),
    )
    other.load_state_dict(layer.state_dict())
    own = [buffer.clone() for buffer in layer.buffers()]
    swapped = {name: buffer.clone() for name, buffer in layer.named_buffers()}

    def call(buffers: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(layer, buffers, (x,))

    run = torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call
    for step in range(3):
        x, y = batch(step), batch(step)
        run(swapped, x).square().sum().backward()
        other(y).square().sum().backward()
        assert torch.equal(x.grad, y.grad)  # type: ignore[arg-type]
    for name, buffer in other.named_buffers():
        assert torch.equal(swapped[name], buffer), name
    assert all(map(torch.equal, own, layer.buffers()))


def test_a_checkpoint_without_state_warns_and_starts_anew() -> None:
    model, fresh = trained(), built()
    without = {name: tensor for name, tensor in model.state_dict().items() if not _is_state(name)}
    with pytest.warns(UserWarning, match="no delayed-scaling state for Linear layers") as warned:
        model.load_state_dict(without)
    assert len({str(one.message) for one in warned}) == 2  # of the classes: Python shows equal texts once
    fresh.load_state_dict({**fresh.state_dict(), **without}, strict=True)
    for name, buffer in model.named_buffers():
        if "scale" not in name:
            assert not buffer.any(), name


def test_a_checkpoint_with_part_of_the_state_is_refused() -> None:
    model = built()
    partial = model.state_dict()
    del partial["mlp.fc1_amax_history"]
    with pytest.raises(RuntimeError, match="lacks.*fc1_amax_history"):
        model.load_state_dict(partial)


def _is_state(name: str) -> bool:
    return any(name.endswith(ending) for ending in STATE)


# -- over ranks --------------------------------------------------------------------------------------------------------


def reduce_on_a_rank(rank: int) -> Any:
    model = built()
    for step in range(3):
        layer = model.last if (step + rank) % 2 else model.first  # another layer runs on each rank
        x = torch.randn(8, layer.in_features, generator=torch.Generator().manual_seed(2 * step + rank))
        nc.set_recipe(layer, RECIPE)
        layer(x).square().sum().backward()
        nc.reduce_delayed_scaling(model)
    results: dict[str, Any] = {"amax": {n: b for n, b in model.named_buffers() if "amax_history" not in n}}
    other = built() if rank else nn.ModuleList([built(), built()])
    for attempt in ("first", "second"):  # after an error the group still works
        try:
            nc.reduce_delayed_scaling(other)
            results[attempt] = "nothing"
        except RuntimeError as error:
            results[attempt] = str(error)
    nc.reduce_delayed_scaling(model)
    return results


@pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")
def test_reduction_over_ranks(tmp_path: Path) -> None:
    first, second = run_ranks(reduce_on_a_rank, tmp_path, 2, 90)
    for name, tensor in first["amax"].items():
        if name.split(".")[1].startswith("amax"):
            assert torch.equal(tensor, second["amax"][name]), name
    for attempt in ("first", "second"):
        assert "delayed scales, others keep between" in first[attempt]
        assert "delayed scales, others keep between" in second[attempt]


# -- the start ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", WAYS)
def test_a_layer_that_saw_inference_first_is_trained(how: str) -> None:
    model, plain, x = built(how), built(how), torch.randn(4, 32)
    with torch.inference_mode(), entered(how):
        model.eval()(x)
    model.train()
    for net in (model, plain):
        for _ in range(2):
            with entered(how):
                y = net(x)
            y.square().mean().backward()
            nc.renew_delayed_scaling(net)
    assert torch.equal(model.first.weight.grad, plain.first.weight.grad)
    assert torch.equal(model.first.scale, plain.first.scale)


@pytest.mark.filterwarnings("ignore:the checkpoint has no delayed-scaling state")
@pytest.mark.parametrize("what", ["made", "moved", "loaded", "assigned"])
def test_state_that_inference_mode_made_is_trained(what: str) -> None:
    model, other = built(), Net()
    state = other.state_dict()
    if what == "assigned":
        model.to("meta")
    with torch.inference_mode():
        if what == "made":
            nc.set_recipe(other, RECIPE)(batch(0).detach())
        elif what == "moved":
            model.half().float()
            model = model.to("meta").to_empty(device="cpu")
        else:
            model.load_state_dict(state, assign=what == "assigned")
    assert not any(buffer.is_inference() for buffer in (*model.buffers(), *other.buffers()))
    if what != "moved":
        for _ in range(2):
            model(batch(0)).square().mean().backward()


def losses(recipe: Any) -> list[float]:
    """Of a small residual network, whose gradients are as small as those of a step over a million tokens."""
    torch.manual_seed(0)
    layers = [nc.LayerNormMLP(32, 64, activation="gelu", device="cpu") for _ in range(4)]
    head = nc.Linear(32, 64, device="cpu")
    model = nn.ModuleList([*layers, head])
    embedding = nn.Embedding(64, 32)
    root = nn.Module()
    root.model, root.embedding = model, embedding
    if recipe is not None:
        nc.set_recipe(root, recipe)
    optimizer = torch.optim.Adam(root.parameters(), lr=3e-3)
    tokens = torch.randint(0, 64, (1024,), generator=torch.Generator().manual_seed(1))
    seen = []
    for _ in range(7):
        x = embedding(tokens)
        for layer in layers:
            x = x + layer(x)
        loss = nn.functional.cross_entropy(head(x), (tokens * 7 + 3) % 64)
        seen.append(loss.item())
        optimizer.zero_grad()
        (loss / 1024).backward()  # this batch is one of 1024 whose gradients are accumulated
        optimizer.step()
    return seen


def test_the_first_steps_learn_as_current_scaling_does() -> None:
    current, ours = losses(Float8CurrentScaling()), losses(DelayedScaling(amax_history_len=4))
    from_one = losses(DelayedScaling(amax_history_len=4, initial_scale="one"))
    progress = current[0] - current[-1]
    assert progress > 0.2 and ours == from_one
    assert abs(ours[-1] - current[-1]) < 0.1 * progress


def test_a_recipe_equal_to_an_earlier_one_compiles() -> None:
    """It shares the plans of that one, and so the objects in them; those of its own plans are other objects."""
    earlier = nc.Linear(32, 32, device="cpu", recipe=DelayedScaling(amax_history_len=7))
    model = nn.Sequential(nc.Linear(32, 32, device="cpu"), nc.Linear(32, 32, device="cpu"))
    nc.set_recipe(model, DelayedScaling(amax_history_len=7))
    assert earlier.recipe == model[0].recipe
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        compiled(torch.randn(4, 32)).sum().backward()


@pytest.mark.parametrize(
    "name, value",
    [
        ("scale", float("nan")),
        ("scale", -1.0),
        ("scale", float("inf")),
        ("amax", -1.0),
        ("amax_history", -2.0),
    ],
)
@pytest.mark.parametrize("known", [False, True])
def test_state_that_no_layer_has_is_refused_by_name(name: str, value: float, known: bool) -> None:
    model = built()
    model(torch.randn(16, 32)).sum().backward()
    state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    key = next(key for key in state if key.endswith(f"last.{name}"))
    state[key].view(-1)[-1] = value
    again = built() if known else Net()
    with pytest.raises(RuntimeError, match=rf"{key} holds {value}; a checkpoint's scales are finite"):
        again.load_state_dict(state)


@pytest.mark.parametrize("length", [1, 7])
def test_scales_are_loaded_under_a_longer_history(length: int) -> None:
    """One row is empty between steps, as it is before the first one."""
    model = nc.set_recipe(nc.Linear(16, 24, device="cpu"), DelayedScaling(amax_history_len=1))
    x = torch.randn(5, 16)
    model(x).sum().backward()
    nc.renew_delayed_scaling(model)
    again = nc.set_recipe(nc.Linear(16, 24, device="cpu"), DelayedScaling(amax_history_len=length))
    for saved in (model, again):
        again.load_state_dict(saved.state_dict())
    assert model.scale[0] > 0 and torch.equal(again.scale, model.scale)
    assert model.scale[2] > 0
    assert again.amax_history.shape == (length, 4)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("way", ["set_recipe", "after_another", "autocast", "evaluation"])
def test_scales_of_another_format_are_not_used(way: str, compiled: bool) -> None:
    """Scales of gradients map E5M2's maximum, 128 times that of E4M3; the tensor's own amax gives one that fits."""
    hybrid = DelayedScaling(amax_history_len=1)
    other = DelayedScaling(amax_history_len=1, fp8_format=nc.recipe.Format.E4M3)
    torch.manual_seed(0)
    layer, x = nc.Linear(64, 64, bias=False, device="cpu", recipe=hybrid), torch.randn(32, 64)

    def step(context: Any) -> float:
        layer.zero_grad()
        run = torch.compile(layer, backend="aot_eager") if compiled else layer
        with context:
            y = run(x)
        y.square().mean().backward()
        weight = layer.weight.detach().requires_grad_()
        nn.functional.linear(x, weight).square().mean().backward()
        assert layer.weight.grad is not None and weight.grad is not None
        return float((layer.weight.grad - weight.grad).norm() / weight.grad.norm())

    def error(context: Any = contextlib.nullcontext()) -> float:  # noqa: B008
        found = step(context)
        nc.renew_delayed_scaling(layer)
        return found

    assert max(error() for _ in range(2)) < 0.1
    if way == "evaluation":
        before = layer.scale.clone()
        layer.eval()
        assert step(nc.autocast(recipe=other)) < 0.1
        assert torch.equal(layer.scale, before)
        return
    elif way == "autocast":
        for recipe in (other, hybrid, other):
            assert error(nc.autocast(recipe=recipe)) < 0.1
        return
    elif way == "after_another":
        nc.set_recipe(layer, Float8CurrentScaling())
    nc.set_recipe(layer, other)
    assert max(error() for _ in range(2)) < 0.1
    assert layer.scale[2] > 0


def test_a_format_that_changes_between_forward_and_backward() -> None:
    """The backward reads the scales of its forward."""
    layers = [nc.Linear(32, 32, bias=False, device="cpu", recipe=RECIPE) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    for changed, layer in enumerate(layers):
        layer(batch(1)).square().sum().backward()
        nc.renew_delayed_scaling(layer)
        y = layer(batch(2))
        if changed:
            nc.set_recipe(layer, DelayedScaling(amax_history_len=3, fp8_format=nc.recipe.Format.E4M3))
        y.square().sum().backward()
    assert layers[0].weight.grad is not None and layers[1].weight.grad is not None
    assert torch.equal(layers[0].weight.grad, layers[1].weight.grad)


def test_an_amax_that_overflowed_is_loaded() -> None:
    model = built()
    model(torch.randn(16, 32)).sum().backward()
    state = model.state_dict()
    state["last.amax_history"][1, 2:] = float("inf")
    state["last.amax"][2] = float("nan")
    built().load_state_dict(state)
