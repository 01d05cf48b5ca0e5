"""How layers are split over ranks, as far as one process can tell; with several: ``nn/test_tensor_parallel.py``."""

from __future__ import annotations

from narrowcast.layers.tensor_parallel import Parallel, ranks_of


def test_one_rank_shares_no_sequence() -> None:
    assert ranks_of(None, 1, True, True) == (None, 1, False)
    assert ranks_of(None, 2, True, True) == (None, 2, True)
    assert ranks_of(None, 2, True, False) == (None, 2, False)
    assert ranks_of(None, 2, False, True) == (None, 1, False)


def test_nothing_is_split_by_default() -> None:
    assert (Parallel({}).mode, Parallel({}).size, Parallel({}).sequence_parallel) == (None, 1, False)
