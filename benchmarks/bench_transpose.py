"""Transposing FP8 codes: the kernel against a device copy of the same bytes, eager PyTorch and torch.compile.

Per-tensor FP8 needs the transposed bytes where only the row-wise ones were made, as after an all-gather. Every byte is
read once and written once.
"""

from __future__ import annotations

from argparse import Namespace

import torch
from harness import TENSORS, Row, Table, compare, compiled, parser, report_on_gpu
from torch import Tensor

from narrowcast.functional import transpose_codes

NAME = "transpose fp8"
BYTES = 2.0


def expression(data: Tensor) -> Tensor:
    return data.t().contiguous()


def random_codes(shape: tuple[int, int], device: str = "cpu") -> tuple[Tensor]:
    return (torch.randint(0, 256, shape, dtype=torch.uint8, device=device),)


def measure(chosen: Namespace) -> list[Row]:
    kernel: Table = {NAME: (lambda data: [transpose_codes(data)], BYTES)}
    peers: Table = {f"torch: {NAME}": (expression, BYTES)}
    if not chosen.skip_compile:
        peers = {**peers, **compiled({NAME: (expression, BYTES)})}
    return compare(chosen, TENSORS, random_codes, kernel, kernel, peers)


def main() -> None:
    report_on_gpu("transpose", measure, parser(__doc__).parse_args())


if __name__ == "__main__":
    main()
