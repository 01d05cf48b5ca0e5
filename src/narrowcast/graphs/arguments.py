"""Checks of ``make_graphed_callables``' arguments: old names, one value per callable, the order of passes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .._checks import a_kind, shown
from .._tracing import users_level
from ..upstream.modules import has_backward_hooks
from ..upstream.tensors import tree_flatten

OLD_NAMES = {
    "fp8_enabled": "enabled",
    "fp8_calibrating": "calibrating",
    "fp8_recipe": "recipe",
    "fp8_group": "amax_reduction_group",
    "fp8_weight_caching": "cache_quantized_params",
}

Pass = tuple[bool, int]
"""(forward or backward, index into the sample arguments)."""


def with_old_names(old: dict[str, Any], **given: Any) -> dict[str, Any]:
    """Return ``given`` completed by arguments under their old names.

    Raises:
        ValueError: an argument under both names.
    """
    merged = dict(given)
    for name, value in old.items():
        new = OLD_NAMES[name]
        if value is None:
            continue
        if given[new] is not None:
            raise ValueError(f"{new} and its old name {name} are both given; use {new}")
        warnings.warn(
            f"{name} is the old name of {new}; use that", DeprecationWarning, stacklevel=users_level()
        )
        merged[new] = value
    return merged


def flat(args: Sequence[Any], kwargs: dict[str, Any] | None) -> tuple[list[Any], Any]:
    """Return arguments of one call as (leaves, what puts them together again), whatever the order of keywords."""
    return tree_flatten((tuple(args), dict(sorted((kwargs or {}).items()))))


def check_leaves(leaves: Sequence[Any]) -> None:
    """Raise TypeError for what a graph cannot take: anything but tensors and None."""
    for leaf in leaves:
        if leaf is not None and not isinstance(leaf, Tensor):
            raise TypeError(
                f"a sample argument is {a_kind(leaf)}; a CUDA graph takes tensors, and None where the calls "
                "have None, too: bind the others with functools.partial"
            )


def check_callable(function: Callable[..., Any]) -> None:
    """Check that a callable can be captured.

    Raises:
        TypeError: it is none.
        RuntimeError: a module with backward hooks, which would run while capturing only, with buffers that need
            gradients, or with weight gradients that wait.
    """
    if not callable(function):
        raise TypeError(f"{type(function).__name__} is not callable; pass modules or functions")
    if not isinstance(function, nn.Module):
        return
    for name, module in function.named_modules():
        where = f"{name or 'the module'} ({type(module).__name__})"
        if has_backward_hooks(module):
            raise RuntimeError(
                f"{where} has backward hooks, which a replay would not run; remove them before"
            )
        if getattr(module, "delay_wgrad_compute", False):
            raise RuntimeError(
                f"{where} has delay_wgrad_compute=True: its queue is filled outside any graph; set it to False"
            )
    if any(buffer.requires_grad for buffer in function.buffers()):
        raise RuntimeError("a buffer needs a gradient; only parameters may")


def per_callable(value: Any, count: int) -> list[Any]:
    """Return one value for each callable, from one for all or a sequence.

    Raises:
        ValueError: a sequence of another length.
    """
    if not isinstance(value, (tuple, list)):
        return [value] * count
    if len(value) != count:
        raise ValueError(
            f"enabled has {len(value)} values for {count} callables; give one each, or one for all"
        )
    return list(value)


def schedule(
    count: int, order: Sequence[int] | None, layers_per_chunk: Sequence[int] | None
) -> tuple[list[Pass], list[int]]:
    """Return passes in the order that they are captured and replayed in and the callable of each sample.

    Without an order all forwards, then all backwards from the last. With one, positive numbers are forwards of a chunk
    of the callables, negative ones its backwards, and each occurs once per microbatch. Samples then go by chunk, by
    microbatch and by layer.

    Raises:
        ValueError: an order that is no such thing, or chunks that do not make up the callables.
    """
    if order is None:
        if layers_per_chunk is not None:
            raise ValueError("_num_layers_per_chunk is given without _order; leave it out")
        forwards: list[Pass] = [(True, i) for i in range(count)]
        return forwards + [(False, i) for i in reversed(range(count))], list(range(count))
    chunks, microbatches = _check_order(order)
    layers = list(layers_per_chunk) if layers_per_chunk is not None else [count // chunks] * chunks
    if len(layers) != chunks or sum(layers) != count:
        raise ValueError(
            f"_order has {chunks} chunks, and {layers} layers in them are not the {count} callables; give "
            "_num_layers_per_chunk"
        )
    starts = [sum(layers[:chunk]) for chunk in range(chunks)]
    callables = [
        starts[chunk] + layer
        for chunk in range(chunks)
        for _ in range(microbatches)
        for layer in range(layers[chunk])
    ]
    done = {number: 0 for number in order}
    passes: list[Pass] = []
    for number in order:
        chunk = abs(number) - 1
        first = starts[chunk] * microbatches + done[number] * layers[chunk]
        indices = range(first, first + layers[chunk])
        passes += [(number > 0, i) for i in (indices if number > 0 else reversed(indices))]
        done[number] += 1
    return passes, callables


def _check_order(order: Sequence[int]) -> tuple[int, int]:
    """Return chunks and the microbatches of an order."""
    if any(isinstance(number, float) and number % 1 == 0.5 for number in order):
        raise ValueError(
            f"_order is {shown(list(order))}; an entry such as -1.5 is a delayed weight gradient, which no graph "
            "holds: set delay_wgrad_compute=False, and leave such entries out"
        )
    if not order or any(not isinstance(number, int) or number == 0 for number in order):
        raise ValueError(
            f"_order is {shown(list(order))}; use integers that are not 0, such as [1, 2, -2, -1]"
        )
    chunks = max(order)
    counts = {number: list(order).count(number) for number in (*range(1, chunks + 1), *range(-chunks, 0))}
    if set(order) - set(counts) or len(set(counts.values())) != 1:
        raise ValueError(
            f"_order is {shown(list(order))}; each of 1 to {max(chunks, 1)} and their negatives must occur once "
            "per microbatch"
        )
    for position in range(len(order)):
        so_far = list(order[: position + 1])
        chunk = abs(order[position])
        if so_far.count(-chunk) > so_far.count(chunk):
            raise ValueError(
                f"_order is {shown(list(order))}; chunk {chunk} has a backward before its forward"
            )
    return chunks, counts[1]


def check_call(leaves: Sequence[Any], spec: Any, static: Sequence[Any], static_spec: Any) -> None:
    """Check that a call fits what was captured.

    Raises:
        ValueError: other arguments, shapes or dtypes, or a gradient that was not captured.
    """
    if spec != static_spec:
        raise ValueError("a graphed callable was called with other arguments than its sample arguments")
    for given, kept in zip(leaves, static):
        if not isinstance(given, torch.Tensor) or kept is None:
            if given is not kept:
                raise ValueError(
                    "a graphed callable got None for a tensor of its sample arguments, or the other way"
                )
            continue
        if given.shape != kept.shape or given.dtype != kept.dtype:
            raise ValueError(
                f"a graphed callable was captured with {tuple(kept.shape)} {kept.dtype} and called with "
                f"{tuple(given.shape)} {given.dtype}; shapes and dtypes are fixed"
            )
        if given.requires_grad and not kept.requires_grad:
            raise ValueError(
                "an input needs a gradient and its sample did not, so none was captured; use requires_grad_() there"
            )
