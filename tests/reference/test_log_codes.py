"""Codes of logarithms: what comes back, and that nothing moves when it is encoded again."""

from __future__ import annotations

import math

import pytest
import torch

from narrowcast.reference import log_codes
from narrowcast.reference.log_codes import decode, encode

from .checks import assert_bitwise


def gradients(kind: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(63, 1000, generator=generator)
    exponents = torch.randint(-100, 100, x.shape, generator=generator).float()
    return {
        "normal": x,
        "small": 1e-25 * x,
        "squares": (1e-18 * x).square(),  # subnormal ones among them
        "narrow": 30 + 0.01 * x,
        "mean squares": 1e-9 * torch.randn(64, 100, 127, generator=generator).square().mean(0),
        "any": x * exponents.exp2(),
        "few": x[:1, :7],
    }[kind]


@pytest.mark.parametrize("kind", ["normal", "small", "squares", "narrow", "mean squares", "any", "few"])
def test_what_is_encoded_again_has_the_same_codes(kind: str) -> None:
    x = gradients(kind)
    codes, ranges = encode(x)
    assert codes.shape == x.shape and ranges.shape == (log_codes.groups_of(x.numel()), 2)
    values = decode(codes, ranges)
    for again, first in zip(encode(values), (codes, ranges)):
        assert_bitwise(again, first, kind)
    assert torch.equal(values == 0, x == 0) and torch.equal(values.signbit(), x.signbit())
    assert abs(values.abs().max() / x.abs().max() - 1) < 2e-3


@pytest.mark.parametrize("kind, mean, largest", [("normal", 0.013, 0.3), ("mean squares", 0.003, 0.06)])
def test_errors(kind: str, mean: float, largest: float) -> None:
    """E4M3 with a scale errs by .022 in the mean, by a third at its smallest code."""
    x = gradients(kind)
    errors = (decode(*encode(x)) / x - 1).abs()
    assert errors.mean() < mean and errors.max() < largest


def test_values_that_are_not_finite_and_zeros() -> None:
    x = torch.ones(3, 128)
    x[0, 5], x[1, 7] = math.nan, -math.inf
    codes, ranges = encode(x)
    assert (codes[:2] == 255).all() and ranges[:2].isnan().all() and decode(codes, ranges)[:2].isnan().all()
    assert torch.equal(decode(codes, ranges)[2], x[2])
    codes, ranges = encode(torch.tensor([0.0, -0.0, 2.0, -4.0]))
    assert codes.tolist() == [0, 128, 1, 254]
    values = decode(codes, ranges)
    assert values.tolist() == [0.0, 0.0, 2.0, -4.0] and values.signbit().tolist() == [
        False,
        True,
        False,
        True,
    ]
    codes, ranges = encode(torch.zeros(2, 65))
    assert (
        not codes.any()
        and not decode(codes, ranges).any()
        and not decode(codes, torch.zeros_like(ranges)).any()
    )
    codes, ranges = encode(torch.zeros(0, 3))
    assert codes.shape == (0, 3) and ranges.shape == (0, 2) and decode(codes, ranges).shape == (0, 3)


def test_logarithms_and_powers() -> None:
    generator = torch.Generator().manual_seed(1)
    x = (1 + torch.rand(9999, generator=generator)) * torch.randint(-126, 127, (9999,)).float().exp2()
    assert (log_codes.log2(x).double() - x.double().log2()).abs().max() < 1e-4
    special = log_codes.log2(torch.tensor([0.0, 1e-40, math.inf, math.nan]))
    assert (special[:2] >= -127).all() and (special[:2] <= -126).all() and (special[2:] >= 128).all()
    whole = torch.arange(-126, 128).float()
    assert torch.equal(log_codes.exp2(whole), whole.exp2())
    y = 250 * torch.rand(9999, generator=generator) - 125
    assert (log_codes.exp2(y).double() / y.double().exp2() - 1).abs().max() < 1.1e-4


def test_magnitudes_below_the_smallest_normal_one_count_as_it() -> None:
    for x in (torch.tensor([[2.0**-126, 2.0**-130, -(2.0**-140), 0.0]]), torch.tensor([[2.0**-130, 0.0]])):
        codes, ranges = encode(x)
        values = decode(codes, ranges)
        assert torch.equal(values == 0, x == 0)
        assert ((values.abs() <= 2.0**-125.9) & (values.abs() >= 2.0**-126.1))[x != 0].all()
        for again, first in zip(encode(values), (codes, ranges)):
            assert_bitwise(again, first, "subnormal")
