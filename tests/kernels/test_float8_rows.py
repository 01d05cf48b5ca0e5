"""FP8 rows and groups by the rules of engines: the kernel against the reference, byte for byte."""

from __future__ import annotations

import functools

import pytest
import torch

from narrowcast import kernels
from narrowcast.formats import E4M3, E5M2
from narrowcast.reference import float8_rows as reference

from .checks import DTYPES, compare, make

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, of numpy

KINDS = ("normal", "special", "tiny", "huge", "ties", "zeros")
SHAPES = [(1, 7), (7, 1), (33, 130), (3, 5, 128), (2, 5000), (65, 300), (0, 8), (8, 0)]


@pytest.mark.parametrize("rule", reference.RULES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equal_to_the_reference(shape: tuple[int, ...], rule: str, device: torch.device) -> None:
    at = SHAPES.index(shape)
    bounds = ((0, 1, 0.0, 0.0), (128, 4, 1e-10, 0.0), (128, 4, 0.0, 1.0 / (448 * 512)))
    for i, (group, alignment, epsilon, smallest) in enumerate(bounds):
        kind, dtype = KINDS[(at + i) % len(KINDS)], DTYPES[(at + i) % 3]
        options = {"fmt": E5M2 if dtype == torch.float16 else E4M3, "rule": rule, "epsilon": epsilon}
        options |= {"smallest": smallest, "group": group, "alignment": alignment}
        compare(
            functools.partial(kernels.float8_rows.quantize, **options),
            functools.partial(reference.quantize, **options),
            make(kind, shape, dtype),
            device,
            f"{rule}, groups of {group}, {kind}",
        )
