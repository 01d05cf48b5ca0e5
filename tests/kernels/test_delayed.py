"""The kernel that advances delayed-scaling state: golden files, and the reference on awkward histories."""

from __future__ import annotations

import itertools
import math

import golden_vectors
import pytest
import torch
from reference.checks import assert_bitwise

from narrowcast import functional, kernels
from narrowcast.formats import E4M3
from narrowcast.reference import delayed as reference
from narrowcast.reference import scaling


@pytest.mark.parametrize("name", golden_vectors.names("fp8_delayed_update_"))
def test_golden(name: str, device: torch.device) -> None:
    golden = golden_vectors.load(name)
    meta = golden.meta
    steps, n = golden["step_amax"].shape
    scale = torch.ones(n, device=device)
    history = torch.zeros(meta["history_len"], n, device=device)
    for step in range(steps):
        history[0] = golden["step_amax"][step].to(device)
        scale, history = kernels.delayed.update(
            scale, history, fp8_max=meta["fp8_max"], margin=meta["margin"], algo=meta["amax_compute_algo"]
        )
        assert_bitwise(scale, golden["scale_skip_unused"][step])
        kept = golden["history_skip_unused"][step]
        rows = [0, *range(history.shape[0] - kept.shape[0] + 1, history.shape[0])]
        assert_bitwise(history[rows], kept)


@pytest.mark.parametrize("length", [1, 2, 3, 64, 65, 130])
def test_equals_the_reference(length: int, device: torch.device) -> None:
    for n, algo, reduced in itertools.product((1, 5, 40), ("max", "most_recent"), (False, True)):
        history = torch.rand(length, n)
        history[0, ::3] = 0.0
        history[-1, 1 % n] = math.nan
        history[0, 4 % n] = math.inf
        history[0, 2 % n] = 1e-40
        scale = torch.rand(n)
        amaxes = torch.where(torch.arange(n) % 2 == 0, 0.0, torch.rand(n)) if reduced else None
        options = {"fp8_max": 57344.0, "margin": 1, "algo": algo}
        expected = reference.update(scale, history, reduced_amax=amaxes, **options)
        actual = kernels.delayed.update(
            scale.to(device),
            history.to(device),
            reduced_amax=None if amaxes is None else amaxes.to(device),
            **options,
        )
        for a, b in zip(actual, expected, strict=True):
            assert_bitwise(a, b, f"{length} {n} {algo} {reduced}")


def test_refuses_an_unknown_rule(device: torch.device) -> None:
    with pytest.raises(ValueError, match="unknown amax_compute_algo 'mean'"):
        kernels.delayed.update(
            torch.ones(1, device=device),
            torch.ones(2, 1, device=device),
            fp8_max=448.0,
            margin=0,
            algo="mean",
        )


