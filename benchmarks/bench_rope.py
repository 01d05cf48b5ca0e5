"""Rotary embeddings: the kernel against a device copy of the same bytes, eager PyTorch and torch.compile.

Every byte of the queries is read once and written once; the tables of cosines and sines are small beside them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from harness import TENSORS, Shape, compiled, gate, measure, parser, report, runs_on_gpu
from torch import Tensor

from narrowcast.functional import rotate

NAME = "rotate bf16"
BYTES = 4.0
DIM = 128


def expression(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    wide = x.float()
    first, second = wide.chunk(2, -1)
    return (wide * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]).to(x.dtype)


def random_queries(shape: tuple[int, int], device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """One sequence of ``shape[0]`` tokens, heads of ``DIM`` channels, and the tables."""
    x = torch.randn(1, shape[0], max(shape[1] // DIM, 1), DIM, dtype=torch.bfloat16, device=device)
    angles = torch.rand(shape[0], DIM, device=device)
    return x, angles.cos(), angles.sin()


def main() -> None:
    chosen = parser(__doc__).parse_args()
    if not runs_on_gpu(chosen):
        return
    table: dict[str, tuple[Callable[..., Any], float]]
    table = {NAME: (lambda x, cos, sin: [rotate(x, cos, sin, None, False, False, False)], BYTES)}
    if not chosen.skip_gate:
        gate(table, table, random_queries)
    table[f"torch: {NAME}"] = (expression, BYTES)
    if not chosen.skip_compile:
        table |= compiled({NAME: (expression, BYTES)})

    def inputs(shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
        return random_queries((shape.rows, shape.columns), "cuda")

    report("rope", measure(chosen, TENSORS, inputs, table), chosen)


if __name__ == "__main__":
    main()
