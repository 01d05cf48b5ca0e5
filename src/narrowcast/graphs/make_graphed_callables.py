"""``make_graphed_callables``: PyTorch's, for modules that quantize."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from .. import _keywords
from ..layers import GroupedLinearLayer, Snapshot
from ..state import THREAD, autocast
from .arguments import OLD_NAMES, check_callable, per_callable, schedule, with_old_names
from .capture import Captured, CudaGraphs


def make_graphed_callables(
    modules: Any,
    sample_args: Any,
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    sample_kwargs: Any = None,
    enabled: bool | Sequence[bool] | None = None,
    calibrating: bool | None = None,
    recipe: Any = None,
    amax_reduction_group: Any = None,
    cache_quantized_params: bool | None = None,
    _order: Sequence[int] | None = None,
    _num_layers_per_chunk: Sequence[int] | None = None,
    pool: Any = None,
    retain_graph_in_backward: bool = False,
    _reuse_graph_input_output_buffers: bool = False,
    clone_param_grads_on_return: bool = True,
    pre_warmup_hook: Callable[[], None] | None = None,
    post_warmup_hook: Callable[[], None] | None = None,
    capture_time_hooks: Any = None,
    **old_names: Any,
) -> Any:
    """Capture modules that quantize in CUDA graphs, as ``torch.cuda.make_graphed_callables`` captures plain modules.

    A call copies its arguments to the graph's inputs and returns the graph's outputs, which the next call overwrites.
    Replays read the current scales, weights and random states. The capture changes no buffer and no ``main_grad``.

    Args:
        modules: a module or function, or a tuple of them. A module's ``forward`` is replaced, while it is in the mode,
            training or not, of the capture; its own forward hooks run around it.
        sample_args: a tuple of tensors, or one such tuple per callable.
        sample_kwargs: a dict, or one per callable. Calls must have the same arguments, shapes and dtypes.
        num_warmup_iters: forwards and backwards before the capture.
        allow_unused_input: as in PyTorch.
        enabled, calibrating, recipe, amax_reduction_group: of an ``autocast`` around each callable, ``enabled`` also
            one per callable; None: layers run under their own recipes.
        cache_quantized_params: weights are quantized only in calls with ``is_first_microbatch=True``, or without it.
        _order: replay order of forwards (1, 2) and backwards (-2, -1) of chunks of the callables, each once per
            microbatch. The forwards of all samples are returned: by chunk, microbatch, layer.
        _num_layers_per_chunk, pool: sizes of chunks that differ; a memory pool to share.
        retain_graph_in_backward: capture the backward with ``retain_graph``.
        _reuse_graph_input_output_buffers: accepted, and without effect: each sample keeps buffers of its own, which
            takes more memory.
        clone_param_grads_on_return: return copies of the parameters' gradients; else the next replay overwrites them.
        pre_warmup_hook, post_warmup_hook: called around the warm-up.
        **old_names: ``fp8_enabled``, ``fp8_calibrating``, ``fp8_recipe``, ``fp8_group``, ``fp8_weight_caching``.
    Returns:
        The module or function, or a tuple of them. ``reset()`` of a returned function, or of a module's ``forward``,
        frees its graphs.
    Raises:
        ValueError: two spellings of one argument, tuples of different lengths, an impossible order, or a later call
            with other arguments, shapes or dtypes.
        TypeError: a sample is not a tensor.
        RuntimeError: backward hooks, delayed weight gradients, no CUDA device, or ``torch.autocast`` caches casts.
        NotImplementedError: ``capture_time_hooks``, cached GroupedLinear weights.
    """
    if capture_time_hooks is not None:
        raise NotImplementedError("make_graphed_callables does not take capture_time_hooks; leave it out")
    if old_names:
        accepted = (*inspect.signature(make_graphed_callables).parameters, *OLD_NAMES)
        _keywords.check("make_graphed_callables", accepted, old_names)
    options = with_old_names(
        old_names,
        enabled=enabled,
        calibrating=calibrating,
        recipe=recipe,
        amax_reduction_group=amax_reduction_group,
        cache_quantized_params=cache_quantized_params,
    )
    alone = not isinstance(modules, tuple)
    functions = (modules,) if alone else modules
    passes, of_sample = schedule(len(functions), _order, _num_layers_per_chunk)
    samples, keywords = sample_args, sample_kwargs
    if alone and _order is None:
        samples, keywords = (sample_args,), (sample_kwargs,)
    captured = _prepare(functions, of_sample, samples, keywords, options)
    graphs = _graphs(pool)
    state = Snapshot([f for f in functions if isinstance(f, nn.Module)])
    with graphs.beside():
        _warm_up(captured, num_warmup_iters, allow_unused_input, pre_warmup_hook, post_warmup_hook)
    for is_forward, index in passes:
        if is_forward:
            captured[index].capture_forward(graphs)
        else:
            captured[index].capture_backward(graphs, allow_unused_input, retain_graph_in_backward)
    state.restore_in_place()
    graphed = [
        _graphed(functions[of_sample[i]], one, clone_param_grads_on_return, _order is None)
        for i, one in enumerate(captured)
    ]
    return graphed[0] if alone and len(graphed) == 1 else tuple(graphed)


def _warm_up(
    captured: list[Captured],
    iterations: int,
    allow_unused_input: bool,
    before: Callable[[], None] | None,
    after: Callable[[], None] | None,
) -> None:
    if before is not None:
        before()
    for one in captured:
        for _ in range(iterations):
            one.warm_up(allow_unused_input)
    if after is not None:
        after()


def _prepare(
    functions: Sequence[Any], of_sample: list[int], samples: Any, keywords: Any, options: dict[str, Any]
) -> list[Captured]:
    """Check all arguments before anything runs; each callable with its sample."""
    if not isinstance(samples, (tuple, list)) or len(samples) != len(of_sample):
        found = len(samples) if isinstance(samples, (tuple, list)) else type(samples).__name__
        raise ValueError(
            f"sample_args has {found} for {len(of_sample)} samples; give a tuple of arguments for each"
        )
    keywords = [None] * len(of_sample) if keywords is None else keywords
    if len(keywords) != len(of_sample):
        raise ValueError(
            f"sample_kwargs has {len(keywords)} for {len(of_sample)} samples; give a dict for each"
        )
    enabled = per_callable(options["enabled"], len(functions))
    caches = bool(options["cache_quantized_params"])
    for function in functions:
        check_callable(function)
        grouped = isinstance(function, nn.Module) and any(
            isinstance(m, GroupedLinearLayer) for m in function.modules()
        )
        if caches and grouped:
            raise NotImplementedError("cache_quantized_params does not hold for GroupedLinear; leave it out")
    if torch.is_autocast_enabled() and torch.is_autocast_cache_enabled():
        raise RuntimeError("a graph cannot hold torch.autocast's cache of casts; use cache_enabled=False")
    prepared = []
    for sample, keyword, index in zip(samples, keywords, of_sample):
        capturing, calling = (
            functools.partial(_under, enabled[index], options, flag) for flag in (True, False)
        )
        args = sample if isinstance(sample, (tuple, list)) else (sample,)
        keeps = caches and isinstance(functions[index], nn.Module)
        prepared.append(Captured(functions[index], args, keyword, (capturing, calling), keeps))
    return prepared


def _under(enabled: bool | None, options: dict[str, Any], capturing: bool) -> AbstractContextManager[Any]:
    """Return the autocast of a callable."""
    if enabled is None or (not capturing and THREAD.state.depth):
        return contextlib.nullcontext()
    calibrating, recipe = bool(options["calibrating"]), options["recipe"]
    return autocast(enabled, calibrating, recipe, options["amax_reduction_group"])


def _graphs(pool: Any) -> CudaGraphs:
    """Return the object that captures.

    Raises:
        RuntimeError: there is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise RuntimeError(
            f"make_graphed_callables needs a CUDA device, and none is visible to torch {torch.__version__}; call the "
            "modules as they are"
        )
    return CudaGraphs(pool)


def _graphed(function: Any, captured: Captured, clone_grads: bool, in_place: bool) -> Any:
    """Return the callable that replays. For a module that stands for one sample: the module itself, with a new
    ``forward``.
    """
    original = function.forward if isinstance(function, nn.Module) else function
    training = function.training if isinstance(function, nn.Module) else None

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if training is not None and function.training != training:
            return original(*args, **kwargs)
        with captured.calling():
            THREAD.state.reached = True  # layers ran in the capture
            return captured(args, kwargs, clone_grads)

    forward.reset = captured.reset  # type: ignore[attr-defined]
    if not (in_place and isinstance(function, nn.Module)):
        return forward
    function.forward = forward  # type: ignore[method-assign]
    return function
