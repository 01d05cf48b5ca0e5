"""Transposing FP8 codes: the kernel against a device copy of the same bytes, eager PyTorch and torch.compile.

Per-tensor FP8 needs the transposed bytes where only the row-wise ones were made, as after an all-gather. Every byte is
read once and written once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from harness import TENSORS, Shape, compiled, gate, measure, parser, report, runs_on_gpu
from torch import Tensor

from narrowcast.functional import transpose_codes

NAME = "transpose fp8"
BYTES = 2.0


def expression(data: Tensor) -> Tensor:
    return data.t().contiguous()


def random_codes(shape: tuple[int, int], device: str = "cpu") -> tuple[Tensor]:
    return (torch.randint(0, 256, shape, dtype=torch.uint8, device=device),)


def main() -> None:
    chosen = parser(__doc__).parse_args()
    if not runs_on_gpu(chosen):
        return
    table: dict[str, tuple[Callable[[Tensor], Any], float]]
    table = {NAME: (lambda data: [transpose_codes(data)], BYTES)}
    if not chosen.skip_gate:
        gate(table, table, random_codes)
    table[f"torch: {NAME}"] = (expression, BYTES)
    if not chosen.skip_compile:
        table |= compiled({NAME: (expression, BYTES)})

    def inputs(shape: Shape) -> tuple[Tensor]:
        return random_codes((shape.rows, shape.columns), "cuda")

    report("transpose", measure(chosen, TENSORS, inputs, table), chosen)


if __name__ == "__main__":
    main()
