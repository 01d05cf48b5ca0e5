"""Operators whose output is quantized: fused with the quantization, followed by it, compiled, and Liger's.

Bytes are per element of the output, as a pass over memory that forgets nothing would move them. A format that needs
the tensor's amax before it can encode makes the producer read its inputs twice.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from harness import Row, Shape, compare, compiled
from peers import expressions
from torch import Tensor

import narrowcast as nc
from narrowcast import functional
from narrowcast.quantizers import DelayedFloat8Quantizer
from narrowcast.reference.hadamard import rht_matrix

E4M3 = nc.DType.kFloat8E4M3
Table = dict[str, tuple[Callable[..., Any], float]]


class Format(NamedTuple):
    """How an output is quantized.

    ``quantizer`` makes both directions; ``state`` is the scale and the amax of delayed scaling; ``expression`` is the
    same in plain PyTorch; ``written`` counts the bytes per element of both directions; ``two_passes`` says that the
    amax of the whole tensor comes first.
    """

    quantizer: Any
    expression: Callable[[Tensor], tuple[Tensor, ...]]
    written: float
    two_passes: bool = False
    state: tuple[Tensor, ...] = ()

    def quantize(self, y: Tensor, dbias: bool) -> Any:
        """Quantize with our operators, with the column sums of ``y`` where the producer has them too."""
        run = functional.quantize_dbias if dbias else functional.quantize
        return run(y, self.quantizer, None, *self.state)


class Producer(NamedTuple):
    """An operator of ``narrowcast.functional`` and what it is compared with.

    Args:
        operator: its name; with ``_quantize`` added, that of the fused one.
        arguments: from the inputs to what both operators take before the quantizer.
        options: what the fused one takes after it, before the seed.
        expression: plain PyTorch from the inputs to (the output to quantize, others).
        reads: bytes of one pass over the inputs, and of a second pass.
        writes: bytes of outputs that are not quantized.
        outputs: elements quantized per element of the shape.
        dbias: the fused operator also gives the column sums of what it quantizes; so does ``expression``.
        liger: from the inputs to the output to quantize.
    """

    operator: str
    arguments: Callable[..., tuple[Any, ...]]
    expression: Callable[..., tuple[Tensor, ...]]
    reads: tuple[float, float]
    writes: float = 0.0
    outputs: int = 1
    dbias: bool = False
    options: tuple[Any, ...] = ()
    liger: Callable[..., Tensor] | None = None

    def bytes_per_element(self, chosen: Format) -> float:
        again = self.reads[1] if chosen.two_passes else 0.0
        return self.reads[0] + again + self.writes + self.outputs * chosen.written


def formats(device: str) -> dict[str, Format]:
    """The formats of the recipes' activations and gradients."""
    scale, amax = torch.full((1,), 90.0, device=device), torch.zeros(1, device=device)
    rotation = rht_matrix(True, device, torch.bfloat16)
    block = nc.Float8BlockQuantizer(
        E4M3, rowwise=True, columnwise=True, force_pow_2_scales=True, block_scaling_dim=1
    )
    return {
        "fp8 given scale": Format(
            DelayedFloat8Quantizer(E4M3, 0),
            lambda y: expressions.given_scale(y, scale, amax),
            2.0,
            state=(scale, amax),
        ),
        "fp8 current": Format(
            nc.Float8CurrentScalingQuantizer(E4M3), expressions.current_scale, 2.0, two_passes=True
        ),
        "fp8 128-block": Format(block, expressions.block_1d, 2 + 8 / 128),
        "mxfp8": Format(nc.MXFP8Quantizer(E4M3), expressions.mxfp8_1d, 2 + 2 / 32),
        "nvfp4 RHT": Format(
            nc.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True),
            lambda y: expressions.nvfp4_rht(y, rotation),
            2 * (1 / 2 + 1 / 16),
            two_passes=True,
        ),
    }


def fused_table(producers: Mapping[str, Producer], device: str) -> Table:
    """``<producer> -> <format>`` for every operator there is; the others are named and left out."""
    table: Table = {}
    for name, producer in producers.items():
        for title, chosen in formats(device).items():
            operator = _operator(f"{producer.operator}_quantize")
            if operator is not None:
                run = _fused(operator, producer, chosen)
                table[f"{name} -> {title}"] = (run, producer.bytes_per_element(chosen))
    return table


def peer_table(producers: Mapping[str, Producer], device: str, compile_too: bool) -> Table:
    """Our unfused operators, ``torch.compile`` of plain PyTorch, and Liger's kernels before our quantization."""
    table: Table = {}
    whole: Table = {}
    for name, producer in producers.items():
        plain = _operator(producer.operator)
        for title, chosen in formats(device).items():
            size = producer.bytes_per_element(chosen)
            kernel = f"{name} -> {title}"
            if plain is not None:
                table[f"unfused: {kernel}"] = (_unfused(plain, producer, chosen), size)
            if producer.liger is not None:
                table[f"liger: {kernel}"] = (_after(producer.liger, producer.dbias, chosen), size)
            whole[kernel] = (_expression(producer, chosen), size)
    return table | compiled(whole) if compile_too else table


def rows_of(
    producers: Mapping[str, Producer],
    make: Callable[..., tuple[Tensor, ...]],
    shapes: Sequence[Shape],
    chosen: Namespace,
) -> list[Row]:
    """Fused operators and their peers, once the fused ones are those of the CPU."""
    kernels, references = (fused_table(producers, device) for device in ("cuda", "cpu"))
    peers = peer_table(producers, "cuda", compile_too=not chosen.skip_compile)
    return compare(chosen, shapes, make, kernels, references, peers)


def _operator(name: str) -> Callable[..., Any] | None:
    operator = getattr(functional, name, None)
    if operator is None:
        print(f"skipped: narrowcast.functional has no {name}")
    return operator


def _fused(operator: Callable[..., Any], producer: Producer, chosen: Format) -> Callable[..., Any]:
    tail = (chosen.quantizer, *producer.options, None, *chosen.state)
    return lambda *inputs: operator(*producer.arguments(*inputs), *tail)


def _unfused(operator: Callable[..., Any], producer: Producer, chosen: Format) -> Callable[..., Any]:
    def run(*inputs: Tensor) -> Any:
        outputs = operator(*producer.arguments(*inputs))
        return chosen.quantize(outputs if isinstance(outputs, Tensor) else outputs[0], producer.dbias)

    return run


def _after(produce: Callable[..., Tensor], dbias: bool, chosen: Format) -> Callable[..., Any]:
    return lambda *inputs: chosen.quantize(produce(*inputs), dbias)


def _expression(producer: Producer, chosen: Format) -> Callable[..., Any]:
    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        output, *others = producer.expression(*inputs)
        return *chosen.expression(output), *others

    return run
