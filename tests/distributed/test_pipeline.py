"""Pipelines of torch.distributed: stages on 2 processes against the whole model on one, and microbatches in turns."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from recipes import RECIPES
from torch import Tensor, nn
from torch.torch_version import TorchVersion

import narrowcast as nc

WORLD, SECONDS, STEPS, MICROBATCHES, ROWS, HIDDEN = 2, 240, 2, 4, 4, 32
needs_ranks = pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")
# schedule -> stages of a process
SCHEDULES = {
    "ScheduleGPipe": 1,
    "Schedule1F1B": 1,
    "ScheduleInterleaved1F1B": 2,
    "ScheduleInterleavedZeroBubble": 2,
}
CASES = [(name, "delayed", "autocast") for name in SCHEDULES]
CASES += [(name, "delayed", "set_recipe") for name in SCHEDULES] + [("Schedule1F1B", "mxfp8", "autocast")]
Case = tuple[str, str, str]
# PyTorch before 2.13 splits the backward of no torch.autograd.Function: "Attribute '_input_metadata' is invalid".
SPLITS_FUNCTIONS = TorchVersion(torch.__version__) >= "2.13"


def blocks() -> list[nn.Module]:
    torch.manual_seed(0)
    return [
        nn.Sequential(
            nc.LayerNormMLP(HIDDEN, 2 * HIDDEN, device="cpu"),
            nc.LayerNormLinear(HIDDEN, 64, device="cpu"),
            nc.Linear(64, HIDDEN, device="cpu"),
        )
        for _ in range(4)
    ]


def batch(step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    x, target = (torch.randn(MICROBATCHES * ROWS, HIDDEN, generator=draw) for _ in range(2))
    return x, target


def loss_of(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


def trained(parts: dict[int, nn.Module]) -> dict[str, Tensor]:
    """Parameters and state of delayed scaling."""
    return {
        f"{index}.{name}": value for index, part in parts.items() for name, value in part.state_dict().items()
    }


def run_pipeline(case: Case) -> dict[str, Tensor]:
    """Train this process's stages for some steps."""
    from torch.distributed import pipelining

    name, recipe, how = case
    parts, here = blocks(), dist.get_rank()
    stages = WORLD * SCHEDULES[name]
    size = len(parts) // stages
    mine = range(here, stages, WORLD)
    made = []
    for index in mine:
        module = nn.Sequential(*parts[index * size : (index + 1) * size])
        if how == "set_recipe":
            nc.set_recipe(module, RECIPES[recipe])
        # Without them, PyTorch finds out by running the stage on memory that nobody has written to.
        inputs = torch.empty(ROWS, HIDDEN, requires_grad=index > 0)
        outputs = torch.empty(ROWS, HIDDEN, requires_grad=True)
        place = torch.device("cpu")
        made.append(
            pipelining.PipelineStage(module, index, stages, place, input_args=inputs, output_args=outputs)
        )
    given = made[0] if SCHEDULES[name] == 1 else made
    schedule = getattr(pipelining, name)(given, MICROBATCHES, loss_fn=loss_of)
    own = {at: parts[at] for index in mine for at in range(index * size, (index + 1) * size)}
    optimizer = torch.optim.SGD(nn.ModuleList(own.values()).parameters(), lr=0.5)
    for step in range(STEPS):
        x, target = batch(step)
        for part in parts:
            part.zero_grad()
        with nc.autocast(recipe=RECIPES[recipe]) if how == "autocast" else contextlib.nullcontext():
            first = (x,) if here == 0 else ()
            last = {"target": target} if stages - 1 in mine else {}
            schedule.step(*first, **last)
        optimizer.step()
    return trained(own)


def run_whole(case: Case) -> dict[str, Tensor]:
    """The same on one process: all forwards, then all backwards."""
    _, recipe, how = case
    parts = blocks()
    model = nn.Sequential(*parts)
    if how == "set_recipe":
        nc.set_recipe(model, RECIPES[recipe])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(STEPS):
        x, target = batch(step)
        model.zero_grad()
        with nc.autocast(recipe=RECIPES[recipe]) if how == "autocast" else contextlib.nullcontext():
            losses = [
                loss_of(model(own), wanted)
                for own, wanted in zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True)
            ]
            for loss in losses:
                loss.backward()
        for parameter in model.parameters():
            parameter.grad /= MICROBATCHES  # as the schedules do
        optimizer.step()
    return trained(dict(enumerate(parts)))


def runs(case: Case) -> bool:
    return SPLITS_FUNCTIONS or "ZeroBubble" not in case[0]


def work(rank: int) -> Any:
    return {case: run_pipeline(case) for case in CASES if runs(case)}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    return run_ranks(work, tmp_path_factory.mktemp("ranks"), WORLD, SECONDS)


@needs_ranks
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_stages_train_as_the_whole_model_does(ranks: list[Any], case: Case) -> None:
    if not runs(case):
        pytest.skip("PyTorch 2.11 and 2.12 split the backward of no autograd function; needs 2.13")
    ours, expected = {**ranks[0][case], **ranks[1][case]}, run_whole(case)
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[key], expected[key]) for key in expected)


# -- one process: microbatches in turns --------------------------------------------------------------------------------


def forward(model: nn.Module, index: int, recipe: Any, first: bool | None = None) -> Tensor:
    """A microbatch under an autocast of its own."""
    x, _ = batch(10 + index)
    with nc.autocast(recipe=recipe):
        for layer in model:
            x = layer(x, is_first_microbatch=first)
    return x


def backward(model: nn.Module, y: Tensor, index: int) -> list[Tensor]:
    return list(torch.autograd.grad(y.square().mean() * 4**index, list(model.parameters())))


def test_a_backward_reads_the_scales_of_its_forward() -> None:
    """Whatever other microbatches' forwards and backwards, and autocasts, came in between."""
    recipe, (model, *_) = nc.recipe.DelayedScaling(amax_history_len=2), blocks()
    for index in range(3):
        backward(model, forward(model, index, recipe), index)
        nc.renew_delayed_scaling(model)
    before: list[nn.Module] = []

    def started(index: int) -> Tensor:
        before.append(copy.deepcopy(model))
        return forward(model, index, recipe)

    outs = [started(0), started(1)]
    found = [backward(model, outs[0], 0)]
    outs.append(started(2))
    found += [backward(model, outs[1], 1), backward(model, outs[2], 2)]
    for index, own in enumerate(before):
        alone = backward(own, forward(own, index, recipe), index)
        assert all(torch.equal(a, b) for a, b in zip(found[index], alone, strict=True)), index


@pytest.mark.parametrize("name", ["current", "block"])
def test_kept_weights_serve_microbatches_in_turns(name: str) -> None:
    """A weight that the first microbatch of the next step replaces stays as it is for backwards still to come."""
    model, recipe = blocks()[0], RECIPES[name]
    kept = [forward(model, 0, recipe, True), forward(model, 1, recipe, False)]
    found = [backward(model, kept[0], 0)]
    kept.append(forward(model, 2, recipe, False))
    forward(model, 3, recipe, True)  # quantizes again, before these backwards
    found += [backward(model, kept[1], 1), backward(model, kept[2], 2)]
    for index, gradient in enumerate(found):
        alone = backward(model, forward(model, index, recipe), index)
        assert all(torch.equal(a, b) for a, b in zip(gradient, alone, strict=True)), index
