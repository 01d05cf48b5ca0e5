"""How a layer is split over processes, as far as one process can tell; with several: ``nn/test_tensor_parallel.py``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from quantizers.catalog import E4M3, VARIANTS
from reference.checks import normal
from torch import Tensor

import narrowcast as nc
from narrowcast.autograd import (
    DelayedScales,
    LinearFunction,
    LinearFwdArgs,
    LinearWgrad,
    NormSettings,
    gemms,
    program,
)
from narrowcast.autograd import tensor_parallel as module
from narrowcast.autograd.tensor_parallel import TensorParallel, local_features, tensor_parallel
from narrowcast.quantizers import DelayedFloat8Quantizer, Operand
from narrowcast.recipe import linear_plan


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


FAKES: dict[str, Any] = {
    "group_size": lambda group: 2,
    "registered_name": lambda group: "",
    "arrived": lambda x: x,
    "start_gather": lambda x, group: torch.cat([x, x]),
    "gather_rows": lambda x, group: torch.cat([x, x]),
    "largest_of": lambda x, group: 2 * x,
    "smallest_of": lambda x, group: x / 2,
    "scatter_rows": lambda x, group: 2 * x[: len(x) // 2],
    "start_scatter": lambda x, group: 2 * x[: len(x) // 2],
    "sum_over": lambda x, group: 2 * x,
    "start_sum": lambda x, group: 2 * x,
}


def pretend(monkeypatch: pytest.MonkeyPatch, **others: Any) -> None:
    for name, fake in {**FAKES, **others}.items():
        for user in (module, gemms, program):
            if hasattr(user, name):
                monkeypatch.setattr(user, name, fake)


@pytest.fixture
def twins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The group has a second process, which holds the same as this one; its amax is twice as large."""
    pretend(monkeypatch)


@pytest.fixture
def equals(monkeypatch: pytest.MonkeyPatch) -> None:
    """The group has a second process, which holds the same as this one."""
    pretend(monkeypatch, largest_of=lambda x, group: x, smallest_of=lambda x, group: x)


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
    assert torch.equal(TensorParallel("row").reduced_output(out, out.dtype, False), 2 * out)
    assert torch.equal(TensorParallel("row", None, True).reduced_output(out, out.dtype, False), 2 * out[:1])
    assert TensorParallel("column", None, True).reduced_output(out, out.dtype, False) is out


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


SPLIT_RECIPES: dict[str, Any] = {
    "none": None,
    "current": nc.recipe.Float8CurrentScaling(),
    "mxfp8": nc.recipe.MXFP8BlockScaling(),
    "dequantized": nc.recipe.MXFP8BlockScaling(backward_override="dequantized"),
    "high precision": nc.recipe.MXFP8BlockScaling(backward_override="high_precision"),
}


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("mode", ["column", "row"])
@pytest.mark.parametrize("name", SPLIT_RECIPES)
def test_a_split_layer_is_the_whole_one(name: str, mode: str, sequence_parallel: bool, equals: None) -> None:
    plan = linear_plan(SPLIT_RECIPES[name], "", True, True, module_type="linear")
    weight = normal((48, 32), torch.bfloat16).requires_grad_()
    for rows, biased in (
        (64, mode == "column"),
        (4, False),
    ):  # the second are too few to be gathered as bytes
        bias = torch.randn(48, dtype=torch.bfloat16, requires_grad=True) if biased else None
        wanted = [weight] if bias is None else [weight, bias]
        alone = LinearFwdArgs(plan, torch.bfloat16, DelayedScales(), None, LinearWgrad(), biased)
        split = alone._replace(parallel=TensorParallel(mode, None, sequence_parallel))
        inp, dy = (normal((rows, 2, size), torch.bfloat16, seed) for size, seed in ((32, 1), (48, 2)))
        both = [torch.cat([one, one]) for one in (inp, dy)]
        given, expected = inp.requires_grad_(), (both[0] if sequence_parallel else inp).requires_grad_()
        if mode == "row" and sequence_parallel:
            given = expected.detach().requires_grad_()
        ours = LinearFunction.apply(weight, given, bias, split)
        theirs = LinearFunction.apply(weight, expected, bias, alone)
        grad = both[1] if sequence_parallel else dy
        grads = torch.autograd.grad(theirs, [expected, *wanted], grad)
        if sequence_parallel and mode == "row":
            assert torch.equal(ours, 2 * theirs[:rows])
            own = torch.autograd.grad(ours, [given, *wanted], dy)
        else:
            assert torch.equal(ours, 2 * theirs if mode == "row" else theirs)
            own = torch.autograd.grad(ours, [given, *wanted], grad)
        dgrad = grads[0][: len(own[0])]
        assert torch.equal(own[0], 2 * dgrad if mode == "column" else dgrad)
        assert all(map(torch.equal, own[1:], grads[1:]))


