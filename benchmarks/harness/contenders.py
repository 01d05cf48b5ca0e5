"""Contenders of a shape: compared with the reference byte for byte, timed in turns, set against a copy and peers.

A table maps a name to a function of the inputs and the bytes that it must move per element. A peer of the kernel
``fp8 current`` is called ``torch.compile: fp8 current`` and has its own row; the kernel's row has the ratio.
"""

from __future__ import annotations

import statistics
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .machine import Row
from .shapes import Shape
from .timing import ring, spread, time_in_turns

Table = Mapping[str, tuple[Callable[..., Any], float]]
COPY = "copy"
SWEEP = "sweep: "  # starts the names of a kernel's variants, which pictures leave out
RATIOS = {
    "torch.compile": "vs_compiled",
    "torchao": "vs_torchao",
    "liger": "vs_liger",
    "unfused": "vs_unfused",
    "torch": "vs_torch",
}


def compiled(expressions: Mapping[str, tuple[Callable[..., Any], float]]) -> dict[str, Any]:
    """The table of the same expressions under ``torch.compile``."""
    # A table makes many functions from one lambda; to the compiler they are recompilations of it.
    torch._dynamo.config.recompile_limit = 256
    return {
        f"torch.compile: {name}": (torch.compile(run, fullgraph=True, dynamic=False), size)
        for name, (run, size) in expressions.items()
    }


def gate(kernels: Table, references: Table, inputs: Callable[[tuple[int, int]], tuple[Any, ...]]) -> None:
    """Exit with the difference if a kernel and the reference of the same name disagree in one byte.

    ``inputs`` makes the arguments on the CPU; the kernels get them on the GPU.
    """
    shapes = ((1000, 1144), (1024, 1536))
    for shape in shapes:
        arguments = inputs(shape)
        for name, (run, _) in kernels.items():
            expected = references[name][0](*arguments)
            for index, (a, b) in enumerate(zip(run(*_to_gpu(arguments)), expected, strict=True)):
                differing = int((_bytes(a) != _bytes(b)).sum())
                if differing:
                    sys.exit(
                        f"{name} on {shape}: output {index} differs from the reference in {differing} bytes"
                    )
    print(f"correct: {len(kernels)} kernels equal the reference on {shapes}")


def _to_gpu(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.cuda()
    if isinstance(value, dict):
        return {key: _to_gpu(entry) for key, entry in value.items()}
    return type(value)(map(_to_gpu, value)) if isinstance(value, (list, tuple)) else value


def _bytes(x: Tensor) -> Tensor:
    return x.cpu().contiguous().flatten().view(torch.uint8)


def measure(
    chosen: Namespace, shapes: Sequence[Shape], inputs: Callable[[Shape], tuple[Any, ...]], table: Table
) -> list[Row]:
    """Rows of all contenders on every shape.

    ``inputs`` makes one set of arguments, the first of them a tensor: the ring is sized by it and a copy of it is
    the yardstick.
    """
    table = {name: case for name, case in table.items() if chosen.only in name}
    rows: list[Row] = []
    for shape in shapes[: chosen.shapes]:
        torch._dynamo.reset()
        arguments = ring(lambda shape=shape: inputs(shape))
        first = arguments[0][0]
        target = torch.empty_like(first)
        contenders: Table = {
            COPY: (lambda x, *_, target=target: target.copy_(x), 2 * first.nbytes / shape.elements),
            **table,
        }
        times = time_in_turns(
            {name: run for name, (run, _) in contenders.items()},
            arguments,
            chosen.repeats,
            device=chosen.device,
        )
        rows += summarize(shape, {name: size for name, (_, size) in contenders.items()}, times)
        del arguments, first, target, contenders
        if chosen.device == "cuda":
            torch.cuda.empty_cache()
    return rows


def compare(
    chosen: Namespace,
    shapes: Sequence[Shape],
    make: Callable[..., tuple[Any, ...]],
    kernels: Table,
    references: Table,
    peers: Table,
) -> list[Row]:
    """Rows of kernels and their peers, once the kernels equal the references of the same names.

    ``make``: of (rows, columns) and a device, the CPU if left out, the arguments.
    """
    if kernels and not chosen.skip_gate:
        gate(kernels, references, make)
    return measure(
        chosen, shapes, lambda shape: make((shape.rows, shape.columns), "cuda"), {**kernels, **peers}
    )


def summarize(
    shape: Shape, bytes_per_element: Mapping[str, float], times: Mapping[str, Sequence[float]]
) -> list[Row]:
    """One row per contender from microseconds per launch.

    ``share`` is the contender's bytes per second over the copy's; ``vs_<peer>`` the peer's time over the kernel's.
    """
    copy_rate = bytes_per_element[COPY] * shape.elements / statistics.median(times[COPY])
    peers = {peer for peer in RATIOS if any(name.startswith(f"{peer}: ") for name in bytes_per_element)}
    rows: list[Row] = []
    for name, per_element in bytes_per_element.items():
        microseconds = spread(times[name], "us")
        median = statistics.median(times[name])
        rate = per_element * shape.elements / median
        row: Row = {"name": shape.name, "shape": str(shape), "kernel": name, "bytes": round(per_element, 4)}
        row |= {f"us_{key[:3]}": round(float(str(value)), 2) for key, value in microseconds.items()}
        row |= {"TB/s": round(rate / 1e6, 3), "share": round(rate / copy_rate, 3)}
        for peer, column in RATIOS.items():
            if peer in peers:
                times_of_peer = times.get(f"{peer}: {name}")
                row[column] = round(statistics.median(times_of_peer) / median, 2) if times_of_peer else ""
        rows.append(row)
    return rows
