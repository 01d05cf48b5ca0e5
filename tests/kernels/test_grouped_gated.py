"""A gated activation of groups, and its gradient, quantized on the way in: as one after the other, byte for byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference.checks import assert_bitwise

from narrowcast import kernels, reference
from narrowcast.formats import E4M3, E5M2, padded_rows

from .checks import make

SPLITS = [([70, 0, 5], 40, 2), ([3, 130], 136, -9), ([0, 0], 8, 3), ([1], 1, 0)]


@pytest.mark.covering(1)
@pytest.mark.parametrize(("splits", "columns", "more"), SPLITS, ids=str)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_per_tensor(splits: list[int], columns: int, more: int, backward: bool, device: torch.device) -> None:
    """Of as many rows as the splits say, of more, which become zeros, and of fewer."""
    x, grad = (make("blocks", (sum(splits) + more, n), torch.bfloat16) for n in (2 * columns, columns))
    groups, count = torch.tensor(splits), len(splits)
    name: Any = "clamped_swiglu" if columns == 136 else "swiglu"

    def source(numerics: Any, *given: torch.Tensor) -> Any:
        producers = numerics.fused_producers
        return (
            producers.activation_backward(*given, name) if backward else producers.activation(given[1], name)
        )

    given, own = (grad, x), (grad.to(device), x.to(device))
    scale, options = torch.rand(count) * 8 + 1, {"rowwise": True, "columnwise": True, "alignment": 128}
    amaxes = torch.zeros(count), torch.zeros(count, device=device)
    theirs = reference.grouped_gated.quantize(
        source(reference, *given), groups, scale, E4M3, amax=amaxes[0], **options
    )
    ours = kernels.grouped_gated.quantize(
        source(kernels, *own), groups.to(device), scale.to(device), E4M3, amax=amaxes[1], **options
    )
    for a, b in zip([*ours, amaxes[1]], [*theirs, amaxes[0]], strict=True):
        assert_bitwise(a, b)
    rules = {"groups": count, "power_2": False, "epsilon": 0.0, "keep_amax": True, **options}
    theirs = reference.grouped_gated.quantize_current(source(reference, *given), groups, E5M2, **rules)
    ours = kernels.grouped_gated.quantize_current(source(kernels, *own), groups.to(device), E5M2, **rules)
    for a, b in zip(ours, theirs, strict=True):
        assert_bitwise(a, b)


@pytest.mark.parametrize(("splits", "columns"), [([130, 0, 5], 40), ([3, 130], 128)], ids=str)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_blocks(splits: list[int], columns: int, backward: bool, device: torch.device) -> None:
    """Of a gradient both halves at once, where tiles divide them, and each by itself."""
    rows = sum(splits)
    x, grad = (make("blocks", (rows, n), torch.bfloat16) for n in (2 * columns, columns))
    groups, count = torch.tensor(splits), padded_rows(rows, len(splits), 128)
    results = []
    for numerics, place in ((reference, "cpu"), (kernels, device)):
        given, producers = (grad.to(place), x.to(place)), numerics.fused_producers
        source = (
            producers.activation_backward(*given, "swiglu")
            if backward
            else producers.activation(given[1], "swiglu")
        )
        source = numerics.grouped_sources.rows_of_groups(source, groups.to(place), count)
        results.append(
            numerics.float8_block.quantize(
                source, E4M3, rowwise=True, columnwise=True, block_dim=1, power_2=True, epsilon=0.0
            )
        )
    for ours, theirs in zip(*results, strict=True):
        assert_bitwise(theirs, ours)
