"""A callable with its static tensors, and the graphs that read and write them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from .._tracing import once_differentiable
from ..functional import NOT_RECOMPUTED, WeightsNote, are_unchanged, begin_main_grad_, note_weights
from ..layers import LinearLayer, mark_added_to_main_grad
from ..state import register_random_states
from ..upstream.tensors import tree_flatten, tree_unflatten
from .arguments import check_call, check_leaves, flat


class CudaGraphs:
    """Capturing on a GPU."""

    def __init__(self, pool: Any) -> None:
        self.pool = torch.cuda.graph_pool_handle() if pool is None else pool

    @staticmethod
    @contextlib.contextmanager
    def beside() -> Any:
        """A side stream, on which lazy set-up may happen that no graph must hold."""
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            yield
        torch.cuda.synchronize()

    def record(self, run: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """Capture ``run``; return its result and a replay function."""
        graph = torch.cuda.CUDAGraph()
        register_random_states(graph)
        with torch.cuda.graph(graph, pool=self.pool):
            result = run()
        return result, graph.replay


class Captured:
    """One callable on the arguments of one sample.

    Args:
        function: a module, whose own hooks are not captured, or a function.
        contexts: what its forward runs in while capturing, and what a call runs in.
        keeps_weights: quantized weights serve several microbatches, and are quantized by a graph of their own.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any] | None,
        contexts: tuple[Callable[[], AbstractContextManager[Any]], Callable[[], AbstractContextManager[Any]]],
        keeps_weights: bool,
    ) -> None:
        self.module = function if isinstance(function, nn.Module) else None
        self.run = function.forward if isinstance(function, nn.Module) else function
        (self.under, self.calling), self.keeps_weights = contexts, keeps_weights
        leaves, self.spec = flat(args, kwargs)
        check_leaves(leaves)
        # own copies: two callables may share a sample, and each backward reads its forward's inputs
        self.leaves = [
            None if x is None else x.detach().clone().requires_grad_(x.requires_grad) for x in leaves
        ]
        parameters = [] if self.module is None else list(self.module.parameters())
        self.parameters = [p for p in parameters if p.requires_grad]
        self.inputs = [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]
        self.surface = [x for x in (*self.inputs, *self.parameters) if x.requires_grad]
        modules = [] if self.module is None else list(self.module.modules())
        self.linears = [m for m in modules if isinstance(m, LinearLayer)]
        self.fused = [
            p
            for m in modules
            if getattr(m, "fuse_wgrad_accumulation", False)
            for p in m.parameters(recurse=False)
            if p.dim() > 1 and hasattr(p, "main_grad")
        ]
        self.replay_forward: Callable[[], None] = _nothing
        self.replay_backward: Callable[[], None] = _nothing
        self.replay_weights: Callable[[], None] = _nothing
        self.kept_weights: Any = None  # held, for the graph reads them
        self.weights_note: WeightsNote | None = None  # note of the weights they were made from
        self.outputs: list[Any] = []
        self.grad_outputs: list[Tensor | None] = []
        self.grads: list[Tensor | None] = []

    # -- before and while capturing ----------------------------------------------------------------------------------

    def forward(self, first: bool | None = None) -> list[Any]:
        """Run on the static inputs; the leaves of the result."""
        args, kwargs = tree_unflatten(self.leaves, self.spec)
        if self.keeps_weights:
            kwargs["is_first_microbatch"] = first
        with self.under():
            outputs = self.run(*args, **kwargs)
        leaves, self.output_spec = tree_flatten(outputs)
        self.outputs = leaves
        return leaves

    def backward(self, allow_unused: bool, retain: bool) -> list[Tensor | None]:
        """Return gradients of the surface, from the static gradients of the outputs."""
        pairs = [(out, grad) for out, grad in zip(self.outputs, self.grad_outputs) if grad is not None]
        return list(
            torch.autograd.grad(
                [out for out, _ in pairs],
                self.surface,
                [grad for _, grad in pairs],
                allow_unused=allow_unused or bool(self.fused),
                retain_graph=retain,
            )
        )

    def _make_grad_outputs(self) -> bool:
        """Return room for the gradients of the outputs; whether there is a backward."""
        self.grad_outputs = [
            torch.zeros_like(out) if isinstance(out, Tensor) and out.requires_grad else None
            for out in self.outputs
        ]
        return bool(self.surface) and any(grad is not None for grad in self.grad_outputs)

    def warm_up(self, allow_unused: bool) -> None:
        """One forward and backward, for what happens only once."""
        self.forward(True)
        if self._make_grad_outputs():
            self.backward(allow_unused, False)
        self.outputs, self.grad_outputs = [], []

    def capture_forward(self, graphs: CudaGraphs) -> None:
        if self.keeps_weights:
            self.kept_weights, self.replay_weights = graphs.record(self._quantize_weights)
        _, self.replay_forward = graphs.record(lambda: self.forward(False))

    def _quantize_weights(self) -> list[Any]:
        with self.under():
            return [linear.refresh_kept_weights() for linear in self.linears]

    def capture_backward(self, graphs: CudaGraphs, allow_unused: bool, retain: bool) -> None:
        if not self._make_grad_outputs():
            return
        self.grads, self.replay_backward = graphs.record(lambda: self.backward(allow_unused, retain))

    def static_outputs(self) -> list[Any]:
        """Return the tensors that a replay fills, apart from the autograd graph of the capture."""
        return [out.detach() if isinstance(out, Tensor) else out for out in self.outputs]

    # -- when it is called -------------------------------------------------------------------------------------------

    def __call__(self, args: Sequence[Any], kwargs: dict[str, Any], clone_grads: bool) -> Any:
        first = kwargs.pop("is_first_microbatch", None)
        leaves, spec = flat(args, kwargs)
        check_call(leaves, spec, self.leaves, self.spec)
        inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if self.keeps_weights:
            weights = [part for linear in self.linears for part in linear.kept_parameters()]
            if first is not False or not are_unchanged(weights, self.weights_note):
                self.replay_weights()
                self.weights_note = note_weights(weights)
        results = iter(_Graphed.apply(self, first is True, clone_grads, *inputs, *self.parameters))
        filled = [next(results) if isinstance(out, Tensor) else out for out in self.outputs]
        return tree_unflatten(filled, self.output_spec)

    def reset(self) -> None:
        """Free the graphs and their tensors; a later call or backward raises RuntimeError."""
        self.replay_forward = self.replay_backward = self.replay_weights = _after_reset
        self.leaves, self.inputs, self.parameters, self.surface = [], [], [], []
        self.linears, self.fused = [], []
        self.outputs, self.grad_outputs, self.grads = [], [], []
        self.kept_weights = self.weights_note = None


