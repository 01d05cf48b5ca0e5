"""Per-tensor FP8 of groups and their column sums: kernels equal to the reference, byte for byte."""

from __future__ import annotations

import pytest
import torch
from reference.checks import assert_bitwise
from torch import Tensor

from narrowcast import kernels, reference
from narrowcast.formats import E4M3, E5M2

from .checks import DTYPES, compare, make

SPLITS = [
    [5],
    [0, 0, 0],
    [16, 32, 0, 16],
    [1, 0, 63, 64, 7],
    [130, 3, 0, 0, 65],
    [3] * 17,
]
COLUMNS = (1, 8, 130)
KINDS = ("normal", "wide", "zeros", "special", "huge", "tiny")


def cases(half: int) -> list[tuple[list[int], int, int, str, torch.dtype]]:
    """Splits, columns, rows beyond the splits, kind of values, dtype: each split with one half of the kinds."""
    made = []
    for i, splits in enumerate(SPLITS):
        for j in range((i + half) % 2, len(KINDS), 2):
            made.append((splits, COLUMNS[(i + j) % 3], (0, 5, 70)[j % 3], KINDS[j], DTYPES[(i + j) % 3]))
    return made


def rows_of(case: tuple[list[int], int, int, str, torch.dtype]) -> Tensor:
    splits, columns, beyond, kind, dtype = case
    return make(kind, (sum(splits) + beyond, columns), dtype)


