"""State in few bits: what comes back, and what must not be lost."""

from __future__ import annotations

import pytest
import torch

from narrowcast.optimizers.stored import decode, encode
from narrowcast.reference.adam import join, split

ERRORS = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.uint8: 2.0**-4}


@pytest.mark.parametrize("dtype", ERRORS, ids=str)
@pytest.mark.parametrize("is_square", [False, True])
def test_round_trip(dtype: torch.dtype, is_square: bool) -> None:
    values = 1e-7 * torch.randn(64, 3)
    values = values.square() if is_square else values
    stored, scale = encode(values, dtype, is_square)
    assert stored.dtype == dtype and stored.shape == values.shape
    assert (scale is not None) == (dtype in (torch.float16, torch.uint8))
    error = (decode(stored, scale, is_square) - values).abs()
    allowed = ERRORS[dtype] * (2.1 if is_square else 1) * values.abs()  # a root's error counts twice
    assert (error <= allowed + 2.0**-12 * values.abs().max()).all()


def test_second_moments_do_not_vanish() -> None:
    """Adam divides by their root."""
    values = torch.tensor([1.0, 1e-30, 0.0])
    for dtype in (torch.float16, torch.uint8):
        made = decode(*encode(values, dtype, True), True)
        assert made[1] > 0 and made[2] == 0
    assert not decode(*encode(torch.zeros(3), torch.uint8, True), True).any()
    assert encode(torch.zeros(0), torch.uint8, False)[0].shape == (0,)


def test_remainders_are_exact() -> None:
    inf = float("inf")
    some = torch.tensor([0.0, -0.0, 1.0, 1 + 2**-8, -1 - 2**-8, 3.4e38, 1e-42, inf, -inf])
    values = torch.cat((some, torch.randn(5000)))
    high, low = split(values)
    assert (high.dtype, low.dtype) == (torch.bfloat16, torch.int16)
    assert torch.equal(join(high, low).view(torch.int32), values.view(torch.int32))
    assert (high.float() - values)[9:].abs().le(2.0**-8 * values[9:].abs()).all()
    gpu_nan = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    high, low = split(gpu_nan)
    assert high.isnan() and join(high, low).isnan()
