"""Delayed scaling on two processes: one explicit call reduces amaxes, so that both ranks hold the same scales."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from delayed_simulation import OF_LAYERS, Simulation, draw, make_layer
from ranks import run_ranks
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

import narrowcast as nc
from narrowcast.recipe import DelayedScaling
from narrowcast.state import DelayedSlots, delayed_scaling

FP32: Any = {"dtype": torch.float32}
WORLD, STEPS, SECONDS = 2, 5, 120
REDUCED = DelayedScaling(amax_history_len=3, initial_scale="one")
LOCAL = DelayedScaling(amax_history_len=3, initial_scale="one", reduce_amax=False)
FUNCTIONS = DelayedScaling(
    amax_history_len=2, scaling_factor_compute_algo=lambda amax, *_: 448.0 / amax.clamp(min=1.0)
)
pytestmark = pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")


def batch(rank: int, step: int, salt: int) -> tuple[torch.Tensor, torch.Tensor]:
    magnitude = 1.0 + 3.0 * ((rank + step) % 2)  # the larger one changes sides
    return draw(step, 4, 24, salt=salt) * magnitude, draw(step, 4, 40, salt=salt + 1) * magnitude


def runs_second(rank: int, step: int) -> bool:
    """The second layer rests on rank 1 at first, and on rank 0 in the last step."""
    return (rank == 0 or step >= 2) and not (rank == 0 and step == STEPS - 1)


def train(rank: int, model: nn.ModuleList, recipe: DelayedScaling, group: Any) -> None:
    for step in range(STEPS):
        pairs = [(model[0], *batch(rank, step, 0))]
        if runs_second(rank, step):
            pairs.append((model[1], *batch(rank, step, 5)))
        with nc.autocast(recipe=recipe):
            ys = [layer(x) for layer, x, _ in pairs]
        torch.autograd.backward(ys, [dy for _, _, dy in pairs])
        model.eval()
        with torch.no_grad(), nc.autocast(recipe=recipe):
            if rank == 0:  # evaluation on one rank must not wait for the other
                model[0](torch.zeros(1, 24))
        model.train()
        nc.reduce_delayed_scaling(model, group)
        nc.renew_delayed_scaling(model)


def make_model(recipe: DelayedScaling) -> nn.ModuleList:
    """Two layers that know their recipe before they run: ranks then keep the same state, whichever layers ran."""
    return nn.ModuleList([make_layer(seed=1, recipe=recipe), make_layer(seed=2, recipe=recipe)])


def refused(rank: int) -> str:
    """What a rank is told whose model keeps another number of scales than the other's."""
    try:
        nc.reduce_delayed_scaling(make_model(REDUCED)[: 1 + rank])
    except RuntimeError as error:
        return str(error)
    return "nothing"


