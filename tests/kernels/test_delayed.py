"""The kernel that advances delayed-scaling state: golden files, and the reference on awkward histories."""

from __future__ import annotations

import math

import golden_vectors
import pytest
import torch
from reference.checks import assert_bitwise

from narrowcast import kernels
from narrowcast.formats import E4M3
from narrowcast.reference import delayed as reference
from narrowcast.reference import scaling

RULE = {"fp8_maxes": "fp8_max", "margins": "margin", "algos": "amax_compute_algo"}


@pytest.mark.parametrize("name", golden_vectors.names("fp8_delayed_update_"))
def test_golden(name: str, device: torch.device) -> None:
    """But for columns that an infinite amax went into: here it tells nothing."""
    golden = golden_vectors.load(name)
    columns = golden["step_amax"].isfinite().all(0)
    scale = torch.ones(int(columns.sum()), device=device)
    history = torch.zeros(golden.meta["history_len"], len(scale), device=device)
    rule = {name: [golden.meta[field]] for name, field in RULE.items()}
    rule["fp8_maxes"] *= 2
    for step, amax in enumerate(golden["step_amax"]):
        kernels.delayed.renew([scale], [history], [amax[columns].to(device)], **rule)
        assert_bitwise(scale, golden["scale_skip_unused"][step][columns])
        kept = golden["history_skip_unused"][step][:, columns]
        rows = [0, *range(history.shape[0] - kept.shape[0] + 1, history.shape[0])]
        assert_bitwise(history[rows][1:], kept[1:])


def test_many_states_are_renewed_in_place(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    widths = [(3, 16), (2, 2), (40, 3), (2, 1), (3, 1100), (0, 4)] * 9  # more of a kind than a launch renews
    count = len(widths)
    rules = {
        "fp8_maxes": [(448.0, 57344.0)[at % 3 % 2] for at in range(2 * count)],
        "margins": [at % 3 for at in range(count)],
        "algos": [("max", "most_recent")[at % 3 == 1] for at in range(count)],
    }
    scales = [torch.rand(n, generator=generator) + 0.1 for n, _ in widths]
    histories = [torch.rand(length, n, generator=generator) for n, length in widths]
    for history in histories:
        history[-1, ::5] = math.nan
        history[0] = 0.0
    given = [[x.to(device, copy=True) for x in states] for states in (scales, histories)]
    collected = [torch.empty(n, device=device) for n, _ in widths]
    for _ in range(2):
        amaxes = [torch.rand(n, generator=generator) for n, _ in widths]
        amaxes[0][1], amaxes[6][0], amaxes[10][:], amaxes[2][3], amaxes[2][4] = (
            0.0,
            math.inf,
            0.0,
            1e-40,
            math.nan,
        )
        for own, new in zip(collected, amaxes, strict=True):
            own.copy_(new)
        reference.renew(scales, histories, amaxes, **rules)
        kernels.delayed.renew(*given, collected, **rules)
        for at in range(count):
            assert_bitwise(given[0][at], scales[at], f"scale {at}")
            assert_bitwise(given[1][at], histories[at], f"history {at}")
            assert not collected[at].any()


def test_refuses_an_unknown_rule(device: torch.device) -> None:
    state = [torch.ones(1, device=device)], [torch.ones(2, 1, device=device)], [torch.ones(1, device=device)]
    with pytest.raises(ValueError, match="unknown amax_compute_algo 'mean'"):
        kernels.delayed.renew(*state, fp8_maxes=[448.0, 448.0], margins=[0], algos=["mean"])


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
