"""The GEMM's scale order: the golden permutation, its formula, and its inverse."""

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import golden_vectors
import pytest
import torch

from narrowcast.reference import swizzle

from .checks import assert_bitwise, assert_fresh


def test_golden(device: torch.device) -> None:
    golden = golden_vectors.load("scale_swizzle")
    swizzled = swizzle.swizzle_scales(golden["compact"].to(device))
    assert_bitwise(swizzled.cpu(), golden["swizzled"])
    assert_bitwise(swizzle.unswizzle_scales(swizzled).cpu(), golden["compact"])


@pytest.mark.parametrize("shape", [(128, 4), (256, 4), (128, 12), (384, 8)])
def test_every_byte_goes_where_the_formula_says(shape: tuple[int, int]) -> None:
    rows, columns = shape
    scales = torch.randint(0, 256, shape, dtype=torch.uint8)
    r, c = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    offset = ((r // 128) * (columns // 4) + c // 4) * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4
    expected = torch.empty(rows * columns, dtype=torch.uint8)
    expected[offset.flatten()] = scales.flatten()
    swizzled = swizzle.swizzle_scales(scales)
    assert torch.equal(swizzled.flatten(), expected)
    assert torch.equal(swizzle.unswizzle_scales(swizzled), scales)
    assert torch.equal(swizzle.swizzle_scales(scales.t().contiguous().t()), swizzled)
    assert_fresh([swizzled], [scales])


def _to_blocked() -> Callable[[torch.Tensor], torch.Tensor]:
    """PyTorch's, out of a module that imports what is not installed with it."""
    path = Path(torch.__file__).parent / "testing/_internal/common_quantized.py"
    wanted = [
        node
        for node in ast.parse(path.read_text()).body
        if getattr(node, "name", "") in ("ceil_div", "to_blocked")
    ]
    names: dict[str, Any] = {"torch": torch}
    exec(compile(ast.Module(wanted, []), str(path), "exec"), names)
    return names["to_blocked"]


@pytest.mark.parametrize("shape", [(128, 4), (1, 1), (33, 5), (257, 9), (512, 36)])
def test_order_is_that_of_pytorch(shape: tuple[int, int]) -> None:
    """PyTorch's own tests of ``scaled_mm`` rearrange scales so for GPUs of compute capability 10."""
    rows, columns = shape
    scales = torch.randint(0, 256, shape, dtype=torch.uint8)
    padded = torch.zeros(-(-rows // 128) * 128, -(-columns // 4) * 4, dtype=torch.uint8)
    padded[:rows, :columns] = scales
    assert torch.equal(swizzle.swizzle_scales(padded).flatten(), _to_blocked()(scales))


@pytest.mark.parametrize("shape", [(0, 4), (128, 0)])
def test_empty(shape: tuple[int, int]) -> None:
    assert swizzle.swizzle_scales(torch.empty(shape, dtype=torch.uint8)).shape == shape


@pytest.mark.parametrize("shape", [(127, 4), (128, 3), (128,), (1, 128, 4)])
def test_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    for function in (swizzle.swizzle_scales, swizzle.unswizzle_scales):
        with pytest.raises(ValueError, match="pad them to a multiple of 128 rows and 4 columns"):
            function(torch.zeros(shape, dtype=torch.uint8))
