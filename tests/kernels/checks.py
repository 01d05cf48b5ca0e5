"""What the kernel tests share: inputs of every kind, and kernel against reference, byte for byte."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import torch
from reference.checks import assert_bitwise, assert_fresh
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# Ranks, single rows and columns, edges of tiles (16, 32, 64, 128) and their neighbours, odd and word-aligned sizes.
SHAPES_2D = [
    (1, 1), (1, 16), (1, 1000), (2, 3), (3, 130), (5, 128), (7, 1), (15, 17), (16, 16), (17, 15),
    (31, 33), (32, 32), (33, 64), (60, 68), (63, 65), (64, 127), (100, 260), (127, 129), (128, 64), (128, 128),
    (129, 127), (132, 256), (200, 1), (255, 257), (256, 128), (257, 40), (384, 96), (500, 8), (512, 512), (1000, 24),
    (1023, 136), (2, 3, 50), (3, 1, 1, 17), (4, 8, 64), (5, 7, 9), (2, 65, 128), (1, 129, 130), (8, 16, 16, 4),
    (0, 32), (32, 0), (2, 0, 16),
]  # fmt: skip
SHAPES = [(1,), (17,), (8200,), *SHAPES_2D]


def _normal(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator)


def _wide(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    return _normal(shape, generator) * torch.exp2(torch.randint(-24, 25, shape, generator=generator).float())


def _blocks(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Rows and columns in runs of 16 with factors 2**-60 .. 2**60."""
    x = _normal(shape, generator)
    for dim in {0, len(shape) - 1}:
        exponents = torch.randint(-30, 31, (math.ceil(shape[dim] / 16),), generator=generator)
        factors = torch.exp2(exponents.float()).repeat_interleave(16)[: shape[dim]]
        x = x * factors.view([-1 if d == dim else 1 for d in range(len(shape))])
    return x


def _zeros(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    x = _normal(shape, generator)
    x[: shape[0] // 2] = 0.0
    x[..., ::7] = -0.0
    return x


def _tiny(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Subnormals and the smallest normals: the reciprocal of an amax overflows."""
    return _normal(shape, generator) * torch.exp2(
        torch.randint(-139, -120, shape, generator=generator).float()
    )


def _huge(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    return (torch.rand(shape, generator=generator) * 2 - 1) * 3.38e38


def _special(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """NaN of both signs, infinities, whole rows of NaN."""
    x = _normal(shape, generator)
    kind = torch.randint(0, 40, shape, generator=generator)
    for index, value in enumerate((math.nan, -math.nan, math.inf, -math.inf)):
        x = torch.where(kind == index, torch.full_like(x, value), x)
    x[shape[0] // 2 :] = x[shape[0] // 2 :].nan_to_num(nan=0.0, posinf=1.0, neginf=-1.0)
    x[-1] = math.nan
    return x


def _ties(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Few mantissa bits, and a power of two as the largest value: scaled values fall on rounding midpoints."""
    steps = torch.randint(-64, 65, shape, generator=generator).float()
    x = steps * torch.exp2(torch.randint(-6, 3, shape, generator=generator).float())
    x.view(-1)[::16] = 448.0
    return x


KINDS: dict[str, Callable[[Sequence[int], torch.Generator], Tensor]] = {
    "normal": _normal,
    "wide": _wide,
    "blocks": _blocks,
    "zeros": _zeros,
    "tiny": _tiny,
    "huge": _huge,
    "special": _special,
    "ties": _ties,
}


def make(kind: str, shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Reproducible CPU values of one kind; empty shapes give empty tensors."""
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    return KINDS[kind](shape, torch.Generator().manual_seed(seed)).to(dtype)


def grid(shapes: Sequence[Sequence[int]]) -> list[tuple[tuple[int, ...], str, torch.dtype]]:
    """Every shape with every kind of input, the dtypes in turn: one per shape, which bounds the compilations."""
    pairs = itertools.product(enumerate(shapes), KINDS)
    return [(tuple(shape), kind, DTYPES[i % 3]) for (i, shape), kind in pairs]


def compare(
    kernel: Callable[[Tensor], list[Tensor]],
    reference: Callable[[Tensor], list[Tensor]],
    x: Tensor,
    device: torch.device,
    what: str = "",
) -> list[Tensor]:
    """Run the kernel on ``device`` and the reference on the CPU; zero bytes may differ. Returns the kernel's."""
    source = x.to(device)
    before = source.clone()
    actual, expected = kernel(source), reference(x)
    assert len(actual) == len(expected), what
    assert_fresh(actual, [source])
    for index, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert_bitwise(a, b, f"{what} buffer {index} of {tuple(x.shape)} {x.dtype}")
    assert_bitwise(source, before, f"{what}: the input changed")
    return actual
