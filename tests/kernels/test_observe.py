"""Statistics of quantizing: the kernel counts as the reference does, and adds in another order."""

from __future__ import annotations

import pytest
import torch

from narrowcast import kernels, reference


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(3, 5), (70, 4096)])
def test_the_kernel_counts_as_the_reference(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator).to(dtype).to(device)
    read = torch.where(x.abs() < 0.1, 0, x.float() * 1.01)
    x[0, :2] = 0
    ceiling = torch.full(shape, 2.0, device=device)
    ours, theirs = (module.observe.loss(x, read, ceiling, 1.03) for module in (kernels, reference))
    counts = [0, 1, 4, 5]
    assert torch.equal(ours[counts], theirs[counts])
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)


def test_not_a_number_is_the_largest(device: torch.device) -> None:
    x = torch.tensor([[1.0, float("nan")]], device=device)
    for module in (kernels, reference):
        assert module.observe.loss(x, x, x.abs(), 1.0)[1].isnan()