@pytest.mark.parametrize("case", cases(0), ids=str)
def test_current(case, device: torch.device) -> None:
    x, splits = rows_of(case), torch.tensor(case[0])
    other = (True, False, E5M2) if case[2] % 4 == 0 else (False, True, E4M3)
    for rowwise, columnwise, fmt in ((True, True, E4M3), other):
        options = {
            "groups": len(case[0]),
            "power_2": fmt is E5M2,
            "epsilon": 0.0,
            "rowwise": rowwise,
            "columnwise": columnwise,
            "alignment": 128 if rowwise and columnwise else 16,  # groups of 16 rows take two passes
            "keep_amax": rowwise,
        }
        compare(
            lambda source, o=options, f=fmt: kernels.grouped_quantize.quantize_current(
                source, splits.to(device), f, **o
            ),
            lambda source, o=options, f=fmt: reference.grouped_quantize.quantize_current(
                source, splits, f, **o
            ),
            x,
            device,
        )


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_current_with_amaxes_of_groups_ahead(
    ahead: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = [300, 0, 129, 128]
    x = make("wide", (sum(sizes) - 30, 130), torch.bfloat16)  # the splits are more than the rows
    monkeypatch.setattr(
        kernels.grouped_quantize.grouped_current, "AHEAD_BYTES", ahead * x.numel() * x.element_size() // 4
    )
    options = {"groups": 4, "power_2": False, "epsilon": 0.0, "rowwise": True, "columnwise": True}
    splits = torch.tensor(sizes)
    for source, at in ((x, splits), (x[:384].reshape(4, 96, 130), None)):
        compare(
            lambda y, at=at: kernels.grouped_quantize.quantize_current(
                y, None if at is None else at.to(device), E4M3, alignment=128, **options
            ),
            lambda y, at=at: reference.grouped_quantize.quantize_current(
                y, at, E4M3, alignment=128, **options
            ),
            source,
            device,
        )


@pytest.mark.gpu
def test_current_in_many_programs_at_once() -> None:
    """What one launch gives with thousands of programs in flight is what given amaxes give."""
    options = {"groups": 32, "power_2": False, "epsilon": 0.0, "rowwise": True, "columnwise": True}
    x = torch.randn(16384, 1408, device="cuda").mul_(torch.rand(16384, 1, device="cuda")).bfloat16()
    for source, splits in (
        (x, torch.randint(0, 1000, (32,), device="cuda")),
        (x.view(32, 512, 1408), None),
    ):
        for _ in range(20):
            *buffers, amax = kernels.grouped_quantize.quantize_current(
                source, splits, E4M3, alignment=128, keep_amax=True, **options
            )
            again = kernels.grouped_quantize.quantize_current(
                source, splits, E4M3, alignment=128, amax=amax, **options
            )
            assert all(torch.equal(a, b) for a, b in zip(buffers, again, strict=True))
        if splits is None:
            assert torch.equal(amax, source.abs().amax((1, 2)).float())


@pytest.mark.parametrize("case", cases(1), ids=str)
def test_delayed(case, device: torch.device) -> None:
    x, splits = rows_of(case), torch.tensor(case[0], dtype=torch.int32)
    groups = len(case[0])
    scale = torch.exp2(torch.arange(groups).float() % 5 - 2) * 1.1
    amax = torch.rand(groups, generator=torch.Generator().manual_seed(0))
    raised, expected = amax.to(device), amax.clone()
    options = {"rowwise": True, "columnwise": True, "alignment": 16}
    compare(
        lambda source: kernels.grouped_quantize.quantize(
            source, splits.to(device), scale.to(device), E5M2, amax=raised, **options
        ),
        lambda source: reference.grouped_quantize.quantize(
            source, splits, scale, E5M2, amax=expected, **options
        ),
        x,
        device,
    )
    assert_bitwise(raised, expected, "amax")


@pytest.mark.covering(1)
@pytest.mark.parametrize("shape", [(1, 4, 8), (3, 5, 7), (2, 66, 130), (4, 64, 128), (2, 1, 3)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_batch(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> None:
    x = make("wide", shape, dtype)
    options = {"groups": shape[0], "power_2": False, "epsilon": 0.0, "alignment": 16}
    for rowwise, columnwise in ((True, True), (True, False), (False, True)):
        directions = {"rowwise": rowwise, "columnwise": columnwise}
        compare(
            lambda source, d=directions: kernels.grouped_quantize.quantize_current(
                source, None, E4M3, **options, **d
            ),
            lambda source, d=directions: reference.grouped_quantize.quantize_current(
                source, None, E4M3, **options, **d
            ),
            x,
            device,
        )
    scale = torch.rand(shape[0]) + 0.5
    raised, expected = torch.zeros(shape[0], device=device), torch.zeros(shape[0])
    both = {"rowwise": True, "columnwise": True, "alignment": 16}
    compare(
        lambda source: kernels.grouped_quantize.quantize(
            source, None, scale.to(device), E4M3, amax=raised, **both
        ),
        lambda source: reference.grouped_quantize.quantize(source, None, scale, E4M3, amax=expected, **both),
        x,
        device,
    )
    assert_bitwise(raised, expected, "amax")


@pytest.mark.covering(1)
@pytest.mark.parametrize("splits", [*SPLITS, [128, 129, 300, 0, 256], [4097, 0, 40]], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_column_sum(splits: list[int], dtype: torch.dtype, device: torch.device) -> None:
    columns = 3 if sum(splits) > 1000 else 70
    x = make("special" if dtype == torch.float32 else "wide", (sum(splits) + 9, columns), dtype)
    sizes = torch.tensor(splits)
    compare(
        lambda source: [kernels.grouped_quantize.column_sum(source, sizes.to(device))],
        lambda source: [reference.grouped_quantize.column_sum(source, sizes)],
        x,
        device,
    )


def test_refuses(device: torch.device) -> None:
    x, splits = torch.zeros(4, 4, device=device), torch.tensor([4], device=device)
    options = {"groups": 1, "power_2": False, "epsilon": 0.0, "rowwise": True, "columnwise": True}
    quantize = kernels.grouped_quantize.quantize_current
    with pytest.raises(ValueError, match="alignment is 3"):
        quantize(x, splits, E4M3, alignment=3, **options)
    with pytest.raises(ValueError, match="without splits"):
        quantize(x, None, E4M3, alignment=16, **options)
    with pytest.raises(TypeError, match="cannot quantize torch.int64"):
        quantize(x.long(), splits, E4M3, alignment=16, **options)
