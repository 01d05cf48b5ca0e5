"""Rotary embeddings: the kernel against a device copy of the same bytes, eager PyTorch and torch.compile.

Every byte of the queries is read once and written once; the tables of cosines and sines are small beside them.
"""

from __future__ import annotations

from argparse import Namespace

import torch
from harness import TENSORS, Row, Table, compare, compiled, parser, report_on_gpu
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


def measure(chosen: Namespace) -> list[Row]:
    kernel: Table = {NAME: (lambda x, cos, sin: [rotate(x, cos, sin, None, False, False, False)], BYTES)}
    peers: Table = {f"torch: {NAME}": (expression, BYTES)}
    if not chosen.skip_compile:
        peers = {**peers, **compiled({NAME: (expression, BYTES)})}
    return compare(chosen, TENSORS, random_queries, kernel, kernel, peers)


def main() -> None:
    report_on_gpu("rope", measure, parser(__doc__).parse_args())


if __name__ == "__main__":
    main()
