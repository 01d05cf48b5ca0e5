"""Per-tensor FP8 kernels: golden files, ragged shapes, and on a GPU every kind of input, against the reference."""

from __future__ import annotations

import functools

import golden_vectors
import pytest
import torch
from reference.checks import assert_bitwise, awkward_layouts

from narrowcast import kernels
from narrowcast.formats import E4M3, E5M2
from narrowcast.reference import float8 as reference
from narrowcast.reference import scaling

from .checks import DTYPES, SHAPES, compare, grid, make

FORMATS = {"e4m3": E4M3, "e5m2": E5M2}
DIRECTIONS = [(True, True), (True, False), (False, True)]
INTERPRETED_SHAPES = [(1,), (5,), (1, 7), (7, 1), (33, 17), (130, 68), (3, 5, 7), (0, 8), (8, 0)]


def check_given(shape, kind, dtype, device, fmt=E4M3, directions=(True, True)) -> None:
    x = make(kind, shape, dtype)
    scale = torch.tensor([37.3])
    running = torch.tensor([1e-3], device=device)
    rowwise, columnwise = directions
    options = {"rowwise": rowwise, "columnwise": columnwise}
    compare(
        lambda x: kernels.float8.quantize(x, scale.to(device), fmt, amax=running, **options),
        lambda x: reference.quantize(x, scale, fmt, **options),
        x,
        device,
        f"given scale, {kind}",
    )
    assert_bitwise(running, torch.maximum(torch.tensor([1e-3]), scaling.amax(x)), f"amax of {kind} {shape}")


def check_current(
    shape, kind, dtype, device, fmt=E4M3, power_2=False, epsilon=0.0, directions=(True, True)
) -> None:
    options = dict(zip(("rowwise", "columnwise"), directions), power_2=power_2, epsilon=epsilon)
    compare(
        functools.partial(kernels.float8.quantize_current, fmt=fmt, **options),
        functools.partial(reference.quantize_current, fmt=fmt, **options),
        make(kind, shape, dtype),
        device,
        f"current scaling, {kind}",
    )


@pytest.mark.parametrize(
    "name", golden_vectors.names("fp8_delayed_", "fp8_current_", without=("fp8_delayed_update",))
)
def test_golden(name: str, device: torch.device) -> None:
    golden = golden_vectors.load(name)
    fmt = FORMATS[golden.meta["format"]]
    x = golden.input().to(device)
    amax = torch.zeros(1, device=device)
    outputs = [
        kernels.float8.quantize(x, golden["scale"].to(device), fmt, rowwise=True, columnwise=True, amax=amax)
    ]
    if name.startswith("fp8_current"):
        outputs.append(
            kernels.float8.quantize_current(
                x,
                fmt,
                power_2=golden.meta["power_2_scale"],
                epsilon=golden.meta["amax_epsilon"],
                rowwise=True,
                columnwise=True,
            )
        )
    assert_bitwise(amax, golden["amax"])
    for data, transpose, scale_inv in outputs:
        assert_bitwise(data, golden["rowwise_data"])
        assert_bitwise(transpose, golden["columnwise_data"])
        assert_bitwise(scale_inv, golden["scale_inv"])


