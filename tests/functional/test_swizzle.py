"""The operators that reorder scales: true fakes, no aliasing, traced under fullgraph."""

from __future__ import annotations

import pytest
import torch
from reference.checks import assert_bitwise, assert_fresh
from torch import Tensor

from narrowcast import functional, reference

OPERATORS = {
    "swizzle": (functional.swizzle_scales, reference.swizzle.swizzle_scales),
    "unswizzle": (functional.unswizzle_scales, reference.swizzle.unswizzle_scales),
}


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("shape", [(128, 4), (384, 12), (0, 4), (128, 0)], ids=str)
def test_equals_the_reference(name: str, shape: tuple[int, int]) -> None:
    operator, expected = OPERATORS[name]
    overload = getattr(torch.ops.narrowcast, f"{name}_scales").default
    scales = torch.randint(0, 256, shape, dtype=torch.uint8)
    out = operator(scales)
    assert_bitwise(out, expected(scales))
    assert_fresh([out], [scales])
    strided = torch.randint(0, 256, (shape[1], shape[0]), dtype=torch.uint8).t()
    for x in (scales, strided):
        torch.library.opcheck(overload, (x,))


def test_traced() -> None:
    def both(scales: Tensor) -> tuple[Tensor, Tensor]:
        swizzled = functional.swizzle_scales(scales)
        return swizzled, functional.unswizzle_scales(swizzled)

    compiled = torch.compile(both, fullgraph=True, dynamic=True, backend="aot_eager")
    for shape in ((128, 4), (256, 8)):
        scales = torch.randint(0, 256, shape, dtype=torch.uint8)
        swizzled, back = compiled(scales)
        assert_bitwise(swizzled, reference.swizzle.swizzle_scales(scales))
        assert_bitwise(back, scales)


def test_other_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="pad them to a multiple of 128 rows and 4 columns"):
        functional.swizzle_scales(torch.zeros(127, 4, dtype=torch.uint8))
