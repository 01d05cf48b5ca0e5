"""Random states by name, for what ranks of tensor parallelism must draw together or apart."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from .._checks import a_kind, shown, whole
from .._device import default_device
from .._tracing import refuse_in_graphs


class CudaRNGStatesTracker:
    """Named random states; inside ``fork(name)`` the device draws random numbers from that state.

    A layer takes a function that returns a tracker as ``get_rng_state_tracker``; :func:`narrowcast.checkpoint` repeats
    its states. Eager code only: a compiled graph draws from its own state.

    Args:
        device: the device of the default generator; None is the accelerator if there is one, else the CPU.
        graph_safe: keep generators instead of bytes, so that a CUDA graph can capture ``fork``. Call :meth:`register`
            before the capture. Without effect on a CPU.
    """

    def __init__(self, device: torch.device | str | None = None, graph_safe: bool = False) -> None:
        self.device = default_device() if device is None else torch.device(device)
        self.graph_safe = graph_safe and self.device.type == "cuda"
        self._states: dict[str, Any] = {}
        self._seeds: set[int] = set()
        if self.graph_safe:
            _GRAPH_SAFE.add(self)

    def reset(self) -> None:
        """Forget all states."""
        self._states, self._seeds = {}, set()

    def get_states(self) -> dict[str, Any]:
        """Return a copy of every state by its name: bytes, or generators where the tracker is ``graph_safe``."""
        return {
            name: state.clone_state() if self.graph_safe else state.clone()
            for name, state in self._states.items()
        }

    def set_states(self, states: dict[str, Any]) -> None:
        """Take over what :meth:`get_states` gave; what a graph has registered is written in place.

        Raises:
            TypeError: ``states`` is no dict.
        """
        if not isinstance(states, dict):
            raise TypeError(f"states is {a_kind(states)}; pass a dict, as get_states() returns")
        adopted: dict[str, Any] = {}
        for name, state in states.items():
            if not self.graph_safe:
                adopted[name] = state.clone()
            elif name in self._states:
                adopted[name] = self._states[name]
                adopted[name].set_state(state.get_state())
            else:
                adopted[name] = state.clone_state()
        self._states = adopted

    def add(self, name: str, seed: int) -> None:
        """Begin a state of this name.

        Raises:
            TypeError: the seed is no whole number.
            RuntimeError: the seed or the name is taken.
        """
        whole(seed=seed)
        if seed in self._seeds:
            raise RuntimeError(
                f"the seed {seed} is taken by another state; use one of its own for {shown(name)}"
            )
        if name in self._states:
            raise RuntimeError(
                f"there is a random state {shown(name)} already; use another name, or reset() before"
            )
        self._seeds.add(seed)
        generator = _default_generator(self.device)
        if self.graph_safe:
            self._states[name] = generator.clone_state()
            self._states[name].manual_seed(seed)
        else:
            self._states[name] = torch.Generator(self.device).manual_seed(seed).get_state()

    @contextlib.contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        """Draw from the state of this name inside; the state outside is put back, also after an error.

        Raises:
            KeyError: an unknown name.
            RuntimeError: in compiled code.
        """
        refuse_in_graphs("CudaRNGStatesTracker.fork cannot be compiled; leave it out of the graph")
        if name not in self._states:
            raise KeyError(
                f"there is no random state {shown(name)}; add() it first, there are {sorted(self._states)}"
            )
        generator = _default_generator(self.device)
        if self.graph_safe:
            outside = generator.graphsafe_get_state()
            generator.graphsafe_set_state(self._states[name])
        else:
            outside = generator.get_state()
            generator.set_state(self._states[name])
        try:
            yield
        finally:
            if self.graph_safe:  # whose generator has gone on by itself
                generator.graphsafe_set_state(outside)
            else:
                self._states[name] = generator.get_state()
                generator.set_state(outside)

    def register(self, graph: torch.cuda.CUDAGraph) -> None:
        """Make the states known to a CUDA graph that is about to be captured: its replays then go on with them.

        Raises:
            RuntimeError: the tracker is not ``graph_safe``.
        """
        if not self.graph_safe:
            raise RuntimeError(
                "this tracker keeps bytes, which no CUDA graph can go on with; make it with graph_safe=True"
            )
        for state in self._states.values():
            graph.register_generator_state(state)


_GRAPH_SAFE: weakref.WeakSet[CudaRNGStatesTracker] = weakref.WeakSet()


def register_random_states(graph: torch.cuda.CUDAGraph) -> None:
    """Make every tracker that is ``graph_safe`` register its states with a graph."""
    for tracker in list(_GRAPH_SAFE):
        tracker.register(graph)


def _default_generator(device: torch.device) -> Any:
    if device.type == "cpu":
        return torch.default_generator
    torch.cuda.init()
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]
