"""Rows of groups padded to a multiple, and back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from recipes import DEVICE, RECIPES

import narrowcast as nc

SPLITS = [5, 0, 16, 1]


def rows(count: int = sum(SPLITS), dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(count, 24, generator=generator).to(DEVICE, dtype).requires_grad_()


@pytest.mark.parametrize(("align_size", "compiled"), [(1, False), (4, False), (16, False), (16, True)])
def test_there_and_back(align_size: int, compiled: bool) -> None:
    pad, unpad = nc.Fp8Padding(4, align_size), nc.Fp8Unpadding(4, align_size=align_size)

    def both(x: torch.Tensor) -> tuple[torch.Tensor, list[int], torch.Tensor]:
        padded, splits = pad(x, SPLITS)
        return padded, splits, unpad(padded, SPLITS)

    x = rows()
    forward = torch.compile(both, fullgraph=True, backend="aot_eager") if compiled else both
    padded, splits, back = forward(x)
    assert splits == [-(-size // align_size) * align_size for size in SPLITS]
    assert padded.shape == (sum(splits), 24)
    for own, theirs in zip(padded.split(splits), x.split(SPLITS)):
        assert torch.equal(own[: len(theirs)], theirs) and not own[len(theirs) :].any()
    assert torch.equal(back, x)
    weights = torch.arange(padded.numel(), dtype=torch.float32).view(padded.shape).to(DEVICE, x.dtype)
    (dx,) = torch.autograd.grad((padded * weights).sum() + back.sum(), [x])
    expected = torch.cat([w[:size] for w, size in zip(weights.split(splits), SPLITS)]) + 1
    assert torch.equal(dx, expected)


@pytest.mark.parametrize(("name", "align"), [("mxfp8", 32), ("nvfp4", 64), ("current", 16), ("block", 16)])
def test_the_recipe_in_force_decides(name: str, align: int) -> None:
    pad, unpad, x = nc.Fp8Padding(4), nc.Fp8Unpadding(4), rows()
    with nc.autocast(recipe=RECIPES[name]):
        padded, splits = pad(x, SPLITS)
        assert splits == [-(-size // align) * align for size in SPLITS]
        assert torch.equal(unpad(padded, SPLITS), x)
    default = 32 if nc.get_default_recipe().mxfp8() else 16
    assert pad(x, SPLITS)[1] == [-(-size // default) * default for size in SPLITS]


def test_padded_groups_are_those_of_a_grouped_layer() -> None:
    layer = nc.GroupedLinear(4, 24, 16, bias=False, device=DEVICE, dtype=torch.bfloat16)
    pad, unpad, x = nc.Fp8Padding(4, 16), nc.Fp8Unpadding(4, 16), rows()
    padded, splits = pad(x, SPLITS)
    assert torch.equal(unpad(layer(padded, splits), SPLITS), layer(x, SPLITS))


def test_nothing_to_pad_copies_nothing() -> None:
    x = rows(32)
    padded, splits = nc.Fp8Padding(2, 16)(x, [16, 16])
    assert padded.data_ptr() == x.data_ptr() and splits == [16, 16]
    assert nc.Fp8Unpadding(2, 16)(padded, [16, 16]).data_ptr() == x.data_ptr()
    assert nc.Fp8Padding(2, 16)(x.view(4, 8, 24), [20, 12])[0].shape == (48, 24)
    assert nc.Fp8Padding(1)(x[:0], [0])[0].shape == (0, 24)


def test_what_cannot_be() -> None:
    pad, unpad, x = nc.Fp8Padding(2, 16), nc.Fp8Unpadding(2, 16), rows(20)
    splits: Any
    for splits in (torch.tensor([10, 10]), [10.0, 10.0]):
        for module in (pad, unpad):
            with pytest.raises(TypeError, match="m_splits is .* list of ints"):
                module(x, splits)
    for module in (pad, unpad):
        with pytest.raises(ValueError, match="3 entries; give one for each of the 2 groups"):
            module(x, [10, 5, 5])
    with pytest.raises(ValueError, match="whose sum is the 20 rows"):
        pad(x, [10, 11])
    with pytest.raises(ValueError, match=r"input has 20 rows; \[10, 10\] padded to multiples of 16 are 32"):
        unpad(x, [10, 10])
    for arguments in ({"num_gemms": 0}, {"num_gemms": 2, "align_size": 0}):
        with pytest.raises(ValueError, match="0"):
            nc.Fp8Padding(**arguments)