def _after_reset() -> None:
    raise RuntimeError("a graphed callable was used after its reset(); capture it again")


def _nothing() -> None:
    """A graph that there is no need of."""


class _Graphed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, captured: Captured, first: bool, clone_grads: bool, *inputs: Tensor
    ) -> tuple[Any, ...]:
        for static, given in zip(captured.inputs, inputs):
            static.detach().copy_(given)
        captured.replay_forward()
        ctx.captured, ctx.first, ctx.clone_grads = captured, first, clone_grads
        outputs = [out for out in captured.static_outputs() if isinstance(out, Tensor)]
        needs_none = [out for out, kept in zip(outputs, _tensors(captured.outputs)) if not kept.requires_grad]
        ctx.mark_non_differentiable(*needs_none)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        captured: Captured = ctx.captured
        statics = [g for g, out in zip(captured.grad_outputs, captured.outputs) if isinstance(out, Tensor)]
        for static, grad in zip(statics, grads):
            if static is None:
                continue
            if grad is None:
                static.zero_()
            elif static.data_ptr() != grad.data_ptr():
                static.copy_(grad)
        if ctx.first:
            for parameter in captured.fused:  # the graph accumulates
                begin_main_grad_(parameter.main_grad, parameter, NOT_RECOMPUTED)  # type: ignore[attr-defined]
        captured.replay_backward()
        for parameter in captured.fused:
            mark_added_to_main_grad(parameter)
        captured_grads = iter(captured.grads)
        filled = [
            next(captured_grads, None) if x.requires_grad else None
            for x in (*captured.inputs, *captured.parameters)
        ]
        ours = len(captured.inputs)
        returned = [None if grad is None else grad.detach() for grad in filled]
        if ctx.clone_grads:  # else .grad would be what the next replay writes to
            returned[ours:] = [None if grad is None else grad.clone() for grad in returned[ours:]]
        return None, None, None, *returned


def _tensors(leaves: Sequence[Any]) -> list[Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]
