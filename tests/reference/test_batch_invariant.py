"""Products and exponentials of rows that do not depend on each other: their edges; bits are in ``nn/``."""

from __future__ import annotations

import torch

from narrowcast.reference import batch_invariant


def test_a_contraction_is_in_one_part_unless_it_is_told() -> None:
    left, right = torch.randn(5, 1000), torch.randn(7, 1000)
    whole = batch_invariant.matmul(left, right)
    assert torch.equal(whole, batch_invariant.matmul(left, right, splits=1))
    assert not torch.equal(whole, batch_invariant.matmul(left, right, splits=8))
    torch.testing.assert_close(whole, left @ right.mT, rtol=1e-5, atol=1e-4)
