"""Operations under recipes of their own: each its own, one per thread, and recomputation inside a backward."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from recipes import DEVICE, QUANTIZED
from torch.utils.checkpoint import checkpoint

import narrowcast as nc
from narrowcast import ops

K = 64


def make_list() -> ops.Sequential:
    torch.manual_seed(3)
    place: dict[str, Any] = {"device": DEVICE, "dtype": torch.bfloat16}
    return ops.Sequential(
        ops.RMSNorm(K, **place), ops.Linear(K, K, **place), ops.GELU(), ops.Linear(K, K, **place)
    )


def make_input() -> torch.Tensor:
    values = torch.randn(32, K, generator=torch.Generator().manual_seed(4))
    return values.to(DEVICE, torch.bfloat16).requires_grad_(True)


def gradients(block: Any, run: Any = None, steps: int = 2) -> list[torch.Tensor]:
    """Output and gradients of the last step."""
    for _ in range(steps):
        x = make_input()
        torch.manual_seed(7)
        out = (run or block)(x)
        grads = torch.autograd.grad(out.float().square().sum(), [x, *block.parameters()])
    return [out.detach(), *grads]


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("name", QUANTIZED)
def test_own_recipe_is_what_the_autocast_would_be(name: str) -> None:
    def under_autocast(x: torch.Tensor) -> torch.Tensor:
        with nc.autocast(recipe=QUANTIZED[name]):
            return expected_of(x)

    expected_of, owned = make_list(), nc.set_recipe(make_list(), QUANTIZED[name])
    expected = gradients(expected_of, under_autocast)
    assert same(gradients(owned), expected) and not same(expected, gradients(make_list()))


@pytest.mark.parametrize("name", ["current", "mxfp8", "delayed"])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_recomputation_runs_under_the_recipe_of_the_forward(name: str, use_reentrant: bool) -> None:
    def under_autocast(block: Any, recompute: bool) -> Any:
        def run(x: torch.Tensor) -> torch.Tensor:
            with nc.autocast(recipe=QUANTIZED[name]):
                return checkpoint(block, x, use_reentrant=use_reentrant) if recompute else block(x)

        return run

    results = []
    for recompute in (False, True):
        block = make_list()
        results.append(step_by_backward(block, under_autocast(block, recompute)))
    assert same(*results)


def step_by_backward(block: Any, run: Any) -> list[torch.Tensor]:
    """Output and gradients of the second of two steps, by ``backward``, which reentrant checkpoints need."""
    for _ in range(2):
        block.zero_grad()
        x = make_input()
        out = run(x)
        out.float().square().sum().backward()
    return [out.detach(), x.grad, *[parameter.grad for parameter in block.parameters()]]


def test_each_operation_reads_its_own_recipe() -> None:
    current, mxfp8 = QUANTIZED["current"], QUANTIZED["mxfp8"]
    mixed, apart = make_list(), make_list()
    nc.set_recipe(mixed, {"1": current, "3": mxfp8})
    assert mixed.groups()[0].recipe_in_force(compiling=False) is None  # type: ignore[union-attr]

    def one_by_one(x: torch.Tensor) -> torch.Tensor:
        with nc.autocast(recipe=current):
            x = apart[1](apart[0](x))
        with nc.autocast(recipe=mxfp8):
            return apart[3](apart[2](x))

    assert same(gradients(mixed), gradients(apart, one_by_one))
    nc.set_recipe(mixed, current)
    assert mixed.groups()[0].recipe_in_force(compiling=False) is current  # type: ignore[union-attr]


def test_two_threads_under_two_recipes() -> None:
    names = ["current", "mxfp8"]
    blocks = {name: make_list() for name in names}
    expected = {}
    for name in names:
        with nc.autocast(recipe=QUANTIZED[name]):
            expected[name] = make_list()(make_input()).detach()
    shared, barrier, wrong = make_list(), threading.Barrier(2), []

    def run(name: str) -> None:
        with nc.autocast(recipe=QUANTIZED[name]):
            barrier.wait()
            for block in (blocks[name], shared) * 4:
                if not torch.equal(block(make_input()), expected[name]):
                    wrong.append(name)

    threads = [threading.Thread(target=run, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_two_backwards_after_a_later_step_read_the_scales_of_their_forward() -> None:
    def losses(block: Any) -> list[torch.Tensor]:
        xs = [make_input(), (8 * make_input()).detach().requires_grad_(True)]
        return [block(x).float().square().sum() for x in xs]

    recipe = nc.recipe.DelayedScaling(amax_history_len=2)
    ours, theirs = (nc.set_recipe(make_list(), recipe) for _ in range(2))
    late, late_parameters = losses(ours)[0], list(ours.parameters())
    alone = theirs(make_input()).float().square().sum()
    expected = torch.autograd.grad(alone, list(theirs.parameters()))
    for _ in range(2):
        assert same(list(torch.autograd.grad(late, late_parameters, retain_graph=True)), list(expected))


def test_state_is_there_once_it_is_needed() -> None:
    block = make_list()
    before = list(block.state_dict())
    nc.set_recipe(block, QUANTIZED["delayed"])
    state = [key for key in block.state_dict() if key not in before]
    assert "1.basic_ops.0.scale" in state and len(state) == 6  # of the two linear operations, nobody else
