"""MX kernels: golden files of MXFP8, ragged shapes, every E8M0 code, every kind of input on a GPU."""

from __future__ import annotations

import functools

import golden_vectors
import pytest
import torch
from reference.checks import assert_bitwise

from narrowcast import kernels
from narrowcast.formats import E2M1, E2M3, E3M2, E4M3, E5M2
from narrowcast.reference import mx as reference

from .checks import DTYPES, KINDS, SHAPES_2D, compare, grid, make

FORMATS = {"e4m3": E4M3, "e5m2": E5M2}
PACKED = {"e2m3": E2M3, "e3m2": E3M2, "e2m1": E2M1}
DIRECTIONS = [(True, True), (True, False), (False, True)]


def check(shape, kind, dtype, device, *, two_d, fmt=E4M3, directions=(True, True)) -> None:
    options = dict(zip(("rowwise", "columnwise"), directions), fmt=fmt, two_d=two_d)
    compare(
        functools.partial(kernels.mx.quantize, **options),
        functools.partial(reference.quantize, **options),
        make(kind, shape, dtype),
        device,
        f"MX {fmt.name} two_d={two_d}, {kind}",
    )


@pytest.mark.parametrize("name", golden_vectors.names("mxfp8_"))
def test_golden(name: str, device: torch.device) -> None:
    golden = golden_vectors.load(name)
    fmt = FORMATS[golden.meta["format"]]
    x = golden.input().to(device)
    buffers = kernels.mx.quantize(x, fmt, rowwise=True, columnwise=True, two_d=golden.meta["two_d"])
    for key, buffer in zip(
        ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv"), buffers, strict=True
    ):
        assert_bitwise(buffer, golden[key], key)


@pytest.mark.covering
@pytest.mark.parametrize(
    "shape", [(1, 7), (7, 1), (33, 17), (3, 50, 7), (128, 128), (130, 136), (0, 8), (8, 0)], ids=str
)
@pytest.mark.parametrize("two_d", [False, True], ids=["1d", "2d"])
@pytest.mark.parametrize(
    ("dtype", "directions", "kind"), list(zip(DTYPES, DIRECTIONS, ("special", "wide", "tiny"))), ids=str
)
def test_ragged(
    shape: tuple[int, ...],
    two_d: bool,
    dtype: torch.dtype,
    directions: tuple[bool, bool],
    kind: str,
    device: torch.device,
) -> None:
    check(shape, kind, dtype, device, two_d=two_d, fmt=E5M2, directions=directions)


@pytest.mark.parametrize("shape", [(1, 7), (33, 17), (3, 11, 7), (40, 136), (0, 8), (8, 0)], ids=str)
@pytest.mark.parametrize("two_d", [False, True], ids=["1d", "2d"])
def test_packed_ragged(shape: tuple[int, ...], two_d: bool, device: torch.device) -> None:
    kinds = ("special", "wide", "tiny")
    for fmt, dtype, directions, kind in zip(PACKED.values(), DTYPES, DIRECTIONS, kinds):
        check(shape, kind, dtype, device, two_d=two_d, fmt=fmt, directions=directions)


@pytest.mark.parametrize("fmt", {**FORMATS, **PACKED}.values(), ids={**FORMATS, **PACKED})
def test_every_scale_code(fmt, device: torch.device) -> None:
    """Constant groups around every power of two, so that the amax rounds up to each of the codes 0..254."""
    exponents = torch.arange(0, 255, dtype=torch.int32) << 23
    mantissas = torch.tensor([0, 1, 0x400000, 0x600000, 0x600001, 0x7FFFFF], dtype=torch.int32)
    amax = (exponents[:, None] + mantissas).view(torch.float32).flatten()
    x = torch.cat([amax, torch.tensor([float("inf"), 0.0])])[:, None].contiguous()
    options = {"fmt": fmt, "rowwise": True, "columnwise": False, "two_d": False}
    compare(
        functools.partial(kernels.mx.quantize, **options),
        functools.partial(reference.quantize, **options),
        x,
        device,
    )


def test_packed_kinds(device: torch.device) -> None:
    for i, kind in enumerate(KINDS):
        check((40, 72), kind, DTYPES[i % 3], device, two_d=False, fmt=tuple(PACKED.values())[i // 2 % 3])


@pytest.mark.parametrize("fmt", PACKED.values(), ids=PACKED)
def test_packed_columns_are_the_rows_of_the_transpose(fmt, device: torch.device) -> None:
    x = make("normal", (50, 70), torch.float32).to(device)
    columns = kernels.mx.quantize(x, fmt, rowwise=False, columnwise=True)
    rows = kernels.mx.quantize(x.t(), fmt, rowwise=True, columnwise=False)
    for ours, theirs in zip(columns, rows, strict=True):
        assert_bitwise(ours, theirs)


@pytest.mark.gpu
@pytest.mark.parametrize("two_d", [False, True], ids=["1d", "2d"])
def test_every_shape_and_kind(two_d: bool, device: torch.device) -> None:
    for i, (shape, kind, dtype) in enumerate(grid(SHAPES_2D)):
        check(shape, kind, dtype, device, two_d=two_d, fmt=(E4M3, E5M2)[i % 2])
        check(shape, kind, dtype, device, two_d=two_d, directions=DIRECTIONS[i % 3])
        packed = tuple(PACKED.values())[i % 3]
        check(shape, kind, dtype, device, two_d=two_d, fmt=packed, directions=DIRECTIONS[i % 3])


@pytest.mark.gpu
def test_more_than_two_billion_elements(device: torch.device) -> None:
    if torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.skip("needs 12 GiB of free GPU memory")
    x = torch.empty(2**20 + 160, 2048, dtype=torch.bfloat16, device=device).normal_()
    actual = kernels.mx.quantize(x, E4M3, rowwise=True, columnwise=True)
    tail = 2**20 - 128
    expected = reference.quantize(x[tail:].cpu(), E4M3, rowwise=True, columnwise=True)
    for buffer, start, part in zip(actual, (tail, tail, tail, tail // 32), expected, strict=True):
        assert_bitwise(buffer[start:], part)
