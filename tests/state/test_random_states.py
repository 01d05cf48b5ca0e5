"""The tracker of random states, on the accelerator where there is one, else on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import narrowcast as nc


def tracker(graph_safe: bool, device: Any) -> nc.CudaRNGStatesTracker:
    made = nc.CudaRNGStatesTracker(device, graph_safe)
    made.add("model-parallel-rng", 11)
    made.add("other", 12)
    return made


@pytest.mark.parametrize("graph_safe", [False, True])
def test_fork_draws_apart(graph_safe: bool, device: torch.device) -> None:
    states = tracker(graph_safe, device)
    torch.manual_seed(3)
    outside = torch.rand(8, device=device)
    torch.manual_seed(3)
    drawn: list[Tensor] = []
    for name in ("model-parallel-rng", "other", "model-parallel-rng"):
        with states.fork(name):
            drawn.append(torch.rand(4, device=device))
    assert torch.equal(torch.rand(8, device=device), outside), "the state outside is what it was"
    assert not torch.equal(drawn[0], drawn[1])
    generator = torch.Generator(device).manual_seed(11)
    expected = [torch.rand(4, device=device, generator=generator) for _ in range(2)]
    assert torch.equal(drawn[0], expected[0]) and torch.equal(drawn[2], expected[1]), "a state goes on"


@pytest.mark.parametrize("graph_safe", [False, True])
def test_states_are_copies(graph_safe: bool, device: torch.device) -> None:
    states = tracker(graph_safe, device)
    kept = states.get_states()
    draws = []
    for _ in range(2):
        with states.fork():
            draws.append(torch.rand(4, device=device))
        states.set_states(kept)
    assert torch.equal(*draws)
    fresh = nc.CudaRNGStatesTracker(device, graph_safe)
    fresh.set_states(kept)
    with fresh.fork():
        assert torch.equal(torch.rand(4, device=device), draws[0])
    states.reset()
    assert states.get_states() == {}
    states.add("other", 11)  # which is free again


def test_the_outer_state_returns_after_an_error(device: torch.device) -> None:
    states = tracker(False, device)
    torch.manual_seed(3)
    expected = torch.rand(2, device=device)
    torch.manual_seed(3)
    with pytest.raises(ZeroDivisionError), states.fork():
        raise ZeroDivisionError
    assert torch.equal(torch.rand(2, device=device), expected)


def test_errors() -> None:
    states = tracker(False, "cpu")
    with pytest.raises(RuntimeError, match="seed 11 is taken"):
        states.add("third", 11)
    with pytest.raises(RuntimeError, match="there is a random state 'other' already"):
        states.add("other", 13)
    with pytest.raises(KeyError, match="no random state 'third'"), states.fork("third"):
        pass
    with pytest.raises(TypeError, match="states is a list"):
        states.set_states([])  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="graph_safe=True"):
        states.register(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("graph_safe", [False, True])
def test_a_checkpoint_repeats_its_draws(graph_safe: bool, device: torch.device) -> None:
    states = tracker(graph_safe, device)
    layer = nc.Linear(32, 32, device=device, recipe=nc.recipe.Float8CurrentScaling())
    phases: list[tuple[bool, bool]] = []

    def run(x: Tensor) -> Tensor:
        queries = nc.is_fp8_activation_recompute_enabled, nc.in_fp8_activation_recompute_phase
        phases.append((queries[0](), queries[1]()))
        with states.fork():
            return nn.functional.dropout(layer(x), 0.5)

    x = torch.randn(32, 32, device=device, requires_grad=True)
    start = states.get_states()
    run(x).sum().backward()
    plain, x.grad = x.grad, None
    states.set_states(start)
    after: list[Tensor] = []
    with nc.autocast(recipe=nc.recipe.Float8CurrentScaling()):
        y = nc.checkpoint(run, x, get_rng_state_tracker=lambda: states)
    with states.fork():
        after.append(torch.rand(3, device=device))
    y.sum().backward()
    assert plain is not None and x.grad is not None and torch.equal(x.grad, plain)
    assert phases == [(False, False), (True, False), (True, True)]
    states.set_states(start)
    run(x)
    with states.fork():
        assert torch.equal(torch.rand(3, device=device), after[0]), "the recomputation draws nothing further"


def test_a_layer_begins_from_it() -> None:
    first, second = (
        nc.GroupedLinear(2, 16, 16, device="cpu", get_rng_state_tracker=lambda made=made: made)
        for made in (tracker(False, "cpu"), tracker(False, "cpu"))
    )
    assert torch.equal(first.weight0, second.weight0)


@pytest.mark.gpu
def test_a_captured_fork_goes_on() -> None:
    states, eager = tracker(True, "cuda"), tracker(True, "cuda")
    out = torch.zeros(4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    states.register(graph)
    with torch.cuda.graph(graph), states.fork():
        out.copy_(torch.rand(4, device="cuda"))
    seen = []
    for _ in range(2):
        graph.replay()
        seen.append(out.clone())
    assert not torch.equal(*seen)
    for drawn in seen:
        with eager.fork():
            assert torch.equal(torch.rand(4, device="cuda"), drawn)