def states(lengths: list[int], widths: list[int]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Scales and histories of modules of different widths, with unused, infinite, NaN and subnormal amaxes."""
    scales, histories = [], []
    for index, (length, n) in enumerate(zip(lengths, widths, strict=True)):
        history = torch.rand(length, n)
        history[0, index % n] = (0.0, math.nan, math.inf, 1e-40, 0.5)[index % 5]
        history[-1, (index + 1) % n] = (math.nan, math.inf, 0.0)[index % 3]
        scales.append(torch.rand(n))
        histories.append(history)
    return scales, histories


def assert_updates_in_place(
    length: int, algo: str, lengths: list[int], widths: list[int], device: torch.device
) -> None:
    scales, histories = states(lengths, widths)
    options = {"fp8_max": 448.0, "margin": 1, "algo": algo}
    here, there = [s.to(device, copy=True) for s in scales], [h.to(device, copy=True) for h in histories]
    for _ in range(2):
        table = kernels.delayed.address_table(here, there, length)
        assert table is not None and table is kernels.delayed.address_table(here, there, length)
        kernels.delayed.update_(table, length=length, **options)
        for index, (scale, history) in enumerate(zip(scales, histories, strict=True)):
            new_scale, rolled = reference.update(scale, history[:length], **options)
            scales[index], histories[index] = new_scale, torch.cat([rolled, history[length:]])
            assert_bitwise(here[index], new_scale, f"scale {index} of {widths}, {length} rows, {algo}")
            assert_bitwise(
                there[index], histories[index], f"history {index} of {widths}, {length} rows, {algo}"
            )


@pytest.mark.parametrize("algo", ["max", "most_recent"])
@pytest.mark.parametrize("length", [1, 2, 3, 255, 256, 257, 600])
def test_updates_modules_in_place(length: int, algo: str, device: torch.device) -> None:
    assert_updates_in_place(
        length, algo, [length, length + 3, length, length + 1, length], [3, 2, 9, 1, 4], device
    )


def test_no_table_for_states_the_kernel_cannot_take(device: torch.device) -> None:
    scales, histories = [torch.ones(2, device=device)], [torch.zeros(4, 2, device=device)]
    assert kernels.delayed.address_table(scales, histories, 4) is not None
    assert kernels.delayed.address_table(scales, histories, 5) is None
    assert kernels.delayed.address_table([torch.ones(4, device=device)[::2]], histories, 4) is None
    assert kernels.delayed.address_table(scales, [torch.zeros(2, 4, device=device).t()], 4) is None


def test_tables_are_rebuilt_and_bounded(device: torch.device) -> None:
    kept = [(torch.ones(2, device=device), torch.zeros(4, 2, device=device)) for _ in range(70)]
    for scale, history in kept:
        table = kernels.delayed.address_table([scale], [history], 4)
        assert table is not None and table.tolist() == [[scale.data_ptr(), history.data_ptr(), 2]]
    assert len(kernels.delayed._tables) - len(kernels.delayed._captured) <= kernels.delayed.TABLES_KEPT


@pytest.mark.gpu
def test_many_modules_in_one_launch(device: torch.device) -> None:
    assert_updates_in_place(1024, "max", [1024] * 400, [3, 2] * 200, device)


@pytest.mark.gpu
def test_captures_into_a_graph(device: torch.device) -> None:
    scales, histories = [torch.ones(3, device=device)], [torch.zeros(16, 3, device=device)]
    options = {"fp8_max": 448.0, "margin": 0, "length": 16, "algo": "max"}
    table = kernels.delayed.address_table(scales, histories, 16)
    kernels.delayed.update_(table, **options)
    torch.cuda.synchronize()
    others = [torch.ones(3, device=device)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert kernels.delayed.address_table(others, histories, 16) is None, (
            "a capture must not copy a new table"
        )
        kernels.delayed.update_(kernels.delayed.address_table(scales, histories, 16), **options)
    histories[0][0] = torch.tensor([2.0, 0.0, 4.0])
    graph.replay()
    assert scales[0].tolist() == [224.0, 1.0, 112.0]
    assert histories[0][-1].tolist() == [2.0, 0.0, 4.0] and not histories[0][0].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_cast_without_outputs_takes_the_amax(dtype: torch.dtype, device: torch.device) -> None:
    """What ``calibrate_`` runs: the scale, which is the amax itself, does not matter."""
    for x in (
        torch.randn(33, 70),
        torch.tensor([1.0, math.nan, -3.0]),
        torch.zeros(0, 4),
        torch.full((5,), math.nan),
    ):
        x = x.to(dtype)
        taken = torch.zeros(3, device=device)[1:2]
        kernels.float8.quantize(x.to(device), taken, E4M3, rowwise=False, columnwise=False, amax=taken)
        assert_bitwise(taken, scaling.amax(x), str(tuple(x.shape)))


@pytest.mark.gpu
def test_calibrates_on_the_device(device: torch.device) -> None:
    history = torch.full((4, 3), 9.0, device=device)
    functional.calibrate_(torch.tensor([1.0, math.nan, -3.0], device=device), history, 1)
    assert history[0].tolist() == [9.0, 3.0, 9.0] and (history[1:] == 9.0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("algo", ["max", "most_recent"])
def test_the_operator_updates_in_place(algo: str, device: torch.device) -> None:
    scales, histories = states([8, 8, 12], [3, 2, 3])
    here, there = [s.to(device) for s in scales], [h.to(device) for h in histories]
    functional.delayed_scaling_update_(scales, histories, 448.0, 0, 8, algo)
    functional.delayed_scaling_update_(here, there, 448.0, 0, 8, algo)
    for a, b in zip([*here, *there], [*scales, *histories], strict=True):
        assert_bitwise(a, b)
