"""The swizzle kernel: the golden permutation, the reference on every shape of tiles, and its inverse."""

from __future__ import annotations

import golden_vectors
import pytest
import torch
from reference.checks import assert_bitwise, assert_fresh, awkward_layouts

from narrowcast import kernels
from narrowcast.reference import swizzle as reference


def test_golden(device: torch.device) -> None:
    golden = golden_vectors.load("scale_swizzle")
    swizzled = kernels.swizzle.swizzle_scales(golden["compact"].to(device))
    assert_bitwise(swizzled, golden["swizzled"])
    assert_bitwise(kernels.swizzle.unswizzle_scales(swizzled), golden["compact"])


@pytest.mark.parametrize(
    "shape", [(128, 4), (256, 4), (128, 12), (384, 8), (128, 1028), (640, 36), (0, 4), (128, 0)], ids=str
)
def test_equals_the_reference(shape: tuple[int, int], device: torch.device) -> None:
    scales = torch.randint(0, 256, shape, dtype=torch.uint8)
    source = scales.to(device)
    for name in ("swizzle_scales", "unswizzle_scales"):
        result = getattr(kernels.swizzle, name)(source)
        assert_bitwise(result, getattr(reference, name)(scales), name)
        assert_fresh([result], [source])


def test_any_layout(device: torch.device) -> None:
    scales = torch.randint(0, 256, (256, 8), dtype=torch.uint8, device=device)
    expected = kernels.swizzle.swizzle_scales(scales)
    for name, strided in awkward_layouts(scales).items():
        assert_bitwise(kernels.swizzle.swizzle_scales(strided), expected, name)
    shifted = torch.cat([scales.new_zeros(1), scales.flatten()])[1:].view(256, 8)
    assert_bitwise(kernels.swizzle.swizzle_scales(shifted), expected, "misaligned")


@pytest.mark.parametrize("shape", [(127, 4), (128, 3), (128,), (1, 128, 4)], ids=str)
def test_refuses(shape: tuple[int, ...], device: torch.device) -> None:
    for function in (kernels.swizzle.swizzle_scales, kernels.swizzle.unswizzle_scales):
        with pytest.raises(ValueError, match="pad them to a multiple of 128 rows and 4 columns"):
            function(torch.zeros(shape, dtype=torch.uint8, device=device))
        with pytest.raises(ValueError, match=r"scales of torch.float32; view them as torch.uint8"):
            function(torch.zeros(128, 4, device=device))
