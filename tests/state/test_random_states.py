"""The tracker of random states, on the accelerator where there is one, else on the CPU."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import narrowcast as nc
from narrowcast.state import random_states


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


def test_a_generator_that_a_graph_knows_is_written_in_place() -> None:
    states = nc.CudaRNGStatesTracker("cpu")
    states.graph_safe = True  # what these methods do of it runs on every device
    states.add("one", 11)
    known, kept = states._states["one"], states.get_states()
    drawn = torch.rand(4, generator=known)
    states.set_states(kept)
    assert states._states["one"] is known and torch.equal(torch.rand(4, generator=known), drawn)
    fresh = nc.CudaRNGStatesTracker("cpu")
    fresh.graph_safe = True
    fresh.set_states(kept)
    assert torch.equal(torch.rand(4, generator=fresh._states["one"]), drawn)
    assert torch.equal(torch.rand(4, generator=kept["one"]), drawn)  # which is another


def test_the_generator_is_that_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "default_generators", ("first", "second", "third"))
    found = [
        random_states._default_generator(torch.device(name)) for name in ("cuda", "cuda:0", "cuda:2", "cpu")
    ]
    assert found == ["second", "first", "third", torch.default_generator]


class Switching:
    """A default generator that a graph may capture: forks switch the state that it draws from."""

    def __init__(self) -> None:
        self.current = "outside"

    def graphsafe_get_state(self) -> str:
        return self.current

    def graphsafe_set_state(self, state: str) -> None:
        self.current = state


def test_a_fork_that_may_be_captured_switches_generators(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = Switching()
    monkeypatch.setattr(random_states, "_default_generator", lambda device: generator)
    states: Any = nc.CudaRNGStatesTracker("cuda", graph_safe=True)
    states._states["one"] = "inside"
    with states.fork("one"):
        assert generator.current == "inside"
    assert generator.current == "outside"
    with pytest.raises(ZeroDivisionError), states.fork("one"):
        raise ZeroDivisionError
    assert generator.current == "outside" and states._states == {"one": "inside"}


def test_a_graph_learns_of_every_tracker_that_is_safe() -> None:
    class Graph:
        known: ClassVar[list[Any]] = []

        def register_generator_state(self, state: Any) -> None:
            self.known.append(state)

    states: Any = nc.CudaRNGStatesTracker("cuda", graph_safe=True)
    states._states["one"] = "mine"
    random_states.register_random_states(Graph())  # type: ignore[arg-type]
    assert "mine" in Graph.known


def test_its_device(device: torch.device) -> None:
    assert nc.CudaRNGStatesTracker().device.type == device.type
    assert nc.CudaRNGStatesTracker("meta").device.type == "meta"


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
