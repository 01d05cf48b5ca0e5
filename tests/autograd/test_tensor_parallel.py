"""How a layer is split over processes, as far as one process can tell; with several: ``nn/test_tensor_parallel.py``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from quantizers.catalog import E4M3, VARIANTS
from reference.checks import normal
from torch import Tensor

from narrowcast.autograd import tensor_parallel as module
from narrowcast.autograd.tensor_parallel import TensorParallel, local_features, tensor_parallel
from narrowcast.quantizers import DelayedFloat8Quantizer, Operand


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
    for one, shape_of in ((row, row.output_shape), (column, column.grad_input_shape)):
        if sequence_parallel:
            with pytest.raises(ValueError, match="7"):
                shape_of((7, 2, 16), 48, 2)
        else:
            assert one and shape_of((7, 2, 16), 48, 2) == (7, 2, 48)


@pytest.fixture
def twins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The group has a second process, which holds the same as this one; its amax is twice as large."""
    fakes: dict[str, Any] = {
        "group_size": lambda group: 2,
        "arrived": lambda x: x,
        "start_gather": lambda x, group: torch.cat([x, x]),
        "largest_of": lambda x, group: 2 * x,
        "smallest_of": lambda x, group: x / 2,
        "scatter_rows": lambda x, group: 2 * x[: len(x) // 2],
        "sum_over": lambda x, group: 2 * x,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(module, name, fake)


def test_features_are_split_along_the_mode_s_dim(twins: None) -> None:
    assert local_features(TensorParallel("column"), 32, 48) == (32, 24)
    assert local_features(TensorParallel("row"), 32, 48) == (16, 48)
    assert local_features(TensorParallel("column"), 31, 48) == (31, 24)
    assert local_features(TensorParallel("row"), 32, 47) == (16, 47)
    for mode, label in (("column", "out_features=47"), ("row", "in_features=31")):
        with pytest.raises(ValueError, match=f"{label} does not divide among 2 processes.*'{mode}'"):
            local_features(TensorParallel(mode), 31, 47)
    assert tensor_parallel("row", None, True) == TensorParallel("row", module.group_name(None), True)


def test_a_row_layer_sums_its_outputs(twins: None) -> None:
    out = torch.arange(6.0).view(2, 3)
    assert torch.equal(TensorParallel("row").reduced_output(out), 2 * out)
    assert torch.equal(TensorParallel("row", None, True).reduced_output(out), 2 * out[:1])
    assert TensorParallel("column", None, True).reduced_output(out) is out


@pytest.mark.parametrize("usage", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("name", ["current", "mxfp8", "mxfp8 2d", "block", "block 1d", "mxfp6", "mxfp4"])
def test_gathered_shares_are_the_whole(name: str, usage: tuple[bool, bool], twins: None) -> None:
    operand, parallel = Operand.of(VARIANTS[name], *usage), TensorParallel("column", None, True)
    rows = 512 if name == "block" else 128  # where four columns of scales end
    x = normal((rows, 96), torch.bfloat16)
    assert parallel.joins(operand, rows) and parallel.joins(operand, rows // 2) is (name == "current")
    share = operand.quantize(x)
    whole, expected = parallel.whole_operand(share, operand), operand.quantize(torch.cat([x, x]))
    assert whole.quantizer is share.quantizer
    for ours, theirs in zip((whole.rowwise, whole.columnwise), (expected.rowwise, expected.columnwise)):
        assert len(ours) == len(theirs)
        for a, b in zip(ours, theirs):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_shares_are_quantized_with_the_scale_of_all(twins: None) -> None:
    x, parallel = normal((128, 96), torch.bfloat16), TensorParallel("column", None, True)
    current, delayed = Operand.of(VARIANTS["current"]), Operand.of(DelayedFloat8Quantizer(E4M3, 0))
    alone = current.quantize(x).rowwise[1]
    assert torch.equal(parallel.share(x, current, None, None, None).rowwise[1], 2 * alone)
    scale, amax = torch.tensor([8.0]), torch.zeros(1)
    assert parallel.share(x, delayed, None, scale, amax).rowwise[1].item() == 0.25
    assert amax.item() == x.abs().max() and scale.item() == 8.0
    blocks = Operand.of(VARIANTS["mxfp8"])
    assert parallel.shared_scale(blocks, scale) is scale and parallel.shared_scale(delayed, None) is None
    ours, theirs = parallel.share(x, blocks, None, None, None), blocks.quantize(x)
    assert all(map(torch.equal, ours.rowwise, theirs.rowwise))


@pytest.mark.parametrize("columns", [8, 12, 16])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32], ids=str)
def test_matrices_of_ranks_are_joined_along_the_columns(dtype: torch.dtype, columns: int) -> None:
    parts: list[Tensor] = [torch.randint(0, 99, (3, columns)).to(dtype) for _ in range(2)]
    joined = module._beside(torch.cat(parts), 2)
    assert torch.equal(joined, torch.cat(parts, 1)) and joined.is_contiguous() and joined.dtype == dtype
