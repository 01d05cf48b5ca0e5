"""How a layer is split over processes, as far as one process can tell; with several: ``nn/test_tensor_parallel.py``."""

from __future__ import annotations

import pytest

from narrowcast.autograd.tensor_parallel import TensorParallel, local_features, tensor_parallel


def test_one_process_is_not_split() -> None:
    for mode in (None, "column", "row"):
        assert tensor_parallel(mode, None, False) == TensorParallel()
    assert local_features(TensorParallel(), 32, 48) == (32, 48)


def test_what_cannot_be_split_is_refused() -> None:
    with pytest.raises(ValueError, match="tensor_parallel_mode is 'both'"):
        tensor_parallel("both", None, False)
    with pytest.raises(ValueError, match="sequence_parallel=True needs"):
        tensor_parallel(None, None, True)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_who_gathers_and_the_shapes_that_follow(sequence_parallel: bool) -> None:
    column, row = (TensorParallel(mode, None, sequence_parallel) for mode in ("column", "row"))
    assert column.gathers_input is sequence_parallel and not column.gathers_grad_output
    assert row.gathers_grad_output is sequence_parallel and not row.gathers_input
    whole, share = (8, 4) if sequence_parallel else (8, 8)
    assert column.output_shape((share, 2, 32), 24, 2) == (whole, 2, 24)
    assert row.output_shape((8, 2, 16), 48, 2) == (share, 2, 48)
    assert column.grad_input_shape((whole, 2, 24), 32, 2) == (share, 2, 32)
    assert row.grad_input_shape((share, 2, 48), 16, 2) == (whole, 2, 16)
