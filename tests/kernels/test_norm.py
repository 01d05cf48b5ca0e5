"""Norm kernels against the reference: statistics, amax partials, forward, sums and gradient."""

from __future__ import annotations

import pytest
import torch
from reference.checks import assert_bitwise, assert_fresh, awkward_layouts
from torch import Tensor

from narrowcast import kernels
from narrowcast.reference import norm as reference
from narrowcast.reference import scaling

from .checks import DTYPES, KINDS, SHAPES, compare, grid, make

EPS = 1e-5
INTERPRETED_SHAPES = [(1, 1), (5,), (7, 3), (17, 300), (3, 1030), (2, 3, 10), (0, 4), (4, 0)]


def present(*tensors: Tensor | None) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor is not None]


def on(device: torch.device, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    return tuple(None if tensor is None else tensor.to(device) for tensor in tensors)


def check(
    shape, kind, dtype, device, normalization: str, *, residual: bool, zero_centered_gamma: bool, bias: bool
) -> None:
    """All four steps, each from the reference's results of the one before."""
    what = f"{normalization} {kind} {residual=} {zero_centered_gamma=} {bias=}"
    K = shape[-1]
    x, grad = make(kind, shape, dtype), make(kind, shape, dtype, seed=1)
    other = make(kind, shape, dtype, seed=2) if residual else None
    weight = make("normal", (K,), dtype, seed=3)
    shift = make("normal", (K,), torch.float32, seed=4) if bias else None
    options = {"eps": EPS, "normalization": normalization}
    summed, mean, rstd = reference.statistics(x, **options, residual=other)
    compare(
        lambda x: present(*kernels.norm.statistics(x, **options, residual=on(device, other)[0])),
        lambda x: present(summed, mean, rstd),
        x,
        device,
        f"statistics of {what}",
    )

    source = x if summed is None else summed
    gamma = {"zero_centered_gamma": zero_centered_gamma}
    y = reference.forward(source, weight, shift, mean, rstd, **gamma)
    vectors, moved = on(device, weight, shift), on(device, other)[0]
    compare(
        lambda x: present(*kernels.norm.normalized(x, *vectors, **options, **gamma, residual=moved)),
        lambda x: present(y, summed, mean, rstd),
        x,
        device,
        what,
    )
    *with_amax, partials = kernels.norm.statistics(
        x.to(device), *vectors, **options, **gamma, residual=moved, amax_partials=True
    )
    for actual, expected in zip(present(*with_amax), present(summed, mean, rstd), strict=True):
        assert_bitwise(actual, expected, what)
    assert 1 <= partials.numel() <= 1024
    assert_bitwise(partials.amax().reshape(1), scaling.amax(y), f"amax of {what}")

    sums = reference.gradient_statistics(grad, source, weight, mean, rstd, **gamma)
    arguments = on(device, weight, mean, rstd)
    compare(
        lambda x: present(*kernels.norm.gradient_statistics(grad.to(device), x, *arguments, **gamma)),
        lambda x: present(*sums),
        source,
        device,
        f"gradient statistics of {what}",
    )
    if dtype != torch.float32:
        actual = kernels.norm.gradient_statistics(
            grad.to(device), source.to(device), *arguments, **gamma, dtype=dtype
        )
        expected = reference.gradient_statistics(grad, source, weight, mean, rstd, **gamma, dtype=dtype)
        for made, wanted in zip(present(*actual), present(*expected), strict=True):
            assert_bitwise(made, wanted, f"rounded gradients of {what}")
    c1, c2 = sums[:2]
    c = on(device, c1, c2)
    compare(
        lambda x: [
            kernels.norm.backward(
                grad.to(device), x, *arguments, *c, **gamma, residual_grad=on(device, other)[0]
            )
        ],
        lambda x: [reference.backward(grad, x, weight, mean, rstd, c1, c2, **gamma, residual_grad=other)],
        source,
        device,
        f"gradient of {what}",
    )


@pytest.mark.covering(1)
@pytest.mark.parametrize("normalization", reference.NORMALIZATIONS)
@pytest.mark.parametrize("shape", INTERPRETED_SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_shapes(dtype: torch.dtype, shape: tuple[int, ...], normalization: str, device: torch.device) -> None:
    options = {"residual": False, "zero_centered_gamma": False, "bias": True}
    check(shape, "normal", dtype, device, normalization, **options)


@pytest.mark.covering
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("normalization", reference.NORMALIZATIONS)
@pytest.mark.parametrize("residual", [False, True], ids=["plain", "residual"])
@pytest.mark.parametrize("zero_centered_gamma", [False, True], ids=["gamma", "zero_centered_gamma"])
@pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kinds_and_options(
    dtype: torch.dtype,
    bias: bool,
    zero_centered_gamma: bool,
    residual: bool,
    normalization: str,
    kind: str,
    device: torch.device,
) -> None:
    options = {"residual": residual, "zero_centered_gamma": zero_centered_gamma, "bias": bias}
    check((6, 270), kind, dtype, device, normalization, **options)


def test_one_program_takes_many_rows(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.norm, "PROGRAMS", 2)
    check(
        (19, 20), "normal", torch.bfloat16, device, "LayerNorm",
        residual=True, zero_centered_gamma=True, bias=True,
    )  # fmt: skip


@pytest.mark.parametrize("residual", [False, True], ids=["no_residual", "residual"])
@pytest.mark.parametrize("normalization", reference.NORMALIZATIONS)
def test_rows_that_stay_in_registers(normalization: str, residual: bool, device: torch.device) -> None:
    dtype, shape = (torch.float16, (3, 4096)) if residual else (torch.bfloat16, (3, 2305))
    x, other = make("special", shape, dtype), make("wide", shape, dtype, 1) if residual else None
    weight, bias = make("normal", shape[1:], dtype, 2), make("normal", shape[1:], torch.float32, 3)
    options = {"eps": EPS, "normalization": normalization}
    gamma = {"zero_centered_gamma": residual}
    expected = reference.normalized(x, weight, bias, residual=other, **options, **gamma)
    moved, vectors = on(device, x, other), on(device, weight, bias)
    actual = kernels.norm.normalized(moved[0], *vectors, residual=moved[1], **options, **gamma)
    alone = kernels.norm.statistics(moved[0], residual=moved[1], **options)
    assert len(present(*actual)) == len(present(*expected))
    for a, b in zip(present(*actual, *alone), present(*expected, *expected[1:]), strict=True):
        assert_bitwise(a, b)


def test_amax_ignores_nan_and_sees_the_rounded_result(device: torch.device) -> None:
    x = make("normal", (5, 40), torch.bfloat16)
    x[2] = float("nan")
    weight = torch.full((40,), 1.01, dtype=torch.float32)
    *_, rstd, partials = kernels.norm.statistics(
        x.to(device), weight.to(device), eps=EPS, normalization="RMSNorm", amax_partials=True
    )
    y = reference.forward(x, weight, None, None, rstd.cpu(), zero_centered_gamma=False)
    assert_bitwise(partials.amax().reshape(1), scaling.amax(y))
    *_, partials = kernels.norm.statistics(
        torch.full((2, 3), float("nan"), device=device),
        torch.ones(3, device=device), eps=EPS, normalization="LayerNorm", amax_partials=True,
    )  # fmt: skip
    assert_bitwise(partials, torch.zeros(1))


@pytest.mark.parametrize("normalization", reference.NORMALIZATIONS)
def test_the_amax_of_a_gradient(
    normalization: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel that writes it takes it for a graph: of what is rounded, and NaN counts for nothing."""
    taken: list[torch.Tensor] = []
    monkeypatch.setattr(kernels.norm, "takes_amax", lambda x: True)
    monkeypatch.setattr(kernels.norm, "keep_amax", lambda x, maxima: taken.extend((x, maxima)))
    x, grad, other = (make("normal", (19, 300), torch.bfloat16, seed=seed) for seed in range(3))
    grad[8:16] = float("nan")  # all rows of a program, so that its maximum is one over nothing but NaN
    weight = make("normal", (300,), torch.float32, seed=3)
    _, mean, rstd = reference.statistics(x, eps=EPS, normalization=normalization)
    gamma = {"zero_centered_gamma": True}
    c1, c2, *_ = reference.gradient_statistics(grad, x, weight, mean, rstd, **gamma)
    arguments = on(device, grad, x, weight, mean, rstd, c1, c2)
    dx = kernels.norm.backward(*arguments, residual_grad=other.to(device), **gamma)
    expected = reference.backward(grad, x, weight, mean, rstd, c1, c2, residual_grad=other, **gamma)
    assert_bitwise(dx, expected)
    assert taken[0] is dx
    assert_bitwise(taken[1].amax().reshape(1), scaling.amax(expected))


def test_strides(device: torch.device) -> None:
    x, grad = make("normal", (34, 20), torch.bfloat16), make("normal", (34, 20), torch.float32, seed=1)
    weight = make("normal", (20,), torch.float16, seed=2)
    _, mean, rstd = reference.statistics(x, eps=EPS, normalization="LayerNorm")
    gamma = {"zero_centered_gamma": True}
    sums = reference.gradient_statistics(grad, x, weight, mean, rstd, **gamma)
    dx = reference.backward(grad, x, weight, mean, rstd, *sums[:2], **gamma)
    arguments = on(device, weight, mean, rstd)
    layouts = zip(
        awkward_layouts(x.to(device)).values(), awkward_layouts(grad.to(device)).values(), strict=True
    )
    for strided, strided_grad in layouts:
        actual = kernels.norm.statistics(strided, eps=EPS, normalization="LayerNorm", residual=strided)
        expected = reference.statistics(x, eps=EPS, normalization="LayerNorm", residual=x)
        actual += kernels.norm.gradient_statistics(strided_grad, strided, *arguments, **gamma)
        for a, b in zip(actual, expected + sums, strict=True):
            assert_bitwise(a, b)
        result = kernels.norm.backward(strided_grad, strided, *arguments, *on(device, *sums[:2]), **gamma)
        assert_bitwise(result, dx)
        assert_fresh([*actual, result], [strided, strided_grad])


def test_refuses(device: torch.device) -> None:
    x, weight, rstd = (torch.ones(size, device=device) for size in ((2, 4), 4, 2))
    gamma = {"zero_centered_gamma": False}
    with pytest.raises(
        ValueError, match="unknown normalization 'BatchNorm'; use one of 'LayerNorm' or 'RMSNorm'"
    ):
        kernels.norm.statistics(x, eps=EPS, normalization="BatchNorm")
    with pytest.raises(ValueError, match="rank 0"):
        kernels.norm.statistics(x[0, 0], eps=EPS, normalization="RMSNorm")
    with pytest.raises(ValueError, match="residual is torch.float16, expected torch.float32"):
        kernels.norm.statistics(x, eps=EPS, normalization="RMSNorm", residual=x.half())
    with pytest.raises(ValueError, match="amax_partials needs the weight"):
        kernels.norm.statistics(x, eps=EPS, normalization="RMSNorm", amax_partials=True)
    options = {"eps": EPS, "normalization": "RMSNorm", **gamma}
    with pytest.raises(TypeError, match="got torch.float64"):
        kernels.norm.normalized(x.double(), weight, None, **options)
    with pytest.raises(ValueError, match="weight is torch.float64"):
        kernels.norm.normalized(x, weight.double(), None, **options)
    with pytest.raises(ValueError, match=r"^the norm's weight has shape \(2,\), expected \(4,\)"):
        kernels.norm.normalized(x, rstd, None, **options)
    with pytest.raises(ValueError, match="rstd is torch.bfloat16"):
        kernels.norm.gradient_statistics(x, x, weight, None, rstd.bfloat16(), **gamma)
    with pytest.raises(ValueError, match=r"rstd has shape \(4,\), expected \(2,\)"):
        kernels.norm.gradient_statistics(x, x, weight, None, weight, **gamma)
    with pytest.raises(ValueError, match=r"residual_grad has shape \(1, 4\), expected \(2, 4\)"):
        kernels.norm.backward(x, x, weight, None, rstd, rstd, None, **gamma, residual_grad=x[:1])


@pytest.mark.gpu
@pytest.mark.parametrize("normalization", reference.NORMALIZATIONS)
def test_every_shape_and_kind(normalization: str, device: torch.device) -> None:
    for index, (shape, kind, dtype) in enumerate(grid([*SHAPES, (33, 4096), (1030, 2880), (5000, 256)])):
        check(
            shape, kind, dtype, device, normalization,
            residual=index % 2 == 0, zero_centered_gamma=index % 3 == 0, bias=index % 5 < 3,
        )  # fmt: skip


@pytest.mark.gpu
def test_more_than_two_billion_elements(device: torch.device) -> None:
    if torch.cuda.mem_get_info()[0] < 30 * 2**30:
        pytest.skip("needs 30 GiB of free GPU memory")
    x = torch.empty((2**20 + 3, 2056), dtype=torch.bfloat16, device=device).normal_()
    weight = torch.randn(2056, dtype=torch.bfloat16, device=device)
    gamma = {"zero_centered_gamma": False}
    y, _, mean, rstd = kernels.norm.normalized(x, weight, None, eps=EPS, normalization="LayerNorm", **gamma)
    c1, c2, _, _ = kernels.norm.gradient_statistics(y, x, weight, mean, rstd, **gamma)
    dx = kernels.norm.backward(y, x, weight, mean, rstd, c1, c2, **gamma)
    last = x[-100:].cpu()
    _, expected_mean, expected_rstd = reference.statistics(last, eps=EPS, normalization="LayerNorm")
    assert_bitwise(mean[-100:], expected_mean)
    assert_bitwise(rstd[-100:], expected_rstd)
    statistics = (weight.cpu(), expected_mean, expected_rstd)
    expected_y = reference.forward(last, statistics[0], None, *statistics[1:], **gamma)
    assert_bitwise(y[-100:], expected_y)
    expected_c1, expected_c2, _, _ = reference.gradient_statistics(expected_y, last, *statistics, **gamma)
    assert_bitwise(c1[-100:], expected_c1)
    assert_bitwise(
        dx[-100:], reference.backward(expected_y, last, *statistics, expected_c1, expected_c2, **gamma)
    )


@pytest.mark.gpu
def test_captures_into_a_graph(device: torch.device) -> None:
    x = torch.randn(256, 384, dtype=torch.bfloat16, device=device)
    weight = torch.ones(384, device=device)

    def run() -> list[Tensor]:
        _, mean, rstd = kernels.norm.statistics(x, eps=EPS, normalization="LayerNorm")
        return present(*kernels.norm.gradient_statistics(x, x, weight, mean, rstd, zero_centered_gamma=False))

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    x.add_(1.0)
    graph.replay()
    for actual, expected in zip(captured, run(), strict=True):
        assert_bitwise(actual, expected)
