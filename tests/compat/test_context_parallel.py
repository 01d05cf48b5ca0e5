"""Transformer Engine's helpers for batches of context parallelism."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from narrowcast.compat import context_parallel
from narrowcast.compat.context_parallel import (
    generate_positional_ids_for_cp,
    get_batch_on_this_cp_rank,
    pad_thd_sequences_for_cp,
)

LENGTHS, FACTOR = (3, 1, 8, 4), 4
CU = torch.tensor([0, 3, 4, 12, 16])


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """(number of ranks, own number), which a test may change."""
    own = [2, 0]
    monkeypatch.setattr(context_parallel.dist, "get_world_size", lambda group=None: own[0])
    monkeypatch.setattr(context_parallel.dist, "get_rank", lambda group=None: own[1])
    return own


@pytest.mark.parametrize("batched", [False, True])
def test_padding_and_positions(batched: bool) -> None:
    ids, labels = torch.arange(1, 17), torch.arange(101, 117, dtype=torch.int32)
    given = (ids[None], labels[None]) if batched else (ids, labels)
    padded, padded_labels, sums = pad_thd_sequences_for_cp(*given, CU, FACTOR, -7, -9)
    expected, expected_labels, positions, ends = [], [], [], [0]
    for begin, length in zip(CU.tolist(), LENGTHS):
        missing = -length % FACTOR
        expected += [*ids[begin : begin + length].tolist(), *[-7] * missing]
        expected_labels += [*labels[begin : begin + length].tolist(), *[-9] * missing]
        positions += range(length + missing)
        ends.append(len(expected))
    assert padded.tolist() == expected and padded.dtype == ids.dtype
    assert padded_labels.tolist() == expected_labels and padded_labels.dtype == labels.dtype
    assert sums.tolist() == ends and sums.dtype == CU.dtype
    own = generate_positional_ids_for_cp(CU, FACTOR, torch.int32)
    assert own.tolist() == positions and own.dtype == torch.int32


@pytest.mark.parametrize("shape", [(-1,), (1, -1), (-1, 1)], ids=str)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_share_each_packed_sequence(ranks: list[int], size: int, shape: tuple[int, ...]) -> None:
    ends = [0, 8, 24]
    whole = torch.arange(24)
    seen = []
    for rank in range(size):
        ranks[:] = size, rank
        ids, labels, places = get_batch_on_this_cp_rank(
            torch.tensor(ends), whole.view(shape), 2 * whole.view(shape), whole
        )
        expected: list[int] = []
        for begin, end in zip(ends, ends[1:]):
            chunks = whole[begin:end].chunk(2 * size)
            mine = [*chunks] if size == 1 else [chunks[rank], chunks[2 * size - 1 - rank]]
            expected += torch.cat(mine).tolist()
        assert ids.flatten().tolist() == expected and ids.dim() == len(shape)
        assert torch.equal(labels, 2 * ids) and places is not None and places.tolist() == expected
        seen += expected
    assert sorted(seen) == whole.tolist()


@pytest.mark.parametrize("fmt", ["bshd", "sbhd"])
def test_batches_of_equal_lengths(ranks: list[int], fmt: str) -> None:
    whole = torch.arange(16).view(2, 8)
    turned: Tensor = whole if fmt == "bshd" else whole.t()
    for rank, places in ((0, [0, 1, 6, 7]), (1, [2, 3, 4, 5])):
        ranks[1] = rank
        ids, _, positions = get_batch_on_this_cp_rank(None, turned, turned, None, qvk_format=fmt)
        assert torch.equal(ids if fmt == "bshd" else ids.t(), whole[:, places]) and positions is None


def test_what_does_not_fit(ranks: list[int]) -> None:
    odd, flat = torch.zeros(2, 7), torch.zeros(8)
    for message, arguments in {
        "7 tokens, which must be divisible by 4.*pad it to 8": (None, odd, odd, odd, None, "bshd"),
        r"shape \(8,\).*at least 2 dimensions": (None, flat, flat, flat, None, "sbhd"),
        "needs cu_seqlens_padded": (None, flat, flat, flat),
        "no dim of the 16 padded tokens": (CU, flat, flat, flat),
        "qvk_format is 'bhsd'": (None, odd, odd, odd, None, "bhsd"),
    }.items():
        with pytest.raises(ValueError, match=message):
            get_batch_on_this_cp_rank(*arguments)
    with pytest.raises(ValueError, match="input_ids has 8 tokens, and cu_seqlens ends at 16"):
        pad_thd_sequences_for_cp(flat, flat, CU, FACTOR)
    with pytest.raises(ValueError, match="divisibility_factor is 0"):
        generate_positional_ids_for_cp(CU, 0)
