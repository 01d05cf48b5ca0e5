"""Dequantizing to bf16, per format and direction, against a device copy and torch.compile of the same expression.

The operator's result is first compared with the CPU's, byte for byte. Codes and scales are read once, bf16 is written
once; `share` is that traffic per second over the copy's.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from harness import TENSORS, Row, compare, compiled, parser, report_on_gpu
from peers import decoding
from torch import Tensor

import narrowcast as nc
from narrowcast.functional import dequantize, quantize

E4M3 = nc.DType.kFloat8E4M3


class Case(NamedTuple):
    """A quantizer, the bytes per element of its codes and scales, and plain PyTorch that decodes them."""

    quantizer: nc.Quantizer
    encoded: float
    expression: Callable[..., Tensor]
    columnwise: bool = False


ROWS = {"rowwise": True, "columnwise": False}
COLUMNS = {"rowwise": False, "columnwise": True}
CASES = {
    "fp8": Case(nc.Float8CurrentScalingQuantizer(E4M3, **ROWS), 1, decoding.per_tensor),
    "fp8 transposed": Case(
        nc.Float8CurrentScalingQuantizer(E4M3, **COLUMNS), 1, decoding.per_tensor_transposed, True
    ),
    "fp8 128-block 1-D": Case(
        nc.Float8BlockQuantizer(E4M3, block_scaling_dim=1, **ROWS), 1 + 4 / 128, decoding.block_1d
    ),
    "fp8 128-block 1-D columns": Case(
        nc.Float8BlockQuantizer(E4M3, block_scaling_dim=1, **COLUMNS),
        1 + 4 / 128,
        decoding.block_1d_columns,
        True,
    ),
    "fp8 128-block 2-D": Case(
        nc.Float8BlockQuantizer(E4M3, block_scaling_dim=2, **ROWS), 1 + 4 / 128**2, decoding.block_2d
    ),
    "mxfp8": Case(nc.MXFP8Quantizer(E4M3, **ROWS), 1 + 1 / 32, decoding.mxfp8),
    "mxfp8 columns": Case(nc.MXFP8Quantizer(E4M3, **COLUMNS), 1 + 1 / 32, decoding.mxfp8_columns, True),
    "nvfp4": Case(nc.NVFP4Quantizer(**ROWS), 1 / 2 + 1 / 16, decoding.nvfp4),
    "nvfp4 columns": Case(nc.NVFP4Quantizer(**COLUMNS), 1 / 2 + 1 / 16, decoding.nvfp4_columns, True),
}


def operator_table() -> dict[str, tuple[Callable[..., Any], float]]:
    """The operator on the encodings that come beside ``x``."""

    def decode(name: str) -> Callable[..., list[Tensor]]:
        case = CASES[name]
        return lambda x, encoded: [
            dequantize(encoded[name], case.quantizer, case.columnwise, torch.bfloat16, list(x.shape))
        ]

    return {name: (decode(name), 2 + case.encoded) for name, case in CASES.items()}


def expression_table() -> dict[str, tuple[Callable[..., Any], float]]:
    def decode(name: str) -> Callable[..., Tensor]:
        expression = CASES[name].expression
        return lambda x, encoded: expression(*encoded[name])

    return {name: (decode(name), 2 + case.encoded) for name, case in CASES.items()}


def encoded_input(shape: tuple[int, int], device: str = "cpu") -> tuple[Tensor, dict[str, list[Tensor]]]:
    """A bf16 matrix, which only the copy reads, and its encodings."""
    x = torch.randn(shape, dtype=torch.bfloat16, device=device)
    return x, {name: quantize(x, case.quantizer) for name, case in CASES.items()}


def measure(chosen: Namespace) -> list[Row]:
    table = operator_table()
    peers = {} if chosen.skip_compile else compiled(expression_table())
    return compare(chosen, TENSORS, encoded_input, table, table, peers)


def main() -> None:
    report_on_gpu("dequantize", measure, parser(__doc__).parse_args())


if __name__ == "__main__":
    main()
