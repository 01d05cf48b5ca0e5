"""SwiGLU, forward and backward, written straight as FP8 or FP4 in both directions.

Peers: our activation followed by our quantization, torch.compile of the whole expression, and where it is installed
Liger's kernel followed by our quantization. The shape is that of the activation's output, so `bytes` is per output
element: SwiGLU reads 4, its gradient reads 6 and writes two quantized elements.
"""

from __future__ import annotations

from argparse import Namespace

import torch
import torch.nn.functional as F
from harness import FFN, Row, parser, report_on_gpu
from peers import liger
from producers import Producer, rows_of
from torch import Tensor

ACTIVATION = "swiglu"


def swiglu(x: Tensor) -> tuple[Tensor]:
    a, b = x.float().chunk(2, -1)
    return ((F.silu(a) * b).to(x.dtype),)


def swiglu_backward(x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of the two halves, side by side, and their column sums: the gradient of a bias."""
    a, b = x.float().chunk(2, -1)
    g = grad.float()
    s = torch.sigmoid(a)
    dx = torch.cat((g * b * (s * (1 + a * (1 - s))), g * (a * s)), -1).to(x.dtype)
    return dx, dx.float().sum(0)


FORWARD = {
    "swiglu": Producer(
        "act",
        lambda x: (x, ACTIVATION),
        swiglu,
        options=([],),
        reads=(4.0, 4.0),
        liger=liger.swiglu_forward if liger.AVAILABLE else None,
    ),
}
BACKWARD = {
    "dswiglu": Producer(
        "act_backward",
        lambda x, grad: (grad, x, ACTIVATION),
        swiglu_backward,
        options=([], True),
        reads=(6.0, 6.0),
        outputs=2,
        dbias=True,
        liger=(lambda x, grad: liger.swiglu_backward(grad, x)) if liger.AVAILABLE else None,
    ),
}


def forward_input(shape: tuple[int, int], device: str = "cpu") -> tuple[Tensor, ...]:
    return (torch.randn(shape[0], 2 * shape[1], dtype=torch.bfloat16, device=device),)


def backward_input(shape: tuple[int, int], device: str = "cpu") -> tuple[Tensor, ...]:
    return *forward_input(shape, device), torch.randn(shape, dtype=torch.bfloat16, device=device)


def measure(chosen: Namespace) -> list[Row]:
    cases = ((FORWARD, forward_input), (BACKWARD, backward_input))
    return [row for case in cases for row in rows_of(*case, FFN, chosen)]


def main() -> None:
    report_on_gpu("activation", measure, parser(__doc__).parse_args())


if __name__ == "__main__":
    main()
