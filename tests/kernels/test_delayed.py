"""The kernel that advances delayed-scaling state: golden files, and the reference on awkward histories."""

from __future__ import annotations

import itertools
import math

import golden_vectors
import pytest
import torch
from reference.checks import assert_bitwise

from narrowcast import kernels
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


@pytest.mark.parametrize("length", [1, 2, 3, 65, 1030])
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


def test_many_states_are_renewed_in_place(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    widths = [(3, 16), (2, 16), (24, 3), (2, 1), (3, 70)] * 4
    rules = [[(448.0, 57344.0)[at % 2] for at in range(20)], [at % 3 for at in range(20)]]
    algos = [("max", "most_recent")[at % 3 == 1] for at in range(20)]
    scales = [torch.rand(n, generator=generator) + 0.1 for n, _ in widths]
    histories = [torch.rand(length, n, generator=generator) for n, length in widths]
    amaxes = [torch.rand(n, generator=generator) for n, _ in widths]
    amaxes[0][1], amaxes[5][0], amaxes[9][:] = 0.0, math.inf, 0.0
    given = [[x.to(device).clone() for x in states] for states in (scales, histories, amaxes)]
    kernels.delayed._TABLES.clear()
    for _ in range(2):  # with a table, and with that table
        expected = []
        for scale, history, amax, *rule in zip(scales, histories, amaxes, *rules, algos, strict=True):
            collected = torch.cat([amax.nan_to_num(posinf=0.0)[None], history[1:]])
            options = dict(zip(("fp8_max", "margin", "algo"), rule, strict=True))
            expected.append(reference.update(scale, collected, **options))
        assert kernels.delayed.renew_many(*given, *rules, algos)
        for at, (scale, history) in enumerate(expected):
            assert_bitwise(given[0][at], scale, f"scale {at}")
            assert_bitwise(given[1][at], history, f"history {at}")
            assert not given[2][at].any()
        scales, histories = [one[0] for one in expected], [one[1] for one in expected]
        amaxes = [torch.rand(n, generator=generator) for n, _ in widths]
        for own, new in zip(given[2], amaxes, strict=True):
            own.copy_(new)
    assert len(kernels.delayed._TABLES) == 1
    monkeypatch.setattr(kernels.delayed, "MOST_TABLES", 1)
    others = [[x.clone() for x in states] for states in given]
    assert not kernels.delayed.renew_many(*others, *rules, algos)  # joined instead
    assert torch.equal(others[2][3], given[2][3])


def test_refuses_an_unknown_rule(device: torch.device) -> None:
    with pytest.raises(ValueError, match="unknown amax_compute_algo 'mean'"):
        kernels.delayed.update(
            torch.ones(1, device=device),
            torch.ones(2, 1, device=device),
            fp8_max=448.0,
            margin=0,
            algo="mean",
        )


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


@pytest.mark.parametrize("lengths", [(1,), (2, 2, 2), (65, 3), (1100, 1024)], ids=str)
def test_renewing_in_place_equals_the_reference(lengths: tuple[int, ...], device: torch.device) -> None:
    for algos in ("max", "most_recent"):
        widths = (3, 40, 5)[: len(lengths)]
        states = [
            [torch.rand(n) for n in widths],
            [torch.rand(length, n) for length, n in zip(lengths, widths)],
            [torch.rand(n) for n in widths],
        ]
        for amax in states[2]:
            amax[0], amax[1], amax[2] = math.inf, 0.0, math.nan
        states[0][0][1] = 0.0
        for history in states[1]:
            history[0] = 0.0  # as between steps
        expected, actual = ([[x.clone() for x in some] for some in states] for _ in range(2))
        actual = [[x.to(device) for x in some] for some in actual]
        options = {"fp8_maxes": [448.0, 57344.0, 448.0][: len(lengths)], "margins": [0, 1, 0][: len(lengths)]}
        options |= {"algos": [algos, "max", "max"][: len(lengths)]}
        reference.renew(*expected, **options)
        kernels.delayed.renew(*actual, **options)
        for some, were in zip(expected[:2], states):  # what collected nothing, or no number, stays as it is
            assert all(torch.equal(a[..., :3], b[..., :3]) for a, b in zip(some, were, strict=True))
        for a, b in zip(itertools.chain(*actual), itertools.chain(*expected), strict=True):
            assert_bitwise(a, b, f"{lengths} {algos}")


@pytest.mark.parametrize("sizes", [(3,), (3, 2), (130, 1, 260)])
def test_copies_of_scales(sizes: tuple[int, ...], device: torch.device) -> None:
    scales = [torch.rand(size, device=device) for size in sizes]
    scales[0][0] = 0.0
    unseen = [-448.0, 16.0, 1.0][: len(sizes)]
    copies = kernels.delayed.copy_scales(scales, unseen)
    expected = reference.copy_scales([scale.cpu() for scale in scales], unseen)
    for scale, copy, value in zip(scales, copies, expected, strict=True):
        assert_bitwise(copy, value)
        assert copy.data_ptr() != scale.data_ptr()
