"""Attention of one query per sequence: what the reference computes, but for the order of sums."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from narrowcast import reference

from .checks import make
from .conftest import HAS_TRITON

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="needs triton")
if HAS_TRITON:
    from narrowcast.kernels import decode_attention as kernel

CASES = [
    # batch, heads, groups, dims, longest, window, sink: one part and several, heads of keys alone and in groups
    (2, 8, 2, (64, 64), 300, -1, False), (1, 4, 4, (16, 8), 700, -1, True), (3, 5, 1, (128, 128), 129, 33, True),
    (2, 2, 2, (80, 48), 1, -1, False), (1, 17, 1, (64, 64), 650, 300, True), (4, 2, 1, (7, 20), 63, 0, False),
]  # fmt: skip


def sums(lengths: list[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=device)


@pytest.mark.parametrize("case", range(len(CASES)))
def test_equals_the_reference(case: int, device: torch.device) -> None:
    batch, heads, groups, (dim, dim_v), longest, window, with_sink = CASES[case]
    dtype = (torch.bfloat16, torch.float16)[case % 2]
    q = make("normal", (batch, heads, dim), dtype, 1).to(device)
    k = make("normal", (batch, longest, groups, dim), dtype, 2).to(device)
    v = make("normal", (batch, longest, groups, dim_v), dtype, 3).to(device)
    lengths = [longest, longest // 3, 0, 1][:batch]
    queries = [1, 1, 1, 0][:batch]
    for row, length in enumerate(lengths):  # what a cache holds behind the last token is never read
        k[row, length:], v[row, length:] = float("nan"), float("inf")
    sink = make("normal", (heads,), torch.float32, 4).to(device) if with_sink else None
    given = q, k, v, sums(queries, device), sums(lengths, device), sink, dim**-0.5, window
    made, wanted = kernel.attend(*given), reference.decode_attention.attend(*given)
    assert made.shape == (batch, heads, dim_v) and made.dtype == dtype and made.is_contiguous()
    assert not made[2:].any(), "there is no key, or no query"
    # weights are rounded to the dtype of the values, whose average they make, and the result once more
    bound = 2 * torch.finfo(dtype).eps * v.nan_to_num(0.0, 0.0).float().abs().amax()
    assert bool(((made.float() - wanted.float()).abs() <= bound).all())


def test_reads_a_view_of_a_cache(device: torch.device) -> None:
    """Strides of batch, tokens and heads are read; a head dim that is not contiguous is copied."""
    q = make("normal", (2, 4, 32), torch.bfloat16, 1).to(device)
    cache = make("normal", (3, 4, 40, 32), torch.bfloat16, 2).to(device)
    views = cache[1:, ::2].transpose(1, 2), cache.transpose(2, 3).contiguous().mT[:2, 1:3].transpose(1, 2)
    lengths = sums([1, 1], device), sums([40, 17], device), None, 0.2, -1
    for k, v in (views, views[::-1]):
        made = kernel.attend(q, k, v, *lengths)
        assert torch.equal(made, kernel.attend(q, k.contiguous(), v.contiguous(), *lengths))


@pytest.mark.parametrize(
    ("programs", "keys", "splits"), [(8, 1024, 8), (8, 32768, 64), (512, 1024, 1), (1, 255, 1)]
)
def test_parts_of_a_sequence(programs: int, keys: int, splits: int) -> None:
    assert kernel.splits_of(programs, keys) == splits
