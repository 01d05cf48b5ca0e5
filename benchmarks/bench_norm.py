"""RMSNorm, with and without a residual to add, and its backward, written straight as FP8 or FP4 in both directions.

Peers: our norm followed by our quantization, torch.compile of the whole expression, and where it is installed Liger's
kernel followed by our quantization. `bytes` is per element: RMSNorm reads 2, with a residual 4, of which the sum is
also written (2); the backward reads input and gradient (4). Statistics and weights are too few to count.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch
from harness import HIDDEN, Row, parser, report_on_gpu
from peers import liger
from producers import Producer, rows_of
from torch import Tensor

EPS = 1e-5
NORMALIZATION = "RMSNorm"
ZERO_CENTERED = False


def rmsnorm(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The norm and what its backward needs."""
    values = x.float()
    rstd = torch.rsqrt(values.square().mean(1, keepdim=True) + EPS)
    return (values * rstd * weight.float()).to(x.dtype), rstd


def add_rmsnorm(x: Tensor, weight: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
    summed = x + residual
    return *rmsnorm(summed, weight), summed


def rmsnorm_backward(x: Tensor, weight: Tensor, grad: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of the input and of the weight."""
    normalized = x.float() * rstd.unsqueeze(1)
    weighted = grad.float() * weight.float()
    projection = (normalized * weighted).mean(1, keepdim=True)
    dx = ((weighted - normalized * projection) * rstd.unsqueeze(1)).to(x.dtype)
    return dx, (grad.float() * normalized).sum(0).to(weight.dtype)


def _norm(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> tuple[Any, ...]:
    """What ``functional.norm`` takes, in its order."""
    return x, residual, weight, None, EPS, NORMALIZATION, ZERO_CENTERED


def _norm_backward(x: Tensor, weight: Tensor, grad: Tensor, rstd: Tensor) -> tuple[Any, ...]:
    """What ``functional.norm_backward`` takes, in its order; RMSNorm has no mean."""
    return grad, x, weight, rstd.new_empty(0), rstd, ZERO_CENTERED, None


PLAIN = {
    "rmsnorm": Producer(
        "norm",
        _norm,
        rmsnorm,
        reads=(2.0, 2.0),
        liger=(lambda x, weight: liger.rmsnorm_forward(x, weight, EPS)) if liger.AVAILABLE else None,
    ),
}
RESIDUAL = {
    "add+rmsnorm": Producer(
        "norm",
        _norm,
        add_rmsnorm,
        reads=(4.0, 2.0),  # a second pass reads the sum
        writes=2.0,
        liger=(lambda x, weight, residual: liger.add_rmsnorm_forward(x, residual, weight, EPS)[0])
        if liger.AVAILABLE
        else None,
    ),
}
BACKWARD = {
    "drmsnorm": Producer("norm_backward", _norm_backward, rmsnorm_backward, reads=(4.0, 4.0)),
}


def plain_input(shape: tuple[int, int], device: str = "cpu") -> tuple[Tensor, ...]:
    x = torch.randn(shape, dtype=torch.bfloat16, device=device)
    return x, torch.randn(shape[1], dtype=torch.bfloat16, device=device)


def residual_input(shape: tuple[int, int], device: str = "cpu") -> tuple[Tensor, ...]:
    return *plain_input(shape, device), torch.randn(shape, dtype=torch.bfloat16, device=device)


def backward_input(shape: tuple[int, int], device: str = "cpu") -> tuple[Tensor, ...]:
    x, weight, grad = residual_input(shape, device)
    return x, weight, grad, torch.rsqrt(x.float().square().mean(1) + EPS)


def measure(chosen: Namespace) -> list[Row]:
    cases = ((PLAIN, plain_input), (RESIDUAL, residual_input), (BACKWARD, backward_input))
    return [row for case in cases for row in rows_of(*case, HIDDEN, chosen)]


def main() -> None:
    report_on_gpu("norm", measure, parser(__doc__).parse_args())


if __name__ == "__main__":
    main()