@pytest.mark.parametrize("shape", INTERPRETED_SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ragged(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    kind = "special" if 0 not in shape and len(shape) > 1 else "wide"
    for directions in DIRECTIONS:
        check_given(shape, kind, dtype, device, E5M2, directions)
    check_current(shape, "tiny", dtype, device)
    check_current(shape, kind, dtype, device, power_2=True)
    check_current(shape, "wide", dtype, device, E5M2, power_2=True, epsilon=0.5)


def test_an_amax_pass_gives_the_scale_that_the_cast_finds(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of small tensors every program of the cast reads all elements; others have partial maxima."""
    for small in (0, kernels.float8.SMALL):
        monkeypatch.setattr(kernels.float8, "SMALL", small)
        for kind in ("special", "wide"):
            check_current((130, 190), kind, torch.bfloat16, device)
        check_current((5, 7), "normal", torch.float32, device, directions=(True, False))
        check_current((24,), "tiny", torch.float16, device, power_2=True)
        nothing = torch.full((3, 40), float("nan"))
        expected = reference.quantize_current(
            nothing, E4M3, power_2=False, epsilon=0.0, rowwise=True, columnwise=True
        )
        actual = kernels.float8.quantize_current(
            nothing.to(device), E4M3, power_2=False, epsilon=0.0, rowwise=True, columnwise=True
        )
        for a, b in zip(actual, expected, strict=True):
            assert_bitwise(a, b)


def test_flags_and_strides(device: torch.device) -> None:
    x = make("normal", (34, 20), torch.bfloat16)
    scale = torch.tensor([2.5])
    assert_bitwise(
        kernels.float8.quantize(x.to(device), scale.to(device), E4M3, rowwise=False, columnwise=False)[0],
        torch.tensor([0.4]),
    )
    for directions in DIRECTIONS[1:]:
        check_current((34, 20), "normal", torch.bfloat16, device, directions=directions)
    expected = reference.quantize(x, scale, E4M3, rowwise=True, columnwise=True)
    for name, strided in awkward_layouts(x.to(device)).items():
        actual = kernels.float8.quantize(strided, scale.to(device), E4M3, rowwise=True, columnwise=True)
        for a, b in zip(actual, expected, strict=True):
            assert_bitwise(a, b, name)


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", ["normal", "special"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(16, 24), (3, 700, 16), (37, 50), (3, 5120), (0, 4)], ids=str)
def test_amax_as_a_graph_takes_it(
    shape: tuple[int, ...], dtype: torch.dtype, kind: str, device: torch.device
) -> None:
    """In the dtype of the tensor, by plain operators, at most as many as a kernel makes; the same scale comes of it."""
    x = make(kind, shape, dtype)
    parts = kernels.graph_amax.amax_parts_in_graph(x.to(device))
    assert_bitwise(parts.float().amax().reshape(1) if parts.numel() else parts.new_zeros(1), scaling.amax(x))
    if x.numel():
        assert parts.dtype == dtype and parts.numel() <= kernels.float8.AMAX_PROGRAMS
    options = {"power_2": False, "epsilon": 0.0, "rowwise": True, "columnwise": True}
    actual = kernels.float8.quantize_current(x.to(device), E4M3, amax=parts, **options)
    for a, b in zip(actual, reference.quantize_current(x, E4M3, amax=None, **options), strict=True):
        assert_bitwise(a, b)


@pytest.mark.parametrize("shape", [(37, 50), (3, 4, 8), (0, 4)], ids=str)
def test_amax_from_outside(shape: tuple[int, ...], device: torch.device) -> None:
    """As processes that hold parts of a tensor share it: the largest of theirs, and the scale of that."""
    x = make("normal", shape, torch.bfloat16)
    assert_bitwise(kernels.float8.amax(x.to(device)), reference.amax(x))
    amax, options = (
        torch.tensor([11.0]),
        {"power_2": False, "epsilon": 0.0, "rowwise": True, "columnwise": True},
    )
    actual = kernels.float8.quantize_current(x.to(device), E4M3, amax=amax.to(device), **options)
    expected = reference.quantize_current(x, E4M3, amax=amax, **options)
    for a, b in zip(actual, expected, strict=True):
        assert_bitwise(a, b)


@pytest.mark.parametrize(
    "shape",
    [(1, 9), (9, 1), (37, 50), (36, 132), (2, 3, 4), (3, 68, 36), (2, 1, 5), (0, 4, 3), (0, 4), (4, 0)],
    ids=str,
)
def test_transpose(shape: tuple[int, ...], device: torch.device) -> None:
    data = torch.randint(0, 256, shape, dtype=torch.uint8)
    source = data.to(device)
    result = kernels.float8.transpose(source)
    assert_bitwise(result, reference.transpose(data))
    assert data.numel() == 0 or result.data_ptr() != source.data_ptr()
    if len(shape) == 3:
        assert_bitwise(kernels.float8.transpose(source, True), data.transpose(1, 2))


def test_refuses(device: torch.device) -> None:
    scale = torch.ones(1, device=device)
    for x, error in (
        (torch.ones(4, dtype=torch.float64, device=device), TypeError),
        (torch.tensor(1.0, device=device), ValueError),
    ):
        with pytest.raises(error, match="cannot quantize"):
            kernels.float8.quantize(x, scale, E4M3, rowwise=True, columnwise=True)


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_every_shape_and_kind(fmt, device: torch.device) -> None:
    for shape, kind, dtype in grid(SHAPES):
        check_given(shape, kind, dtype, device, fmt)
        check_current(shape, kind, dtype, device, fmt)
    for shape, kind, dtype in grid(SHAPES[::5]):
        check_given(shape, kind, dtype, device, fmt, (True, False))
        check_current(shape, kind, dtype, device, fmt, power_2=True, epsilon=1e-3)


@pytest.mark.gpu
def test_every_float_casts_like_the_reference(device: torch.device) -> None:
    """All exponents with random mantissas, and every neighbour of a rounding midpoint."""
    bits = torch.randint(-(2**31), 2**31, (2**22,), dtype=torch.int64).to(torch.int32)
    edges = torch.arange(-(2**31), 2**31, 2**18, dtype=torch.int64)
    bits = torch.cat(
        [bits, *((edges + shift).clamp(-(2**31), 2**31 - 1).to(torch.int32) for shift in (-1, 0, 1))]
    )
    x = bits.view(torch.float32).view(-1, 64)
    for fmt in FORMATS.values():
        options = {"rowwise": True, "columnwise": True}
        compare(
            lambda x, fmt=fmt: kernels.float8.quantize(x, torch.ones(1, device=device), fmt, **options),
            lambda x, fmt=fmt: reference.quantize(x, torch.ones(1), fmt, **options),
            x,
            device,
        )


@pytest.mark.gpu
def test_more_than_two_billion_elements(device: torch.device) -> None:
    rows, columns = 2**20 + 129, 2048
    if torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.skip("needs 12 GiB of free GPU memory")
    x = torch.empty(rows, columns, dtype=torch.bfloat16, device=device).normal_()
    scale = torch.full((1,), 100.0, device=device)
    data, transpose, _ = kernels.float8.quantize(x, scale, E4M3, rowwise=True, columnwise=True)
    for part in (slice(0, 300), slice(-300, None)):
        expected = reference.quantize(x[part].cpu(), scale.cpu(), E4M3, rowwise=True, columnwise=True)
        assert_bitwise(data[part], expected[0])
        assert_bitwise(transpose[:, part], expected[1])
    current, current_t, scale_inv = kernels.float8.quantize_current(
        x, E4M3, power_2=False, epsilon=0.0, rowwise=True, columnwise=True
    )
    assert_bitwise(scale_inv, scaling.reciprocal(_current_scale(x)))
    assert torch.equal(current[-200:].t(), current_t[:, -200:])


def _current_scale(x: torch.Tensor) -> torch.Tensor:
    amax = torch.stack([part.abs().amax() for part in x.split(2**16)]).amax().float().cpu().reshape(1)
    return scaling.scale_from_amax(amax, E4M3.max, power_2=False, epsilon=0.0, overflow=3.0e38)


@pytest.mark.gpu
def test_captures_into_a_graph(device: torch.device) -> None:
    x = torch.randn(256, 384, dtype=torch.bfloat16, device=device)
    options = {"power_2": False, "epsilon": 0.0, "rowwise": True, "columnwise": True}
    expected = kernels.float8.quantize_current(x, E4M3, **options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = kernels.float8.quantize_current(x, E4M3, **options)
    x.mul_(2.0)
    graph.replay()
    assert torch.equal(captured[0], expected[0])
    assert_bitwise(captured[2], expected[2] * 2.0)
