"""Rows of codes as they travel: decoded, padded to groups and quantized again, added up; equal to the reference."""

from __future__ import annotations

import pytest
import torch
from reference.checks import assert_bitwise
from torch import Tensor

from narrowcast import kernels, reference
from narrowcast.formats import E4M3, E5M2, padded_rows
from narrowcast.moe.rows import row_map_of_mask

FORMATS = ("e4m3 in blocks", "e5m2 in blocks", "mxfp8")


def draw(fmt: str, rows: int, columns: int) -> tuple[Tensor, Tensor, bool]:
    """Codes of all values, NaN included, and scales that are powers of two but for one."""
    generator = torch.Generator().manual_seed(rows + columns)
    codes = torch.randint(0, 256, (rows, columns), dtype=torch.uint8, generator=generator)
    blocks = -(-columns // 128)
    if fmt == "mxfp8":
        scales = torch.randint(100, 140, (rows, 4 * blocks), dtype=torch.uint8, generator=generator)
        scales.view(-1)[:1] = 0
    else:
        scales = 2.0 ** torch.randint(-9, 9, (rows, blocks), generator=generator)
        scales.view(-1)[:1] = 0.3
    return codes, scales, "e5m2" in fmt


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("shape", [(5, 8), (3, 1000), (1, 1), (6, 1280), (0, 16)], ids=str)
def test_rows(fmt: str, shape: tuple[int, int], device: torch.device) -> None:
    codes, scales, e5m2 = draw(fmt, *shape)
    for dtype in (torch.bfloat16, torch.float32):
        ours = kernels.block_scaled_rows.rows(codes.to(device), scales.to(device), e5m2, dtype)
        assert_bitwise(ours, reference.block_scaled_rows.rows(codes, scales, e5m2, dtype))


@pytest.mark.covering(1)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(("splits", "columns", "more"), [([130, 0, 5], 40, 0), ([3, 90], 136, -20)], ids=str)
def test_rows_of_groups(fmt: str, splits: list[int], columns: int, more: int, device: torch.device) -> None:
    """Quantized on the way in, in both directions, as what is decoded first is."""
    total = sum(splits) + more
    groups, rows = torch.tensor(splits), padded_rows(total, len(splits), 128)
    codes, scales, e5m2 = draw(fmt, total, columns)
    decoded = reference.block_scaled_rows.source(codes, scales, e5m2, torch.bfloat16)
    padded = reference.grouped_sources.rows_of_groups(decoded, groups, rows)
    source = kernels.block_scaled_rows.source(codes.to(device), scales.to(device), e5m2, torch.bfloat16)
    source = kernels.grouped_sources.rows_of_groups(source, groups.to(device), rows)
    results = []
    for numerics, x in ((kernels, source), (reference, padded)):
        if fmt == "mxfp8":
            results.append(numerics.mx.quantize(x, E5M2, rowwise=True, columnwise=True))
        else:
            results.append(
                numerics.float8_block.quantize(
                    x, E4M3, rowwise=True, columnwise=True, block_dim=1, power_2=True, epsilon=0.0
                )
            )
    for ours, theirs in zip(*results, strict=True):
        assert_bitwise(ours, theirs)
    assert_bitwise(kernels.fused_producers.materialize(source), padded)


@pytest.mark.covering(1)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("shape", [(5, 3, 8), (7, 4, 1100)], ids=str)
def test_sums(fmt: str, shape: tuple[int, int, int], device: torch.device) -> None:
    tokens, experts, columns = shape
    generator = torch.Generator().manual_seed(0)
    row_map = row_map_of_mask(torch.rand(tokens, experts, generator=generator) < 0.5)
    rows = int(row_map.max()) + 2
    positions = reference.moe.positions(row_map, rows)
    codes, scales, e5m2 = draw(fmt, rows, columns)
    weights = torch.rand(tokens, experts, generator=generator) - 0.3
    grad = torch.randn(tokens, columns, generator=generator).bfloat16()
    dcodes, dscales, dmap, dweights, dpositions, dgrad = (
        one.to(device) for one in (codes, scales, row_map, weights, positions, grad)
    )
    for given, own in ((None, None), (weights, dweights)):
        ours = kernels.moe.collect_coded(dcodes, dscales, e5m2, dmap, own, torch.bfloat16)
        assert_bitwise(ours, reference.moe.collect_coded(codes, scales, e5m2, row_map, given, torch.bfloat16))
    ours = kernels.moe.collect_backward(dgrad, dcodes, dpositions, dweights, dscales, e5m2)
    theirs = reference.moe.collect_backward(grad, codes, positions, weights, scales, e5m2)
    assert_bitwise(ours[0], theirs[0])
    assert_bitwise(ours[1], theirs[1])


def test_other_dtypes_and_shapes_are_refused(device: torch.device) -> None:
    codes, scales = (one.to(device) for one in draw("e4m3 in blocks", 3, 200)[:2])
    with pytest.raises(ValueError, match="scales have shape"):
        kernels.block_scaled_rows.rows(codes, scales[:, :1], False, torch.bfloat16)
    with pytest.raises(ValueError, match="codes are torch.int8"):
        kernels.block_scaled_rows.rows(codes.view(torch.int8), scales, False, torch.bfloat16)
