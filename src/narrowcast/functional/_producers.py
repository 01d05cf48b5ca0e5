"""Producers: operators whose result is returned as it is, or quantized on its way to memory, from one record each."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from ._library import QUANTIZER, always, define
from .numerics import numerics_for
from .quantizer_value import QuantizerValue

Operator = Callable[..., Any]

STATE = "Tensor? seed=None, Tensor? scale=None, Tensor? amax=None"
"""Schema of the arguments that every quantizing operator ends in."""


def describe(
    like: Tensor, shape: tuple[int, ...], dtype: torch.dtype, quantizer: QuantizerValue
) -> list[Tensor]:
    """Empty buffers as quantizing a tensor of that shape and dtype yields."""
    described = quantizer._describe_buffers(shape, dtype)
    return [like.new_empty(size, dtype=kind) for size, kind in described.values()]


def encode(
    x: Any,
    quantizer: QuantizerValue,
    seed: Tensor | None = None,
    scale: Tensor | None = None,
    amax: Tensor | None = None,
    numerics: Any = None,
    keep_amax: bool = False,
) -> list[Tensor]:
    """Quantize a tensor, or a source of ``numerics`` where the quantizer takes sources; flatten order.

    Args:
        numerics: what computes; None: what suits the tensor's device.
        keep_amax: return the amax that was found, too; for current scaling.
    Raises:
        ValueError: a delayed quantizer without ``scale``.
    """
    if numerics is None:
        numerics = numerics_for(x)
    if keep_amax:
        return quantizer._encode_keeping_amax(numerics, x)
    if scale is not None and quantizer._is_delayed():
        return quantizer._encode_scaled(numerics, x, scale, amax)
    if scale is None and amax is not None and quantizer._needs_amax:
        return quantizer._encode_again(numerics, x, amax)
    return quantizer._encode(numerics, x, seed)


@dataclass(frozen=True)
class Producer:
    """One computation, of which there are two operators: ``<name>`` and ``<name>_quantize``.

    ``inputs``: schemas of the arguments before the quantizer. ``options``: of those after it, with their defaults.
    ``like``: index of the input whose dtype and device the result has.
    ``source(numerics, wanted, *inputs, *options)``: the result as a source of ``numerics``, and the further outputs;
    None if the first input is the result.
    ``wanted``: "source", or what a pass before the one that quantizes, if there is one, should leave: the result's
    "amax", or the result itself, the "matrix".
    ``shape(*inputs, *options)``: shape of the result. ``further(*inputs, *options)``: empty further outputs.
    ``further_count``: how many they are.
    ``dtype(*inputs, *options)``: dtype of the result, if it is not that of ``like``.
    ``sums``: the quantizing form also returns the sums of the result over all but its last dim, fp32 (K,). "always", or
    "asked": by a last option ``column_sums``, true by default, that the plain form lacks.
    """

    name: str
    inputs: tuple[str, ...]
    like: int
    source: Callable[..., tuple[Any, tuple[Tensor, ...]]] | None
    shape: Callable[..., tuple[int, ...]]
    further: Callable[..., tuple[Tensor, ...]] = lambda *_: ()
    further_count: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    dtype: Callable[..., torch.dtype] | None = None
    sums: Literal["", "asked", "always"] = ""


def define_plain(producer: Producer) -> Operator:
    """Return the operator that returns (result, *further outputs)."""
    count, defaults, compute = len(producer.inputs), tuple(producer.options.values()), producer.source
    assert compute is not None

    def run(*given: Any) -> Any:
        numerics = numerics_for(given[producer.like])
        source, further = compute(numerics, "matrix", *given, *defaults[len(given) - count :])
        result = numerics.fused_producers.materialize(source)
        return (result, *further) if further else result

    def fake(*given: Any) -> Any:
        arguments = (*given, *defaults[len(given) - count :])
        result = arguments[producer.like].new_empty(producer.shape(*arguments))
        further = producer.further(*arguments)
        return (result, *further) if further else result

    arguments = ", ".join([*producer.inputs, *_with_defaults(producer.options)])
    results = ", ".join(["Tensor"] * (1 + producer.further_count))
    schema = f"{producer.name}({arguments}) -> {f'({results})' if producer.further_count else results}"
    return define(schema, run, fake, lowered=always)


def define_quantizing(producer: Producer, name: str = "", keep_amax: bool = False) -> Operator:
    """Return the operator that returns the quantizer's buffers of the result, then the sums, then the further outputs.

    It takes (*inputs, quantizer, *options, seed, scale, amax).

    Args:
        name: of the operator; "": ``<name>_quantize``.
        keep_amax: return the amax after the buffers, in parts.
    """
    always_sums, asked_sums = producer.sums == "always", producer.sums == "asked"
    options = {**producer.options, **({"bool column_sums": True} if asked_sums else {})}
    count = len(producer.inputs)
    defaults: tuple[Any, ...] = (*options.values(), None, None, None)

    def run(*given: Any) -> list[Tensor]:
        *arguments, seed, scale, amax = (*given, *defaults[len(given) - count - 1 :])
        quantizer = arguments.pop(count)
        numerics = numerics_for(arguments[producer.like])
        takes = quantizer._takes_sources
        wanted = "matrix" if not takes else "amax" if quantizer._needs_amax else "source"
        if producer.source is not None:
            source, further = producer.source(numerics, wanted, *arguments)
        else:
            source, further = arguments[0], ()
            if always_sums:
                source = numerics.fused_producers.tensor(source, column_sums=True)
        x = source if takes else numerics.fused_producers.materialize(source)
        if scale is None and amax is None and not keep_amax:  # the common case, one call less
            buffers = quantizer._encode(numerics, x, seed)
        else:
            buffers = encode(x, quantizer, seed, scale, amax, numerics, keep_amax)
        if always_sums or (asked_sums and arguments[-1]):
            return [*buffers, numerics.fused_producers.column_sum(x), *further]
        return [*buffers, *further]

    def fake(*given: Any) -> list[Tensor]:
        *arguments, _, _, _ = (*given, *defaults[len(given) - count - 1 :])
        quantizer = arguments.pop(count)
        like, shape = arguments[producer.like], producer.shape(*arguments)
        dtype = producer.dtype(*arguments) if producer.dtype else like.dtype
        buffers = describe(like, shape, dtype, quantizer)
        if keep_amax:
            parts = numerics_for(like).float8.parts_of(math.prod(shape))
            buffers.append(like.new_empty((parts,), dtype=torch.float32))
        if always_sums or (asked_sums and arguments[-1]):
            buffers.append(like.new_empty(shape[-1:], dtype=torch.float32))
        return [*buffers, *producer.further(*arguments)]

    schema = ", ".join([*producer.inputs, f"{QUANTIZER} quantizer", *_with_defaults(options), STATE])
    return define(f"{name or producer.name + '_quantize'}({schema}) -> Tensor[]", run, fake, lowered=always)


def _with_defaults(options: dict[str, Any]) -> list[str]:
    return [f"{schema}={default}" for schema, default in options.items()]
