"""Delayed scaling: golden sequences of updates for both rules, reduction, NaN, and user-given functions."""

import functools
import math
from collections.abc import Callable

import golden_vectors
import pytest
import torch
from torch import Tensor

from narrowcast.formats import FLT_MAX
from narrowcast.reference import delayed

from .checks import assert_bitwise, assert_fresh

RULES = {"skip_unused": delayed.update, "always_roll": functools.partial(delayed.update, always_roll=True)}


def options(algo: str = "max", fp8_max: float = 448.0, margin: int = 0) -> dict:
    return {"fp8_max": fp8_max, "margin": margin, "algo": algo}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", golden_vectors.names("fp8_delayed_update"))
def test_golden(name: str, rule: str, device: torch.device) -> None:
    golden = golden_vectors.load(name)
    length, steps = golden.meta["history_len"], golden["step_amax"].to(device)
    scale = torch.ones(steps.shape[1], device=device)
    history = torch.zeros(length, steps.shape[1], device=device)
    kept_rows = golden[f"history_{rule}"].shape[1]
    for step, amax in enumerate(steps):
        history[0] = amax
        scale, history = RULES[rule](
            scale,
            history,
            **options(golden.meta["amax_compute_algo"], golden.meta["fp8_max"], golden.meta["margin"]),
        )
        kept = torch.cat((history[:1], history[length - kept_rows + 1 :]))
        assert_bitwise(scale.cpu(), golden[f"scale_{rule}"][step], f"scale after step {step}")
        assert_bitwise(kept.cpu(), golden[f"history_{rule}"][step], f"history after step {step}")


@pytest.mark.parametrize("update", RULES.values(), ids=RULES)
@pytest.mark.parametrize("length", [1, 2, 5])
def test_inputs_are_left_alone_and_outputs_are_fresh(update: Callable, length: int) -> None:
    scale, history = torch.ones(3), torch.rand(length, 3)
    kept = scale.clone(), history.clone()
    outputs = update(scale, history, **options())
    assert_bitwise(scale, kept[0])
    assert_bitwise(history, kept[1])
    assert_fresh(outputs, [scale, history])


def test_an_unused_tensor_keeps_history_and_scale() -> None:
    history = torch.tensor([[0.0, 1.0], [3.0, 3.0], [5.0, 5.0]])
    scale, new = delayed.update(torch.full((2,), 7.0), history, **options())
    assert scale[0] == 7.0
    assert torch.equal(new[:, 0], history[:, 0])
    assert new[:, 1].tolist() == [0.0, 5.0, 1.0]
    assert scale[1] == torch.tensor(448.0) / torch.tensor(5.0)
    _, rolled = RULES["always_roll"](torch.full((2,), 7.0), history, **options())
    assert rolled[:, 0].tolist() == [0.0, 5.0, 0.0]


def test_nan_is_ignored_by_the_fused_max_and_kept_by_the_other() -> None:
    history = torch.tensor([[2.0], [math.nan], [1.0]])
    scale, _ = delayed.update(torch.full((1,), 7.0), history, **options())
    assert scale.tolist() == [224.0]
    scale, _ = RULES["always_roll"](torch.full((1,), 7.0), history, **options())
    assert scale.tolist() == [7.0]


@pytest.mark.parametrize("update", RULES.values(), ids=RULES)
@pytest.mark.parametrize(
    ("amax", "expected"), [(math.inf, 7.0), (math.nan, 7.0), (2.0**-140, FLT_MAX), (448.0, 1.0)]
)
def test_amaxes_without_a_scale(update: Callable, amax: float, expected: float) -> None:
    scale, history = update(torch.full((1,), 7.0), torch.tensor([[amax], [0.0]]), **options("most_recent"))
    assert scale.tolist() == [expected]
    assert history[0].tolist() == [0.0]


def test_callables_get_the_filled_history_and_the_recipe() -> None:
    seen: list[object] = []

    def amax_of(history: Tensor) -> Tensor:
        seen.append(history.tolist())
        return history.mean(0)

    def scale_of(amax: Tensor, old: Tensor, fp8_max: Tensor, recipe: object) -> Tensor:
        seen.append(recipe)
        return fp8_max / amax + old

    scale, history = RULES["always_roll"](
        torch.ones(1),
        torch.tensor([[5.0], [3.0]]),
        fp8_max=448.0,
        margin=0,
        algo=amax_of,
        scale_algo=scale_of,
        recipe="recipe",
    )
    assert seen == [[[5.0], [3.0]], "recipe"]
    assert scale.tolist() == [113.0]
    assert history.tolist() == [[0.0], [5.0]]


@pytest.mark.parametrize("update", RULES.values(), ids=RULES)
def test_an_unknown_algorithm_is_named(update: Callable) -> None:
    with pytest.raises(ValueError, match="unknown amax_compute_algo 'mean'; use 'max'"):
        update(torch.ones(1), torch.ones(2, 1), **options("mean"))


def test_renewal_in_place_is_the_update_of_each_state() -> None:
    scales, amaxes = (
        [torch.tensor([2.0, 3.0]), torch.tensor([5.0])],
        [torch.tensor([1.5, 0.0]), torch.tensor([7.0])],
    )
    histories = [torch.tensor([[9.0, 9.0], [0.5, 0.25], [4.0, 0.0]]), torch.tensor([[1.0]])]
    how = {"fp8_maxes": [448.0, 57344.0, 57344.0, 448.0], "margins": [0, 2], "algos": ["max", "most_recent"]}
    expected = []
    for at, (scale, history, amax) in enumerate(zip(scales, histories, amaxes)):
        begun = torch.cat((amax[None], history[1:]))
        largest = delayed.of_halves(scale, *how["fp8_maxes"][2 * at : 2 * at + 2])
        one = {"fp8_max": largest, "margin": how["margins"][at], "algo": how["algos"][at]}
        expected.append((*delayed.update(scale, begun, **one), torch.zeros_like(amax)))
    delayed.renew(scales, histories, amaxes, **how)
    for states, wanted in zip(zip(scales, histories, amaxes), expected):
        for state, value in zip(states, wanted):
            assert_bitwise(state, value)


def test_what_was_not_seen_stays_unseen_until_an_amax_gives_a_scale() -> None:
    for amax in (0.0, math.inf, math.nan):
        state = torch.zeros(2), torch.zeros(3, 2), torch.tensor([amax, 7.0])
        delayed.renew(*([one] for one in state), fp8_maxes=[448.0, 448.0], margins=[1], algos=["most_recent"])
        assert state[0].tolist() == [0.0, 32.0]