@pytest.mark.parametrize("rows", [64, 4])
@pytest.mark.parametrize("name", ["none", "current", "mxfp8", "high precision"])
def test_a_norm_before_a_split_layer(name: str, rows: int, equals: None) -> None:
    """Its rows are normalized by each process and gathered as bytes, or in high precision if they are too few."""
    plan, norm = (
        linear_plan(SPLIT_RECIPES[name], "", True, True, module_type="linear"),
        NormSettings("RMSNorm", 1e-5, False),
    )
    share, dy = (normal((rows, 2, size), torch.bfloat16, seed) for size, seed in ((32, 1), (48, 2)))
    results = []
    for parallel in (TensorParallel("column", None, True), None):
        x = (share if parallel else torch.cat([share, share])).clone().requires_grad_()
        parameters = [normal(shape, torch.bfloat16).requires_grad_() for shape in ((32,), (48, 32))]
        linear = LinearFwdArgs(plan, torch.bfloat16, DelayedScales(), None, LinearWgrad(), False)
        linear = linear._replace(parallel=parallel) if parallel else linear
        stages = program.Program([program.Norm(1, 2), program.Linear(3, 4)], 5)
        call = program.ProgramArgs(stages, (program.NormArgs(norm, False, False), linear))
        y = program.ProgramFunction.apply(call, x, parameters[0], None, parameters[1], None)
        results.append([y, *torch.autograd.grad(y, [x, *parameters], torch.cat([dy, dy]))])
    (ours, dx, dnorm, dweight), expected = results
    assert torch.equal(ours, expected[0]) and torch.equal(dweight, expected[3])
    assert torch.equal(dx, 2 * expected[1][:rows])
    torch.testing.assert_close(dnorm, expected[2], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("columns", [8, 12, 16])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32], ids=str)
def test_matrices_of_ranks_are_joined_along_the_columns(dtype: torch.dtype, columns: int) -> None:
    parts: list[Tensor] = [torch.randint(0, 99, (3, columns)).to(dtype) for _ in range(2)]
    joined = module._beside(torch.cat(parts), 2)
    assert torch.equal(joined, torch.cat(parts, 1)) and joined.is_contiguous() and joined.dtype == dtype


def test_how_many_processes_add_a_part_and_what_keys_a_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "group_size", lambda group: 3)
    of_mode = {mode: TensorParallel(mode).processes_of_sum for mode in (None, "column", "row")}
    assert of_mode == {None: 1, "column": 1, "row": 3}
    assert len({TensorParallel("row"), TensorParallel("row"), TensorParallel("column")}) == 2


@pytest.mark.parametrize("columns", [4, 8, 9, 72])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16])
def test_gathered_matrices_are_joined_along_the_columns(dtype: torch.dtype, columns: int) -> None:
    parts = [torch.arange(5 * columns).add(7 * rank).view(5, columns).to(dtype) for rank in range(3)]
    assert torch.equal(module._beside(torch.cat(parts), 3), torch.cat(parts, 1))
