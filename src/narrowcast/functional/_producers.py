"""Producers: operators whose result is returned as it is, or quantized on its way to memory, from one record each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ._library import QUANTIZER, always, define
from .numerics import numerics_for
from .quantize import STATE, describe

Operator = Callable[..., Any]


@dataclass(frozen=True)
class Producer:
    """One computation, of which there are two operators: ``<name>`` and ``<name>_quantize``.

    ``inputs``: schemas of the arguments before the quantizer. ``options``: of those after it, with their defaults.
    ``like``: index of the input whose dtype and device the result has.
    ``source(numerics, wanted, *inputs, *options)``: the result as a source of ``numerics``, and the further outputs.
    ``wanted``: "source", or what a pass before the one that quantizes, if there is one, should leave: the result's
    "amax", or the result itself, the "matrix".
    ``shape(*inputs, *options)``: shape of the result. ``further(*inputs, *options)``: empty further outputs.
    ``further_count``: how many they are.
    ``sums``: the quantizing form has a last option ``column_sums``, true by default, that the plain form lacks: the
    sums of the result over all but its last dim, fp32 (K,), then come last.
    """

    name: str
    inputs: tuple[str, ...]
    like: int
    source: Callable[..., tuple[Any, tuple[Tensor, ...]]]
    shape: Callable[..., tuple[int, ...]]
    further: Callable[..., tuple[Tensor, ...]] = lambda *_: ()
    further_count: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    sums: bool = False


def define_plain(producer: Producer) -> Operator:
    """Return the operator that returns (result, *further outputs)."""
    count, defaults = len(producer.inputs), tuple(producer.options.values())

    def run(*given: Any) -> Any:
        numerics = numerics_for(given[producer.like])
        source, further = producer.source(numerics, "matrix", *given, *defaults[len(given) - count :])
        result = numerics.sources.materialize(source)
        return (result, *further) if further else result

    def fake(*given: Any) -> Any:
        arguments = (*given, *defaults[len(given) - count :])
        result = arguments[producer.like].new_empty(producer.shape(*arguments))
        further = producer.further(*arguments)
        return (result, *further) if further else result

    arguments = ", ".join([*producer.inputs, *_with_defaults(producer.options)])
    results = ", ".join(["Tensor"] * (1 + producer.further_count))
    schema = f"{producer.name}({arguments}) -> {f'({results})' if producer.further_count else results}"
    return define(schema, run, fake, inlined=always)


def define_quantizing(producer: Producer) -> Operator:
    """Return the operator that returns the quantizer's buffers of the result, then the sums, then the further outputs.

    It takes (*inputs, quantizer, *options, seed, scale, amax).
    """
    options = {**producer.options, **({"bool column_sums": True} if producer.sums else {})}
    count = len(producer.inputs)
    defaults: tuple[Any, ...] = (*options.values(), None, None, None)

    def run(*given: Any) -> list[Tensor]:
        *arguments, seed, scale, amax = (*given, *defaults[len(given) - count - 1 :])
        quantizer = arguments.pop(count)
        numerics = numerics_for(arguments[producer.like])
        takes = quantizer._takes_sources
        wanted = "matrix" if not takes else "amax" if quantizer._needs_amax else "source"
        source, further = producer.source(numerics, wanted, *arguments)
        sums = producer.sums and arguments[-1]
        # as encode_source(), in line: these operators run much
        x = source if takes else numerics.sources.materialize(source)
        if scale is not None and quantizer._is_delayed():
            buffers = quantizer._encode_scaled(numerics, x, scale, amax)
        else:
            buffers = quantizer._encode(numerics, x, seed)
        return [*buffers, numerics.sources.column_sum(x), *further] if sums else [*buffers, *further]

    def fake(*given: Any) -> list[Tensor]:
        *arguments, _, _, _ = (*given, *defaults[len(given) - count - 1 :])
        quantizer = arguments.pop(count)
        like, shape = arguments[producer.like], producer.shape(*arguments)
        sums = [like.new_empty(shape[-1:], dtype=torch.float32)] if producer.sums and arguments[-1] else []
        return [*describe(like, shape, like.dtype, quantizer), *sums, *producer.further(*arguments)]

    schema = ", ".join([*producer.inputs, f"{QUANTIZER} quantizer", *_with_defaults(options), STATE])
    return define(f"{producer.name}_quantize({schema}) -> Tensor[]", run, fake, inlined=always)


def _with_defaults(options: dict[str, Any]) -> list[str]:
    return [f"{schema}={default}" for schema, default in options.items()]
