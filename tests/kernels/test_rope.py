"""Kernels of rotary embeddings against the reference, byte for byte."""

from __future__ import annotations

import pytest
import torch
from reference.checks import assert_bitwise, assert_fresh

from narrowcast import kernels
from narrowcast.reference import rope as reference
from narrowcast.reference import scaling

from .checks import DTYPES


@pytest.mark.covering
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("sequence_first", [False, True])
@pytest.mark.parametrize("placed", [0, 1, 2])
@pytest.mark.parametrize(
    "heads, dim, turned, dtype", [(3, 64, 64, DTYPES[0]), (20, 10, 6, DTYPES[1]), (1, 2, 2, DTYPES[2])]
)
def test_one_tensor(
    heads: int,
    dim: int,
    turned: int,
    dtype: torch.dtype,
    placed: int,
    sequence_first: bool,
    interleaved: bool,
    inverse: bool,
    device: torch.device,
) -> None:
    lead = (5, 2) if sequence_first else (2, 5)
    whole = torch.randn(*lead, 3 * heads, dim + 2).to(dtype)
    cos, sin = torch.randn(9, turned), torch.randn(9, turned)
    positions = torch.randint(0, 9, (placed, 5)) if placed else None
    how = (sequence_first, interleaved, inverse)
    expected = reference.rotate(whole[..., ::3, :dim], cos, sin, positions, *how)
    x = whole.to(device)[..., ::3, :dim]
    moved = None if positions is None else positions.to(device)
    ours = kernels.rope.rotate(x, cos.to(device), sin.to(device), moved, *how)
    assert_fresh([ours], [x])
    assert_bitwise(ours, expected)


@pytest.mark.covering
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("sequence_first", [False, True])
@pytest.mark.parametrize("widths", [(64, 32, 32), (24, 8, 12), (5, 5, 1)])
@pytest.mark.parametrize("by_group", [True, False])
def test_a_packed_tensor(
    by_group: bool,
    widths: tuple[int, int, int],
    sequence_first: bool,
    interleaved: bool,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[torch.Tensor] = []  # by the kernel of the gradient, for a graph
    monkeypatch.setattr(kernels.rope, "takes_amax", lambda x: True)
    monkeypatch.setattr(kernels.rope, "keep_amax", lambda x, maxima: taken.extend((x, maxima)))
    lead = (5, 2) if sequence_first else (2, 5)
    qkv = torch.randn(*lead, 3, sum(widths)).bfloat16()
    of_q, of_k = torch.randn(2, 9, widths[1] // 2 * 2), torch.randn(2, 9, 4)
    tables = [*of_q.unbind(0), *of_k.unbind(0)]
    moved = [table.to(device) for table in tables]
    positions = torch.randint(0, 9, (2, 5))
    how = (sequence_first, interleaved)
    expected = reference.rotate_qkv(qkv, tables, positions, *how, widths, by_group)
    ours = kernels.rope.rotate_qkv(qkv.to(device), moved, positions.to(device), *how, widths, by_group)
    for a, b in zip(ours, expected):
        assert_bitwise(a, b)
    grads = [torch.randn_like(x) for x in expected]
    back = kernels.rope.rotate_qkv_backward([x.to(device) for x in grads], moved, None, *how, by_group)
    assert_bitwise(back, reference.rotate_qkv_backward(grads, tables, None, *how, by_group))
    assert len(taken) == 2 and taken[0] is back
    assert_bitwise(taken[1].amax().reshape(1), scaling.amax(back))


def test_nothing_to_turn(device: torch.device) -> None:
    table = torch.ones(4, 8, device=device)
    for shape in ((0, 2, 3, 8), (2, 0, 3, 8)):
        assert (
            kernels.rope.rotate(torch.ones(shape, device=device), table, table, None, False, False).shape
            == shape
        )
