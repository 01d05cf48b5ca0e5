"""A norm as the producer of a GEMM's operand: in one step or two, the same bits, and what is kept of it."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from recipes import QUANTIZED

from narrowcast import functional
from narrowcast.autograd.arguments import DelayedScales, LinearFwdArgs, LinearWgrad
from narrowcast.autograd.norm import NormSettings, normalized_operand
from narrowcast.recipe import linear_plan

NORMS = [NormSettings("LayerNorm", 1e-5, False), NormSettings("RMSNorm", 1e-3, True)]


def arguments(name: str, override: str | None = None) -> LinearFwdArgs:
    plan = dataclasses.replace(
        linear_plan(QUANTIZED[name], "", True, True, module_type="linear"), backward_override=override
    )
    scales = DelayedScales()
    if plan.input.delayed:
        scales = DelayedScales(torch.tensor([2.0, 1.0, 1.0]), torch.zeros(3))
    return LinearFwdArgs(plan, torch.bfloat16, scales, None, LinearWgrad(), False)


@pytest.mark.parametrize("settings", NORMS, ids=lambda settings: settings.normalization)
@pytest.mark.parametrize("name", QUANTIZED)
def test_the_output_is_kept_where_somebody_reads_it(name: str, settings: NormSettings) -> None:
    x, weight = torch.randn(33, 50).bfloat16(), torch.randn(50)
    bias = torch.randn(50) if settings.normalization == "LayerNorm" else None
    expected, mean, rstd, _ = functional.norm(
        x, None, weight, bias, settings.eps, settings.normalization, settings.zero_centered_gamma
    )
    results = []
    for override, keep in ((None, False), (None, True), ("high_precision", False)):
        args = arguments(name, override)
        torch.manual_seed(3)
        normalized = normalized_operand(x, None, weight, bias, settings, args, keep)
        assert torch.equal(normalized.mean, mean) and torch.equal(normalized.rstd, rstd)
        if keep or override:
            assert normalized.output is not None and torch.equal(normalized.output, expected)
        else:
            assert normalized.output is None
        rowwise, columnwise, quantizer = normalized.operand
        assert quantizer == args.plan.input.quantizer and rowwise and columnwise
        if args.plan.input.delayed:
            assert args.scales.amax_fwd.tolist() == [float(expected.abs().max()), 0.0, 0.0]
        results.append(rowwise + columnwise)
    for others in results[1:]:
        assert all(map(torch.equal, results[0], others)) and len(results[0]) == len(others)