def differences_said(rank: int, recipe: DelayedScaling, often: bool, spoiled: bool = False) -> list[str]:
    """Warnings of three steps of two microbatches, reduced in each, or in the last alone.

    Args:
        spoiled: rank 1 has an amax that it has not reduced.
    """
    delayed_scaling._SAID.discard("differ")
    model = nc.set_recipe(make_model(recipe), recipe)
    if spoiled and rank:
        model[0].amax[0] = 99.0
        nc.renew_delayed_scaling(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            for micro in (0, 1):
                model.forward = lambda x: model[0](x)
                x, dy = batch(rank, 2 * step + micro, 0)
                model(x).backward(dy)
            if often or step == 2:
                nc.reduce_delayed_scaling(model)
            nc.renew_delayed_scaling(model)
    return [str(one.message) for one in caught if "differ between ranks" in str(one.message)]


def histories_of_two_models(rank: int, zero: bool, groups: list[Any]) -> list[list[float]]:
    """Histories of the inputs of two models after two steps, if each rank's optimizer has the weight of one of them."""
    models = [nc.Linear(16, 16, bias=False, device="cpu") for _ in range(2)]
    for model, group in zip(models, groups):
        nc.set_recipe(model, REDUCED, amax_group=group)
    weights = [model.weight for model in models]
    step = torch.optim.SGD([weights[rank]], lr=0.1).step
    if zero:
        step = ZeroRedundancyOptimizer(weights, torch.optim.SGD, lr=0.1).step
    for _ in range(2):
        for size, model in enumerate(models, 1):
            model(torch.full((4, 16), size * (1.0 + rank))).sum().backward()
        step()
    return [model.amax_history[:, 0].tolist() for model in models]


def work(rank: int) -> Any:
    everyone, alone = dist.new_group([0, 1]), [dist.new_group([r]) for r in range(WORLD)][rank]
    cases = {"default": (REDUCED, None), "group": (REDUCED, everyone), "alone": (REDUCED, alone)}
    cases |= {"local": (LOCAL, None), "functions": (FUNCTIONS, None)}
    results = {}
    for name, (recipe, group) in cases.items():
        model = make_model(recipe)
        train(rank, model, recipe, group)
        results[name] = [layer.state_dict() for layer in model]
    results["refused"] = refused(rank)
    mine, agreement = torch.tensor([1.0 + rank, 5.0 - rank], **FP32), delayed_scaling.Agreement()
    other = None if rank else torch.zeros(3, **FP32)
    kept = [
        (
            len(amax),
            DelayedSlots(REDUCED, "forward", torch.ones_like(amax), torch.zeros(4, len(amax), **FP32), amax),
        )
        for amax in (mine, torch.zeros(3, **FP32) if other is None else other)
    ]
    slots = kept if other is not None else [kept[0], (3, None)]
    counts = []
    for _ in range(2):
        delayed_scaling.reduce_amax(slots, agreement=agreement)
        counts.append(agreement.count)
    results["slots"] = counts, mine, other
    everywhere = dist.group.WORLD
    results["two models"] = [histories_of_two_models(rank, zero, [everywhere] * 2) for zero in (False, True)]
    results["two groups"] = histories_of_two_models(rank, True, [everywhere, everyone])
    results["one group"] = histories_of_two_models(rank, True, [everywhere, None])
    results["often"] = differences_said(rank, REDUCED, True)
    results["seldom"] = differences_said(rank, REDUCED, False)
    results["seldom, local"] = differences_said(rank, LOCAL, False)
    results["spoiled"] = differences_said(rank, REDUCED, True, spoiled=True)
    return results


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    return run_ranks(work, folder, WORLD, SECONDS)


def expected(recipe: DelayedScaling, layer: int, ranks_: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """The rule on the largest amax of the given ranks."""
    rule = Simulation(recipe)
    for step in range(STEPS):
        for rank in ranks_:
            if layer == 0 or runs_second(rank, step):
                x, dy = batch(rank, step, 5 * layer)
                rule.collect(input=x, grad_output=dy)
        rule.renew()
    return dict(zip(("scale", "amax_history", "amax"), rule.tensors(OF_LAYERS)))


def assert_states(state: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    for name, tensor in wanted.items():
        assert torch.equal(state[name], tensor), name


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("case", ["default", "group"])
def test_reduced_amax_gives_equal_scales(ranks: list[dict[str, Any]], case: str, layer: int) -> None:
    for rank in range(WORLD):
        assert_states(ranks[rank][case][layer], expected(REDUCED, layer, (0, 1)))


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("case", ["local", "alone"])
def test_unreduced_amax_stays_local(ranks: list[dict[str, Any]], case: str, layer: int) -> None:
    for rank in range(WORLD):
        assert_states(ranks[rank][case][layer], expected(LOCAL, layer, (rank,)))
    ours, theirs = (ranks[rank][case][layer]["scale"] for rank in range(WORLD))
    assert not torch.equal(ours, theirs)


def test_functions_see_the_reduced_amax(ranks: list[dict[str, Any]]) -> None:
    for layer in range(2):
        ours, theirs = (ranks[rank]["functions"][layer] for rank in range(WORLD))
        assert sorted(ours) == sorted(theirs)
        for name in ours:
            assert torch.equal(ours[name], theirs[name]), name
    assert ours["scale"][0] != 1


def test_ranks_with_different_models_find_out_together(ranks: list[dict[str, Any]]) -> None:
    for rank in range(WORLD):
        assert (
            f"this rank's model keeps {4 * (rank + 1)} delayed scales, others keep between 4 and 8"
            in (ranks[rank]["refused"])
        )


def test_two_models_are_renewed_together_if_each_ranks_optimizer_has_one(ranks: list[dict[str, Any]]) -> None:
    for rank in range(WORLD):
        assert ranks[rank]["two models"] == [[[0.0, 2.0, 2.0], [0.0, 4.0, 4.0]]] * 2


def test_models_of_different_groups_are_renewed_under_zero(ranks: list[dict[str, Any]]) -> None:
    """ZeRO gives the optimizer of each rank weights of a model that no rank of the other's group may ask about."""
    reduced, larger = [0.0, 2.0, 2.0], [0.0, 4.0, 4.0]
    for rank in range(WORLD):
        assert ranks[rank]["two groups"] == [reduced, larger]
        assert ranks[rank]["one group"] == [reduced, larger if rank else reduced]


def test_scales_that_differ_between_ranks_are_told_once(ranks: list[dict[str, Any]]) -> None:
    """By the first reduction after renewals without one."""
    for said in ranks:
        assert said["often"] == [] and said["seldom, local"] == []
        for case in ("seldom", "spoiled"):
            (message,) = said[case]
            assert "reduce_delayed_scaling(model, group) before every optimizer.step()" in message


def test_nobody_waits_for_a_device_to_compare_scales() -> None:
    """What a GPU found is told by the first reduction that finds it there."""
    delayed_scaling._SAID.discard("differ")
    agreement, scales = delayed_scaling.Agreement(), torch.tensor([2.0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            agreement.compare(scales, -scales)
    assert agreement._differ is not None
    agreement._differ.fill_(True)  # as a device does that got there
    with pytest.warns(UserWarning, match="differ between ranks"):
        agreement.compare(scales, -scales)


def test_without_ranks_nothing_is_reduced() -> None:
    model = make_model(REDUCED)
    model[0].amax.fill_(3.0)
    nc.reduce_delayed_scaling(model)
    assert model[0].amax.tolist() == [3.0] * 4


@pytest.fixture
def two() -> Any:
    """The default group, of this process and one that answers nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    return dist.group.WORLD


def said_in_steps(recipe: DelayedScaling = REDUCED, reduces: str = "") -> list[str]:
    """Warnings of three steps of a model that each rank has."""
    model = nn.Sequential(nc.Linear(16, 16, device="cpu"))
    nc.set_recipe(model, recipe, amax_group=dist.group.WORLD if reduces == "group" else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            model(torch.ones(4, 16)).sum().backward()
            if reduces == "call":
                nc.reduce_delayed_scaling(model)
            optimizer.step()
    return [str(one.message) for one in caught if "several ranks" in str(one.message)]


def test_ranks_that_reduce_nothing_are_told_once(two: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delayed_scaling, "_SAID", set())
    gc.collect()  # layers of other tests: a step renews frozen ones of any model
    assert (
        not said_in_steps(LOCAL) and not said_in_steps(reduces="call") and not said_in_steps(reduces="group")
    )
    (message,) = said_in_steps()
    assert "narrowcast.set_recipe(model, recipe, amax_group=group)" in message
    assert not said_in_steps()


def test_a_part_in_which_nothing_trains_is_renewed_and_said_not_to_be_reduced(
    two: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of another model may be one rank's alone, and so reduces nothing."""
    monkeypatch.setattr(delayed_scaling, "_SAID", set())
    gc.collect()
    part = nc.Linear(16, 16, device="cpu").requires_grad_(False)
    nc.set_recipe(part, REDUCED, amax_group=dist.group.WORLD)
    model = nn.Sequential(part, nn.Linear(16, 1))
    model(torch.ones(4, 16)).sum().backward()
    with pytest.warns(UserWarning, match="several ranks"):
        torch.optim.SGD(model[1].parameters(), lr=0.1).step()
    assert part.scale[0] == 448.0


def test_the_group_of_an_autocast_names_what_reduces(two: Any) -> None:
    with pytest.warns(UserWarning, match=r"amax_group=group\) once, or narrowcast.reduce_delayed_scaling"):
        nc.autocast(recipe=REDUCED, amax_reduction_group=two)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nc.autocast(recipe=LOCAL, amax_reduction_group=two)


def test_what_a_rank_does_not_keep_counts_as_nothing_collected(ranks: list[dict[str, Any]]) -> None:
    for rank, zeros in ((0, [0.0, 0.0, 0.0]), (1, None)):
        counts, mine, others = ranks[rank]["slots"]
        assert counts == [5, 5] and mine.tolist() == [2.0, 5.0]
        assert (None if others is None else others.tolist()) == zeros
